"""Trains a model on all GPUs of this host, one process for each; without a GPU, with two processes.

python launch.py [key=value ...]                         train
torchrun --nproc_per_node=N launch.py [key=value ...]    the same run under torchrun
python launch.py mode=evaluate checkpoint.resume=PATH    score the test set with a checkpoint
python launch.py mode=predict checkpoint.resume=PATH     write the predictions of a trained model
python launch.py mode=export checkpoint.resume=PATH      write a trained model as .pt2 or ONNX
python launch.py mode=doctor [key=value ...]             can this host (or these hosts) train?
python launch.py mode=prove [key=value ...]              same result on any number of processes?
python launch.py -m optimizer.lr=0.1,0.2 [...]           a sweep: train with each value, compare
python launch.py mode=study study=NAME [...]             compare several variants in one report
python launch.py --cfg job [key=value ...]               show the config, run nothing
python launch.py check [key=value ...]                   check a command, run nothing
python launch.py watch RUNS                              show the progress of runs
python launch.py prove train.py [...]                    mode=prove for a script with a session
python launch.py compare RUN RUN [...]                   do runs differ by more than noise?
python launch.py resize RUN N                            change the processes of a run
python launch.py init FOLDER                             start a project of your own
"""

import sys

if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036  in words that old ones can read, before those that they cannot
        found = "launch.py: " + sys.executable + " is Python " + sys.version.split()[0]
        remedy = "make PYTHON=/path/to/python3.11 train sets up .venv with it"
        sys.stderr.write(found + ", and 3.11 or newer is needed; " + remedy + "\n")
        sys.exit(2)
    from pathlib import Path

    from ddp_train.__main__ import run

    run(Path(__file__).resolve())
