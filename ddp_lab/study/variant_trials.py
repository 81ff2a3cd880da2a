"""The runs of a study of named variants, in rounds of alternating order."""

from __future__ import annotations

from rich.console import Console

from ddp_lab.study.comparison_table import Outcomes
from ddp_lab.study.request import Request
from ddp_lab.study.results import METRICS, files_of, median, metric_named
from ddp_lab.study.trials import Outcome, Trial, completed_outcome, run
from ddp_lab.study.variants import Study, Variant, merged
from ddp_train.errors import ConfigError
from ddp_train.text import did_you_mean


class VariantTrials:
    """Runs every trial that did not complete earlier. Does not repeat a variant that failed."""

    def __init__(self, request: Request, study: Study) -> None:
        """Raises ConfigError if an earlier trial had other settings."""
        self.request = request
        self.study = study
        self.console = Console(highlight=False)
        self.outcomes: Outcomes = {}
        self.runnable = [variant for variant in study.variants if not variant.reason]
        self.earlier: dict[tuple[str, int], Outcome | None] = {}
        for variant in self.runnable:
            for repeat in range(study.config.repeats):
                trial = self.trial(variant, repeat)
                self.earlier[variant.name, repeat] = completed_outcome(trial)

    def trial(self, variant: Variant, repeat: int) -> Trial:
        """One run of a variant."""
        overrides = variant.overrides
        if self.study.config.vary_seed:
            overrides = merged(overrides, [f"seed={self.study.first.seed + repeat}"])
        return Trial(overrides, self.request.run_dir / "trials" / variant.folder / str(repeat))

    @property
    def is_comparison(self) -> bool:
        """True if the baseline has a result, and another variant if there is one."""
        completed = set()
        for name, outcomes in self.outcomes.items():
            if any(outcome.completed for outcome in outcomes):
                completed.add(name)
        needed = min(2, len(self.study.variants))
        return self.study.baseline in completed and len(completed) >= needed

    def run(self) -> None:
        """Run all trials, or those before a stop.

        Raises ConfigError if the first one that completes has no such metric.
        """
        number = 0
        for repeat in range(self.study.config.repeats):
            ordered = self.runnable if repeat % 2 == 0 else self.runnable[::-1]
            for variant in ordered:
                number += 1
                outcomes = self.outcomes.setdefault(variant.name, [])
                if any(not outcome.completed for outcome in outcomes):
                    continue
                outcome = self._outcome(variant, repeat, number)
                if outcome is None:
                    self._print(f"stopped; continue with {self.request.command}")
                    return
                if not any(one.completed for runs in self.outcomes.values() for one in runs):
                    self._check_metric(outcome)
                outcomes.append(outcome)

    def _outcome(self, variant: Variant, repeat: int, number: int) -> Outcome | None:
        """The outcome of one trial, with a line for it; None after a stop."""
        total = len(self.runnable) * self.study.config.repeats
        name = f"trial {number}/{total}  {variant.name}, repeat {repeat + 1}"
        self._print(name, end="  ")
        earlier = self.earlier[variant.name, repeat]
        if earlier:
            self._print(f"{self._result(earlier)}  (from an earlier run)")
            return earlier
        trial = self.trial(variant, repeat)
        outcome = run(trial, self.request.program, self.request.stop)
        if outcome:
            self._print(f"{self._result(outcome)}  (took {outcome.seconds:.0f} s)")
        return outcome

    def _check_metric(self, outcome: Outcome) -> None:
        name = self.study.config.metric
        if not outcome.completed:
            return
        known = [*dict.fromkeys([*METRICS, *files_of(outcome).numbers])]
        if name in known:
            return
        rule = f"the run in {outcome.run_dir} has no such number; it has {', '.join(known)}"
        problem = f"study.metric={name}: {rule}{did_you_mean(name, known)}"
        raise ConfigError([problem])

    def _result(self, outcome: Outcome) -> str:
        """Why it failed, or its value of the metric."""
        if not outcome.completed:
            return outcome.reason
        metric = metric_named(self.study.config.metric, [outcome])
        value = median(metric.values([outcome]))
        return "completed" if value is None else f"{value:,.4g} {metric.label}"

    def _print(self, text: str, end: str = "\n") -> None:
        self.console.print(text, end=end, markup=False, soft_wrap=True)
