"""Numbers that code of the user's logs: exact over all processes, without an exchange of their own.

They are added up where they are logged, and travel with the losses, once in a logging interval.
Processes need not log the same names: each new name is made known to all in the interval in which
it comes first, by one exchange more.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ddp_train.distributed.exchange import texts_from_all_ranks
from ddp_train.distributed.training_step import CURRENT
from ddp_train.errors import LogError
from ddp_train.tasks.mean_loss import Number
from ddp_train.telemetry.own_numbers import MOST_NAMES, OF_TRAINING, check_name

LOG = "ddp_train.log"
HOOK_LOG = "job.log"
"""The calls, for messages."""
ONE_RULE = "use the same how= in each call with this name"
ROUNDING = 1e-5
"""Relative difference of numbers that count as the same."""


class Rule(StrEnum):
    """The way from the numbers of a name, over processes and steps of an interval, to one."""

    MEAN = "mean"
    SUM = "sum"
    LAST = "last"
    """The number of the last step that has one, the same on all processes."""


RULES = {str(rule): rule for rule in Rule}


@dataclass(frozen=True, slots=True)
class Entry:
    """A sum that one call has logged, and what it is taken over."""

    name: str
    rule: Rule
    total: Number
    count: Number

    def renamed(self, name: str) -> Entry:
        return Entry(name, self.rule, self.total, self.count)


@dataclass(slots=True)
class Series:
    """The numbers of one name since the last line of metrics, added up."""

    rule: Rule
    step: int = -1
    """The last step that has some."""
    total: Number = 0.0
    count: Number = 0.0

    @classmethod
    def of(cls, parts: Sequence[Series]) -> Series:
        """The sum of parts of one name and rule. Never waits for the device."""
        rule = parts[0].rule
        last = max(part.step for part in parts)
        if rule is Rule.LAST:  # one of them: a mean would round what is the same
            parts = [part for part in parts if part.step == last][:1]
        totals = [part.total for part in parts]
        counts = [part.count for part in parts]
        return cls(rule, last, _sum(totals), _sum(counts))

    @property
    def value(self) -> float:
        """The number that is reported; NaN if one that is part of it is."""
        if self.rule is Rule.SUM:
            return float(self.total)
        return float(self.total) / float(self.count)

    def plain(self) -> list[float]:
        """Step, count and total. Waits for the device."""
        return [self.step, float(self.count), float(self.total)]


@dataclass(frozen=True, slots=True)
class Moment:
    """A step between whose end and the next one numbers were logged: a line of its own."""

    kind: str
    """The kind of its line in metrics.jsonl."""
    step: int


NOTHING = Series(Rule.SUM)
Key = tuple[str, Moment | None]
"""A name, and the moment at which its numbers were logged; None: in training steps."""
Row = list[Any]
"""Numbers as plain data: name, kind and step of the moment or None, rule, step, count, total."""


@dataclass
class LoggedNumbers:
    """The numbers of this process, and what all processes together logged.

    A payload of an exchange, see `tasks.mean_loss.ExtraPayload`. Logging adds to a list and does
    not wait for the device.
    """

    device: str
    taken: Sequence[str] = OF_TRAINING
    """Names that the user cannot have."""
    pending: list[Entry] = field(default_factory=list)
    """Entries of the current forward pass."""
    _rules: dict[str, Rule] = field(default_factory=dict)
    """The rule of each name that this process has logged or heard of."""
    _here: list[tuple[int, Moment | None, Entry]] = field(default_factory=list)
    """Entries of this process since the last exchange, with their steps and moments."""
    _agreed: list[str] = field(default_factory=list)
    """Names of training steps that all processes know, in one order."""
    _unknown: dict[Key, Series] = field(default_factory=dict)
    """Numbers of the last `collect` whose names not all processes know."""
    _all: dict[Key, Series] = field(default_factory=dict)
    """Numbers of all processes that are in no line yet."""

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """A context in which `log` adds to these numbers."""
        before = OPEN.numbers
        OPEN.numbers = self
        try:
            yield
        finally:
            OPEN.numbers = before

    # --- one process ------------------------------------------------------------------------------

    def check(self, call: str, name: str, rule: Rule) -> None:
        """Raise LogError for a name that cannot be, or that was logged by another rule."""
        known = self._rules.get(name)
        if known is rule:
            return
        check_name(call, name, self.taken)
        if known:
            raise LogError(
                f"{call}({name!r}): logged with how={known} before, and with how={rule} now",
                ONE_RULE,
            )
        if len(self._rules) == MOST_NAMES:
            raise LogError(
                f"{call}({name!r}): {MOST_NAMES} names were logged already",
                "use a name without a number of a step or sample: each line of metrics.jsonl has"
                " its step",
            )
        self._rules[name] = rule

    def add(self, step: int, entry: Entry) -> None:
        """Add numbers of a training step."""
        self._here.append((step, None, entry))

    def add_at(self, moment: Moment, entry: Entry | None) -> None:
        """Add numbers of a moment; None adds nothing."""
        if entry:
            self._here.append((moment.step, moment, entry))

    def count_pass(self, step: int, counts: bool) -> None:
        """Take the numbers of a forward pass.

        step: the optimizer steps before it.
        counts: False for samples that stand in for none.
        """
        if counts:
            self._here += [(step, None, entry) for entry in self.pending]
        self.pending.clear()

    def forget(self, step: int) -> None:
        """Drop the numbers of a step that was skipped."""
        self._here = [one for one in self._here if one[0] != step or one[1] is not None]

    # --- all processes ----------------------------------------------------------------------------

    def collect(self) -> list[Number]:
        """1 if not all processes know of some numbers, then steps, counts and totals of the agreed
        names."""
        here = self._of_this_process()
        self._here = []
        agreed = [here.pop((name, None), NOTHING) for name in self._agreed]
        self._unknown = here
        sums = [*(series.count for series in agreed), *(series.total for series in agreed)]
        return [
            float(bool(here)),
            *(float(series.step) for series in agreed),
            *(self._at_home(number) for number in sums),
        ]

    def _of_this_process(self) -> dict[Key, Series]:
        """The numbers of this process since the last exchange, added up."""
        parts: dict[Key, list[Series]] = {}
        for step, moment, entry in self._here:
            part = Series(entry.rule, step, entry.total, entry.count)
            parts.setdefault((entry.name, moment), []).append(part)
        return {key: Series.of(of_key) for key, of_key in parts.items()}

    def _at_home(self, number: Number) -> Number:
        """A number on the device of this process: a replica may have logged it on another GPU."""
        if isinstance(number, Tensor):
            return number.to(self.device)
        return number

    def deliver(self, of_ranks: list[list[float]]) -> None:
        """Take what all ranks have collected. A collective if one of them has something new.

        Raises LogError on all ranks if they log a name by different rules.
        """
        names = self._agreed
        count = len(names)
        for place, name in enumerate(names, start=1):
            rule = self._rules[name]
            parts = [
                Series(rule, int(row[place]), row[place + 2 * count], row[place + count])
                for row in of_ranks
            ]
            self._take((name, None), parts)
        if any(row[0] for row in of_ranks):
            self._make_known()

    def _make_known(self) -> None:
        """Exchange the numbers whose names not all processes know. A collective."""
        mine = [_row(key, series) for key, series in self._unknown.items()]
        texts = texts_from_all_ranks(json.dumps(mine), self.device)
        news: dict[Key, dict[int, Series]] = {}
        for rank, text in enumerate(texts):
            for key, series in map(_from_row, json.loads(text)):
                news.setdefault(key, {})[rank] = series
        for (name, moment), of_ranks in news.items():
            rule = _same_rule(name, of_ranks)
            self._take((name, moment), list(of_ranks.values()))
            if moment is None:
                self._rules[name] = rule
                self._agreed.append(name)
        self._agreed.sort()

    def _take(self, key: Key, parts: Sequence[Series]) -> None:
        """Add the numbers that the ranks have of one name."""
        parts = [part for part in parts if part.count]
        if not parts:
            return
        of_all = Series.of(parts)
        if of_all.rule is Rule.LAST:
            _check_same(key[0], [part.value for part in parts if part.step == of_all.step])
        before = self._all.get(key)
        if before is None or before.rule is not of_all.rule:  # of other code, before a resume
            self._all[key] = of_all
        else:
            self._all[key] = Series.of([before, of_all])

    # --- lines ------------------------------------------------------------------------------------

    @property
    def has_some(self) -> bool:
        """Whether training steps have logged numbers that are in no line yet."""
        return any(moment is None for _, moment in self._all)

    def take(self) -> dict[str, float]:
        """The numbers of training steps since the last line."""
        taken = [key for key in self._all if key[1] is None]
        return {name: self._all.pop((name, moment)).value for name, moment in sorted(taken)}

    def take_moments(self) -> list[tuple[Moment, dict[str, float]]]:
        """The numbers of each moment, in their order."""
        lines: dict[Moment, dict[str, float]] = {}
        for name, moment in sorted(self._all, key=lambda key: key[0]):
            if moment:
                lines.setdefault(moment, {})[name] = self._all.pop((name, moment)).value
        return sorted(lines.items(), key=lambda line: line[0].step)

    def state(self) -> list[Row]:
        """The numbers that are in no line yet, plain data for a checkpoint."""
        return [_row(key, series) for key, series in self._all.items()]

    @property
    def is_used(self) -> bool:
        """Whether this process has numbers that no line has."""
        return bool(self._here or self._all)

    def kept(self) -> list[Row]:
        """The numbers of this process that no exchange has yet, for memory that outlives it.

        Waits for the device.
        """
        return [_row(key, series) for key, series in self._of_this_process().items()]

    def add_kept(self, of_ranks: Sequence[Sequence[Row]]) -> None:
        """Add what `kept` returned on each rank."""
        parts: dict[Key, list[Series]] = {}
        for of_rank in of_ranks:
            for key, series in map(_from_row, of_rank):
                parts.setdefault(key, []).append(series)
        for key, of_key in parts.items():
            self._take(key, of_key)

    def load_state(self, state: Sequence[Row]) -> None:
        self._all = dict(map(_from_row, state))


def _row(key: Key, series: Series) -> Row:
    """Numbers as plain data. Waits for the device."""
    name, moment = key
    place = moment and [moment.kind, moment.step]
    return [name, place, str(series.rule), *series.plain()]


def _from_row(row: Row) -> tuple[Key, Series]:
    name, place, rule, step, count, total = row
    moment = Moment(*place) if place else None
    return (name, moment), Series(Rule(rule), step, total, count)


def _same_rule(name: str, of_ranks: Mapping[int, Series]) -> Rule:
    """The rule of a name. Raises LogError if the ranks have different ones."""
    rules = {series.rule for series in of_ranks.values()}
    if len(rules) > 1:
        found = ", ".join(f"how={series.rule} on rank {rank}" for rank, series in of_ranks.items())
        raise LogError(f"log({name!r}): {found}", ONE_RULE)
    (rule,) = rules
    return rule


def _check_same(name: str, values: Sequence[float]) -> None:
    """Raise LogError if the numbers of the ranks differ by more than rounding."""
    low = min(values)
    high = max(values)
    if high - low > ROUNDING * max(abs(low), abs(high)):
        raise LogError(
            f"log({name!r}): how=last needs the same number on all processes, but it goes from"
            f" {low:.6g} to {high:.6g}",
            f"log one number for each sample: log({name!r}, numbers); or a sum and its count:"
            f" log({name!r}, total, over=count); or use how='sum'",
        )


def _sum(numbers: Sequence[Number]) -> Number:
    """The sum; exact before it is rounded, unless some are on a device."""
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    others = [number for number in numbers if not isinstance(number, Tensor)]
    try:
        total = math.fsum(others)
    except (OverflowError, ValueError):  # too large; infinite on both sides
        total = float(sum(others))
    if not tensors:
        return total
    device = tensors[0].device  # replicas are on several
    return torch.stack([tensor.to(device) for tensor in tensors]).sum() + total


# --- calls ----------------------------------------------------------------------------------------


@dataclass
class Open:
    """The numbers that `log` adds to; None where nothing is trained."""

    numbers: LoggedNumbers | None = None
    pauses: int = 0
    """Contexts in which it adds nothing; iterators that hold some may end in any order."""
    moment: Moment | None = None
    """Set while a hook acts: what is logged meanwhile is of this moment."""


OPEN = Open()


@contextlib.contextmanager
def no_numbers() -> Iterator[None]:
    """A context in which `log` adds nothing: batches are scored, or a pass is thrown away."""
    OPEN.pauses += 1
    try:
        yield
    finally:
        OPEN.pauses -= 1


@contextlib.contextmanager
def logging_at(moment: Moment) -> Iterator[None]:
    """A context in which `log` adds numbers of a moment between two steps."""
    OPEN.moment = moment
    try:
        yield
    finally:
        OPEN.moment = None


def log(
    name: str,
    values: Tensor | float,
    *,
    over: Tensor | float | None = None,
    how: str = "mean",
) -> None:
    """Log a number of your own: in the loss of a task, in a model, or in a hook.

    The number appears in metrics.jsonl, on the page of the run, in trackers, and in `ddp-train
    compare` and `watch`. Each `train` line of metrics.jsonl has one value, computed over all
    samples of all processes since the line before. A call neither communicates nor waits for the
    device. In evaluations calls have no effect: return numbers from `Task.score` instead.

    name: slashes make groups, for example vae/kl.
    values: the numbers of this process: a tensor [n, ...] with one per sample or token, which are
        averaged; or, with `over`, their sum.
    over: the number of samples or tokens that were added up in `values`, or their mask.
    how: `mean`; `sum`, which adds all values up; or `last`, the newest value, which must be the
        same on all processes, as a temperature is.

    Raises LogError for a name that is a key of metrics.jsonl itself, such as `step`; for a single
    number in a training step with how="mean" and without `over`; and while a step is captured as a
    CUDA graph.
    """
    _log(name, values, over, how)


def _note(name: str, values: Any, over: Any, how: str) -> None:
    numbers = None if OPEN.pauses else OPEN.numbers
    moment = OPEN.moment
    call = LogCall.of(LOG, name, values, over, how, Rule.MEAN if moment else None)
    (numbers or LoggedNumbers("cpu")).check(LOG, name, call.rule)
    if numbers is None or _in_backward():
        return
    if CURRENT.step is not None:
        entry = call.entry()
        if entry:
            numbers.pending.append(entry)
    elif moment and torch.is_grad_enabled():  # not of an evaluation that the hook makes
        numbers.add_at(moment, call.entry())


_log = cast("Callable[..., None]", torch.compiler.disable(_note))
"""In a compiled model it is called between two graphs."""


@dataclass(frozen=True, slots=True)
class LogCall:
    """A call that logs a number, checked."""

    name: str
    values: Tensor | float
    over: Tensor | float | None
    rule: Rule

    @classmethod
    def of(
        cls, call: str, name: str, values: Any, over: Any, how: str, alone: Rule | None
    ) -> LogCall:
        """Take the arguments of a call. Raises LogError if they do not fit together.

        call: its name, for messages.
        alone: the rule of a number without its count, which is no mean over samples; None refuses
            it.
        """
        rule = RULES.get(how)
        if rule is None:
            raise LogError(
                f"{call}({name!r}): how={how!r} must be one of {', '.join(RULES)}", "use how='mean'"
            )
        if over is not None:
            over = _number(call, name, over)
        values = _number(call, name, values)
        is_one = not isinstance(values, Tensor) or values.ndim == 0
        if rule is Rule.MEAN and is_one and over is None:
            if alone is None:
                raise LogError(
                    f"{call}({name!r}): one number is not enough for a mean over all processes,"
                    " which may have different numbers of samples",
                    f"log one number for each sample: {call}({name!r}, losses); or a sum and its"
                    f" count: {call}({name!r}, total, over=count). For other numbers use"
                    " how='sum', or how='last' if it is the same on all processes",
                )
            rule = alone
        if rule is not Rule.MEAN and over is not None:
            raise LogError(
                f"{call}({name!r}): over= is the count of a mean, and cannot be used with"
                f" how={rule}",
                "leave one of them out",
            )
        if rule is Rule.LAST and isinstance(values, Tensor) and values.numel() != 1:
            raise LogError(
                f"{call}({name!r}): how=last with {values.numel()} numbers",
                "log one number, or use how='mean'",
            )
        return cls(name, values, over, rule)

    def entry(self) -> Entry | None:
        """The entry to add; None if it is taken over nothing. Never waits for a GPU.

        Raises LogError where a CUDA graph is being captured.
        """
        total = _total(self.name, self.values)
        count: Number = 1.0
        if self.over is not None:
            count = _total(self.name, self.over)
        elif self.rule is Rule.MEAN and isinstance(self.values, Tensor):
            count = float(self.values.numel())
        if isinstance(count, Tensor):
            if not isinstance(total, Tensor):
                total = torch.full_like(count, total)
            total = torch.where(count == 0, 0.0, total)
        elif not count:
            return None
        return Entry(self.name, self.rule, total, count)


def _number(call: str, name: str, value: Any) -> Tensor | float:
    """A number, or a tensor of numbers without gradients. Raises LogError for anything else."""
    if isinstance(value, Tensor) and not value.is_complex():
        return value.detach()
    if type(value) in (float, int):  # `Real` takes longer
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return torch.as_tensor(value)
    if isinstance(value, Real):
        return float(value)
    raise LogError(
        f"{call}({name!r}): a {type(value).__name__} cannot be logged",
        "log a number, or a tensor of real numbers",
    )


def _total(name: str, values: Tensor | float) -> Number:
    """The sum of some numbers: a float of those on the CPU, else a float64 on the device."""
    if not isinstance(values, Tensor):
        return float(values)
    if values.is_cpu:
        return values.sum(dtype=torch.float64).item()
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        raise LogError(
            f"log({name!r}): cannot be called in a step captured as a CUDA graph, since its"
            " replays run no Python",
            "use tuning.cuda_graph=false; with a CUDA graph of your own, log its static tensor"
            " after each replay",
        )
    return values.sum(dtype=torch.float64)


def _in_backward() -> bool:
    """Whether a forward pass is repeated in a backward pass (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]
