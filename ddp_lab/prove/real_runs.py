"""The checks of a proof that real processes make: over gloo, and one run of them is killed.

Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ddp_lab.doctor.findings import WARNING, Finding, failure, ok, skipped
from ddp_lab.prove.answer import GRADIENTS, Examined
from ddp_lab.prove.configs import EVERY_STEPS, HOOKS, RealRun, counts_of
from ddp_lab.prove.progress import LATE, Progress
from ddp_lab.prove.runner import LOG, Runner
from ddp_lab.prove.tolerances import (
    GRADIENTS_ALLOWED,
    SCORES_ALLOWED,
    WEIGHTS_ALLOWED,
    relative_difference,
)
from ddp_lab.study.gradient_difference import compare
from ddp_lab.study.trials import Outcome
from ddp_train.checkpoints.layout import places, read_manifest
from ddp_train.errors import DataError, LaunchError
from ddp_train.options.schema import Config
from ddp_train.text import counted

LEFT_OUT = "prove.runs=false"
OTHER_DATA = ("changed since the checkpoint", "a digest of the samples")
"""Parts of the error of a run whose samples are not those of the checkpoint, or of a process."""
DATA_MADE_ANEW = "the data set has other samples, or another order, in a new process"
MAKE_THEM_ALIKE = (
    "where the data set is created, sort what comes from a Python set, and use a generator with"
    " a fixed seed"
)
STATES = "states.json"
"""The file of the hook States, before the rank."""
SAME_REASON = "it would fail for the same reason as: "
PRECONDITIONS = ("gradients", "augmentation", "random numbers", "state", "unused parameters")
"""Checks of one process without which real processes cannot agree."""


class _RunFailedError(Exception):
    """A run that should complete did not."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class RealRuns:
    """Adds the findings of real runs to those of one process."""

    def __init__(
        self, config: Config, runner: Runner, examined: Examined, progress: Progress
    ) -> None:
        """config: as `configs.for_proof` makes it."""
        self.config = config
        self.runner = runner
        self.examined = examined
        self.progress = progress
        self.checkpoint_of_killed: Path | None = None
        if examined.precision:
            tuning = replace(config.tuning, precision=examined.precision)
            self.config = replace(config, tuning=tuning)

    def run(self) -> None:
        """Make all checks for which there is time. Raises StoppedError.

        A check is skipped if it would fail for the same reason as a failed check of one process.
        """
        two, other = counts_of(self.config)
        processes = counted(other, "process")
        failed = self.examined.failed_checks()
        preconditions = [name for name in failed if name in PRECONDITIONS]
        why_no_run = self._reason_to_skip_all(failed)
        if not why_no_run and "unused parameters" in preconditions:
            # DDP refuses the second step.
            why_no_run = SAME_REASON + ", ".join(preconditions)
        why_no_comparison = why_no_run
        if not why_no_run and preconditions:
            why_no_comparison = SAME_REASON + ", ".join(preconditions)
        why_no_scores = why_no_run
        if not why_no_run and "evaluation" in failed:
            why_no_scores = SAME_REASON + "evaluation"
        self._check(f"gradients, {max(two, other)} processes", self.gradients, why_no_comparison)
        self._check("resume after a kill", self.resume, why_no_run)
        self._check(f"resume on {processes}", self.other_number, why_no_comparison)
        self._check(f"evaluation, {processes}", self.evaluation, why_no_scores)

    def _check(self, name: str, function: Callable[[], Finding], reason: str) -> None:
        """Make one check. reason: why it is skipped; empty if it is made."""
        if reason:
            finding = skipped(reason).named(name)
        else:
            finding = self.progress.check(name, lambda: self._finding(function))
            if finding.detail != LATE:
                self.progress.print(f"{name}: {finding.status}")
        self.examined.findings.append(finding)

    def _finding(self, function: Callable[[], Finding]) -> Finding:
        """The finding of a check, also if one of its runs fails."""
        try:
            return function()
        except _RunFailedError as error:
            code = error.outcome.exit_code or LaunchError.exit_code
            detail = f"the run failed: {error.outcome.reason}"
            return failure(detail, self._see_log, code, cause="run")

    def _reason_to_skip_all(self, failed: list[str]) -> str:
        if not self.config.prove.runs:
            return LEFT_OUT
        if "job" in failed or not self.examined.precision:
            return "the job does not start"
        return ""

    # --- the checks -------------------------------------------------------------------------------

    def gradients(self) -> Finding:
        """Compare the gradients of the first step with DDP with those of one process without it."""
        processes = max(counts_of(self.config))
        hooks = [f"{HOOKS}.Gradients"]
        outcome = self._run(RealRun("gradients", processes, hooks, max_steps=1))
        if self.examined.unfixed:
            return skipped("the model draws random numbers in a way that prove cannot fix")
        if self._has_other_data(outcome.run_dir):
            return _data_made_anew()
        probe = outcome.run_dir / "probe"
        ranks_differ = json.loads((probe / "model.json").read_text())["ranks_differ"]
        one = load_file(self.runner.folder / GRADIENTS)
        many = load_file(probe / "gradients.safetensors")
        differences = compare(one, many)
        relative = differences[0].relative if differences else 0.0
        allowed = GRADIENTS_ALLOWED[self.examined.precision]
        numbers: dict[str, Any] = {"found": relative, "allowed": allowed}
        if relative <= allowed and not ranks_differ and one.keys() == many.keys():
            return ok(
                f"the gradients of {counted(len(many), 'parameter')}, exchanged by gloo", **numbers
            )
        names = [*ranks_differ, *(difference.name for difference in differences), ""]
        detail = (
            "real processes compute other gradients than one process that takes their parts in"
            f" turn: {names[0]}"
        )
        warned = [finding.check for finding in self.examined.findings if finding.status == WARNING]
        if warned:
            detail += f"; see {' and '.join(warned)}"
        remedy = (
            "look for what depends on the process: its rank, number, host name, files that"
            " another process writes"
        )
        return failure(detail, remedy, cause="process", **numbers)

    def resume(self) -> Finding:
        """Kill and resume a run, and compare the bytes that it leaves with those of one without a
        break."""
        processes = counts_of(self.config)[0]
        steps = self.config.prove.steps
        last_step = max(EVERY_STEPS + 1, steps // 2)
        whole = self._run(RealRun("whole", processes, self._hooks_of_states()))
        kill = {"_target_": f"{HOOKS}.KillAt", "step": last_step}
        self.runner.run(self.config, RealRun("killed", processes, [kill]))
        checkpoints = places(self.runner.folder / "killed")
        if not checkpoints:
            detail = "the run that was killed left no checkpoint"
            return failure(detail, self._see_log, cause="run")
        self.checkpoint_of_killed = checkpoints[0]
        resumed_run = RealRun("killed", processes, self._hooks_of_states(), in_new_processes=True)
        resumed = self.runner.run(self.config, resumed_run)
        if not resumed.completed:
            if any(text in resumed.reason for text in OTHER_DATA):
                return _data_made_anew()
            raise _RunFailedError(resumed)
        step = int(checkpoints[0].name.partition("_")[2])
        lost = _names_apart([_states(whole.run_dir)[0], _states(resumed.run_dir)[0]])
        if lost:
            detail = (
                f"killed after step {last_step}, resumed from step {step}: {lost}, on which the"
                " loss depends, is another one at the end"
            )
            remedy = "keep it in a buffer of the model, or in the state_dict() of a hook"
            return failure(detail, remedy, cause="state")
        if _weight_digests(whole.run_dir) == _weight_digests(resumed.run_dir):
            detail = (
                f"killed after step {last_step} of {steps}, resumed from step {step}: the same"
                " bytes"
            )
            return ok(detail, found=0, allowed=0)
        relative, name = _weight_difference(whole.run_dir, resumed.run_dir)
        detail = (
            f"killed after step {last_step}, resumed from step {step}: other weights at the end"
            f" ({name})"
        )
        remedy = (
            "keep what the result depends on in parameters, buffers or the state_dict() of a"
            " hook. In a model or loss draw random numbers with torch"
        )
        return failure(detail, remedy, cause="state", found=relative, allowed=0)

    def other_number(self) -> Finding:
        """Resume the killed run on another number of processes, and compare the weights at the end.

        Draws of dropout belong to a process, so both continue without them.
        """
        two, other = counts_of(self.config)
        if self.checkpoint_of_killed is None:
            return skipped("there is no checkpoint of a run that was killed")
        if self.examined.unfixed:
            return skipped("the model draws random numbers in a way that prove cannot fix")
        checkpoint = str(self.checkpoint_of_killed)
        reference = self.runner.folder / "whole"
        draws = self.examined.draws
        hooks: list[Any] = []
        fixed = ""
        if draws:
            hooks = [f"{HOOKS}.Fixed"]
            fixed = f"; with fixed random numbers in {', '.join(draws)}"
            same = self._run(RealRun("fixed", two, hooks, resume=checkpoint))
            reference = same.run_dir
        hooks_of_moved = [*hooks, *self._hooks_of_states()]
        moved = self._run(RealRun("other", other, hooks_of_moved, resume=checkpoint))
        apart = _names_apart(_states(moved.run_dir))
        if apart:
            detail = (
                f"{apart}, on which the loss depends, is not the same on all processes, since each"
                " process fills it from its own samples"
            )
            remedy = "fill it from the samples of all processes (ddp_train.all_gather)"
            return failure(detail, remedy, cause="state")
        relative, name = _weight_difference(reference, moved.run_dir)
        allowed = WEIGHTS_ALLOWED[self.examined.precision]
        numbers: dict[str, Any] = {"found": relative, "allowed": allowed}
        if relative <= allowed:
            steps = self.config.prove.steps
            detail = f"weights after {steps} steps are the same as on {two} processes{fixed}"
            return ok(detail, **numbers)
        detail = (
            f"a run that is resumed on {counted(other, 'process')} ends with other weights ({name})"
        )
        remedy = (
            "look for state that is in no checkpoint, or that depends on the number of processes"
        )
        return failure(detail, remedy, cause="process", **numbers)

    def evaluation(self) -> Finding:
        """Compare the scores of the weights at the end on two numbers of processes."""
        checkpoints = places(self.runner.folder / "whole")
        if not checkpoints:
            return skipped("there is no run whose weights could be scored")
        checkpoint = str(checkpoints[0])
        scores: list[dict[str, Any]] = []
        for processes in counts_of(self.config):
            name = f"evaluation_{processes}"
            outcome = self._run(RealRun(name, processes, resume=checkpoint, mode="evaluate"))
            scores.append(outcome.summary["test"])
        before, after = scores
        worst = 0.0
        metric = ""
        for name, value in before.items():
            if isinstance(value, float | int) and isinstance(after.get(name), float | int):
                difference = relative_difference(after[name], value)
                worst, metric = max((worst, metric), (difference, name))
        allowed = SCORES_ALLOWED[self.examined.precision]
        numbers: dict[str, Any] = {"found": worst, "allowed": allowed}
        if worst <= allowed:
            return ok(f"{before.get('samples')} samples", **numbers)
        counts = " and ".join(map(str, counts_of(self.config)))
        detail = f"{metric} is not the same on {counts} processes"
        remedy = "compute the score of a batch from that batch and the weights alone"
        return failure(detail, remedy, cause="process", **numbers)

    # --- what they need ---------------------------------------------------------------------------

    def _hooks_of_states(self) -> list[Any]:
        """The hook that leaves the state which only real processes can judge, if there is any."""
        names = self.examined.deciding_state
        if not names:
            return []
        return [{"_target_": f"{HOOKS}.States", "names": names, "file": STATES}]

    def _run(self, real_run: RealRun) -> Outcome:
        """Run to the end. Raises _RunFailedError if the run does not complete."""
        outcome = self.runner.run(self.config, real_run)
        if not outcome.completed:
            raise _RunFailedError(outcome)
        return outcome

    @property
    def _see_log(self) -> str:
        return f"see {self.runner.folder / LOG}"

    def _has_other_data(self, run_dir: Path) -> bool:
        """Compare the samples of a run with those of the checks of one process."""
        digests = self.examined.data_digests
        checkpoints = places(run_dir)
        if not digests or not checkpoints:
            return False
        of_run = read_manifest(checkpoints[0]).get("data_digests") or digests
        return any(of_run.get(name, digest) != digest for name, digest in digests.items())


def _data_made_anew() -> Finding:
    return failure(DATA_MADE_ANEW, MAKE_THEM_ALIKE, DataError.exit_code, cause="randomness")


def _states(run_dir: Path) -> list[dict[str, str | None]]:
    """The digests that the hook States left, of each rank; without it one without digests."""
    files = sorted(run_dir.glob(f"{STATES}.*"))
    return [json.loads(path.read_text()) for path in files] or [{}]


def _names_apart(states: list[dict[str, str | None]]) -> str:
    """The names of what is not the same in all; empty if all is."""
    first = states[0]
    return ", ".join(
        name for name in first if any(state[name] != first[name] for state in states[1:])
    )


def _weight_digests(run_dir: Path) -> dict[str, str]:
    """Digests of the weights in the newest checkpoint, by file."""
    newest = places(run_dir)[0]
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(newest.glob("*.safetensors"))
    }


def _weight_difference(one: Path, other: Path) -> tuple[float, str]:
    """The largest relative difference of the weights at the end of two runs, and its parameter."""
    mine = load_file(places(one)[0] / "model.safetensors")
    theirs = load_file(places(other)[0] / "model.safetensors")
    floats = {
        name: value for name, value in mine.items() if np.issubdtype(value.dtype, np.floating)
    }
    differences = compare(floats, theirs)
    if not differences:
        return 0.0, ""
    return differences[0].relative, differences[0].name
