"""The study of Optuna behind `hydra/sweeper=pool_optuna`: what is drawn, ask and tell."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.utils import JobReturn, JobStatus
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
)
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hydra_plugins.ddp_train_pool._devices import PoolError
from hydra_plugins.ddp_train_pool._jobs import Pruned, SweepEnd
from hydra_plugins.ddp_train_pool._journal import NAME_ANOTHER, Journal
from hydra_plugins.ddp_train_pool.launcher import PoolLauncher

log = logging.getLogger(__name__)
OVERRIDES = "overrides"
"""Attribute of a trial: the overrides of its job, by which a later start resumes it."""
ASKED = "asked"
"""Attribute of a study: its overrides, fixed and drawn. Results under others are those of another
study."""
DRAWN = "(drawn)"
CLASSES: dict[str, dict[str, Any]] = {
    "pruner": {
        "none": optuna.pruners.NopPruner,
        "median": optuna.pruners.MedianPruner,
        "percentile": optuna.pruners.PercentilePruner,
        "halving": optuna.pruners.SuccessiveHalvingPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
        "threshold": optuna.pruners.ThresholdPruner,
    },
    "sampler": {
        "tpe": optuna.samplers.TPESampler,
        "random": optuna.samplers.RandomSampler,
        "qmc": optuna.samplers.QMCSampler,
    },
}
RESEEDED = ("tpe", "random")
"""Samplers that draw from a stream. With `seed` each trial has a stream of its own: a later start
draws what an undisturbed one would, and repeats nothing. A quasi-random sequence has its place in
the study itself."""


def open_study(path: Path, name: str, direction: str, pruner: Mapping[str, Any]) -> optuna.Study:
    """The study in a journal; a new one if there is none. Raises PoolError."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    built_pruner = build("pruner", pruner)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.JournalStorage(Journal(path))
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction=StudyDirection[direction.upper()],
            pruner=built_pruner,
            load_if_exists=True,
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PoolError(
            f"{path}: cannot be the journal of a study: {reason}; {NAME_ANOTHER}"
        ) from None
    earlier_direction = study.direction.name.lower()
    if earlier_direction != direction:
        raise PoolError(
            f"hydra.sweeper.direction={direction}: the study in {path} has"
            f" {earlier_direction}; use hydra.sweeper.direction={earlier_direction}, or"
            f" {NAME_ANOTHER}"
        )
    return study


def build(kind: str, options: Mapping[str, Any]) -> Any:
    """A sampler or a pruner of Optuna. Raises PoolError.

    kind: sampler or pruner.
    options: its `name`, and the arguments of Optuna's class.
    """
    arguments = {name: value for name, value in options.items() if name != "name"}
    try:
        with warnings.catch_warnings():  # of options that are new in Optuna
            warnings.simplefilter("ignore")
            return CLASSES[kind][str(options.get("name"))](**arguments)
    except (KeyError, TypeError, ValueError, ImportError) as error:
        raise PoolError(_unusable(kind, options, error)) from None


def _unusable(kind: str, options: Mapping[str, Any], error: Exception) -> str:
    arguments = [
        f"hydra.sweeper.{kind}.{name}={value}" for name, value in options.items() if name != "name"
    ]
    return (
        f"hydra/sweeper/{kind}={options.get('name')}: {str(error).rstrip('.')}; the arguments"
        f" were {', '.join(arguments) or 'none'}"
    )


