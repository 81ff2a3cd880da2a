"""Data sets with `set_epoch(epoch)`, which a loop of the user's own must call itself."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from ddp_train.data.dataset_state import told_of_epochs
from ddp_train.data.datasets import BatchSource, digests
from ddp_train.models.put_back import leaving_nothing

NAME = "set_epoch"
NOT_CALLED = (
    "%s.set_epoch was not called between two epochs, so its samples are those of the same epoch"
    " again. run.loader calls set_epoch of samplers alone: call that of the data set at the"
    " beginning of each epoch, before the loop over the batches: dataset.set_epoch(epoch)"
)
log = logging.getLogger(__name__)


class NotedMethod:
    """The `set_epoch` of one data set, which notes that it was called.

    It is an attribute of that data set; copies of the data set have the method itself.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.method = dataset.set_epoch
        self.was_called = False
        self.first_epoch: int | None = None
        """The epoch of the first pass over its samples; None before."""
        self.is_over = False
        """A second epoch has begun: nothing is looked at any more."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.was_called = True
        return self.method(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.dataset, NAME)


class DataEpochs:
    """Warns once of each data set whose samples depend on an epoch that nobody tells it."""

    def __init__(self) -> None:
        self.noted: list[NotedMethod] = []

    def close(self) -> None:
        """Leave the data sets as they were."""
        for noted in self.noted:
            vars(noted.dataset).pop(NAME, None)

    def methods_of(self, source: BatchSource) -> list[NotedMethod]:
        """Look, from now on, at the data sets of a loader. Several loaders may share them."""
        datasets = list(_told_by_method(source))
        for dataset in datasets:
            if NAME not in vars(dataset):
                noted = NotedMethod(dataset)
                self.noted.append(noted)
                vars(dataset)[NAME] = noted
        return [noted for noted in self.noted if any(noted.dataset is one for one in datasets)]

    def begin_pass(self, methods: list[NotedMethod], source: BatchSource, epoch: int) -> None:
        """Called on all processes before each pass over the samples of a loader.

        methods: what `methods_of` gave for the source.
        """
        for noted in methods:
            if noted.first_epoch is None:
                noted.first_epoch = epoch
                noted.was_called = False
            elif noted.first_epoch != epoch and not noted.is_over:
                noted.is_over = True
                if not noted.was_called and _changes_samples(noted, source, epoch):
                    log.warning(NOT_CALLED, type(noted.dataset).__name__)


def _told_by_method(source: BatchSource) -> Iterator[Any]:
    """The data sets of a source that have `set_epoch` as a method of their class."""
    for set_epoch in told_of_epochs(getattr(source, "dataset", None)):
        dataset = getattr(set_epoch, "__self__", None)
        if isinstance(set_epoch, NotedMethod):
            dataset = set_epoch.dataset
        of_class = inspect.getattr_static(type(dataset), NAME, None)
        if isinstance(of_class, FunctionType) and hasattr(dataset, "__dict__"):
            yield dataset


def _changes_samples(noted: NotedMethod, source: BatchSource, epoch: int) -> bool:
    """Whether some samples would be others if the data set knew its epoch. It stays as it is."""
    roots = {"the data set": noted.dataset}
    try:
        with leaving_nothing("run.loader: a call of set_epoch", roots):
            before = digests(source)
            again = digests(source)
            noted.method(epoch)
            after = digests(source)
    except Exception:  # noqa: BLE001  the user's method may raise anything, and nobody called it
        return False
    return before == again != after
