"""State that each process fills by its own samples is named at a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ddp_train.distributed.all_gather import all_gather
from ddp_train.distributed.world import World
from ddp_train.sessions.watches import checkpoint_watch
from tests.sessions.loops import SAMPLES, rows, sgd
from tests.support.ranks import on_ranks
from tests.support.session_ranks import session_on

gather: Any = all_gather


class Net(nn.Module):
    """It has seen samples: in whole numbers, in an attribute."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1).double()
        self.norm = nn.BatchNorm1d(1).double()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.long))
        self.largest = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.layer(inputs)).squeeze(1)


class Kept:
    """An object with a state: a baseline, a table of losses."""

    def __init__(self) -> None:
        self.baseline = 0.0
        self.table = torch.zeros(3).double()

    def state_dict(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "tables": [self.table],
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.baseline = state["baseline"]
        (self.table,) = state["tables"]


def of_whole_numbers(model: Any, kept: Kept, labels: Tensor) -> None:
    model.seen += torch.bincount(labels.long(), minlength=2)


def of_numbers(model: Any, kept: Kept, labels: Tensor) -> None:
    kept.baseline += labels.sum().item()


def of_tensors(model: Any, kept: Kept, labels: Tensor) -> None:
    kept.table[0] += labels.sum()


def of_attributes(model: Any, kept: Kept, labels: Tensor) -> None:
    model.largest += labels.sum().item()


def of_all(model: Any, kept: Kept, labels: Tensor) -> None:
    labels = gather(labels)[0]
    for fill in (of_whole_numbers, of_numbers, of_tensors):
        fill(model, kept, labels)


FILLED = {
    "seen": of_whole_numbers,
    "kept['baseline']": of_numbers,
    "kept['tables'][0]": of_tensors,
    "model.largest": of_attributes,
}


def collected_warnings() -> list[str]:
    """The warnings of checkpoints, from now on in this process."""
    messages: list[str] = []
    log = checkpoint_watch.log
    log.warning = lambda text, *values: messages.append(text % values)  # type: ignore[method-assign]
    return messages


def told(world: World, fill: Any) -> list[str]:
    """The warnings of two epochs with a checkpoint after each."""
    messages = collected_warnings()
    with session_on(world) as run:
        model = run.wrap(Net(), sync_batch_norm=False)
        average = AveragedModel(model, use_buffers=True)
        kept = Kept()
        optimizer = sgd(model)
        loader = run.loader(rows(), global_batch_size=SAMPLES // 2)
        run.resume(model=model, optimizer=optimizer, kept=kept, average=average)
        for _ in run.epochs(2):
            for inputs, labels in loader:
                optimizer.zero_grad()
                run.mean((model(inputs) - labels).square()).backward()
                optimizer.step()
                fill(model, kept, labels)
                average.update_parameters(model)
    return messages


@pytest.mark.parametrize("name", FILLED)
def test_what_each_process_fills_alone_is_named_once(name: str) -> None:
    for messages in on_ranks(3, told, FILLED[name]):
        assert len(messages) == 1
        assert name in messages[0]
        assert "not the same on all processes" in messages[0]


def test_what_is_of_all_samples_is_not() -> None:
    """Statistics of norms and states of generators may differ."""
    for messages in on_ranks(3, told, of_all):
        assert messages == []


def in_train_mode(run: Any, model: Any) -> Any:
    return Net()


def wrapped(run: Any, model: Any) -> Any:
    return run.wrap(Net())


def in_eval_mode(run: Any, model: Any) -> Any:
    return Net().eval()


def average(run: Any, model: Any) -> Any:
    return AveragedModel(model)


def told_of_teacher(world: World, make: Any, sync_batch_norm: bool = True) -> list[str]:
    """The warnings of two epochs in which a teacher sees each batch."""
    messages = collected_warnings()
    with session_on(world) as run:
        model = run.wrap(Net(), sync_batch_norm=sync_batch_norm)
        teacher = make(run, model)
        optimizer = sgd(model)
        loader = run.loader(rows(), global_batch_size=SAMPLES // 2)
        run.resume(model=model, optimizer=optimizer, teacher=teacher)
        for _ in run.epochs(2):
            for inputs, _ in loader:
                with torch.no_grad():
                    wanted = teacher(inputs)
                optimizer.zero_grad()
                run.mean((model(inputs) - wanted).square()).backward()
                optimizer.step()
    return messages


def test_batch_norm_that_was_not_wrapped_is_named_once() -> None:
    for messages in on_ranks(3, told_of_teacher, in_train_mode):
        assert len(messages) == 1
        assert messages[0].startswith("teacher.norm.running_mean, teacher.norm.running_var: not")
        assert "teacher = run.wrap(teacher) before run.resume" in messages[0]


@pytest.mark.parametrize("make", [wrapped, in_eval_mode, average])
def test_batch_norm_of_teachers_that_agree_is_not(make: Any) -> None:
    assert on_ranks(3, told_of_teacher, make) == [[], [], []]


def test_batch_norm_that_was_chosen_is_not() -> None:
    assert on_ranks(3, told_of_teacher, in_train_mode, False) == [[], [], []]


class Centred(Net):
    """A teacher that keeps the mean of its outputs, as DINO's."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.register_buffer("centre", torch.zeros(1).double())

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        self.centre.lerp_(outputs.mean(0, keepdim=True), 0.1)
        return outputs


def centred(run: Any, model: Any) -> Any:
    return Centred()


def test_centre_that_a_teacher_fills_alone_is_named() -> None:
    for messages in on_ranks(3, told_of_teacher, centred):
        assert len(messages) == 1
        assert messages[0].startswith("teacher.centre: not the same")
