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
from ddp_train.distributed.training_step import CURRENT
from ddp_train.models.python_state import changed, state_of
from ddp_train.text import counted

WHOLE = "gradients"
UNEVEN = "weights of units"
UNUSED = "unused parameters"
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
        gathers = CURRENT.gathers
        before = state_of(bench.parts)
        self.first = self.division.compute(0)
        self.second = self.division.compute(0, trace=True)
        self.changed_state: list[str] = changed(before, state_of(bench.parts))
        """Names of what is neither parameter nor buffer, and changes in a forward pass."""
        self.uses_all_rows = CURRENT.gathers > gathers
        """The loss calls `all_gather`: its state may come from the rows of all processes."""
        self.passes = [self.first]
        """The passes whose parameters without a gradient are reported."""

    @property
    def deciding_state(self) -> list[str]:
        """The state that only real processes can judge: the loss depends on it, and it may come
        from the rows of all of them."""
        difference = largest_difference(self.first, self.second)
        if self.uses_all_rows and difference > self.tolerance:
            return self.changed_state
        return []

    def save(self, folder: Path) -> None:
        """Leave the gradients of one process, for the real runs."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.first.gradients, folder / GRADIENTS)

    def findings_without_samples(self) -> list[Finding]:
        """The findings if the samples themselves differ: no gradients can be compared."""
        unused = self.parameters().named(UNUSED)
        return [*_not_compared("the samples themselves differ: see augmentation"), unused]

    def findings(self) -> list[Finding]:
        """All findings: of gradients, unused parameters, random numbers and state."""
        repeated = [self.random_numbers().named("random numbers"), self.state().named("state")]
        broken = [finding for finding in repeated if finding.status == FAILURE]
        if broken:
            self.passes.append(self.second)
            gradients = self._unrepeatable(broken[0])
        else:
            gradients = self._divided_batches()
        return [*gradients, self.parameters().named(UNUSED), *repeated]

    def _unrepeatable(self, broken: Finding) -> list[Finding]:
        """The findings if one process alone does not get the same gradients twice."""
        cause = Cause(broken.numbers["cause"], broken.detail, broken.remedy)
        worst = largest_difference(self.first, self.second)
        reason = f"the gradients differ already: see {broken.check}"
        whole = causes.finding(cause, worst, self.tolerance)
        return [whole.named(WHOLE), skipped(reason).named(UNEVEN)]

    def _divided_batches(self) -> list[Finding]:
        last_step = self.bench.plan.steps_per_epoch - 1
        whole = partial(self.divided, 0, DIVISIONS)
        unit = self.bench.module.task.unit
        uneven = partial(self.divided, last_step, UNEVEN_DIVISIONS, unit)
        try:
            return [self.deadline.check(WHOLE, whole), self.deadline.check(UNEVEN, uneven)]
        except GathersError:
            return _not_compared(
                "cannot be told from one process, since the loss uses rows of all processes"
                " (all_gather); see the checks with real processes below"
            )

    def divided(self, step: int, divisions: tuple[tuple[int, int], ...], unit: str = "") -> Finding:
        """Compare the gradients of the parts of a global batch with those of the whole.

        divisions: processes and accumulation steps of each.
        unit: what the loss counts, if the finding is to give its number.
        """
        if causes.batch_norms(self.bench.module.model):
            if self.bench.synchronises_batch_norm:
                return skipped(
                    "cannot be told from one process, since batch norm is computed over all"
                    " processes (strategy.sync_bn); see the checks with real processes below"
                )
            # statistics are of a micro-batch: the real runs have the accumulation of the job
            divisions = tuple(division for division in divisions if division[1] == 1)
        whole = self.division.compute(step) if step else self.first
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
            detail = self._description(step, whole, divisions, unit)
            return ok(detail, found=worst, allowed=self.tolerance)
        if self.division.unfixed:
            return skipped(
                "the model draws random numbers in a way that prove cannot fix. They differ"
                f" between processes and steps, so the gradients differ by {worst:.1e}"
            )
        return causes.finding(self.cause(step, *worst_division), worst, self.tolerance)

    def _description(
        self, step: int, whole: Pass, divisions: tuple[tuple[int, int], ...], unit: str
    ) -> str:
        """The description of the comparison."""
        parameters = counted(len(whole.gradients), "parameter")
        samples = counted(len(self.bench.plan.global_batch(step)), "sample")
        computed = ", ".join(f"{processes} x {steps}" for processes, steps in divisions)
        text = f"{parameters}, {samples} on {computed} (processes x accumulation)"
        if unit:
            text += f", {whole.units:g} {unit}s"
        text += f", {self.bench.precision}"
        if self.division.met:
            text += f"; with fixed random numbers in {', '.join(sorted(self.division.met))}"
        return text

    def cause(self, step: int, processes: int, accumulation: int) -> Cause:
        """Why the parts of a global batch do not make up the whole."""
        tolerance = 1e-9 if self.bench.precision == "fp64" else 1e-4
        buffers = self.division.buffers_that_decide(step, tolerance)
        if buffers:
            return causes.state_in_buffers(buffers)
        return causes.Divided(
            module=self.bench.module,
            whole=self.division.compute(step, trace=True),
            parts=self.division.compute(step, processes, accumulation, trace=True),
            tolerance=tolerance,
            samples_per_micro_batch=self.bench.samples_per_micro_batch,
            loss_of_cut=partial(self.division.loss_of_cut, step, processes, accumulation),
        ).cause()

    def parameters(self) -> Finding:
        """Look for parameters without a gradient, on all processes or on some."""
        missing = [names for computed in self.passes for names in computed.missing]
        everywhere = set.intersection(*missing)
        somewhere = set.union(*missing) - everywhere
        allowed = self.bench.allows_missing_gradients
        return causes.unused(sorted(everywhere), sorted(somewhere), allowed)

    def random_numbers(self) -> Finding:
        """Look for random numbers in model or loss that no step seeds."""
        drew: dict[str, str] = {}
        for forward in self.first.forwards + self.second.forwards:
            drew |= forward.drew
        if drew:
            generator, layer = next(iter(drew.items()))
            cause = causes.outside_generator(self.bench.module.model, generator, layer)
            return causes.finding(cause)
        difference = largest_difference(self.first, self.second)
        asked = unseeded(lambda: self.division.compute(0))
        if difference > self.tolerance and (asked or not self.changed_state):
            return causes.finding(causes.unrepeatable(asked), difference, self.tolerance)
        detail = "model and loss draw random numbers from torch's generator only"
        if self.division.met:
            met = ", ".join(sorted(self.division.met))
            detail += f"; {met}, seeded for each process and step"
        return ok(detail)

    def state(self) -> Finding:
        """Look for what forward passes change, and is neither parameter nor buffer."""
        if not self.changed_state:
            return ok("forward passes change nothing but buffers")
        difference = largest_difference(self.first, self.second)
        names = causes.listed(self.changed_state)
        if self.deciding_state:
            return skipped(
                f"cannot be told from one process: the loss depends on {names}, which forward"
                " passes change, and uses rows of all processes (all_gather); see the checks with"
                " real processes below"
            )
        if difference > self.tolerance:
            return causes.finding(causes.hidden_state(names), difference, self.tolerance)
        detail = f"forward passes change {names}; two passes showed no effect on the gradients"
        remedy = (
            "if results depend on that state, keep it in a buffer: now no checkpoint has it, and"
            " it may differ between processes"
        )
        return warning(detail, remedy)


def _not_compared(reason: str) -> list[Finding]:
    return [skipped(reason).named(WHOLE), skipped(reason).named(UNEVEN)]


def largest_difference(one: Pass, other: Pass) -> float:
    """The largest relative difference of the gradient of a parameter; inf if it is not finite."""
    if one.gradients.keys() != other.gradients.keys():
        return float("inf")
    differences = compare(one.gradients, other.gradients)
    if not differences:
        return 0.0
    largest = differences[0].relative
    return largest if np.isfinite(largest) else float("inf")
