"""Trains a model on every GPU of this host, one process each; without GPUs, in two processes over gloo.

python launch.py [key=value ...]                         train
torchrun --nproc_per_node=N launch.py [key=value ...]    the same run under torchrun
python launch.py mode=evaluate checkpoint.resume=PATH    score the test set with a checkpoint
python launch.py mode=doctor [key=value ...]             is this host, or under torchrun are these hosts, fit to train?
python launch.py -m optimizer.lr=0.1,0.2 [...]           a sweep: fresh processes for each trial, one table
python launch.py mode=study study=NAME [...]             runs of several variants, compared in one report
python launch.py --cfg job [key=value ...]               show the config, run nothing
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from ddp_train.launcher.packages import require_packages

if __name__ == "__main__":  # before an import that would fail
    require_packages(Path(__file__).resolve().parent)

from ddp_train import stdio
from ddp_train.distributed.environment import restart_in_utf8, world_from_environment, write_torchrun_error_file
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.launcher.fork_server import ForkServer
from ddp_train.linux import end_with_parent, keep_exit_codes
from ddp_train.resilience.preemption import INTERRUPTED

SCRIPT = Path(__file__).resolve()
CONF = SCRIPT.parent / "conf"
STUDY = "mode=study"


def main(argv: list[str]) -> int:
    """Does what the words ask. Returns the exit code."""
    try:
        Path.cwd()
        world = world_from_environment()
    except FileNotFoundError:
        return refuse(None, ConfigError(["the working directory has been removed; change into one that exists"]))
    except ConfigError as error:
        return refuse(None, error)
    if world:  # before torch is imported, which takes seconds: an agent that is killed meanwhile leaves nobody behind
        end_with_parent()
    if world and not world.is_leader:  # rank 0 composes, prints and refuses for all
        return 0 if any(word.startswith("-") for word in argv) else under_torchrun(world, argv, None)
    server = None if world or not starts_workers(argv) else ForkServer(SCRIPT.parent)
    try:
        return lead(world, argv, server)
    finally:
        if server:
            server.close()


def starts_workers(argv: list[str]) -> bool:
    """Whether it is likely, by the look of the words, that workers will be started here."""
    flags = {word for word in argv if word.startswith("-")}
    elsewhere = any(word.startswith(("launch.nnodes=", "hydra/launcher=")) for word in argv)
    unwanted = {STUDY, "mode=doctor", "launch.fork_server=false"}  # the runs of a study have servers of their own
    return flags <= {"-m", "--multirun"} and not elsewhere and unwanted.isdisjoint(argv)


def lead(world: World | None, argv: list[str], server: ForkServer | None) -> int:
    """Composes, validates, dispatches by mode. Hydra is imported here, while a server, which came first, imports
    torch."""
    from ddp_train.config.prepare import prepare
    from ddp_train.launcher import local, multihost

    try:
        if STUDY in argv:
            from ddp_train.study.main import study

            return study(SCRIPT, CONF, argv, world)
        if any(word.startswith("-") for word in argv):
            return with_flags(world, argv, server)
        prepared = prepare(CONF, argv, world)
    except ConfigError as error:
        return refuse(world, error)
    for notice in prepared.notices:
        print(f"note: {notice}", file=sys.stderr)
    if world:
        return under_torchrun(world, argv, prepared.text)
    if prepared.config.launch.nnodes > 1:
        if server:
            server.close()  # torchrun starts the workers
        return multihost.join_hosts(prepared.config, SCRIPT, argv)
    if prepared.config.mode == "doctor":
        from ddp_train.doctor.main import check_this_host

        return check_this_host(prepared.config, SCRIPT.parent)
    return local.launch(prepared.config, SCRIPT.parent, local.StopRequests(program_ends=True), server)


def with_flags(world: World | None, argv: list[str], server: ForkServer | None) -> int:
    """Help, --cfg and the like, or a sweep, of which a page is written. Returns the exit code."""
    from ddp_train.launcher.cli import through_hydra
    from ddp_train.launcher.sweep import Trials

    trials = Trials(SCRIPT, CONF, server)
    try:
        return through_hydra(__doc__ or "", trials, argv, world)
    finally:
        if trials.rows:
            from ddp_train.study.sweep_report import print_report

            print_report(trials.sweep_dir, trials.rows, trials.objective, argv)


def under_torchrun(world: World, argv: list[str], text: str | None) -> NoReturn:
    """A rank of torchrun. text: the frozen config, on rank 0, which composed it; the others receive it."""
    from ddp_train.config.freeze import load_frozen
    from ddp_train.training import worker

    store, text = worker.receive_config(world, text)
    config = load_frozen(text)
    if config.mode == "doctor":
        from ddp_train.doctor.main import check_all_hosts

        worker.leave(check_all_hosts(store, world, argv, config, SCRIPT.parent))
    worker.run_under_torchrun(store, world, argv, config, text)


def refuse(world: World | None, error: ConfigError) -> int:
    """Says why. Returns exit code 2. torchrun ends the ranks of this host; those of other hosts must be told."""
    print(error, file=sys.stderr)
    write_torchrun_error_file(str(error))
    if world and world.hosts > 1:
        from ddp_train.training.worker import receive_config

        receive_config(world, "")
    return ConfigError.exit_code


if __name__ == "__main__":
    restart_in_utf8()
    stdio.tolerate_closed_streams()
    keep_exit_codes()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before anything was started
        sys.exit(INTERRUPTED)
