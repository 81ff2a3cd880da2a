"""The checks that one process can make of a job, and the causes that it can name: `python -m
ddp_lab.prove.examine`.

Processes and accumulation steps are played here one after the other, by the batch plan and the
steps of a real run. The real processes are in `runs`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.numpy import save_file

from ddp_lab.doctor.findings import FAILURE, Finding, failure, ok, skipped, warning
from ddp_lab.prove import causes
from ddp_lab.prove.causes import Cause
from ddp_lab.prove.data_checks import augmentation, order_of_samples, roots
from ddp_lab.prove.division import Division, GathersError, Pass
from ddp_lab.prove.runs import ANSWER, BY_SIZE_ALLOWED, GRADIENTS_ALLOWED, ONE, SCORES_ALLOWED
from ddp_lab.prove.unseeded import unseeded
from ddp_lab.study.gradient_difference import compare
from ddp_train.assembly.batches import loader_options
from ddp_train.assembly.data_sets import open_datasets
from ddp_train.assembly.job import JobBuilder
from ddp_train.assembly.model import build_module, try_user_task
from ddp_train.assembly.strategy import build_strategy
from ddp_train.config.freeze import FILE, load_frozen
from ddp_train.config.program import import_from_working_folder
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.datasets import BatchSource, digests
from ddp_train.data.rng import global_states
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job
from ddp_train.engine.step_observers import ReportedBatches
from ddp_train.errors import ConfigError, LaunchError, TaskError
from ddp_train.linux import end_with_parent
from ddp_train.models.python_state import changed, state_of
from ddp_train.options.schema import Config
from ddp_train.parallel.strategy import Single
from ddp_train.performance.switches import set_process_flags
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.whole_files import write_json
from ddp_train.tasks.task import ModelWithTask
from ddp_train.text import counted, first_line

DIVISIONS = ((2, 1), (3, 1), (1, 2), (3, 2))
"""Processes, and accumulation steps, that are compared with (1, 1)."""
UNEVENLY = ((2, 2), (3, 1))
EVALUATION_BATCHES = 5
"""So that three processes have unequally many."""


@dataclass
class Examined:
    """What was found. facts: what the real runs must know."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(finding.status == FAILURE for finding in self.findings)

    def causes(self) -> list[str]:
        """Of what does not hold, each once."""
        found = [
            finding.numbers["cause"] for finding in self.findings if finding.numbers.get("cause")
        ]
        return list(dict.fromkeys(found))


def examine(
    config: Config, samples_each: int = 0, folder: Path | None = None, seconds: float = 600.0
) -> Examined:
    """All checks of one process. config: as `configs.for_proof` makes it. samples_each: in a
    micro-batch of the job itself, for messages. folder: gets the gradients of one process.

    Errors of the job itself are findings: the proof says that it does not begin, and why.
    """
    deadline = time.monotonic() + seconds
    examined = Examined()
    bench = None
    for precision in ("fp64", "fp32"):
        config = dataclasses.replace(
            config, tuning=dataclasses.replace(config.tuning, precision=precision)
        )
        try:
            bench = Bench(config, samples_each)
            bench.division.compute(0)
        except Exception as error:  # noqa: BLE001  the job is the user's: whatever it raises is its finding
            if (
                precision == "fp64"
                and isinstance(error, RuntimeError)
                and not isinstance(error, LaunchError)
            ):
                continue  # a model may have float32 written into it
            examined.findings.append(_not_begun(error))
            return examined
        examined.facts["precision"] = precision
        break
    assert bench, "fp32 ends the loop"
    bench.check(examined, folder, deadline)
    return examined


def _not_begun(error: Exception) -> Finding:
    if isinstance(error, ConfigError):
        text = "; ".join(error.problems)
    else:
        text = first_line(error)
    if "that is a mean" in text or "would depend on the number of processes" in text:
        return causes.finding("weights of units", Cause("mean", text, causes.SUMS))
    if "units_are_samples is True" in text:
        return causes.finding("weights of units", Cause("units", text, causes.UNITS))
    if isinstance(error, LaunchError):
        what = "weights of units" if isinstance(error, TaskError) else "job"
        return failure(what, text, error.remedy, error.exit_code, cause="job")
    line = causes.place_of(error)
    return failure(
        "job", f"{type(error).__name__}: {text}{line}", "correct the line that raises", cause="job"
    )


