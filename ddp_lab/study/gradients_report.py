"""The report of `study=gradients`: whether gradients agree, where they differ most, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ddp_lab.study.gradient_difference import Difference, compare
from ddp_lab.study.model_pitfalls import UNUSED_REMEDY, Pitfalls, pitfalls_of
from ddp_lab.study.provenance import provenance
from ddp_lab.study.request import Request
from ddp_lab.study.trials import Outcome
from ddp_train.options.schema import Config
from ddp_train.telemetry.pages.report import Plot, Report
from ddp_train.telemetry.pages.tables import Table

SHOWN = 8
"""Most parameter names in a table."""


@dataclass(frozen=True)
class Comparison:
    """The runs of one and of several processes in one precision."""

    precision: str
    tolerance: float
    one: Outcome | None
    many: Outcome | None

    @property
    def failure(self) -> str:
        """Why the gradients cannot be compared; empty if they can."""
        for name, outcome in (("one process", self.one), ("several processes", self.many)):
            if outcome is None:
                return f"{name}: not run"
            if not outcome.completed:
                return f"{name}: {outcome.reason}"
        return ""


class GradientsReport:
    """Collects the comparisons of all precisions."""

    def __init__(self, request: Request, base: Config, processes: int) -> None:
        """base: the config of the runs of several processes."""
        self.request = request
        self.base = base
        self.processes = processes
        self.all_agree = True
        self.pitfalls: Pitfalls = {}
        self.summary_rows: list[list[Any]] = []
        self.difference_rows: list[list[Any]] = []

    def add(self, comparison: Comparison) -> None:
        """Add the rows of one precision."""
        self._add_pitfalls(comparison.one, 1)
        self._add_pitfalls(comparison.many, self.processes)
        precision = comparison.precision
        allowed = f"{comparison.tolerance:.0e}"
        if comparison.failure:
            self.all_agree = False
            self.summary_rows.append([precision, None, None, None, allowed, comparison.failure])
            return
        assert comparison.one and comparison.many
        one = _gradients(comparison.one.run_dir)
        many = _gradients(comparison.many.run_dir)
        differences = compare(one, many)
        worst = differences[0] if differences else Difference("", 0.0, 0.0)
        ranks_differ = _facts(comparison.many.run_dir)["ranks_differ"]
        if worst.relative <= comparison.tolerance and not ranks_differ:
            verdict = "agree"
        else:
            verdict = self._explanation(ranks_differ)
            self.all_agree = False
        self.summary_rows.append(
            [precision, len(differences), worst.name, worst.relative, allowed, verdict]
        )
        for difference in differences[:SHOWN]:
            self.difference_rows.append(
                [precision, difference.name, difference.absolute, difference.relative]
            )

    def build(self) -> Report:
        """The report of what was added."""
        sections: list[Table | Plot] = [self._summary(), self._differences()]
        if self.pitfalls:
            sections.append(self._possible_problems())
        intro = (
            "Compares the gradients that the optimizer gets in the first step: those of one"
            f" process without DDP, and those of {self.processes} processes with the options of"
            " this command. Weights and samples are the same, and dropout is off. There is one"
            " sample less than in a global batch, so that micro-batches have different sizes."
        )
        commands = [self.request.command]
        return Report("Self-test of gradients", intro, sections, provenance(), commands)

    def _add_pitfalls(self, outcome: Outcome | None, processes: int) -> None:
        if not outcome or not outcome.completed:
            return
        pitfalls = pitfalls_of(_facts(outcome.run_dir), processes)
        for problem, names in pitfalls.items():
            known = self.pitfalls.get(problem, [])
            self.pitfalls[problem] = list(dict.fromkeys([*known, *names]))

    def _explanation(self, ranks_differ: Sequence[str]) -> str:
        """Why gradients differ, as far as it is known.

        ranks_differ: parameters whose gradients are not the same on all ranks.
        """
        if ranks_differ:
            explanation = (
                f"differ: the ranks have different gradients for {ranks_differ[0]} and"
                f" {len(ranks_differ) - 1} more"
            )
            if self._has_pitfall("no gradient"):
                explanation += f"; {UNUSED_REMEDY}"
            return explanation
        is_synchronised = getattr(self.base.strategy, "sync_bn", False)
        if self._has_pitfall("batch norm") and not is_synchronised:
            return (
                "differ: batch norm uses each process's own samples; set strategy.sync_bn=true, or"
                " use another norm"
            )
        return (
            "differ by more than rounding: see the parameters below; look for state that differs"
            " between processes"
        )

    def _has_pitfall(self, prefix: str) -> bool:
        return any(problem.startswith(prefix) for problem in self.pitfalls)

    def _summary(self) -> Table:
        columns = [
            "precision",
            "parameters",
            "largest difference in",
            "relative",
            "allowed",
            "verdict",
        ]
        title = f"Gradients of {self.processes} processes compared with one"
        return Table(title, columns, self.summary_rows)

    def _differences(self) -> Table:
        columns = ["precision", "parameter", "absolute", "relative"]
        note = (
            "Differences are relative to the largest gradient of the parameter, or to a"
            " thousandth of the largest gradient of all parameters."
        )
        return Table("Largest differences", columns, self.difference_rows, note)

    def _possible_problems(self) -> Table:
        rows = []
        for problem, names in self.pitfalls.items():
            shown = names[:SHOWN]
            if len(names) > SHOWN:
                shown = [*shown, "..."]
            rows.append([problem, len(names), ", ".join(shown)])
        return Table("Possible problems of this model", ["problem", "count", "names"], rows)


def _facts(run_dir: Path) -> dict[str, Any]:
    """The facts that the gradient probe noted of the model."""
    return json.loads((run_dir / "probe" / "model.json").read_text())


def _gradients(run_dir: Path) -> dict[str, np.ndarray]:
    return load_file(run_dir / "probe" / "gradients.safetensors")
