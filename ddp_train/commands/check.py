"""`ddp-train check key=value ...`: is this a command that can run here? Starts nothing, writes
nothing. Torch-free."""

from __future__ import annotations

import sys

from ddp_train.commands.flags import SWEEP
from ddp_train.config.conflicts import notices
from ddp_train.config.freeze import not_default
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import read_run, resolve_and_check
from ddp_train.config.program import Program
from ddp_train.errors import ConfigError
from ddp_train.sweeps.trials import Trials
from ddp_train.text import counted, shown

CHECK = "check"


def check(program: Program, words: list[str]) -> int:
    """Prints what the command would run. words: of that command, those of a sweep too. Returns the
    exit code. Raises ConfigError with all problems, as the command itself would."""
    for note in program.notes:
        print(f"note: {note}", file=sys.stderr)
    sweep = any(word in SWEEP for word in words)
    if flags := [word for word in words if word.startswith("-") and word not in SWEEP]:
        raise ConfigError([f"{CHECK} {flags[0]}: checks a run or a sweep (-m); leave the flag out"])
    if sweep:
        trials = Trials(program, None)
        trials.check(words, True)
        count = counted(trials.total, "trial") if trials.total else "a sweep"
        if trials.swept:
            over = f" over {', '.join(sorted(trials.swept))}"
        else:
            over = " without a swept key"
        print(f"valid: {count}{over}; nothing was started")
        return 0
    config, problems = read_run(program, read_overrides(program, words))
    resolved, more = resolve_and_check(config, None)
    if problems or more:
        raise ConfigError(list(dict.fromkeys(problems + more)))
    for notice in notices(config, resolved):
        print(f"note: {notice}", file=sys.stderr)
    print(
        f"valid: mode={resolved.mode}, {resolved.launch.nproc_per_node} x {resolved.device};"
        " nothing was started"
    )
    print("\n".join(f"{key}={shown(value)}" for key, value in not_default(resolved).items()))
    return 0
