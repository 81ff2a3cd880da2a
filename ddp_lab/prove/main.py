"""`mode=prove`: does this job give the same result however it is divided, and if not, what breaks
it? Torch-free."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ddp_lab.prove.configs import CPU_OVERRIDES
from ddp_lab.prove.progress import Progress
from ddp_lab.prove.proof import Proof
from ddp_lab.prove.report import report
from ddp_lab.prove.runner import StoppedError
from ddp_lab.study.request import key_of, raise_problems
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import lock_run_dir, read_run, resolve_and_check
from ddp_train.config.program import Program
from ddp_train.config.run_directory import unwritten
from ddp_train.distributed.environment import new_run_id
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.options.schema import Config
from ddp_train.resilience.preemption import UNSAVED
from ddp_train.text import shell_word


def prove(program: Program, argv: list[str], world: World | None) -> int:
    """Check the job that the command line names, print the table, write page and prove.json.

    Returns the exit code: 0 if all that could be checked holds. Raises ConfigError before anything
    runs.
    """
    began = time.monotonic()
    if world:
        problem = (
            f"mode=prove: a proof starts its own processes; run it with {program.typed}, not"
            " torchrun"
        )
        raise ConfigError([problem])
    flags = [argument for argument in argv if argument.startswith("-")]
    if flags:
        raise ConfigError([f"{flags[0]}: mode=prove takes no flags; leave it out"])
    asked, run_dir = read_job(program, argv)
    progress = Progress(began, asked.prove.seconds)
    lock = lock_run_dir(asked, None)
    stop = StopRequests()
    try:
        findings = Proof(asked, program, run_dir, stop).run(progress)
        return report(findings, run_dir, progress.seconds_passed, program.command(argv))
    except StoppedError:
        return stop.exit_code(UNSAVED)
    except OSError as error:
        raise unwritten(run_dir, error) from None
    finally:
        lock.release()


def read_job(program: Program, argv: Sequence[str]) -> tuple[Config, Path]:
    """The job on CPUs, resolved, and the directory of its proof. Raises ConfigError."""
    values = {key_of(override): override.partition("=")[2] for override in argv}
    overrides = [override for override in argv if key_of(override) not in ("mode", "run_dir")]
    config, problems = read_run(program, read_overrides(program, [*overrides, *CPU_OVERRIDES]))
    resume = config.checkpoint.resume
    if resume not in ("auto", "never"):
        problem = (
            f"checkpoint.resume={resume}: mode=prove resumes no run but its own; to begin with"
            f" those weights, use {shell_word('model.init_from', resume)} in its place"
        )
        raise ConfigError([problem])
    run_dir = values.get("run_dir") or f"runs/{config.name}/prove_{new_run_id(None)}"
    config.run_dir = run_dir
    resolved, unsuited = resolve_and_check(config, None)
    raise_problems(problems + unsuited)
    return resolved, Path(run_dir)
