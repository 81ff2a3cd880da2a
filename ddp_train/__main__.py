"""The program behind `python launch.py`, `ddp-train` and `python -m ddp_train`."""

from __future__ import annotations

import os
import sys

# the working folder comes last: `import_from_working_folder`
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]
    if not __package__:  # started by its path: the package need not be installed
        sys.path.append(__file__.rpartition("/ddp_train/")[0])

from pathlib import Path
from typing import NoReturn

from ddp_train.commands.packages import require_packages
from ddp_train.commands.table import (
    CHECK,
    OF_FOLDERS,
    PROVE_SCRIPT,
    asks_for_help,
    command_of_run,
    has_flags,
    load,
)
from ddp_train.config.hydra_parser import keep_asserts
from ddp_train.config.program import find_program
from ddp_train.distributed.agent import (
    end_with_agent,
    serves_store,
    write_begun,
    write_torchrun_error_file,
)
from ddp_train.distributed.environment import restart_in_utf8, world_from_environment
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.linux import keep_exit_codes
from ddp_train.resilience import stdio
from ddp_train.resilience.preemption import INTERRUPTED


def main(script: Path | None, argv: list[str]) -> int:
    """Run the command that a command line names. Returns the exit code.

    script: launch.py, if that was started.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        problem = "the working directory has been removed; change into one that exists"
        return refuse(None, ConfigError([problem]))
    keep_asserts()
    first = argv[0] if argv else ""
    world = None
    try:
        if asks_for_help(argv):
            return load("help of")(first)
        if first in OF_FOLDERS:
            return load(first)(argv[1:])
        if first == PROVE_SCRIPT:
            return load("prove script")(argv[1:])
        if first == CHECK:
            program, arguments = find_program(script, argv[1:])
            return load(CHECK)(program, arguments)
        program, arguments = find_program(script, argv)
        world = world_from_environment()
        if world:
            # before torch is imported, which takes seconds: an agent that is killed meanwhile
            # leaves nobody behind
            end_with_agent(world)
            write_begun()
        if world and not world.is_leader:  # rank 0 composes, prints and refuses for all
            if has_flags(arguments):
                return 0
            load("rank")(program, world, arguments, None)
        command = load(command_of_run(arguments))
        return command(program, arguments, world)
    except ConfigError as error:
        return refuse(world, error)


def refuse(world: World | None, error: ConfigError) -> int:
    """Print the problems. Returns the exit code.

    torchrun ends the ranks of this host; those of other hosts, and those that no agent started,
    are told.
    """
    print(error, file=sys.stderr)
    write_torchrun_error_file(str(error))
    if world and (world.hosts > 1 or not serves_store()) and world.size > 1:
        from ddp_train.runs.worker import receive_config

        receive_config(world, "")
    return error.exit_code


def run(script: Path | None = None) -> NoReturn:
    """Run the whole program, to its exit code. script: launch.py, if that was started."""
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
    # after a sweep whose trials ran at once: `fork_server.preload`
    if "torch" in sys.modules and isinstance(code, int):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an interpreter that ends lists what triton's extension leaked
    sys.exit(code)


if __name__ == "__main__":
    run()
