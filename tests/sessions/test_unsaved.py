"""Schedulers and scalers that act on an optimizer and are in no checkpoint."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ddp_train.models.living_objects import living_objects
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.watches.unsaved import (
    refuse_unsaved_scaler,
    refuse_unsaved_schedulers,
    warn_of_unsaved_schedulers,
)
from ddp_train.text import with_article


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


class Own:
    """An object of the user's that holds a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.all = {"first": [scheduler]}


class EpochScheduler:
    """A scheduler as those of timm: not derived from torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int) -> None: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
        lr_scheduler.ReduceLROnPlateau,
        EpochScheduler,
    ],
)
@pytest.mark.slow
def test_a_scheduler_that_is_not_saved_is_refused_with_its_class(make: Any) -> None:
    optimizer = sgd()
    scheduler = make(optimizer)
    with pytest.raises(UsageError) as caught:
        refuse_unsaved_schedulers({"sgd": optimizer}, living_objects())
    kind = type(scheduler).__name__
    assert f"run.resume did not get {with_article(kind)} of sgd" in str(caught.value)
    assert "sgd=sgd, scheduler=scheduler" in caught.value.remedy
    refuse_unsaved_schedulers({"sgd": optimizer, "scheduler": scheduler}, living_objects())
    refuse_unsaved_schedulers({"sgd": optimizer, "own": Own(scheduler)}, living_objects())


@pytest.mark.slow
def test_schedulers_within_a_saved_one_and_of_others_are_no_cause() -> None:
    optimizer = sgd()
    parts: list[Any] = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, [3])
    of_another = lr_scheduler.StepLR(sgd(), 1)
    refuse_unsaved_schedulers({"optimizer": optimizer, "scheduler": scheduler}, living_objects())
    with pytest.raises(UsageError):
        refuse_unsaved_schedulers(
            {"optimizer": of_another.optimizer, "scheduler": scheduler}, living_objects()
        )


def test_a_scheduler_that_nobody_uses_any_more_is_no_cause() -> None:
    optimizer = sgd()
    scheduler: Any = lr_scheduler.StepLR(optimizer, 1)
    scheduler.itself = scheduler  # a cycle, which waits for the collector
    del scheduler
    refuse_unsaved_schedulers({"optimizer": optimizer}, living_objects())


@pytest.mark.slow
def test_a_scheduler_made_later_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = sgd()
    warn_of_unsaved_schedulers({"optimizer": optimizer}, living_objects())
    assert not caplog.records
    parts: list[Any] = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, [3])
    warn_of_unsaved_schedulers({"optimizer": optimizer}, living_objects())
    assert (
        caplog.text.count("was created after run.resume") == 1 and "a SequentialLR" in caplog.text
    )
    caplog.clear()
    warn_of_unsaved_schedulers({"optimizer": optimizer, "scheduler": scheduler}, living_objects())
    assert not caplog.records


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_that_is_not_saved_is_refused_in_its_first_step(enabled: bool) -> None:
    optimizer = sgd()
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    other = torch.amp.GradScaler("cpu")  # of no step
    parameter = optimizer.param_groups[0]["params"][0]
    scaler.scale(parameter.sum()).backward()
    saved = {"optimizer": optimizer}
    optimizer.register_step_pre_hook(lambda *_: refuse_unsaved_scaler(saved))
    if enabled:
        with pytest.raises(UsageError, match=r"a GradScaler makes a step, but run\.resume did not"):
            scaler.step(optimizer)
        saved["scaler"] = scaler  # pyright: ignore[reportArgumentType]
    scaler.step(optimizer)
    assert other.is_enabled()


def test_locals_of_a_loop_end_with_it() -> None:
    """An iterator that a frame kept would hold its step open until the collector comes."""
    optimizer = sgd()
    optimizer.register_step_pre_hook(lambda *_: refuse_unsaved_scaler({"optimizer": optimizer}))

    def loop() -> weakref.ref[Any]:
        batches = (number for number in range(3))
        next(batches)
        optimizer.step()
        return weakref.ref(batches)

    gc.disable()
    try:
        assert loop()() is None
    finally:
        gc.enable()
