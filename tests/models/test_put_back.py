"""A pass that is thrown away leaves nothing behind, or what it left is named."""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.models.put_back import leaving_nothing, reading_ahead
from ddp_train.sessions.wrapped import Wrapped
from tests.support.ranks import on_ranks

CALLS = 0
LOG: list[int] = []
BY_NAME: dict[str, int] = collections.defaultdict(int)
ON_HOST = torch.Generator().manual_seed(3)
OF_NUMPY = np.random.default_rng(1)
OF_PYTHON = random.Random(2)
ROWS = iter([1, 2, 3, 4])
CYCLE = itertools.cycle([1, 2, 3])
PAIRS = zip([1, 2, 3], iter([4, 5, 6]), strict=True)
NUMBERS = itertools.count()
TOTALS = np.zeros(3)


@functools.lru_cache
def computed_once(number: int) -> int:
    LOG.append(number)
    return number


def counting() -> Any:
    counting.calls = getattr(counting, "calls", 0) + 1  # type: ignore[attr-defined]


def counter() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


CLOSURE = counter()


class Registry:
    count = 0


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def change_globals() -> None:
    global CALLS
    CALLS += 1
    LOG.append(CALLS)
    BY_NAME["forward"] += 1
    torch.rand(1, generator=ON_HOST)
    OF_NUMPY.random()
    OF_PYTHON.random()
    for iterator in (ROWS, CYCLE, PAIRS, NUMBERS):
        next(iterator)
    TOTALS[0] += 1
    computed_once(7)
    counting()
    CLOSURE()
    Registry.count += 1
    torch.rand(1)
    random.random()
    np.random.rand()


class Net(nn.Module):
    """A network whose forward pass changes whatever can be changed."""

    steps = 0
    seen_by_class: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.seen = 0
        self.inputs: list[Tensor] = []
        self.newest: collections.deque[int] = collections.deque(maxlen=2)
        self.names: set[int] = set()
        self.tree = {"counts": [0]}
        self.slots = Slots()
        self.hidden: Tensor | None = None
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)
        self.register_buffer("replaced", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        change_globals()
        type(self).steps += 1
        self.seen_by_class.append(1)
        self.seen += 1
        self.inputs.append(inputs)
        self.newest.append(self.seen)
        self.names.add(self.seen)
        self.tree["counts"][0] += 1
        self.slots.count += 1
        self.unsaved += 1
        self.replaced = self.replaced + 1
        self.later = 4
        self.layer.register_forward_hook(lambda *_: None)
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)
        outputs = self.norm(self.layer(inputs))
        self.hidden = outputs
        return outputs


def state(net: Net) -> str:
    """Whatever `Net` changes."""
    python = [CALLS, LOG, dict(BY_NAME), NUMBERS, TOTALS.tolist(), Registry.count]
    python += [computed_once.cache_info().currsize, getattr(counting, "calls", 0)]
    python += [CLOSURE.__closure__[0].cell_contents, ROWS.__length_hint__()]  # type: ignore[index,attr-defined]
    generators = [ON_HOST.get_state().sum(), OF_NUMPY.bit_generator.state, OF_PYTHON.getstate()]
    generators += [torch.get_rng_state().sum(), random.getstate(), np.random.get_state()]
    of_net = [Net.steps, Net.seen_by_class, net.seen, net.inputs, net.newest, net.names]
    of_net += [net.tree, net.slots.count, net.hidden, hasattr(net, "later")]
    of_net += [net.layer._forward_hooks, [weight.grad for weight in net.parameters()]]
    tensors = {name: tensor.tolist() for name, tensor in net.named_parameters()}
    tensors |= {name: tensor.tolist() for name, tensor in net.named_buffers()}
    return repr([python, generators, of_net, tensors])


