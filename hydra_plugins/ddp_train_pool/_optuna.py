"""Optuna's study behind `hydra/sweeper=pool_optuna`: its journal, what is drawn from which words, ask and tell."""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.utils import JobReturn, JobStatus
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import BaseJournalBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hydra_plugins.ddp_train_pool._devices import PoolError
from hydra_plugins.ddp_train_pool._jobs import Pruned, SweepEnd
from hydra_plugins.ddp_train_pool.launcher import PoolLauncher

log = logging.getLogger(__name__)
OVERRIDES = "overrides"
"""Attribute of a trial: the words of its job, by which a later start goes on with it."""
RESEEDED = ("tpe", "random")
"""Samplers that draw from a stream. With `seed` each trial has a stream of its own: a later start goes on with the
draws that an undisturbed one has, and repeats none. A quasi-random sequence has its place in the study itself."""


class Journal(BaseJournalBackend):
    """The file of Optuna's journal storage, for one process. Half a line, of a process that was killed, goes; lines for
    which there is no room on the disk wait for the next ones."""

    def __init__(self, path: Path) -> None:
        self.path, self.told = path, False
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(path, len(whole))
        self.logs: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        self.waiting: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        logs = json.loads(json.dumps(logs))  # as they are read again
        self.logs += logs
        self.waiting += logs
        text = b"".join(json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in self.waiting)
        try:
            with self.path.open("ab", buffering=0) as file:
                begin = file.seek(0, os.SEEK_END)
                try:
                    while text:
                        text = text[file.write(text) :]
                except OSError:
                    file.truncate(begin)
                    raise
            self.waiting = []
        except OSError as error:
            if not self.told:
                self.told = True
                log.warning("%s cannot be written: %s; it is tried again", self.path, error)


def open_study(path: Path, name: str, direction: str, pruner: dict[str, Any]) -> optuna.Study:
    """The study in a journal; a new one if there is none. Raises PoolError."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    classes = {
        "none": optuna.pruners.NopPruner,
        "median": optuna.pruners.MedianPruner,
        "percentile": optuna.pruners.PercentilePruner,
        "halving": optuna.pruners.SuccessiveHalvingPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
        "threshold": optuna.pruners.ThresholdPruner,
    }
    arguments = {key: value for key, value in pruner.items() if key != "name"}
    try:
        made = classes[str(pruner.get("name"))](**arguments)
        path.parent.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.JournalStorage(Journal(path))
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction=StudyDirection[direction.upper()],
            pruner=made,
            load_if_exists=True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PoolError(f"hydra.sweeper.pruner={pruner}, {path}: {error}") from None
    if study.direction.name.lower() != direction:
        before = study.direction.name.lower()
        raise PoolError(f"hydra.sweeper.direction={direction}: {path} is of a study that has {before}; name another")
    return study


def distribution(override: Override) -> BaseDistribution | None:
    """What a word draws from; None: it is fixed. As hydra-optuna-sweeper reads it, but that the end of a range is left
    out, as everywhere in Hydra. Raises PoolError."""
    if not override.is_sweep_override():
        return None
    value = override.value()
    if isinstance(value, IntervalSweep):
        is_log = "log" in value.tags
        kind = IntDistribution if isinstance(value.start, int) and isinstance(value.end, int) else FloatDistribution
        try:
            return kind(value.start, value.end, log=is_log)  # type: ignore
        except ValueError as error:
            raise PoolError(f"{override.input_line}: {error}") from None
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers = sorted(value.range())
        if numbers and all(isinstance(number, int) for number in numbers):
            return IntDistribution(numbers[0], numbers[-1], step=int(abs(value.step)))
    if not override.is_discrete_sweep():
        raise PoolError(f"{override.input_line}: nothing that Optuna can draw from")
    return CategoricalDistribution(list(override.sweep_string_iterator()))


class Draws:
    """The jobs that a study asks for. One that is open in it was cut off with an earlier start, and comes first."""

    def __init__(
        self, study: optuna.Study, words: Sequence[Override], sampler: dict[str, Any], n_trials: int,
        n_jobs: int | None, launcher: PoolLauncher,
    ) -> None:  # fmt: skip
        self.study, self.n_trials, self.n_jobs, self.launcher = study, n_trials, n_jobs, launcher
        self.sampler = sampler
        drawn = {word.get_key_element(): distribution(word) for word in words}
        self.distributions = {key.lstrip("+"): found for key, found in drawn.items() if found is not None}
        self.keys = {key.lstrip("+"): key for key in drawn}
        """As they were typed: `+x` adds a key."""
        self.fixed = [
            f"{word.get_key_element()}={word.get_value_element_as_str()}"
            for word in words
            if drawn[word.get_key_element()] is None
        ]
        if not self.distributions:
            raise PoolError("hydra/sweeper=pool_optuna: nothing to draw; give a key an interval(...) or several values")
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

    def ask(self) -> tuple[int, list[str]] | None:
        if self.n_jobs is not None and len(self.running) >= self.n_jobs:
            return None
        if self.open:
            found = self.open.pop(0)
        elif self.count < self.n_trials:
            self.study.sampler = self._sampler()
            try:
                trial = self.study.ask(self.distributions)
            except ValueError as error:
                raise PoolError(f"{error}; what is drawn from has changed: name another directory") from None
            words = [
                f"{self.keys[name]}={value!r}" if isinstance(value, float) else f"{self.keys[name]}={value}"
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
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        completed = returned.status == JobStatus.COMPLETED and is_number and not isinstance(value, Pruned)
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
        classes = {
            "tpe": optuna.samplers.TPESampler,
            "random": optuna.samplers.RandomSampler,
            "qmc": optuna.samplers.QMCSampler,
        }
        name, arguments = str(self.sampler.get("name")), {k: v for k, v in self.sampler.items() if k != "name"}
        if arguments.get("seed") is not None and name in RESEEDED:
            arguments["seed"] += self.count
        elif self.stream:
            return self.stream
        try:
            with warnings.catch_warnings():  # of options that are new in Optuna
                warnings.simplefilter("ignore")
                self.stream = made = classes[name](**arguments)
        except (KeyError, TypeError, ValueError) as error:
            raise PoolError(f"hydra.sweeper.sampler={self.sampler}: {error}") from None
        return made
