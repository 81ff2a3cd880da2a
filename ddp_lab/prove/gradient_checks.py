"""The checks of gradients: those of one global batch, however it is divided."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ddp_lab.doctor.findings import FAILURE, Finding, ok, skipped, warning
from ddp_lab.prove import causes
from ddp_lab.prove.answer import GRADIENTS
from ddp_lab.prove.bench import Bench
from ddp_lab.prove.causes import Cause
from ddp_lab.prove.division import GathersError, Pass
from ddp_lab.prove.progress import Deadline
from ddp_lab.prove.tolerances import GRADIENTS_ALLOWED, relative_difference
from ddp_lab.prove.unseeded import unseeded
from ddp_lab.study.gradient_difference import compare
from ddp_train.models.python_state import changed, state_of
from ddp_train.text import counted

WHOLE = "gradients"
UNEVEN = "weights of units"
DIVISIONS = ((2, 1), (3, 1), (1, 2), (3, 2))
"""Processes, and accumulation steps, that are compared with (1, 1)."""
UNEVEN_DIVISIONS = ((2, 2), (3, 1))
"""The same for the last batch of an epoch, which is short."""


class GradientChecks:
    """Divides global batches of a job, and looks for what breaks the gradients."""

    def __init__(self, bench: Bench, deadline: Deadline) -> None:
        self.bench = bench
        self.division = bench.division
        self.deadline = deadline
        self.tolerance = GRADIENTS_ALLOWED[bench.precision]
        before = state_of(bench.parts)
        self.first = self.division.compute(0)
        self.second = self.division.compute(0, trace=True)
        self.changed_state: list[str] = changed(before, state_of(bench.parts))
        """Names of what is neither parameter nor buffer, and changes in a forward pass."""
        self.passes = [self.first]
        """Those whose parameters without a gradient are reported."""

    def save(self, folder: Path) -> None:
        """Leave the gradients of one process, for the real runs."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.first.gradients, folder / GRADIENTS)

    def findings_without_samples(self) -> list[Finding]:
        """The findings if the samples themselves differ: no gradients can be compared."""
        why = "the samples themselves differ: see augmentation"
        return [skipped(WHOLE, why), skipped(UNEVEN, why), self.parameters()]

    def findings(self) -> list[Finding]:
        """All findings: of gradients, unused parameters, random numbers and state."""
        repeated = [self.random_numbers(), self.state()]
        broken = [finding for finding in repeated if finding.status == FAILURE]
        if broken:
            self.passes.append(self.second)
            gradients = self._unrepeatable(broken[0])
        else:
            gradients = self._divided_batches()
        return [*gradients, self.parameters(), *repeated]

    def _unrepeatable(self, broken: Finding) -> list[Finding]:
        """The findings if one process alone does not get the same gradients twice."""
        cause = Cause(broken.numbers["cause"], broken.detail, broken.remedy)
        worst = largest_difference(self.first, self.second)
        why = f"the gradients differ already: see {broken.check}"
        return [causes.finding(WHOLE, cause, worst, self.tolerance), skipped(UNEVEN, why)]

    def _divided_batches(self) -> list[Finding]:
        last_step = self.bench.plan.steps_per_epoch - 1
        try:
            whole = self.deadline.check(WHOLE, partial(self.divided, WHOLE, 0, DIVISIONS))
            uneven = self.deadline.check(
                UNEVEN, partial(self.divided, UNEVEN, last_step, UNEVEN_DIVISIONS)
            )
        except GathersError:
            why = "the loss takes rows of all processes (all_gather): real processes show it, below"
            return [skipped(WHOLE, why), skipped(UNEVEN, why)]
        return [whole, uneven]

    def divided(self, check: str, step: int, divisions: tuple[tuple[int, int], ...]) -> Finding:
        """Whether the parts of a global batch have the gradients of the whole.

        divisions: processes and accumulation steps of each.
        """
        has_batch_norm = bool(causes.batch_norms(self.bench.module.model))
        if has_batch_norm and self.bench.synchronises_batch_norm:
            why = "batch norm over all processes (strategy.sync_bn): real processes show it, below"
            return skipped(check, why)
        if has_batch_norm:
            # statistics are of a micro-batch: the real runs have the accumulation of the job
            divisions = tuple(division for division in divisions if division[1] == 1)
        whole = self.first if check == WHOLE else self.division.compute(step)
        worst = -1.0
        worst_division = (1, 1)
        for processes, accumulation in divisions:
            parts = self.division.compute(step, processes, accumulation)
            self.passes.append(parts)
            difference = max(
                largest_difference(whole, parts),
                relative_difference(parts.loss, whole.loss),
                relative_difference(parts.units, whole.units),
            )
            if not difference <= worst:  # nan too
                worst = difference
                worst_division = (processes, accumulation)
        if worst <= self.tolerance:
            detail = self._description(check, step, whole, divisions)
            return ok(check, detail, found=worst, allowed=self.tolerance)
        if self.division.unfixed:
            why = (
                "the model draws random numbers of torch that cannot be fixed; they belong to"
                f" process and step; so the gradients differ by {worst:.1e}"
            )
            return skipped(check, why)
        cause = self.cause(step, *worst_division)
        return causes.finding(check, cause, worst, self.tolerance)

    def _description(
        self, check: str, step: int, whole: Pass, divisions: tuple[tuple[int, int], ...]
    ) -> str:
        """What was compared."""
        parameters = counted(len(whole.gradients), "parameter")
        samples = counted(len(self.bench.plan.global_batch(step)), "sample")
        computed = ", ".join(f"{processes} x {steps}" for processes, steps in divisions)
        text = f"{parameters}, {samples} on {computed} (processes x accumulation)"
        if check == UNEVEN:
            text += f", {whole.units:g} {self.bench.module.task.unit}s"
        text += f", {self.bench.precision}"
        if self.division.met:
            text += f"; fixed: {', '.join(sorted(self.division.met))}"
        return text

    def cause(self, step: int, processes: int, accumulation: int) -> Cause:
        """Why the parts of a global batch do not make up the whole."""
        whole = self.division.compute(step, trace=True)
        parts = self.division.compute(step, processes, accumulation, trace=True)
        tolerance = 1e-9 if self.bench.precision == "fp64" else 1e-4
        divided = causes.Divided(
            module=self.bench.module,
            whole=whole,
            parts=parts,
            tolerance=tolerance,
            samples_per_micro_batch=self.bench.samples_per_micro_batch,
            loss_of_cut=partial(self.division.loss_of_cut, step, processes, accumulation),
        )
        return divided.cause()

    def parameters(self) -> Finding:
        """Whether parameters get no gradient, on all processes or on one."""
        missing = [names for computed in self.passes for names in computed.missing]
        everywhere = set.intersection(*missing)
        somewhere = set.union(*missing) - everywhere
        allowed = self.bench.allows_missing_gradients
        return causes.unused(sorted(everywhere), sorted(somewhere), allowed)

    def random_numbers(self) -> Finding:
        """Whether model or loss draw random numbers that no step seeds."""
        check = "random numbers"
        drew: dict[str, str] = {}
        for forward in self.first.forwards + self.second.forwards:
            drew |= forward.drew
        if drew:
            generator, layer = next(iter(drew.items()))
            cause = causes.outside_generator(self.bench.module.model, generator, layer)
            return causes.finding(check, cause)
        difference = largest_difference(self.first, self.second)
        asked = unseeded(lambda: self.division.compute(0))
        if difference > self.tolerance and (asked or not self.changed_state):
            return causes.finding(check, causes.unrepeatable(asked), difference, self.tolerance)
        detail = "model and loss draw none but torch's"
        if self.division.met:
            met = ", ".join(sorted(self.division.met))
            detail += f"; {met}, seeded for each process and step"
        return ok(check, detail)

    def state(self) -> Finding:
        """Whether forward passes change what is neither parameter nor buffer."""
        check = "state"
        if not self.changed_state:
            return ok(check, "forward passes change nothing but buffers")
        difference = largest_difference(self.first, self.second)
        names = causes.listed(self.changed_state)
        if difference > self.tolerance:
            return causes.finding(check, causes.hidden_state(names), difference, self.tolerance)
        detail = (
            f"{names} changes in forward passes; no effect on gradients was seen in two of them"
        )
        remedy = (
            "keep it in a buffer if results depend on it: no checkpoint has it, and each process"
            " has its own"
        )
        return warning(check, detail, remedy)


def largest_difference(one: Pass, other: Pass) -> float:
    """The largest relative difference of the gradient of a parameter; inf if it is not finite."""
    if one.gradients.keys() != other.gradients.keys():
        return float("inf")
    differences = compare(one.gradients, other.gradients)
    if not differences:
        return 0.0
    largest = differences[0].relative
    return largest if np.isfinite(largest) else float("inf")
