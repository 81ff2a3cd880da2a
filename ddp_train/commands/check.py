"""`ddp-train check key=value ...`: can this command run here? Nothing is started. Torch-free."""

from __future__ import annotations

import sys

from ddp_train.commands.flags import SWEEP
from ddp_train.commands.table import CHECK, MODES, command_of_run
from ddp_train.config.freeze import not_default
from ddp_train.config.notices import notices, of_other_modes
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import check_owner, read_run, resolve_and_check
from ddp_train.config.program import Program
from ddp_train.distributed.environment import visible_devices
from ddp_train.errors import ConfigError
from ddp_train.hardware import detect_hardware
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.schema import RequestedRun
from ddp_train.sweeps.plan import plan_sweep
from ddp_train.telemetry.pages.run_files import as_typed
from ddp_train.text import counted, shown


def check(program: Program, argv: list[str]) -> int:
    """Print what a command would run. Returns the exit code.

    argv: of that command, which may be a sweep.

    Raises ConfigError with all problems, as the command itself would.
    """
    for note in program.notes:
        print(f"note: {note}", file=sys.stderr)
    command = command_of_run(argv)
    if command in MODES:
        raise ConfigError(
            [
                f"{CHECK} mode={command}: only a run or a sweep (-m) can be checked; leave out"
                f" `{CHECK}`, since mode={command} checks all its runs before it starts the first"
            ]
        )
    flags = [word for word in argv if word.startswith("-")]
    others = [flag for flag in flags if flag not in SWEEP]
    if others:
        raise ConfigError(
            [f"{CHECK} {others[0]}: takes no flag but -m (a sweep); leave out {others[0]}"]
        )
    if flags:
        return check_sweep(program, argv)
    return check_run(program, argv)


def check_sweep(program: Program, argv: list[str]) -> int:
    plan = plan_sweep(program, argv)
    plan.print_notes()
    count = counted(plan.total, "trial") if plan.total else "a sweep"
    keys = ", no key is swept"
    if plan.swept:
        keys = f" over {', '.join(sorted(plan.swept))}"
    print(f"valid: {count}{keys}; nothing was started")
    return 0


def check_run(program: Program, overrides: list[str]) -> int:
    command_line = read_overrides(program, overrides)
    config, problems = read_run(program, command_line)
    hardware = detect_hardware(visible_devices())
    resolved, more = resolve_and_check(config, None, hardware)
    if problems or more:
        raise ConfigError(list(dict.fromkeys(problems + more)))
    if resolved.mode != "doctor":  # it writes nothing into the folder of a run
        check_owner(resolved)
    notes = notices(RequestedRun(config, resolved, hardware))
    notes += of_other_modes(command_line.given, config.mode)
    for notice in notes:
        print(f"note: {notice}", file=sys.stderr)
    print(
        f"valid: mode={resolved.mode}, {resolved.launch.nproc_per_node} x {resolved.device};"
        " nothing was started"
    )
    for key, value in as_typed(not_default(resolved)).items():
        if value != CUSTOM:
            print(f"{key}={shown(value)}")
    return 0
