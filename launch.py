"""Trains a model on every GPU of this host, one process each; without GPUs, in two processes over gloo.

python launch.py [key=value ...]                         train
torchrun --nproc_per_node=N launch.py [key=value ...]    the same run under torchrun
python launch.py mode=evaluate checkpoint.resume=PATH    score the test set with a checkpoint
python launch.py mode=predict checkpoint.resume=PATH     write what a trained model predicts for each sample
python launch.py mode=export checkpoint.resume=PATH      write a trained model for torch.export, or as ONNX
python launch.py mode=doctor [key=value ...]             is this host, or under torchrun are these hosts, fit to train?
python launch.py mode=prove [key=value ...]              is this job's result the same however it is divided?
python launch.py -m optimizer.lr=0.1,0.2 [...]           a sweep: fresh processes for each trial, one table
python launch.py mode=study study=NAME [...]             runs of several variants, compared in one report
python launch.py --cfg job [key=value ...]               show the config, run nothing
python launch.py check [key=value ...]                   is that a command that can run here? nothing is started
python launch.py watch RUNS                              all runs of a folder as they go, the failed ones too
python launch.py compare RUN RUN [...]                   what differs between runs, and whether it is more than noise
python launch.py resize RUN N                            change a run's number of processes while it trains
python launch.py init FOLDER                             a project of your own: model, data, task, experiment, test
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
