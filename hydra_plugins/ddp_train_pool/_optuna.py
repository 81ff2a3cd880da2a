"""Optuna's study behind `hydra/sweeper=pool_optuna`: its journal, what is drawn from which words,
ask and tell."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
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
from optuna.storages.journal import BaseJournalBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hydra_plugins.ddp_train_pool._devices import PoolError
from hydra_plugins.ddp_train_pool._jobs import Pruned, SweepEnd
from hydra_plugins.ddp_train_pool.launcher import PoolLauncher

log = logging.getLogger(__name__)
NAME_ANOTHER = "name another directory, or another file: hydra.sweeper.storage=FILE"
OVERRIDES = "overrides"
"""Attribute of a trial: the words of its job, by which a later start goes on with it."""
ASKED = "asked"
"""Attribute of a study: its words, fixed and drawn. Results under other words are those of another
study."""
DRAWN = "(drawn)"
LINE = b'{"op_code"'
"""How each line of Optuna's journal begins."""
RESEEDED = ("tpe", "random")
"""Samplers that draw from a stream. With `seed` each trial has a stream of its own: a later start
goes on with the draws that an undisturbed one has, and repeats none. A quasi-random sequence has
its place in the study itself."""


class Journal(BaseJournalBackend):
    """The file of Optuna's journal storage, for one process, which locks it. Half a line, of a
    process that was killed, goes; lines for which there is no room on the disk wait for the next
    ones."""

    def __init__(self, path: Path) -> None:
        """Raises PoolError, OSError, and ValueError for a file that is no journal."""
        self.path = path
        self.told = False
        self.file = path.open("a+b", buffering=0)
        try:
            fcntl.lockf(
                self.file, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # not of the jobs too, as that of flock would be
        except (BlockingIOError, PermissionError):
            self.file.close()
            raise PoolError(
                f"{path}: another sweep has this study; wait for it, or {NAME_ANOTHER}"
            ) from None
        self.file.seek(0)
        *whole, half = self.file.read().split(b"\n")
        if not half.startswith(LINE[: len(half)]) or any(
            not line.startswith(LINE) for line in whole
        ):
            raise ValueError(
                "it has other lines"
            )  # somebody's file, of which nothing may be cut off
        self.logs: list[dict[str, Any]] = [json.loads(line) for line in whole]
        if half:
            self.file.truncate(sum(len(line) + 1 for line in whole))
        self.waiting: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        logs = json.loads(json.dumps(logs))  # as they are read again
        self.logs += logs
        self.waiting += logs
        text = b"".join(
            json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in self.waiting
        )
        try:
            begin = self.file.seek(0, os.SEEK_END)
            try:
                while text:
                    text = text[self.file.write(text) :]
            except OSError:
                self.file.truncate(begin)
                raise
            self.waiting = []
        except OSError as error:
            if not self.told:
                self.told = True
                log.warning("%s cannot be written: %s; it is tried again", self.path, error)


def open_study(path: Path, name: str, direction: str, pruner: Mapping[str, Any]) -> optuna.Study:
    """The study in a journal; a new one if there is none. Raises PoolError."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    made = made_pruner(pruner)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.JournalStorage(Journal(path))
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction=StudyDirection[direction.upper()],
            pruner=made,
            load_if_exists=True,
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PoolError(
            f"{path}: cannot be the journal of a study: {why}; {NAME_ANOTHER}"
        ) from None
    if study.direction.name.lower() != direction:
        before = study.direction.name.lower()
        raise PoolError(
            f"hydra.sweeper.direction={direction}: {path} is of a study that has {before};"
            f" {NAME_ANOTHER}"
        )
    return study


def made_pruner(given: Mapping[str, Any]) -> optuna.pruners.BasePruner:
    """Raises PoolError."""
    classes = {
        "none": optuna.pruners.NopPruner,
        "median": optuna.pruners.MedianPruner,
        "percentile": optuna.pruners.PercentilePruner,
        "halving": optuna.pruners.SuccessiveHalvingPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
        "threshold": optuna.pruners.ThresholdPruner,
    }
    return _made("pruner", classes, given)


def made_sampler(given: Mapping[str, Any], count: int = 0) -> optuna.samplers.BaseSampler:
    """count: of the trials that have begun. Raises PoolError."""
    classes = {
        "tpe": optuna.samplers.TPESampler,
        "random": optuna.samplers.RandomSampler,
        "qmc": optuna.samplers.QMCSampler,
    }
    seed = given.get("seed")
    if isinstance(seed, int) and given.get("name") in RESEEDED:
        given = {**given, "seed": seed + count}
    return _made("sampler", classes, given)


def _made(kind: str, classes: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    arguments = {name: value for name, value in given.items() if name != "name"}
    try:
        with warnings.catch_warnings():  # of options that are new in Optuna
            warnings.simplefilter("ignore")
            return classes[str(given.get("name"))](**arguments)
    except (KeyError, TypeError, ValueError, ImportError) as error:
        raise PoolError(_unusable(kind, given, error)) from None


def _unusable(kind: str, given: Mapping[str, Any], error: Exception) -> str:
    shown = ", ".join(
        f"hydra.sweeper.{kind}.{name}={value}" for name, value in given.items() if name != "name"
    )
    return (
        f"hydra/sweeper/{kind}={given.get('name')}: {str(error).rstrip('.')}; it was given"
        f" {shown or 'no arguments'}"
    )


def drawn_from(words: Sequence[Override]) -> dict[str, BaseDistribution]:
    """The keys that are drawn. The last word about a key counts. Raises PoolError."""
    found = {key: distribution(word) for key, word in _last(words).items()}
    drawn = {key: one for key, one in found.items() if one is not None}
    if not drawn:
        raise PoolError(
            "hydra/sweeper=pool_optuna: nothing to draw; give a key an interval(...) or several"
            " values"
        )
    return drawn


def _last(words: Sequence[Override]) -> dict[str, Override]:
    return {word.get_key_element().lstrip("+"): word for word in words}


def try_out(
    words: Sequence[Override], sampler: Mapping[str, Any], pruner: Mapping[str, Any]
) -> None:
    """Draws a trial of a study that is thrown away: Optuna looks at some arguments only then.
    Raises PoolError."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what it warns of it says again
    drawn = drawn_from(words)
    kind = "sampler"
    given = sampler
    study = optuna.create_study(sampler=made_sampler(sampler), pruner=made_pruner(pruner))
    try:
        trial = study.ask(drawn)
        kind = "pruner"
        given = pruner
        trial.report(0.0, 1)
        trial.should_prune()
    except (KeyError, TypeError, ValueError, ImportError) as error:
        raise PoolError(_unusable(kind, given, error)) from None


def distribution(override: Override) -> BaseDistribution | None:
    """What a word draws from; None: it is fixed. As hydra-optuna-sweeper reads it, but that the end
    of a range is left out, as everywhere in Hydra. Raises PoolError."""
    if not override.is_sweep_override():
        return None
    try:
        return _of_sweep(override)
    except ValueError as error:
        raise PoolError(f"{_shown(override)}: {str(error).rstrip('.')}") from None


def _of_sweep(override: Override) -> BaseDistribution:
    value = override.value()
    if isinstance(value, IntervalSweep):
        if isinstance(value.start, int) and isinstance(value.end, int):
            kind = IntDistribution
        else:
            kind = FloatDistribution
        return kind(value.start, value.end, log="log" in value.tags)  # type: ignore
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers = sorted(value.range())
        if numbers and all(isinstance(number, int) for number in numbers):
            return IntDistribution(numbers[0], numbers[-1], step=int(abs(value.step)))
    if not override.is_discrete_sweep():
        raise PoolError(f"{_shown(override)}: nothing that Optuna can draw from")
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def _shown(override: Override) -> str:
    return (override.input_line or "").lstrip("+")


class Draws:
    """The jobs that a study asks for. One that is open in it was cut off with an earlier start, and
    comes first."""

    def __init__(
        self,
        study: optuna.Study,
        words: Sequence[Override],
        sampler: dict[str, Any],
        n_trials: int,
        n_jobs: int | None,
        launcher: PoolLauncher,
    ) -> None:
        self.study = study
        self.n_trials = n_trials
        self.n_jobs = n_jobs
        self.launcher = launcher
        self.sampler = sampler
        self.distributions = drawn_from(words)
        last = _last(words)
        self.keys = {key: word.get_key_element() for key, word in last.items()}
        """As they were typed: `+x` adds a key."""
        self.fixed = [
            f"{word.get_key_element()}={word.get_value_element_as_str()}"
            for key, word in last.items()
            if key not in self.distributions
        ]
        self._go_on()
        self.running: dict[int, FrozenTrial] = {}
        self.open: list[FrozenTrial] = []
        self.count = 0
        """Of trials whose jobs have begun, in earlier starts too."""
        self.stream: optuna.samplers.BaseSampler | None = None
        for trial in study.get_trials(deepcopy=False):
            has_job = OVERRIDES in trial.user_attrs
            self.count += has_job
            if trial.state == TrialState.RUNNING and has_job:
                self.open.append(trial)
            elif trial.state == TrialState.RUNNING:  # the sweep was killed while it drew
                study.tell(trial.number, state=TrialState.FAIL)
        self.pruned: set[int] = set()
        if self.count >= n_trials and not self.open:
            rule = "and no more are run; raise hydra.sweeper.n_trials"
            print(f"note: the study has {self.count} of {n_trials} trials, {rule}", file=sys.stderr)

    def _go_on(self) -> None:
        """Refuses a study of other words: its results would be shown as those of these. Raises
        PoolError."""
        compared = self.launcher.tell("compared", self.fixed, default=self.fixed)
        asked = dict(word.lstrip("+").split("=", 1) for word in compared) | dict.fromkeys(
            self.distributions, DRAWN
        )
        before = self.study.user_attrs.get(ASKED)
        if before is None:
            self.study.set_user_attr(ASKED, asked)
            return
        for key in sorted({*asked, *before}):
            mine, its = (f"{key}={of[key]}" if key in of else f"no {key}" for of in (asked, before))
            if mine != its:
                raise PoolError(
                    f"{mine}: the study that would go on has {its}; give the same words, or"
                    f" {NAME_ANOTHER}"
                )
        for trial in self.study.get_trials(deepcopy=False):
            for key in trial.distributions.keys() & self.distributions.keys():
                try:
                    check_distribution_compatibility(
                        trial.distributions[key], self.distributions[key]
                    )
                except ValueError as error:
                    raise PoolError(
                        f"{key}: {error}; what is drawn from has changed: {NAME_ANOTHER}"
                    ) from None

    def ask(self) -> tuple[int, list[str]] | None:
        if self.n_jobs is not None and len(self.running) >= self.n_jobs:
            return None
        if self.open:
            found = self.open.pop(0)
        elif self.count < self.n_trials:
            self.study.sampler = self._sampler()
            trial = self.study.ask(self.distributions)
            words = [
                (
                    f"{self.keys[name]}={value!r}"
                    if isinstance(value, float)
                    else f"{self.keys[name]}={value}"
                )
                for name, value in trial.params.items()
            ]
            trial.set_user_attr(OVERRIDES, words)
            self.count += 1
            found = self._frozen(trial.number)
        else:
            return None
        self.running[found.number] = found
        return found.number, [*self.fixed, *found.user_attrs[OVERRIDES]]

    def to_stop(self, running: dict[int, int]) -> list[int]:
        """Hands new values of the objective to the pruner."""
        found = []
        if isinstance(self.study.pruner, optuna.pruners.NopPruner):
            return found
        for number, job in running.items():
            if number not in self.running or number in self.pruned:
                continue
            known = len(self._frozen(number).intermediate_values)
            values = self.launcher.tell("reports", job, default=())
            for count, value in enumerate(values[known:], known + 1):
                trial = optuna.trial.Trial(self.study, self.running[number]._trial_id)
                trial.report(value, count)
                if trial.should_prune():
                    self.pruned.add(number)
                    self.launcher.tell("prune", job, count, value)
                    found.append(number)
                    break
        return found

    def ended(self, number: int, returned: JobReturn) -> None:
        self.running.pop(number)
        value = returned._return_value
        if isinstance(value, SweepEnd):
            raise value
        is_number = (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
        completed = (
            returned.status == JobStatus.COMPLETED and is_number and not isinstance(value, Pruned)
        )
        if completed:
            self.study.tell(number, float(value))  # type: ignore
        elif isinstance(value, Pruned) or number in self.pruned:
            self.study.tell(number, state=TrialState.PRUNED)
        elif not self.launcher.received:  # or it was stopped with the sweep: it stays open
            self.study.tell(number, state=TrialState.FAIL)
            if isinstance(value, BaseException):
                log.warning("job %d failed: %s: %s", number, type(value).__name__, value)

    def best(self) -> FrozenTrial | None:
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return self.study.best_trial if done else None

    def _frozen(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _sampler(self) -> optuna.samplers.BaseSampler:
        reseeded = self.sampler.get("seed") is not None and self.sampler.get("name") in RESEEDED
        if self.stream is None or reseeded:
            self.stream = made_sampler(self.sampler, self.count)
        return self.stream
