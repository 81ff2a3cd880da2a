"""A loop of the user's own in which some process has no sample: nothing that it computes counts
one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from ddp_train.data.batch_plan import epoch_order
from tests.support import zygote
from tests.support.commands import LIMIT_SECONDS, ROOT, environment, fatal_lines

NET = """
import torch
from torch import nn

EPOCHS, SAMPLES, BATCH = 2, 20, 6
IMAGES = torch.randn(SAMPLES, 1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
LABELS = (IMAGES.flatten(1)[:, 0] > 0).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(64, 2)

    def forward(self, images):
        features = self.norm(self.conv(images)).relu()
        return self.head(features.view(features.size(0), -1))


def new_net():
    torch.manual_seed(1)
    return Net().double()
"""
SCRIPT = """
import json
import sys

import torch
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import ddp_train
from net import BATCH, EPOCHS, IMAGES, LABELS, new_net


class Rows(Dataset):
    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, number):
        return IMAGES[number], int(LABELS[number]), f"image {number}"


def collate(rows):
    images, labels, names = zip(*rows)
    return {"images": torch.stack(images, 1), "labels": torch.tensor(labels), "names": names, "count": len(rows)}


def main(kind):
    model = run.wrap(new_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "collated":
        loader = run.loader(Rows(), global_batch_size=BATCH, collate_fn=collate, num_workers=1)
    else:
        loader = run.loader(TensorDataset(IMAGES, LABELS), global_batch_size=BATCH)
    test_loader = run.test_loader(TensorDataset(IMAGES[:2], LABELS[:2]), batch_size=1)
    run.resume(model=model, optimizer=optimizer)
    centre = torch.zeros(2).double()
    for epoch in run.epochs(EPOCHS):
        correct = total = loss = 0
        bank = []
        for batch in loader:
            if kind == "collated":
                images, labels = batch["images"].transpose(0, 1), batch["labels"]
                assert len(batch["names"]) == batch["count"] == len(labels)
            else:
                images, labels = batch
            if kind == "first image":
                images[0]
            optimizer.zero_grad()
            outputs = model(images)
            losses = functional.cross_entropy(outputs, labels, reduction="none")
            run.mean(losses, over=len(labels) if kind == "collated" else None).backward()
            optimizer.step()
            correct += (outputs.argmax(1) == labels).sum().item()
            total += len(labels)
            loss += losses.sum().item()
            centre = 0.9 * centre + 0.1 * run.sum(outputs.detach().sum(0)) / run.sum(len(labels))
            bank.append(labels)
        test_loss = 0
        model.eval()
        with torch.no_grad():
            for images, labels in test_loader:
                test_loss += functional.cross_entropy(model(images), labels, reduction="sum").item()
        model.train()
        bank = run.gather(bank).sort().values.tolist()
        results = [run.sum(correct), run.sum(total), run.sum(loss), centre.tolist(), bank, run.sum(test_loss)]
        weights = torch.cat([weight.double().flatten() for weight in model.state_dict().values()])
        with open(f"{run_dir}/results_{run.rank}", "a") as file:
            file.write(json.dumps([*results, weights.tolist()]) + "\\n")


kind, run_dir = sys.argv[1:]
with ddp_train.session(run_dir) as run:
    main(kind)
"""


def command(folder: Path, kind: str, processes: int) -> subprocess.CompletedProcess[str]:
    (folder / "net.py").write_text(NET)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = environment({"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": str(processes)})
    argv = [sys.executable, str(script), kind, str(folder / "run")]
    return zygote.run(argv, LIMIT_SECONDS, cwd=folder, env=env, text=True)


def by_hand() -> list[list[Any]]:
    """The same loop in one process, without this package."""
    names: dict[str, Any] = {}
    exec(NET, names)
    images, labels, net = names["IMAGES"], names["LABELS"], names["new_net"]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    centre = torch.zeros(2).double()
    results = []
    for epoch in range(names["EPOCHS"]):
        correct, loss = 0, 0.0
        for rows in torch.as_tensor(epoch_order(0, epoch, len(labels))).split(names["BATCH"]):
            optimizer.zero_grad()
            outputs = net(images[rows])
            losses = functional.cross_entropy(outputs, labels[rows], reduction="none")
            losses.mean().backward()
            optimizer.step()
            correct += int((outputs.argmax(1) == labels[rows]).sum())
            loss += losses.sum().item()
            centre = 0.9 * centre + 0.1 * outputs.detach().mean(0)
        net.eval()
        with torch.no_grad():
            tested = functional.cross_entropy(net(images[:2]), labels[:2], reduction="sum")
        net.train()
        weights = torch.cat([weight.double().flatten() for weight in net.state_dict().values()])
        bank = sorted(labels.tolist())
        results.append(
            [correct, len(labels), loss, centre.tolist(), bank, tested.item(), weights.tolist()]
        )
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), [("rows", 3), ("collated", 4)])
def test_sums_centres_and_banks_are_those_of_one(tmp_path: Path, kind: str, processes: int) -> None:
    done = command(tmp_path, kind, processes)
    assert done.returncode == 0, done.stderr
    assert f"the smallest global batch has 2 samples for {processes} processes" in done.stderr
    for rank in range(processes):
        lines = (tmp_path / f"run/results_{rank}").read_text().splitlines()
        for found, expected in zip(map(json.loads, lines), by_hand(), strict=True):
            assert found[:2] == expected[:2] and found[4] == expected[4]
            for place in (2, 3, 5, 6):
                here, there = (
                    torch.tensor(values[place], dtype=torch.float64) for values in (found, expected)
                )
                torch.testing.assert_close(here, there, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_an_error_of_an_empty_batch_says_so(tmp_path: Path) -> None:
    done = command(tmp_path, "first image", 3)
    assert done.returncode == 70
    (line,) = fatal_lines(done.stderr)
    assert "rank 2 on" in line and "in this step this process has no sample" in line
