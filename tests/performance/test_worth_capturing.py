"""A trial decides whether compiled steps are captured: by which step, and what happens if not.
Without a GPU."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.world import World
from ddp_train.errors import LaunchError
from ddp_train.optim.stepper import Stepper
from ddp_train.performance.cuda_graph import WARM_UP_STEPS, GraphedStepper
from ddp_train.performance.worth_capturing import CaptureTrial, places_that_wait, reason_against
from tests.support.jobs import constant
from tests.support.ranks import on_ranks


class Noted(CaptureTrial):
    """Says no, and notes what it measured."""

    def __init__(self) -> None:
        super().__init__("cpu", {})
        self.calls: list[str] = []
        self.sizes: list[int] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self) -> None:
        self.calls.append("end")

    def why_not(self) -> str:
        self.calls.append("why not")
        return "for a test"


def trained(make: Any, sizes: list[int]) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    noted: list[int] = []

    def wrapped(data: torch.Tensor) -> tuple[torch.Tensor, None]:
        noted.append(len(data))
        return model(data).pow(2).sum(), None

    stepper, trial = make(wrapped, optimizer)
    forward = stepper.forward if isinstance(stepper, GraphedStepper) else wrapped
    for step, size in enumerate(sizes):
        before = list(trial.calls) if trial else []
        loss, units = forward(torch.arange(4.0 * size).view(size, 4) / (4 * size))
        if trial and "begin" in trial.calls and "begin" not in before:
            trial.sizes.append(size)
        stepper.backward(loss, units, MicroBatch(step, 0, np.arange(size), size, 1 / size, True))
        stepper.step()
    assert noted == sizes
    return model.weight.detach().clone()


@pytest.mark.parametrize("epoch", [12, 13, 40])
def test_a_whole_batch_is_tried_once(epoch: int) -> None:
    sizes = [2 if step % epoch == epoch - 1 else 8 for step in range(45)]
    trial = Noted()
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def graphed(wrapped: Any, optimizer: torch.optim.Optimizer) -> Any:
        whole = lambda step: sizes[step] == 8  # noqa: E731
        return GraphedStepper(
            wrapped, None, whole, optimizer, constant(optimizer), scaler, trial=trial
        ), trial  # pyright: ignore

    found = trained(graphed, sizes)
    expected = trained(
        lambda _, optimizer: (Stepper(optimizer, constant(optimizer), scaler), None), sizes
    )
    assert torch.equal(found, expected)
    assert trial.calls == ["begin", "end", "why not"] and trial.sizes == [8]
    assert WARM_UP_STEPS == 11


def test_a_slow_host_with_enough_memory_captures() -> None:
    assert reason_against(host_share=0.6, memory_share=0.6) == ""
    assert reason_against(0.4, 0.6) == "the host needs only 40% of the time of a step to launch it"
    assert reason_against(0.95, 1.2) == "steps and an evaluation might need 120% of a GPU's memory"


class Slotted:
    __slots__ = ("calls",)


class Remembers(nn.Module):
    """Does something in Python with each forward pass."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.how = how
        self.calls = 0
        self.seen = torch.zeros(())
        self.register_buffer("mean", torch.zeros(4))
        self.history: list[float] = []
        self.kinds = {0}
        self.number = np.int64(0)
        self.slotted = Slotted()
        self.many, self.partly = [0] * 100, functools.partial(self.history.append)
        self.graph = torch.eye(4).to_sparse()
        self.unknown = torch.empty(2, device="meta")
        self.function = torch.relu
        self.layers = (nn.ReLU(), nn.Tanh())
        self.huge = 10**5000
        self.current = self.layers[0]
        self.slotted.calls = 0
        self.steps = (number for number in range(9))
        if how == "hook":
            self.layer.register_forward_hook(lambda *_: self.history.append(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(inputs.mean(0), 0.1)  # pyright: ignore  a captured step does this, too
        if self.how == "counter":
            self.calls += 1
        elif self.how == "list":
            self.history.append(0.5)
        elif self.how == "set":
            self.kinds = {value + 1 for value in self.kinds}
        elif self.how == "number":
            self.number = self.number + 1
        elif self.how == "slot":
            self.slotted.calls += 1
        elif self.how == "late in a list":
            self.many[90] += 1
        elif self.how == "of a partial function":
            self.partly.keywords["key"] = self.partly.keywords.get("key", 0) + 1
        elif self.how == "generator":
            next(self.steps)
        elif self.how == "another function":
            self.function = torch.tanh if self.function is torch.relu else torch.relu
        elif self.how == "another layer":
            self.current = self.layers[int(self.current is self.layers[0])]
        elif self.how == "of a layer of torch's":
            self.layer.calls = getattr(self.layer, "calls", 0) + 1
        elif self.how == "deleted":
            del self.calls
        elif self.how == "buffer":
            self.mean = self.mean * 0.9
        elif self.how == "tensor":
            self.seen = self.seen + inputs.sum()
        elif self.how == "tensor in place":
            self.seen += inputs.sum()
        elif self.how == "torch":
            inputs = inputs * torch.rand(())
        elif self.how == "numpy":
            inputs = inputs * np.random.rand()
        elif self.how == "python":
            inputs = inputs * random.random()
        return self.layer(inputs)


@pytest.fixture
def same_generators() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def watched(model: nn.Module, device: str = "cpu", asked: bool = False) -> CaptureTrial:
    trial = CaptureTrial(device, {"model": model}, asked, if_it_pays=False)
    with trial.watched():
        model(torch.ones(2, 4))
    return trial


@pytest.mark.usefixtures("same_generators")
@pytest.mark.parametrize(
    ("how", "reason"),
    {
        "": "",
        "counter": "changes model.calls",
        "list": "changes model.history",
        "set": "changes model.kinds",
        "number": "changes model.number",
        "slot": "changes model.slotted.calls",
        "late in a list": "changes model.many",
        "of a partial function": "changes model.partly.keywords",
        "generator": "changes model.steps",
        "another function": "changes model.function",
        "another layer": "changes model.current",
        "of a layer of torch's": "changes model.layer.calls",
        "deleted": "changes model.calls",
        "hook": "changes model.history",
        "buffer": "puts another tensor in the place of model.mean",
        "tensor": "",
        "tensor in place": "",
        "torch": "draws from torch's generator on the host",
        "numpy": "draws from numpy's generator",
        "python": "draws from Python's generator",
    }.items(),
)
def test_what_python_does_in_a_step_is_not_captured(
    how: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = watched(Remembers(how))
    assert chosen.why_not() == (
        f"the forward pass {reason}; a captured step runs no Python" if reason else ""
    )
    asked = watched(Remembers(how), asked=True)
    with pytest.raises(LaunchError, match=reason) if reason else contextlib.nullcontext():
        assert asked.why_not() == ""
    assert ("each forward pass replaces the tensor model.seen" in caplog.text) == (how == "tensor")


def test_a_tensor_on_the_host_is_not_changed_by_a_graph() -> None:
    trial = watched(Remembers("tensor in place"), device="cuda:0")
    assert trial.in_python == "the forward pass changes model.seen"


def stateful_on_one(world: World) -> str:
    trial = CaptureTrial("cpu", {}, if_it_pays=False)
    trial.in_python = "the forward pass changes model.calls" if world.rank == 1 else ""
    return trial.why_not()


def test_python_state_on_one_rank_keeps_all_from_capturing() -> None:
    mine = "the forward pass changes model.calls"
    other = "another rank's forward pass has state"
    assert on_ranks(3, stateful_on_one) == [
        f"{reason}; a captured step runs no Python" for reason in (other, mine, other)
    ]


def waiting_on_one(world: World, asked: bool) -> str:
    trial = CaptureTrial("cpu", {}, asked, if_it_pays=False)
    if world.rank == 1:
        trial.waits = "the forward pass waits for the GPU at model.py, line 3"
    else:
        trial.waits = ""
    return trial.why_not()


def test_a_rank_that_waits_for_its_gpu_keeps_all_from_capturing() -> None:
    """Unless it was asked for: the capture fails where it cannot be, and a model may wait only
    where none is."""
    mine = "the forward pass waits for the GPU at model.py, line 3"
    other = "another rank's forward pass waits for its GPU"
    assert on_ranks(3, waiting_on_one, False) == [
        f"{one}; a captured step cannot" for one in (other, mine, other)
    ]
    assert on_ranks(3, waiting_on_one, True) == ["", "", ""]


@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_is_noted_and_other_warnings_are_shown_at_once(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, where nothing waits: the warnings alone. tests/end_to_end/test_gpu.py has real
    ones."""
    modes: list[str | int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with (
        pytest.warns(UserWarning) as seen,
        contextlib.suppress(ZeroDivisionError),
        places_that_wait() as places,
    ):
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        for _ in range(2):
            warnings.warn(
                "called a synchronizing CUDA operation (of a file of torch's)", stacklevel=1
            )
        warnings.warn("of the model", stacklevel=1)
        torch._C._warn()  # pyright: ignore  as the others come, from C++
        assert not fails or 1 / 0
    assert [str(one.message)[:12] for one in seen] == ["of the model", "Test message"]
    assert len(places) == 2 and places[0].startswith(f"{Path(__file__).name}, line ")
    assert modes == ["warn", 0]


def test_a_capture_that_fails_says_where_the_gpu_was_waited_for() -> None:
    stepper: Any = GraphedStepper.__new__(GraphedStepper)
    stepper.trial = CaptureTrial("cpu", {}, asked=True)
    stepper.trial.waits = "the forward pass waits for the GPU at model.py, line 3"

    def capture(_: Any) -> None:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    stepper._capture = capture
    with pytest.raises(
        LaunchError, match=r"graph: the forward pass .*line 3; operation not permitted"
    ):
        stepper._capture_or_explain(None)
