"""A run over a stream, by config: what plain torch learns from it in one process."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import nn

from tests.support.commands import read, run, weights

MODULE = '''
import os
import random

import torch
from torch import nn
from torch.utils.data import IterableDataset


PLACES = os.environ.get("PLACES", os.devnull)


def row(number):
    inputs = torch.randn(6, generator=torch.Generator().manual_seed(number))
    return inputs, int(inputs[0] > 0)


class Lines(IterableDataset):
    """Rows, others in each epoch; without a length."""

    classes = ("below", "above")

    def __init__(self, split="train"):
        self.first, self.samples = (0, 53) if split == "train" else (5000, 17)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.samples):
            yield row(self.first + 100 * self.epoch + number)


class Shuffled(Lines):
    """The same, shuffled within a buffer."""

    def __iter__(self):
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 9:
                yield buffer.pop(random.randrange(9))
        yield from buffer


class Positioned(Lines):
    """The same, which goes on where it was, and writes down where."""

    place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

    def __iter__(self):
        with open(PLACES, "a") as places:
            print(self.epoch, self.place, file=places)
        while self.place < self.samples:
            self.place += 1
            yield row(self.first + 100 * self.epoch + self.place - 1)
        self.place = 0


class Net(nn.Linear):
    def __init__(self):
        super().__init__(6, 2)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
'''
WORDS = (
    *("model._target_=my_stream.Net", "trusted_modules=[my_stream]", "data.validation=0"),
    *("optimizer=sgd", "optimizer.lr=0.5", "optimizer.momentum=0", "optimizer.weight_decay=0"),
    *("schedule=constant", "train.global_batch_size=12", "tuning.precision=fp64"),
)
THREE_EPOCHS = "train.epochs=3"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "my_stream.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}


def train(run_dir: Path, env: dict[str, str], processes: int, name: str, *more: str) -> bytes:
    done = run(
        *WORDS,
        f"data._target_=my_stream.{name}",
        f"launch.nproc_per_node={processes}",
        f"run_dir={run_dir}",
        *more,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(run_dir)


def plain_weights(epochs: int) -> dict[str, torch.Tensor]:
    """The weights after a loop of torch alone, in float64."""
    module = importlib.import_module("my_stream")
    net = module.Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    lines = module.Lines()
    for epoch in range(epochs):
        lines.set_epoch(epoch)
        rows = list(lines)
        for start in range(0, len(rows), 12):
            inputs, targets = zip(*rows[start : start + 12], strict=True)
            loss = nn.functional.cross_entropy(
                net(torch.stack(inputs).double()), torch.tensor(targets)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.state_dict()


@pytest.mark.slow
def test_a_run_over_a_stream_learns_what_a_plain_loop_does(
    tmp_path: Path, env: dict[str, str]
) -> None:
    found = load(train(tmp_path / "run", env, 3, "Lines", THREE_EPOCHS, "tuning.num_workers=2"))
    for name, expected in plain_weights(epochs=3).items():
        (value,) = (value for key, value in found.items() if key.endswith(name))
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    assert read(tmp_path / "run", "summary.json")["status"] == "completed"


@pytest.mark.slow
def test_a_run_over_a_stream_resumes_to_the_same_bytes(tmp_path: Path, env: dict[str, str]) -> None:
    whole = train(tmp_path / "whole", env, 3, "Shuffled", THREE_EPOCHS)
    train(tmp_path / "part", env, 3, "Shuffled", THREE_EPOCHS, "train.max_steps=7")
    assert train(tmp_path / "part", env, 3, "Shuffled", THREE_EPOCHS) == whole


@pytest.mark.slow
def test_a_stream_with_a_state_resumes_by_it(tmp_path: Path, env: dict[str, str]) -> None:
    places = tmp_path / "places"
    workers = "tuning.num_workers=2"
    whole = train(tmp_path / "whole", env, 3, "Positioned", THREE_EPOCHS, workers)
    assert whole == train(tmp_path / "plain", env, 3, "Lines", THREE_EPOCHS)
    train(tmp_path / "part", env, 3, "Positioned", THREE_EPOCHS, workers, "train.max_steps=7")
    env["PLACES"] = str(places)
    assert train(tmp_path / "part", env, 3, "Positioned", THREE_EPOCHS, workers) == whole
    begun = places.read_text().splitlines()
    # Step 7 is the second of epoch 1; rank 0 saved it behind sample 15 of its batch of 12 to 23.
    assert begun.count("1 16") == 3 and begun.count("2 0") == 3
    log = (tmp_path / "part" / "logs" / "rank_0.log").read_text()
    assert "a resumed run uses the stream's state_dict" in log
    assert "in one loader process (with tuning.num_workers=2, each would" in log


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Shuffled", "Positioned"])
def test_a_run_over_a_stream_goes_on_with_other_processes(
    name: str, tmp_path: Path, env: dict[str, str]
) -> None:
    one = load(train(tmp_path / "one", env, 1, name, "train.max_steps=9"))
    train(tmp_path / "run", env, 3, name, "train.max_steps=6")
    run_on = load(train(tmp_path / "run", env, 4, name, "train.max_steps=9"))
    for key, value in one.items():
        torch.testing.assert_close(run_on[key], value, rtol=0, atol=1e-12)


# --- on GPUs --------------------------------------------------------------------------------------

GPUS = torch.cuda.device_count()
NEEDS_A_GPU = pytest.mark.skipif(not GPUS, reason="needs a GPU: torch.cuda.is_available() is false")
SAMPLED = '''
import random

from my_stream import Net, row


class Rows:
    classes = ("below", "above")

    def __init__(self, split="train", first=0):
        self.first = {"train": 0, "validation": 2000, "test": 5000}[split] + first

    def __len__(self):
        return 40

    def __getitem__(self, number):
        return row(self.first + number)


class InPairs:
    """Batches of six pairs of neighbours."""

    def __init__(self, dataset):
        self.draw = random.Random(4)

    def __len__(self):
        return 3

    def __iter__(self):
        for _ in range(3):
            firsts = self.draw.sample(range(0, 40, 2), 6)
            yield [number for first in firsts for number in (first, first + 1)]
'''


def on_gpus(env: dict[str, str]) -> dict[str, str]:
    return env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(GPUS)))}


@NEEDS_A_GPU
def test_a_run_over_a_stream_learns_on_gpus_what_a_plain_loop_does(
    tmp_path: Path, env: dict[str, str]
) -> None:
    epochs = (THREE_EPOCHS, "tuning.num_workers=2")
    learned = load(train(tmp_path / "run", on_gpus(env), GPUS, "Lines", *epochs))
    for name, expected in plain_weights(epochs=3).items():
        (value,) = (value for key, value in learned.items() if key.endswith(name))
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-9)


@NEEDS_A_GPU
def test_batches_and_named_sets_are_on_gpus_what_they_are_on_the_cpu(
    tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "my_rows.py").write_text(SAMPLED)
    words = (
        *("trusted_modules=[my_stream,my_rows]", "data._target_=my_rows.Rows", THREE_EPOCHS),
        *("data.validation=null", "data.batch_sampler._target_=my_rows.InPairs"),
        *("data.validation_sets.far.first=300", "data.test_sets.farther.first=600"),
    )
    summaries = []
    states = []
    for processes, place in ((1, env), (GPUS, on_gpus(env))):
        run_dir = tmp_path / str(len(states))
        states.append(load(train(run_dir, place, processes, "Lines", *words)))
        summaries.append(read(run_dir, "summary.json"))
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=1e-9)
    names = ("test", "validation", "test/farther", "validation/far")
    for name in names:
        for metric, value in summaries[0][name].items():
            assert summaries[1][name][metric] == pytest.approx(value, abs=1e-9), (name, metric)
