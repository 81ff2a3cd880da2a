"""The program behind `python launch.py`, `ddp-train` and `python -m ddp_train`: which parts does
this command need?"""

from __future__ import annotations

import os
import sys

if (
    __name__ == "__main__" and not sys.flags.safe_path
):  # the working folder comes last: `import_from_working_folder`
    del sys.path[0]
    if not __package__:  # started by its path: the package need not be installed
        sys.path.append(__file__.rpartition("/ddp_train/")[0])

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from ddp_train.commands.new_project import INIT, create
from ddp_train.commands.packages import require_packages
from ddp_train.config.program import Program, started
from ddp_train.distributed.agent import end_with_agent
from ddp_train.distributed.environment import (
    restart_in_utf8,
    world_from_environment,
    write_begun,
    write_torchrun_error_file,
)
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.launcher.fork_server import ForkServer
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.linux import keep_exit_codes
from ddp_train.resilience import stdio
from ddp_train.resilience.preemption import INTERRUPTED

STUDY = "mode=study"
PROVE = "mode=prove"
CHECK = "check"
LABORATORY = {
    STUDY: "ddp_lab.study.main:study",
    PROVE: "ddp_lab.prove.main:prove",
    "doctor of this host": "ddp_lab.doctor.main:check_this_host",
    "doctor of all hosts": "ddp_lab.doctor.main:check_all_hosts",
}
"""What examines a job, a machine or a choice. The core knows it by these names alone."""
OF_RUNS = "resize", "compare", "watch"
"""First words of commands for runs that there are: each is a function of a module of that name."""


def main(script: Path | None, argv: list[str]) -> int:
    """Does what the words ask. script: launch.py, if that was started. Returns the exit code."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return refuse(
            None,
            ConfigError(["the working directory has been removed; change into one that exists"]),
        )
    try:
        if argv[:1] == [INIT]:
            return create(argv[1:])
        if argv and argv[0] in OF_RUNS:  # imported here: they read YAML, which may not be installed
            return getattr(import_module(f"ddp_train.commands.{argv[0]}"), argv[0])(argv[1:])
        if argv[:1] == [CHECK]:
            from ddp_train.commands.check import check

            return check(*started(script, argv[1:]))
        program, argv = started(script, argv)
        world = world_from_environment()
    except ConfigError as error:
        return refuse(None, error)
    # before torch is imported, which takes seconds: an agent that is killed meanwhile leaves nobody
    # behind
    if world:
        end_with_agent(world)
        write_begun()
    if world and not world.is_leader:  # rank 0 composes, prints and refuses for all
        if any(word.startswith("-") for word in argv):
            return 0
        return under_torchrun(program, world, argv, None)
    server = None if world or not starts_workers(argv) else ForkServer(program.import_path)
    try:
        return lead(program, world, argv, server)
    finally:
        if server:
            server.close()


def starts_workers(argv: list[str]) -> bool:
    """Whether it is likely, by the look of the words, that workers will be started here."""
    flags = {word for word in argv if word.startswith("-")}
    elsewhere = any(
        word.startswith(("launch.nnodes=", "hydra/launcher=", "sweep.")) for word in argv
    )
    elsewhere = elsewhere and "hydra/launcher=basic" not in argv
    unwanted = {
        STUDY,
        PROVE,
        "mode=doctor",
        "launch.fork_server=false",
    }  # studies and proofs have servers of their own
    return flags <= {"-m", "--multirun"} and not elsewhere and unwanted.isdisjoint(argv)


def lead(program: Program, world: World | None, argv: list[str], server: ForkServer | None) -> int:
    """Composes, validates, dispatches by mode. Hydra is imported here, while a server, which came
    first, imports torch."""
    from ddp_train.config.prepare import prepare
    from ddp_train.launcher import local, multihost
    from ddp_train.launcher.workload import workload_of

    try:
        if STUDY in argv:
            return laboratory(STUDY)(program, argv, world)
        if PROVE in argv:
            return laboratory(PROVE)(program, argv, world)
        if any(word.startswith("-") for word in argv):
            return with_flags(program, world, argv, server)
        prepared = prepare(program, argv, world)
    except ConfigError as error:
        return refuse(world, error)
    for notice in (*program.notes, *prepared.notices):
        print(f"note: {notice}", file=sys.stderr)
    if world:
        return under_torchrun(program, world, argv, prepared.text)
    if int(prepared.config.launch.nnodes) > 1:
        if server:
            server.close()  # torchrun starts the workers
        return multihost.join_hosts(prepared.config, program, argv)
    if prepared.config.mode == "doctor":
        return laboratory("doctor of this host")(prepared.config, program.import_path)
    stop = StopRequests(program_ends=True)
    workload = workload_of(prepared.config)
    return local.launch(
        prepared.config, program.import_path, stop, server, prepared.at_another_number, workload
    )


def laboratory(examination: str) -> Callable[..., int]:
    """The function that does an examination, imported when it is asked for."""
    module, _, function = LABORATORY[examination].partition(":")
    return getattr(import_module(module), function)


def with_flags(
    program: Program, world: World | None, argv: list[str], server: ForkServer | None
) -> int:
    """Help, --cfg and the like, or a sweep, of which a page is written. Returns the exit code."""
    from ddp_train.commands.flags import through_hydra
    from ddp_train.sweeps.trials import Trials

    trials = Trials(program, server)
    try:
        return through_hydra(trials, argv, world)
    finally:
        if trials.rows:
            trials.write_page()


def under_torchrun(program: Program, world: World, argv: list[str], text: str | None) -> NoReturn:
    """A rank of torchrun. text: the frozen config, on rank 0, which composed it; the others receive
    it."""
    from ddp_train.config.freeze import load_frozen
    from ddp_train.runs import worker

    store, text = worker.receive_config(world, text)
    config = load_frozen(text)
    if config.mode == "doctor":
        check_all_hosts = laboratory("doctor of all hosts")
        worker.leave(check_all_hosts(store, world, argv, config, program.import_path))
    worker.run_under_torchrun(store, world, argv, config, text)


def refuse(world: World | None, error: ConfigError) -> int:
    """Says why. Returns the exit code. torchrun ends the ranks of this host; those of other hosts
    must be told."""
    print(error, file=sys.stderr)
    write_torchrun_error_file(str(error))
    if world and world.hosts > 1:
        from ddp_train.runs.worker import receive_config

        receive_config(world, "")
    return error.exit_code


def run(script: Path | None = None) -> NoReturn:
    """The whole program, to its exit code. script: launch.py, if that was started."""
    require_packages(script.parent if script else None)
    restart_in_utf8()
    stdio.tolerate_closed_streams()
    stdio.show_stack_on_request()
    keep_exit_codes()
    try:
        code = main(script, sys.argv[1:])
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        print("stopped by SIGINT before anything was started", file=sys.stderr)
        code = INTERRUPTED
    if "torch" in sys.modules and isinstance(
        code, int
    ):  # a sweep whose trials ran at once: `fork_server.preload`
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an interpreter that ends lists what triton's extension leaked
    sys.exit(code)


if __name__ == "__main__":
    run()
