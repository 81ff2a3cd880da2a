"""Runs from a script or a notebook: `ddp_train.run("experiment=mnist", "train.epochs=1")`."""

from __future__ import annotations

import itertools
import signal
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_train.config.code_checks import package_of
from ddp_train.config.overrides import read_overrides
from ddp_train.config.prepare import read_run, resolve_and_check
from ddp_train.config.program import find_program
from ddp_train.distributed.environment import world_from_environment
from ddp_train.errors import ConfigError
from ddp_train.options.schema import Config
from ddp_train.resilience import failure_report
from ddp_train.resilience.preemption import INTERRUPTED, SAVED
from ddp_train.telemetry.json_files import read_object
from ddp_train.telemetry.metrics_log import METRICS, read_metrics

if TYPE_CHECKING:
    from ddp_train.inference.trained_model import Trained


class RunFailedError(RuntimeError):
    """Raised by `ddp_train.run` if the run failed.

    Its message is `detail` of failure.json and the remedy.
    """

    def __init__(self, exit_code: int, failure: dict[str, Any]) -> None:
        self.exit_code = exit_code
        """The exit code of the run, as in docs/reference/files.md."""
        self.failure = failure
        """The content of failure.json, a dict; empty if there is none."""
        self.kind = failure.get("kind")
        """The kind of failure, such as `oom` (docs/operate/failures.md); None if unknown."""
        self.remedy = failure.get("remedy")
        """A text that says how to mend the cause; None if unknown."""
        detail = failure.get("detail", f"the run ended with exit code {exit_code}")
        remedy = self.remedy or "see its output above"
        super().__init__(f"{detail}; {remedy}")


@dataclass(frozen=True)
class Result:
    """The result of `ddp_train.run`."""

    run_dir: Path
    """The folder of the run, a Path."""
    summary: dict[str, Any] = field(repr=False)
    """The content of summary.json, a dict. Its `status` is `completed`, or `preempted` after a
    stop."""
    trusted_modules: list[str] = field(default_factory=list, repr=False)
    """Your own packages that the overrides named; `model` may import them."""

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation, a dict with metric, value, step and checkpoint; None if there was
        none.
        """
        return self.summary.get("best")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in order, a list of dicts.

        `pandas.DataFrame(result.metrics)` makes a table of them.
        """
        return read_metrics(self.run_dir / METRICS)

    @property
    def checkpoint(self) -> Path | None:
        """The Path of the last checkpoint; None if there is none.

        For a run that evaluated, predicted or exported: the Path of the checkpoint that it loaded.
        """
        evaluated = self.summary.get("evaluated") or {}
        path = self.summary.get("checkpoint") or evaluated.get("path")
        return Path(path) if path else None

    def model(self, which: str = "auto") -> Trained:
        """Load the trained model, in eval mode, on the CPU.

        which: the checkpoint to load: `best`, `last`, or `auto`: the best if it was kept, else the
            last. For a run that evaluated, predicted or exported it is ignored: the checkpoint
            that this run loaded is loaded again.

        Returns a `Trained`, as `ddp_train.load` does. Raises DataError if there is no such
        checkpoint.
        """
        from ddp_train.inference.trained_model import load

        place = self.run_dir
        if self.summary.get("evaluated") and self.checkpoint:
            place = self.checkpoint
        return load(place, which=which, trusted_modules=self.trusted_modules)


def run(*overrides: str) -> Result:
    """Start a run, as the command `ddp-train OVERRIDES` does, and wait until it has ended.

    The run has its own processes. Its output goes to the terminal, or into the cell of a notebook.
    Its processes import the classes that overrides name from the current folder, from installed
    packages or from PYTHONPATH; they cannot import a class that is defined in a notebook.

    overrides: texts KEY=VALUE, each as on the command line.

    Returns a `Result`, also if the run was stopped (SIGTERM, Ctrl-C). Raises ConfigError before
    anything starts, with all mistakes in the overrides, and RunFailedError if the run failed.
    """
    config, command = _checked(list(overrides))
    run_dir = Path(str(config.run_dir))
    with subprocess.Popen(command) as process:
        try:
            code = process.wait()
        except BaseException:  # a notebook's interrupt reaches this process only
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    summary = read_object(run_dir / failure_report.SUMMARY)
    if code not in (0, SAVED, INTERRUPTED) or not summary:
        raise RunFailedError(code, read_object(run_dir / failure_report.FILE))
    return Result(run_dir, summary, package_of(getattr(config.model, "target", "")))


def _checked(overrides: list[str]) -> tuple[Config, list[str]]:
    """The resolved config of these overrides, and the command of its run. Raises ConfigError."""
    if world_from_environment():
        raise ConfigError(
            [
                "ddp_train.run: starts its processes itself, so it cannot run under torchrun;"
                " start the script with python, or use `torchrun --nproc_per_node=2 -m ddp_train"
                " key=value`"
            ]
        )
    for argument in overrides:
        if argument.startswith("-"):
            rule = "takes key=value and no flags; for a flag use the command line, ddp-train"
            raise ConfigError([f"ddp_train.run({argument!r}): {rule}"])
    program, overrides = find_program(None, overrides)
    requested, problems = read_run(program, read_overrides(program, overrides))
    config, further_problems = resolve_and_check(requested, None)
    if problems or further_problems:
        raise ConfigError(list(dict.fromkeys(problems + further_problems)))
    unsupported = ""
    if int(config.launch.nnodes) > 1:
        unsupported = f"launch.nnodes={config.launch.nnodes}"
    elif config.mode != "train" and not config.uses_trained:
        unsupported = f"mode={config.mode}"
    if unsupported:
        rule = "trains, evaluates, predicts or exports on one host"
        raise ConfigError([f"ddp_train.run: {rule}; for {unsupported} use the command line"])
    if not requested.run_dir:  # one process may start many runs in a second
        config = replace(config, run_dir=_free_name(str(config.run_dir)))
        overrides = [*overrides, f"run_dir={config.run_dir}"]
    return config, replace(program, typed="ddp-train").again(overrides)


def _free_name(run_dir: str) -> str:
    """The name of a folder that does not exist: `run_dir`, `run_dir_2` ..."""
    name = run_dir
    for number in itertools.count(2):
        if not Path(name).exists():
            break
        name = f"{run_dir}_{number}"
    return name
