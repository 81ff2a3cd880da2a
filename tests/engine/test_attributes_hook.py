"""Attributes that change in training, and are in no checkpoint, are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ddp_train.engine.attributes_hook import AttributesHook, names_set_at_start
from tests.support.commands import SMALL, THREE, environment, run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.temperature = 1.0
        self.cache = None
        self.scales = [1.0, 1.0]


class Loss:
    def __init__(self) -> None:
        self.epoch = 0


class Forgets:
    def act(self, job: Any) -> None: ...


class SetsAgain:
    def __enter__(self) -> None:
        self.tell(self)

    def tell(self, job: Any) -> None:
        job.task.epoch = 1
        job.optimizer.param_groups[0]["weight_decay"] = 1.0

    def act(self, job: Any) -> None:
        job.task.other = 1


def lines_of(move: Any, hook: Any = None) -> list[str]:
    """What is shown in three checkpoints, two steps apart, with `move(job, step)` in each step."""
    net = Net()
    job: Any = SimpleNamespace(
        step=0,
        module=SimpleNamespace(model=net, task=Loss()),
        stepper=SimpleNamespace(
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1), values=[{"lr": 0.1}]
        ),
    )
    display = mock.Mock()
    watch = AttributesHook(display, [hook], lambda job: job.step + 2 - job.step % 2)
    for step in range(1, 7):
        watch.due(job)
        move(job, step)
        job.step = step
        watch.act(job)
    return [call.args[0] for call in display.line.call_args_list]


def set_epoch(job: Any, step: int) -> None:
    job.module.task.epoch = step // 2


def set_late(job: Any, step: int) -> None:
    job.module.model.temperature = 0.5 if step > 4 else 1.0


def set_decay(job: Any, step: int) -> None:
    job.stepper.optimizer.param_groups[0]["weight_decay"] = 0.1 * step


def set_scales(job: Any, step: int) -> None:
    job.module.model.scales[:] = [step, step]


def set_what_is_kept(job: Any, step: int) -> None:
    """Weights, buffers, the rates of the schedule, a cache, and what no step reads."""
    net = job.module.model
    net.seen += 1
    net.layer.weight.data += 1
    net.cache = torch.zeros(3)
    net.train(step % 2 == 0)
    job.stepper.optimizer.param_groups[0]["lr"] = 0.1 * step


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (set_epoch, "task.epoch"),
        (set_late, "model.temperature"),
        (set_decay, "optimizer.param_groups[0].weight_decay"),
        (set_scales, "model.scales[0], model.scales[1]"),
    ],
)
def test_what_changes_is_named_once(move: Any, name: str) -> None:
    (line,) = lines_of(move, Forgets())
    assert line.startswith(f"note: {name} changed during training but is in no checkpoint"), line
    assert "ddp_train.all_gather" in line


def test_what_is_kept_is_not_named() -> None:
    assert lines_of(set_what_is_kept) == []


def test_what_a_hook_sets_when_it_is_entered_is_not_named() -> None:
    assert {"epoch", "weight_decay"} <= names_set_at_start(SetsAgain())
    assert "other" not in names_set_at_start(SetsAgain())
    assert lines_of(set_epoch, SetsAgain()) == lines_of(set_decay, SetsAgain()) == []


ANNEALS = """
from torch.nn import functional as F


class Anneals:
    epoch = 0

    def loss(self, model, batch):
        images, labels = batch
        losses = F.cross_entropy(model(images), labels, reduction="none")
        return losses.sum() * (1 + self.epoch), len(labels)


class Tell:
    def __init__(self, job, run_dir, world):
        self.job = job

    def act(self, job):
        job.module.task.epoch = job.step // job.plan.steps_per_epoch
        job.optimizer.param_groups[0]["weight_decay"] = 0.01 * job.step


class TellAgain(Tell):
    def __enter__(self):
        self.act(self.job)

    def __exit__(self, *error):
        pass
"""


@pytest.mark.slow
def test_run_names_what_a_hook_would_lose(tmp_path: Path) -> None:
    (tmp_path / "anneals.py").write_text(ANNEALS)
    env = environment({"PYTHONPATH": str(tmp_path)})
    words = [*SMALL, THREE, "task._target_=anneals.Anneals", "train.epochs=3"]
    for hook in ("Tell", "TellAgain"):
        done = run(*words, f"hooks=[anneals.{hook}]", f"run_dir={tmp_path}/{hook}", env=env)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        found = [line for line in said.splitlines() if "changed during training" in line]
        if hook == "Tell":
            assert "optimizer.param_groups[0].weight_decay" in found[0] and len(found) == 2
            assert "task.epoch" in found[1]
        else:
            assert found == []
