"""The real runs of a proof: processes over gloo that the launcher starts, one of which is killed.
Torch-free."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ddp_lab.doctor.findings import WARNING, Finding, failure, ok, skipped
from ddp_lab.prove.configs import EVERY_STEPS, HOOKS, counts_of, variant
from ddp_lab.study.gradient_difference import compare
from ddp_lab.study.trials import Outcome, read_outcome
from ddp_train.checkpoints.layout import places, read_manifest
from ddp_train.config.freeze import freeze
from ddp_train.config.program import Program
from ddp_train.distributed.environment import preload_environment
from ddp_train.errors import LaunchError
from ddp_train.launcher import local
from ddp_train.launcher.fork_server import MODULE, ForkServer
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.options.schema import Config
from ddp_train.text import counted

LOG = "runs.log"
EXAMINE = "ddp_lab.prove.examine"
ANSWER = "examined.json"
ONE = "one_process.safetensors"
GRADIENTS_ALLOWED = {"fp64": 1e-10, "fp32": 1e-5}
WEIGHTS_ALLOWED = {"fp64": 1e-5, "fp32": 1e-2}
"""Relative, after some steps: an optimizer that divides by small numbers makes rounding larger."""
SCORES_ALLOWED = {"fp64": 1e-12, "fp32": 1e-6}
BY_SIZE_ALLOWED = {"fp64": 1e-9, "fp32": 1e-4}
"""Of batches of another size: a matrix product of other rows adds up in another order."""
POLL_SECONDS = 0.02
MARGIN_SECONDS = 60.0
"""That the checks of one process may take longer than prove.seconds: one that has begun is
finished."""
LEFT_OUT = "prove.runs=false"
LATE = "prove.seconds is over"
MORE_TIME = "raise prove.seconds, or lower prove.samples and prove.steps"


OTHER_DATA = ("changed since the checkpoint", "a digest of the samples")
"""What a run says that finds other samples than the checkpoint had, or another process has."""
DATA_MADE_ANEW = (
    "the data set has other samples, or in another order, in a process that is started anew"
)
MAKE_THEM_ALIKE = (
    "sort what comes out of a set; draw with a generator of a fixed seed when the data set is made"
)


class StoppedError(Exception):
    """A stop was requested."""


@dataclass
class Proof:
    """One proof on its way. config: that of `configs.for_proof`."""

    config: Config
    program: Program
    folder: Path
    began: float
    stop: StopRequests
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    asked: Config = field(default_factory=Config)
    """The job as it was asked for."""
    server: ForkServer | None = None
    console: Console = field(default_factory=lambda: Console(highlight=False))

    def run(self) -> None:
        """Fills `findings`. Raises StoppedError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOG).open("ab") as log:
            if (
                self.config.prove.runs
            ):  # it imports torch while this process's checks run in another one
                with _printing_to(log.fileno()):
                    self.server = ForkServer(self.program.import_path)
            try:
                self._examine(log.fileno())
                self._real_runs(log.fileno())
            finally:
                if self.server:
                    self.server.close()

    @property
    def seconds_left(self) -> float:
        return self.config.prove.seconds - (time.monotonic() - self.began)

    def _said(self, what: str) -> None:
        self.console.print(
            f"{time.monotonic() - self.began:5.1f} s  {what}", markup=False, soft_wrap=True
        )

    # --- in one process ---------------------------------------------------------------------------

    def _examine(self, log: int) -> None:
        freeze(replace(self.config, run_dir=str(self.folder)))
        seconds = max(self.seconds_left, 1.0)
        command = [
            sys.executable,
            *MODULE,
            EXAMINE,
            str(self.folder),
            str(seconds),
            str(self.samples_each),
        ]
        env = preload_environment(self.program.import_path)
        with (
            self.stop.listening(),
            subprocess.Popen(command, env=env, stdout=log, stderr=log) as process,
        ):
            while (
                process.poll() is None
                and not self.stop.received
                and self.seconds_left > -MARGIN_SECONDS
            ):
                time.sleep(POLL_SECONDS)
            process.kill()
        if self.stop.received:
            raise StoppedError
        answer = self.folder / ANSWER
        if answer.is_file():
            found = json.loads(answer.read_text())
            self.findings += [Finding(**finding) for finding in found["findings"]]
            self.facts = found["facts"]
            self._said("checks of one process: done")
            return
        last = (self.folder / LOG).read_text(errors="replace").strip().splitlines()[-1:]
        why = last[0] if last and process.returncode >= 0 else "no answer in time, or killed"
        remedy = (
            f"see {self.folder / LOG}; raise prove.seconds, or lower prove.samples, if it is only"
            " slow"
        )
        self.findings.append(
            failure("job", f"the checks of one process ended: {why}", remedy, cause="job")
        )

    @property
    def samples_each(self) -> int:
        """In a micro-batch of the job itself."""
        train = self.asked.train
        launch = self.asked.launch
        return -(
            -train.global_batch_size // (train.accumulation_steps * int(launch.nproc_per_node))
        )

    # --- in several -------------------------------------------------------------------------------

    def _real_runs(self, log: int) -> None:
        two, other = counts_of(self.config)
        names = {
            "gradients": f"gradients, {other if other > 1 else two} processes",
            "resume": "resume after a kill",
            "other": f"resume on {counted(other, 'process')}",
            "evaluation": f"evaluation, {counted(other, 'process')}",
        }
        broken = [one.check for one in self.findings if one.status == "failure"]
        if not self.config.prove.runs or "job" in broken or "precision" not in self.facts:
            why = LEFT_OUT if not self.config.prove.runs else "the job does not begin"
            self.findings += [skipped(name, why) for name in names.values()]
            return
        precision = self.facts["precision"]
        tuning = replace(self.config.tuning, precision=precision)
        self.config = replace(self.config, tuning=tuning)
        differs = [
            one
            for one in broken
            if one in ("gradients", "augmentation", "random numbers", "state", "unused parameters")
        ]
        same_reason = f"it would fail for the same reason as: {', '.join(differs)}"
        if "unused parameters" in differs:  # DDP refuses the second step
            self.findings += [skipped(name, same_reason) for name in names.values()]
            return
        if differs:
            self.findings.append(skipped(names["gradients"], same_reason))
        else:
            self._checked(names["gradients"], lambda: self._gradients(names["gradients"], log))
        self._checked(names["resume"], lambda: self._resume(names["resume"], log))
        if differs:
            self.findings.append(skipped(names["other"], same_reason))
        else:
            self._checked(names["other"], lambda: self._other_number(names["other"], log))
        if "evaluation" in broken:
            self.findings.append(
                skipped(names["evaluation"], "it would fail for the same reason as: evaluation")
            )
        else:
            self._checked(names["evaluation"], lambda: self._evaluation(names["evaluation"], log))

    def _checked(self, check: str, function: Callable[[], Finding]) -> None:
        if self.seconds_left <= 0:
            self.findings.append(
                Finding(check, "skipped", LATE, MORE_TIME, exit_code=LaunchError.exit_code)
            )
            return
        self.findings.append(function())
        self._said(f"{check}: {self.findings[-1].status}")

    def _launch(
        self,
        name: str,
        log: int,
        processes: int,
        hooks: list[Any] | None = None,
        anew: bool = False,
        **more: Any,
    ) -> Outcome:
        """A run to its end. anew: in processes that are not forked: with hashes of texts of their
        own, as the next day. Raises StoppedError."""
        run_dir = self.folder / name
        config = variant(self.config, run_dir, processes, hooks, **more)
        freeze(config)
        began = time.monotonic()
        with _printing_to(log):
            print(f"--- {name}: {counted(processes, 'process')}", flush=True)
            code = local.launch(
                config, self.program.import_path, self.stop, None if anew else self.server
            )
        if self.stop.received:
            raise StoppedError
        return read_outcome(run_dir, code, time.monotonic() - began)

    def _failed(self, check: str, outcome: Outcome) -> Finding:
        remedy = f"see {self.folder / LOG}"
        return failure(
            check,
            f"the run failed: {outcome.reason}",
            remedy,
            outcome.exit_code or LaunchError.exit_code,
            cause="run",
        )

    def _gradients(self, check: str, log: int) -> Finding:
        """Of the first step, as DDP leaves them, against those of one process without it."""
        from safetensors.numpy import load_file

        processes = max(counts_of(self.config))
        outcome = self._launch("gradients", log, processes, [f"{HOOKS}.Gradients"], max_steps=1)
        if not outcome.completed:
            return self._failed(check, outcome)
        if self.facts.get("unfixed"):
            return skipped(check, "the model draws random numbers that cannot be fixed")
        digests = self.facts.get("data_digests")
        if digests and places(outcome.run_dir):
            theirs = read_manifest(places(outcome.run_dir)[0]).get("data_digests") or digests
            if any(theirs.get(name, digest) != digest for name, digest in digests.items()):
                return failure(check, DATA_MADE_ANEW, MAKE_THEM_ALIKE, 65, cause="randomness")
        facts = json.loads((outcome.run_dir / "probe" / "model.json").read_text())
        one = load_file(self.folder / ONE)
        many = load_file(outcome.run_dir / "probe" / "gradients.safetensors")
        found = compare(one, many)
        allowed = GRADIENTS_ALLOWED[self.facts["precision"]]
        worst = found[0] if found else None
        relative = worst.relative if worst else 0.0
        if facts["ranks_differ"] or one.keys() != many.keys() or not relative <= allowed:
            where = facts["ranks_differ"][:1] or [worst.name if worst else ""]
            words = f"real processes compute other gradients than one does in turns: {where[0]}"
            warned = [one.check for one in self.findings if one.status == WARNING]
            words += f"; see {' and '.join(warned)}" if warned else ""
            remedy = (
                "look for what depends on the process: its rank, number, host name, files that"
                " another writes"
            )
            return failure(check, words, remedy, cause="process", found=relative, allowed=allowed)
        return ok(
            check, f"{counted(len(many), 'parameter')} over gloo", found=relative, allowed=allowed
        )

    def _resume(self, check: str, log: int) -> Finding:
        """A run without a break, and one that is killed and resumed: the same bytes."""
        processes = counts_of(self.config)[0]
        half = max(EVERY_STEPS + 1, self.config.prove.steps // 2)
        whole = self._launch("whole", log, processes)
        if not whole.completed:
            return self._failed(check, whole)
        self._launch("killed", log, processes, [{"_target_": f"{HOOKS}.KillAt", "step": half}])
        left = places(self.folder / "killed")
        if not left:
            return failure(
                check,
                "the run that was killed left no checkpoint",
                f"see {self.folder / LOG}",
                cause="run",
            )
        self.facts["left"] = str(left[0])
        step = int(left[0].name.partition("_")[2])
        resumed = self._launch("killed", log, processes, anew=True)
        if not resumed.completed and any(words in resumed.reason for words in OTHER_DATA):
            return failure(check, DATA_MADE_ANEW, MAKE_THEM_ALIKE, 65, cause="randomness")
        if not resumed.completed:
            return self._failed(check, resumed)
        if _digests(whole.run_dir) == _digests(resumed.run_dir):
            words = (
                f"killed after step {half} of {self.config.prove.steps}, resumed from step {step}:"
                " the same bytes"
            )
            return ok(check, words, found=0, allowed=0)
        relative, name = _difference(whole.run_dir, resumed.run_dir)
        words = (
            f"killed after step {half}, resumed from step {step}: other weights at the end ({name})"
        )
        remedy = (
            "keep what decides a result where checkpoints have it: in parameters, buffers, the"
            " state_dict() of a hook; draw random numbers with torch in a model or loss"
        )
        return failure(check, words, remedy, cause="state", found=relative, allowed=0)

    def _other_number(self, check: str, log: int) -> Finding:
        """From the checkpoint of the killed run on another number of processes; dropout's draws
        belong to a process, so both continue without them."""
        two, other = counts_of(self.config)
        if "left" not in self.facts:
            return skipped(check, "there is no checkpoint of a run that was killed")
        if self.facts.get("unfixed"):
            return skipped(check, "the model draws random numbers that cannot be fixed")
        reference = self.folder / "whole"
        hooks = []
        if self.facts.get("draws"):
            hooks = [f"{HOOKS}.Fixed"]
            same = self._launch("fixed", log, two, hooks, resume=self.facts["left"])
            if not same.completed:
                return self._failed(check, same)
            reference = same.run_dir
        moved = self._launch("other", log, other, hooks, resume=self.facts["left"])
        if not moved.completed:
            return self._failed(check, moved)
        relative, name = _difference(reference, moved.run_dir)
        allowed = WEIGHTS_ALLOWED[self.facts["precision"]]
        fixed = f"; fixed: {', '.join(self.facts['draws'])}" if hooks else ""
        if relative <= allowed:
            return ok(
                check,
                f"weights after {self.config.prove.steps} steps, {two} processes before{fixed}",
                found=relative,
                allowed=allowed,
            )
        words = f"resumed on {counted(other, 'process')} the run ends with other weights ({name})"
        remedy = "look for what is not in a checkpoint, or depends on the number of processes"
        return failure(check, words, remedy, cause="process", found=relative, allowed=allowed)

    def _evaluation(self, check: str, log: int) -> Finding:
        """The scores of the weights that the whole run ended with, on two numbers of processes."""
        if not places(self.folder / "whole"):
            return skipped(check, "there is no run whose weights could be scored")
        newest = str(places(self.folder / "whole")[0])
        scores = []
        for processes in counts_of(self.config):
            outcome = self._launch(
                f"evaluation_{processes}", log, processes, resume=newest, mode="evaluate"
            )
            if not outcome.completed:
                return self._failed(check, outcome)
            scores.append(outcome.summary["test"])
        (before, after), worst, metric = scores, 0.0, ""
        for name, value in before.items():
            if isinstance(value, float | int) and isinstance(after.get(name), float | int):
                difference = abs(after[name] - value) / max(abs(value), 1e-30)
                worst, metric = max((worst, metric), (difference, name))
        allowed = SCORES_ALLOWED[self.facts["precision"]]
        if worst <= allowed:
            return ok(check, f"{before.get('samples')} samples", found=worst, allowed=allowed)
        remedy = "compute the score of a batch from that batch and the weights alone"
        return failure(
            check,
            f"{metric} is another one than on two processes",
            remedy,
            cause="process",
            found=worst,
            allowed=allowed,
        )


def _digests(run_dir: Path) -> dict[str, str]:
    """Of the weights in the newest checkpoint."""
    newest = places(run_dir)[0]
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(newest.glob("*.safetensors"))
    }


def _difference(one: Path, other: Path) -> tuple[float, str]:
    """Of the weights at the end: the largest relative one, and where."""
    from safetensors.numpy import load_file

    mine, theirs = (load_file(places(run_dir)[0] / "model.safetensors") for run_dir in (one, other))
    numbers = {
        name: value for name, value in mine.items() if np.issubdtype(value.dtype, np.floating)
    }
    found = compare(numbers, theirs)
    return (found[0].relative, found[0].name) if found else (0.0, "")


@contextlib.contextmanager
def _printing_to(descriptor: int) -> Iterator[None]:
    """Inside, what this process and those that it starts print goes into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, own in zip((1, 2), before, strict=True):
            os.dup2(own, number)
            os.close(own)