class Bench:
    """A job as a run of one process builds it, and what is asked of it."""

    def __init__(self, config: Config, samples_each: int) -> None:
        self.config = config
        self.status = RankStatus()
        self.samples_each = samples_each
        self.precision = config.tuning.precision
        self.tolerance = GRADIENTS_ALLOWED[self.precision]
        self.splits = open_datasets(config)
        self.data_at_first = state_of(roots(self.splits.train))
        self.strategy = Single("cpu")
        real = build_strategy(config, World(), "cpu")
        self.may_miss = real.allow_missing_grads
        self.sync_bn = bool(getattr(config.strategy, "sync_bn", False))
        self.module: ModelWithTask = build_module(config, self.splits.train, self.strategy, "cpu")
        try_user_task(config, self.module, self.splits.train, "cpu")
        builder = JobBuilder(config, World(), "cpu", self.module, self.strategy, self.status)
        self.job: Job = builder.build_job(self.splits)
        mix = cast(ReportedBatches, self.job.batches).loader.mix
        options = dataclasses.replace(loader_options(config, self.module.task), num_workers=0)
        self.division = Division(self.module, self.splits.train, self.plan, options, mix)

    @property
    def plan(self) -> BatchPlan:
        return dataclasses.replace(self.job.plan, virtual_shards=None)

    @property
    def parts(self) -> dict[str, Any]:
        """What belongs to a forward pass."""
        inner = getattr(self.config.task, "target", None)
        task = self.module.task
        owner = getattr(task.loss, "__self__", task)
        return {"model": self.module.model, **({"task": owner} if inner else {})}

    def check(self, examined: Examined, folder: Path | None, deadline: float) -> None:
        """Adds the findings and facts."""
        findings = examined.findings
        late = _Late(deadline)
        data = augmentation(self.splits, self.plan, self.data_at_first)
        samples_differ = any(one.status == FAILURE for one in data)
        again = self.splits.train if samples_differ else open_datasets(self.config).train
        findings += [order_of_samples(self.splits.train, again, self.plan), *data]
        findings += self.gradients(examined, folder, samples_differ, late)
        same_reason = _failed(findings, "gradients")
        findings.append(
            late.or_else("evaluation", lambda: self.evaluation(by_size=not same_reason))
        )
        model = self.module.model
        examined.facts |= {
            "draws": sorted(self.division.met),
            "unfixed": self.division.unfixed,
            "data_digests": digests(self.splits.train),
            "batch_norm": causes.batch_norms(model),
            "gradients": not _failed(findings, "gradients"),
        }

    # --- gradients --------------------------------------------------------------------------------

    def gradients(
        self, examined: Examined, folder: Path | None, samples_differ: bool, late: _Late
    ) -> list[Finding]:
        """Of one global batch, and of an uneven one; and what of the model breaks them."""
        before = state_of(self.parts)
        one = self.division.compute(0)
        again = self.division.compute(0, trace=True)
        now_changed = changed(before, state_of(self.parts))
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(one.gradients, folder / ONE)
        if samples_differ:
            why = "the samples themselves differ: see augmentation"
            return [
                skipped("gradients", why),
                skipped("weights of units", why),
                self.parameters([one]),
            ]
        findings = [
            self.random_numbers(one, again, now_changed),
            self.state(now_changed, one, again),
        ]
        if broken := next((finding for finding in findings if finding.status == FAILURE), None):
            cause = Cause(broken.numbers["cause"], broken.detail, broken.remedy)
            units = skipped("weights of units", f"the gradients differ already: see {broken.check}")
            gradients = causes.finding("gradients", cause, _worst(one, again), self.tolerance)
            return [gradients, units, self.parameters([one, again]), *findings]
        parts: list[Pass] = []
        try:
            found = late.or_else(
                "gradients", lambda: self.divided("gradients", 0, one, DIVISIONS, parts)
            )
            # the last batch of the epoch is short
            uneven = self.plan.steps_per_epoch - 1
            check = "weights of units"
            units = late.or_else(check, lambda: self.divided(check, uneven, None, UNEVENLY, parts))
        except GathersError:
            why = "the loss takes rows of all processes (all_gather): real processes show it, below"
            found = skipped("gradients", why)
            units = skipped("weights of units", why)
        return [found, units, self.parameters([one, *parts]), *findings]

    def divided(
        self,
        check: str,
        step: int,
        one: Pass | None,
        divisions: tuple[tuple[int, int], ...],
        parts: list[Pass],
    ) -> Finding:
        one = one or self.division.compute(step)
        layers = causes.batch_norms(self.module.model)
        worst = -1.0
        where = (1, 1)
        for processes, accumulation in divisions:
            if layers and self.sync_bn:
                return skipped(
                    check,
                    "batch norm over all processes (strategy.sync_bn): real processes show it,"
                    " below",
                )
            if accumulation > 1 and layers:
                # statistics are of a micro-batch: the real runs have the accumulation of the job
                continue
            many = self.division.compute(step, processes, accumulation)
            parts.append(many)
            difference = max(
                _worst(one, many), abs(one.loss - many.loss) / max(abs(one.loss), 1e-30)
            )
            difference = max(difference, abs(one.units - many.units) / max(abs(one.units), 1e-30))
            if not difference <= worst:
                worst = difference
                where = (processes, accumulation)
        size = len(self.plan.global_batch(step))
        if worst <= self.tolerance:
            done = ", ".join(f"{p} x {a}" for p, a in divisions if a == 1 or not layers)
            what = (
                f"{counted(len(one.gradients), 'parameter')}, {counted(size, 'sample')} on {done}"
            )
            what += " (processes x accumulation)"
            fixed = f"; fixed: {', '.join(sorted(self.division.met))}" if self.division.met else ""
            what += (
                f", {one.units:g} {self.module.task.unit}s" if check == "weights of units" else ""
            )
            return ok(
                check, f"{what}, {self.precision}{fixed}", found=worst, allowed=self.tolerance
            )
        if self.division.unfixed:
            why = (
                "the model draws random numbers of torch that cannot be fixed; they belong to"
                " process and step"
            )
            return skipped(check, f"{why}; so the gradients differ by {worst:.1e}")
        cause = self.explain(step, *where)
        return causes.finding(check, cause, worst, self.tolerance)

    def explain(self, step: int, processes: int, accumulation: int) -> Cause:
        """Why the parts of a global batch do not make up the whole."""
        whole = self.division.compute(step, trace=True)
        many = self.division.compute(step, processes, accumulation, trace=True)
        loose = 1e-9 if self.precision == "fp64" else 1e-4
        cut = partial(self.division.loss_of_cut, step, processes, accumulation)
        return causes.of_division(self.module, whole, many, loose, self.samples_each, cut)

    def parameters(self, passes: list[Pass]) -> Finding:
        """Those that get no gradient, on all processes or on one."""
        never = sorted(set.intersection(*(names for one in passes for names in one.missing)))
        some = sorted(set.union(*(names for one in passes for names in one.missing)) - set(never))
        return causes.unused(never, some, self.may_miss)

    def random_numbers(self, one: Pass, again: Pass, now_changed: list[str]) -> Finding:
        """Those that the model or the loss draws outside of what a step seeds."""
        drew = {
            name: where
            for forward in one.forwards + again.forwards
            for name, where in forward.drew.items()
        }
        if drew:
            generator, layer = next(iter(drew.items()))
            return causes.finding(
                "random numbers", causes.outside_generator(self.module.model, generator, layer)
            )
        difference = _worst(one, again)
        asked = unseeded(lambda: self.division.compute(0))
        if difference > self.tolerance and (asked or not now_changed):
            return causes.finding(
                "random numbers", causes.unrepeatable(asked, again), difference, self.tolerance
            )
        if self.division.met:
            met = f"; {', '.join(sorted(self.division.met))}, seeded for each process and step"
        else:
            met = ""
        return ok("random numbers", f"model and loss draw none but torch's{met}")

    def state(self, now_changed: list[str], one: Pass, again: Pass) -> Finding:
        """That is neither parameter nor buffer, and changes in a forward pass."""
        difference = _worst(one, again)
        if not now_changed:
            return ok("state", "forward passes change nothing but buffers")
        names = causes.listed(now_changed)
        if difference > self.tolerance:
            return causes.finding("state", causes.hidden_state(names), difference, self.tolerance)
        return warning(
            "state",
            f"{names} changes in forward passes; no effect on gradients was seen in two of them",
            "keep it in a buffer if results depend on it: no checkpoint has it, and each process"
            " has its own",
        )

    # --- evaluation -------------------------------------------------------------------------------

    def evaluation(self, by_size: bool) -> Finding:
        """The scores of the same batches, as 1, 2 and 3 processes compute them; with `by_size`
        those of others too."""
        name, source = self.splits.scored
        size = min(
            self.config.train.evaluate_batch_size, max(1, -(-len(source) // EVALUATION_BATCHES))
        )
        train = dataclasses.replace(self.config.train, evaluate_batch_size=size)
        config = dataclasses.replace(self.config, train=train)
        before = state_of({**self.parts, "data set": source})
        scores = []
        drew = ""
        for processes in (1, 2, 3):
            states = global_states()
            scores.append(self.scored(config, source, processes))
            drew = drew or causes.moved(states)
        worst = 0.0
        metric = ""
        for other in scores[1:]:
            for name_of, value in scores[0].items():
                difference = abs(other[name_of] - value) / max(abs(value), 1e-30)
                if difference == difference and difference > worst:
                    worst = difference
                    metric = name_of
        allowed = SCORES_ALLOWED[self.precision]
        if (
            worst <= allowed
            and by_size
            and (finding := self.by_size(config, source, size, scores[0]))
        ):
            return finding
        if worst <= allowed:
            batches = f"batches of {size}" + " and of others" * by_size
            return ok(
                "evaluation",
                f"{', '.join(scores[0])} of {len(source)} samples of the {name} set in {batches}",
                found=worst,
                allowed=allowed,
            )
        now_changed = changed(before, state_of({**self.parts, "data set": source}))
        asked = unseeded(lambda: self.scored(config, source, 1))
        cause = causes.of_evaluation(metric, drew, asked, now_changed)
        return causes.finding("evaluation", cause, worst, allowed)

    def by_size(
        self, config: Config, source: BatchSource, size: int, before: dict[str, float]
    ) -> Finding | None:
        """What is wrong if other batches give another score: it is averaged by batch, or a sample's
        depends on others in its batch. before: with batches of `size`."""
        other = 2 * size // 3
        if not other:
            return None
        train = dataclasses.replace(config.train, evaluate_batch_size=other)
        now = self.scored(dataclasses.replace(config, train=train), source, 1)
        differences = {
            name: abs(now[name] - value) / max(abs(value), 1e-30) for name, value in before.items()
        }
        worst = max(differences, key=lambda name: differences[name])
        if not differences[worst] > BY_SIZE_ALLOWED[self.precision]:
            return None
        words = (
            f"{worst} is {before[worst]:.6g} with batches of {size} samples, and {now[worst]:.6g}"
            f" with {other}"
        )
        cause = causes.of_batch_size(words)
        return causes.finding(
            "evaluation", cause, differences[worst], BY_SIZE_ALLOWED[self.precision]
        )

    @torch.no_grad()
    def scored(self, config: Config, source: BatchSource, processes: int) -> dict[str, float]:
        """The metrics, with the batches of one process after those of another."""
        self.module.eval()
        try:
            scorer = None
            for rank in range(processes):
                world = World(rank, processes, rank, processes)
                builder = JobBuilder(config, world, "cpu", self.module, self.strategy, self.status)
                evaluation = builder.build_evaluation(source)
                scorer = scorer or evaluation.new_scorer()
                for batch in evaluation.batches:
                    scorer.add(
                        batch.micro_batch.step,
                        self.module.score(batch.data),
                        batch.micro_batch.num_real,
                    )
                evaluation.close()
            score = scorer.result() if scorer else None
            assert score, "no stop was asked for"
            return score.metrics
        finally:
            self.module.train()


class _Late:
    """What is not begun after a time is skipped, and the proof is incomplete."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def or_else(self, check: str, function: Callable[[], Finding]) -> Finding:
        if time.monotonic() < self.deadline:
            return function()
        return causes.out_of_time(check)


def _failed(findings: list[Finding], check: str) -> bool:
    return any(finding.check == check and finding.status == FAILURE for finding in findings)


def _worst(one: Pass, other: Pass) -> float:
    """The largest relative difference of the gradient of a parameter."""
    if one.gradients.keys() != other.gradients.keys():
        return float("inf")
    found = compare(one.gradients, other.gradients)
    if not found:
        return 0.0
    if np.isfinite(found[0].relative):
        return found[0].relative
    return float("inf")


def main() -> None:
    """`python -m ddp_lab.prove.examine FOLDER SECONDS SAMPLES_EACH`: reads its config.yaml,
    writes examined.json."""
    end_with_parent()
    import_from_working_folder()
    folder = Path(sys.argv[1])
    seconds = float(sys.argv[2])
    config = load_frozen((folder / FILE).read_text())
    set_process_flags(
        threads=int(config.launch.threads_per_process),
        deterministic=True,
        cudnn_benchmark=False,
        tf32=False,
    )
    examined = examine(config, int(sys.argv[3]), folder, seconds)
    findings = [dataclasses.asdict(finding) for finding in examined.findings]
    write_json(
        folder / ANSWER, json.loads(json.dumps({"findings": findings, "facts": examined.facts}))
    )


if __name__ == "__main__":
    main()
