"""What a session logs is that of a plain loop, on any number of processes, and goes on after a
resume."""

from __future__ import annotations

import math
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import ddp_train
from ddp_train.checkpoints.layout import places
from ddp_train.data.batch_plan import epoch_order
from ddp_train.distributed.world import World
from ddp_train.sessions.numbers import SessionNumbers, log_call
from ddp_train.sessions.settings import UsageError
from ddp_train.telemetry.metrics_log import METRICS, read_metrics
from tests.support import zygote
from tests.support.commands import LIMIT_SECONDS, ROOT, environment
from tests.support.ranks import on_ranks

SAMPLES = 29
GLOBAL_BATCH = 7
"""Five batches in an epoch, the last of one sample: on three processes two have none."""
EPOCHS = 2
EVERY = 3
SAVED_AT = 7
"""In mid-epoch, and between two lines."""
SCRIPT = """
import sys
import ddp_train
from tests.sessions.test_numbers import train
with ddp_train.session(sys.argv[1], device="cpu", keep=9, log_every_steps=3) as run:
    train(run)
"""


def rows(samples: int, seed: int) -> TensorDataset:
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed)).double()
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


class Net(nn.Module):
    """A model that logs a number itself, in training and in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layers(inputs)
        ddp_train.log("model/outputs", outputs.abs())
        return outputs


def train(run: Any) -> None:
    model = run.wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(rows(SAMPLES, 1), global_batch_size=GLOBAL_BATCH)
    test_loader = run.test_loader(rows(23, 2), batch_size=4)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            losses = functional.cross_entropy(outputs, labels, reduction="none")
            run.mean(losses).backward()
            optimizer.step()
            run.log("loss", losses)
            run.log("ones", losses[labels == 1].sum(), over=(labels == 1).sum())
            run.log("count", len(labels), how="sum")
            run.log("lr", 0.1, how="last")
            if run.rank == run.processes - 1:
                run.log("one_rank", 2.0, over=1)
            if run.step + 1 == SAVED_AT:
                run.save()
        right = 0
        with torch.no_grad():
            for inputs, labels in test_loader:
                found = model(inputs).argmax(1) == labels
                run.log("test/right", found)
                right += int(found.sum())
        run.log("test/of_sum", run.sum(right) / 23)


def by_hand() -> list[dict[str, Any]]:
    """The lines of a plain loop."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = rows(SAMPLES, 1).tensors
    test_inputs, test_labels = rows(23, 2).tensors
    lines = []
    step = seen = 0
    for epoch in range(EPOCHS):
        numbers: dict[str, list[float]] = defaultdict(list)
        shares = torch.as_tensor(epoch_order(0, epoch, SAMPLES)).split(GLOBAL_BATCH)
        for number, share in enumerate(shares, start=1):
            optimizer.zero_grad()
            outputs = model(inputs[share])
            losses = functional.cross_entropy(outputs, labels[share], reduction="none")
            losses.mean().backward()
            optimizer.step()
            numbers["loss"] += losses.tolist()
            numbers["ones"] += losses[labels[share] == 1].tolist()
            numbers["model/outputs"] += outputs.abs().flatten().tolist()
            step += 1
            seen += len(share)
            if step % EVERY == 0 or number == len(shares):
                means = {name: math.fsum(one) / len(one) for name, one in numbers.items() if one}
                others = {"count": len(numbers["loss"]), "lr": 0.1, "one_rank": 2.0}
                place = {"kind": "train", "step": step, "epoch": epoch + 1, "samples_seen": seen}
                lines.append({**place, **means, **others})
                numbers.clear()
        with torch.no_grad():
            right = (model(test_inputs).argmax(1) == test_labels).double().mean().item()
        place = {"kind": "test", "step": step, "epoch": epoch + 1}
        lines.append({**place, "right": right, "of_sum": right})
    return lines


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock measures."""
    return [
        {name: line[name] for name in line if name not in ("time", "samples_per_second")}
        for line in read_metrics(run_dir / METRICS)
    ]


def check_lines(found: list[dict[str, Any]]) -> None:
    expected = by_hand()
    assert [line["kind"] for line in found] == [line["kind"] for line in expected]
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-10), line["step"]


def test_one_process_logs_as_a_plain_loop(tmp_path: Path) -> None:
    with ddp_train.session(
        tmp_path / "run", device="cpu", processes=1, log_every_steps=EVERY
    ) as run:
        train(run)
    check_lines(lines_of(tmp_path / "run"))
    assert "model/outputs" in (tmp_path / "run/report.html").read_text()


@pytest.mark.slow
def test_three_processes_log_the_same_and_resume_the_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = environment({"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": "3"})

    def lines_of_run(run_dir: Path) -> list[dict[str, Any]]:
        command = [sys.executable, str(script), str(run_dir)]
        done = zygote.run(command, LIMIT_SECONDS, text=True, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return lines_of(run_dir)

    calm = lines_of_run(tmp_path / "calm")
    check_lines(calm)
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "calm", resumed)
    for place in places(resumed):
        if not place.name.endswith(f"{SAVED_AT:08}"):
            shutil.rmtree(place)
    assert len(places(resumed)) == 1
    assert lines_of_run(resumed) == calm
    assert "model/outputs" in (resumed / "report.html").read_text()


def of_four(world: World, folder: str) -> str:
    numbers = SessionNumbers(Path(folder), world, "cpu", 2)

    def log(step: int, name: str, values: Any, over: Any = None, in_step: bool = False) -> None:
        numbers.log(step, log_call(name, values, over, "mean", in_step))

    for step in (0, 1):
        if world.rank != 2:  # has no sample
            log(step, "kl", torch.full((world.rank + 1,), float(world.rank)), in_step=True)
        numbers.end_step(step, world.rank + 1)
    log(2, "test/right", float(world.rank), over=2)
    numbers.line(2, 1)
    numbers.end_step(2, 1)
    numbers.flush(3, 1)
    log(3, "same", 1.0)
    log(3, "apart", float(world.rank))
    with pytest.raises(UsageError, match="it goes from 0 to 3") as refused:
        numbers.flush(4, 1)
    return refused.value.remedy


def test_four_processes_agree_on_what_some_of_them_log(tmp_path: Path) -> None:
    remedies = on_ranks(4, of_four, str(tmp_path))
    assert all("over=count" in remedy for remedy in remedies)
    mean = (1 * 0 + 2 * 1 + 4 * 3) / (1 + 2 + 4)
    assert lines_of(tmp_path) == [
        {"kind": "train", "step": 2, "epoch": 1, "kl": mean, "samples_seen": 20},
        {"kind": "test", "step": 2, "epoch": 1, "right": 6 / 8},
        {"kind": "train", "step": 3, "epoch": 1, "samples_seen": 24},
    ]


@pytest.mark.parametrize(
    ("name", "values", "options", "message"),
    [
        ("loss", torch.tensor(1.0), {}, "one number is not enough for a mean"),
        ("samples_seen", torch.ones(2), {}, "metrics.jsonl already have a field of that name"),
        ("loss", torch.ones(2), {"how": "sum", "over": 2}, "over= is the count of a mean"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_at_their_line(
    tmp_path: Path, name: str, values: Any, options: dict[str, Any], message: str
) -> None:
    numbers = SessionNumbers(tmp_path, World(), "cpu", 2)
    arguments = {"over": None, "how": "mean", **options}
    with pytest.raises(UsageError, match=rf"test_numbers.py:\d+: run.log\('{name}'\): .*{message}"):
        numbers.log(0, log_call(name, values, in_step=True, **arguments))