def try_out(
    overrides: Sequence[Override], sampler: Mapping[str, Any], pruner: Mapping[str, Any]
) -> None:
    """Draw a trial of a study that is discarded. Raises PoolError.

    Optuna looks at some arguments only when it draws.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # the real study repeats its warnings
    drawn = drawn_distributions(overrides)
    study = optuna.create_study(sampler=build("sampler", sampler), pruner=build("pruner", pruner))
    errors = (KeyError, TypeError, ValueError, ImportError)
    try:
        trial = study.ask(drawn)
    except errors as error:
        raise PoolError(_unusable("sampler", sampler, error)) from None
    try:
        trial.report(0.0, 1)
        trial.should_prune()
    except errors as error:
        raise PoolError(_unusable("pruner", pruner, error)) from None


def drawn_distributions(overrides: Sequence[Override]) -> dict[str, BaseDistribution]:
    """The distributions of the keys that are drawn. Raises PoolError if there are none."""
    drawn = {}
    for key, override in _last_by_key(overrides).items():
        distribution = distribution_of(override)
        if distribution is not None:
            drawn[key] = distribution
    if not drawn:
        raise PoolError(
            "hydra/sweeper=pool_optuna: no key has several values to draw from; give one an"
            " interval, 'KEY=interval(0.01,0.1)', or a list, KEY=1,2,3"
        )
    return drawn


def _last_by_key(overrides: Sequence[Override]) -> dict[str, Override]:
    return {override.get_key_element().lstrip("+"): override for override in overrides}


def distribution_of(override: Override) -> BaseDistribution | None:
    """The distribution that an override draws from; None: it is fixed. Raises PoolError.

    It is read as hydra-optuna-sweeper reads it, except that the end of a range is left out, as
    everywhere in Hydra.
    """
    if not override.is_sweep_override():
        return None
    try:
        return _distribution_of_sweep(override)
    except ValueError as error:
        raise PoolError(f"{_typed(override)}: {str(error).rstrip('.')}") from None


def _distribution_of_sweep(override: Override) -> BaseDistribution:
    value = override.value()
    if isinstance(value, IntervalSweep):
        is_log = "log" in value.tags
        if isinstance(value.start, int) and isinstance(value.end, int):
            return IntDistribution(value.start, value.end, log=is_log)
        return FloatDistribution(value.start, value.end, log=is_log)  # type: ignore
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers = sorted(value.range())
        if numbers and all(isinstance(number, int) for number in numbers):
            return IntDistribution(numbers[0], numbers[-1], step=int(abs(value.step)))
    if not override.is_discrete_sweep():
        raise PoolError(
            f"{_typed(override)}: Optuna cannot draw from this; use interval(...), range(...) or"
            " choice(...)"
        )
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def _typed(override: Override) -> str:
    return (override.input_line or "").lstrip("+")


class StudyJobs:
    """The jobs that a study asks for. Those that an earlier start left open come first."""

    def __init__(
        self,
        study: optuna.Study,
        overrides: Sequence[Override],
        sampler: dict[str, Any],
        n_trials: int,
        n_jobs: int | None,
        launcher: PoolLauncher,
    ) -> None:
        """Read how far the study is. Raises PoolError if it is one of other overrides."""
        self.study = study
        self.n_trials = n_trials
        self.n_jobs = n_jobs
        self.listener = launcher.listener
        self.signals = launcher.signals
        self.sampler = sampler
        self.distributions = drawn_distributions(overrides)
        last = _last_by_key(overrides)
        self.keys = {key: override.get_key_element() for key, override in last.items()}
        """As they were typed: `+x` adds a key."""
        self.fixed = [
            f"{override.get_key_element()}={override.get_value_element_as_str()}"
            for key, override in last.items()
            if key not in self.distributions
        ]
        self._check_same_study()
        self.running: dict[int, FrozenTrial] = {}
        self.open: list[FrozenTrial] = []
        self.pruned: set[int] = set()
        self.has_sampler = False
        """Whether the study has the sampler that was asked for: a new study has Optuna's own."""
        self.count = 0
        """Trials whose jobs have begun, in earlier starts too."""
        self._read_trials()

    def _check_same_study(self) -> None:
        """Refuse a study of other overrides, whose results would be shown as those of these.

        Raises PoolError.
        """
        asked: dict[str, str] = {}
        for override in self.listener.study_overrides(self.fixed):
            key, value = override.lstrip("+").split("=", 1)
            asked[key] = value
        asked |= dict.fromkeys(self.distributions, DRAWN)
        earlier = self.study.user_attrs.get(ASKED)
        if earlier is None:
            self.study.set_user_attr(ASKED, asked)
            return
        for key in sorted({*asked, *earlier}):
            if asked.get(key) != earlier.get(key):
                now = f"{key}={asked[key]}" if key in asked else f"no {key}"
                before = f"{key}={earlier[key]}" if key in earlier else f"no {key}"
                raise PoolError(
                    f"{now}: the earlier study, which this sweep would continue, has {before};"
                    f" give the same overrides, or {NAME_ANOTHER}"
                )
        for trial in self.study.get_trials(deepcopy=False):
            self._check_distributions(trial)

    def _check_distributions(self, trial: FrozenTrial) -> None:
        for key in trial.distributions.keys() & self.distributions.keys():
            try:
                check_distribution_compatibility(trial.distributions[key], self.distributions[key])
            except ValueError as error:
                raise PoolError(
                    f"{key}: the earlier study, which this sweep would continue, draws from other"
                    f" values ({error}); {NAME_ANOTHER}"
                ) from None

    def _read_trials(self) -> None:
        for trial in self.study.get_trials(deepcopy=False):
            has_job = OVERRIDES in trial.user_attrs
            self.count += has_job
            if trial.state != TrialState.RUNNING:
                continue
            if has_job:
                self.open.append(trial)
            else:  # the sweep was killed while it drew
                self.study.tell(trial.number, state=TrialState.FAIL)
        if self.count >= self.n_trials and not self.open:
            rule = "so it runs no more; to run more, raise hydra.sweeper.n_trials"
            print(
                f"note: the study has {self.count} of {self.n_trials} trials, {rule}",
                file=sys.stderr,
            )

    def ask(self) -> tuple[int, list[str]] | None:
        if self.n_jobs is not None and len(self.running) >= self.n_jobs:
            return None
        if self.open:
            trial = self.open.pop(0)
        elif self.count < self.n_trials:
            trial = self._draw()
        else:
            return None
        self.running[trial.number] = trial
        return trial.number, [*self.fixed, *trial.user_attrs[OVERRIDES]]

    def _draw(self) -> FrozenTrial:
        self._choose_sampler()
        trial = self.study.ask(self.distributions)
        overrides = []
        for name, value in trial.params.items():
            text = repr(value) if isinstance(value, float) else value
            overrides.append(f"{self.keys[name]}={text}")
        trial.set_user_attr(OVERRIDES, overrides)
        self.count += 1
        return self._frozen(trial.number)

    def _choose_sampler(self) -> None:
        """Give the study the sampler of its next trial."""
        seed = self.sampler.get("seed")
        if seed is not None and self.sampler.get("name") in RESEEDED:
            self.study.sampler = build("sampler", {**self.sampler, "seed": seed + self.count})
        elif not self.has_sampler:
            self.study.sampler = build("sampler", self.sampler)
            self.has_sampler = True

    def jobs_to_stop(self, numbers: dict[int, int]) -> list[int]:
        """Hand new values of the objective to the pruner. Returns the trials that it ends."""
        if isinstance(self.study.pruner, optuna.pruners.NopPruner):
            return []
        undecided = numbers.keys() - self.pruned
        ended = []
        for trial_number in sorted(self.running.keys() & undecided):
            if self._report_values(trial_number, numbers[trial_number]):
                ended.append(trial_number)
        return ended

    def _report_values(self, trial_number: int, job_number: int) -> bool:
        """Report a trial's new values to the pruner, one by one.

        Returns whether it ends the trial.
        """
        known = len(self._frozen(trial_number).intermediate_values)
        values = self.listener.values_so_far(job_number)
        for count, value in enumerate(values[known:], known + 1):
            trial = optuna.trial.Trial(self.study, self.running[trial_number]._trial_id)
            trial.report(value, count)
            if trial.should_prune():
                self.pruned.add(trial_number)
                self.listener.job_pruned(job_number, count, value)
                return True
        return False

    def ended(self, key: int, returned: JobReturn) -> None:
        """Tell the study the result of a trial. Raises SweepEnd if the job returned that."""
        self.running.pop(key)
        value = returned._return_value
        if isinstance(value, SweepEnd):
            raise value
        if isinstance(value, Pruned):
            self.study.tell(key, state=TrialState.PRUNED)
        elif returned.status == JobStatus.COMPLETED and _is_finite_number(value):
            self.study.tell(key, float(value))
        elif key in self.pruned:
            self.study.tell(key, state=TrialState.PRUNED)
        elif not self.signals.received:  # a trial that was stopped with the sweep stays open
            self.study.tell(key, state=TrialState.FAIL)
            if isinstance(value, BaseException):
                log.warning("job %d failed: %s: %s", key, type(value).__name__, value)

    def best(self) -> FrozenTrial | None:
        """The best trial that was completed."""
        completed = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return self.study.best_trial if completed else None

    def _frozen(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]


def _is_finite_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