def test_all_that_a_pass_changes_is_put_back(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.layer.weight.grad = torch.ones(2, 2)
    before = state(net)
    with leaving_nothing("a trial", {"model": net}):
        for _ in range(2):
            net(torch.ones(3, 2)).sum().backward()
    assert state(net) == before
    assert next(CYCLE) == 1
    assert next(PAIRS) == (1, 4)
    assert not caplog.records


def test_what_cannot_be_put_back_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = (row for row in range(4))

        def forward(self) -> int:
            return next(self.rows)

    reader = Reader()
    with leaving_nothing("the warm-up", {"model": reader}):
        reader()
    assert "the warm-up has changed model.rows" in caplog.text


class MadeWhenAsked(collections.OrderedDict[str, Any]):
    """Keeps classes, and gives an object of one: the activations of transformers are such a table."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class UsesTable:
    def __init__(self) -> None:
        self.table = MadeWhenAsked(slots=Slots)

    def __call__(self) -> None:
        self.table["slots"].count += 1


def test_a_table_that_makes_its_values_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    task = UsesTable()
    with leaving_nothing("a trial", {"task": task}):
        task()
    assert caplog.text == ""
    task()
    assert list(task.table.items()) == [("slots", Slots)]


def test_an_error_in_a_pass_leaves_nothing_either() -> None:
    net = Net()
    before = state(net)
    with pytest.raises(RuntimeError), leaving_nothing("a trial", {"model": net}):
        net(torch.ones(3, 5))
    assert state(net) == before


def test_a_layer_that_became_another_one_stays_so() -> None:
    lazy = nn.LazyLinear(2)
    with leaving_nothing("a trial", {"model": lazy}):
        lazy(torch.ones(3, 4))
    assert lazy(torch.ones(3, 4)).shape == (3, 2)


class Reads:
    """A data set that counts its reads, and takes rows from an iterator."""

    def __init__(self) -> None:
        self.count = 0
        self.rows = iter(range(100))

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> int:
        self.count += 1
        return next(self.rows)

    def __iter__(self) -> Iterator[int]:
        raise TypeError


def test_samples_that_are_read_ahead_are_not_counted() -> None:
    reads = Reads()
    source = UserDataset(reads, 0)
    with reading_ahead(source):
        source.get_batch(np.array([0, 1]), None)
    assert reads.count == 0
    assert next(reads.rows) == 0


class Told(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.level = -1

    def set_epoch(self, epoch: int) -> None:
        self.level = epoch

    def __getitem__(self, number: int) -> int:
        return self.level


def test_a_data_set_that_is_read_ahead_knows_its_epoch() -> None:
    source = UserDataset(Told(), 0)
    for epoch in (None, 0, 3):
        with reading_ahead(source):
            source.get_batch(np.array([0]), epoch)
        assert source.get_batch(np.array([0]), epoch).tolist() == [epoch or 0]


class Beside(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self.done = 0


def test_what_other_threads_share_stays_as_it_is() -> None:
    net = nn.Linear(2, 2)
    net.beside = Beside()  # type: ignore[assignment]
    net.queue = queue.Queue()  # type: ignore[assignment]
    with leaving_nothing("a trial", {"model": net}):
        net.beside.done += 1  # type: ignore[operator]
        net.queue.put(1)  # type: ignore[operator]
    assert net.beside.done == 1 and net.queue.unfinished_tasks == 1


def test_a_module_imported_meanwhile_stays_in_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "lazy_net"
    folder.mkdir()
    (folder / "__init__.py").write_text("def call():\n    import lazy_net.late\n")
    (folder / "late.py").write_text("CALLS = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("lazy_net")
    with leaving_nothing("a trial", {"call": package.call}):
        package.call()
    assert package.late.CALLS == 1
    assert "a trial" not in caplog.text


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = 0
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        self.unsaved += 1
        return self.layer(inputs)


def count_forward_passes(world: World) -> list[float]:
    net = Counting()
    model = Wrapped(net, "cpu", world.size, True, {})
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
    model.release()
    return [net.seen, float(net.get_buffer("unsaved"))]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_a_model_counts_as_many_passes_on_any_number(processes: int) -> None:
    assert on_ranks(processes, count_forward_passes) == [[2, 2]] * processes
