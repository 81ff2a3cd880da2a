"""A model and a task of one's own that count samples: a process without a sample adds none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddp_train import all_gather
from ddp_train.assembly.model import try_user_code
from ddp_train.data.datasets import ArraySource
from ddp_train.data.splits import Splits
from ddp_train.distributed.world import World
from ddp_train.engine.loop import fit
from ddp_train.runs.plan_report import PlanFacts, plan_rows
from ddp_train.tasks.task import Task
from tests.support.jobs import config_of, job_of, module_of, table
from tests.support.ranks import on_ranks

SAMPLES = 20
GLOBAL_BATCH = 6
"""The last batch of an epoch has 2 samples: the last of three processes has none."""
EPOCHS = 2
SOURCE = table(SAMPLES)


class PairsScored(Task):
    """A task whose test samples have another form than those that train: 100 items each."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    def score(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        items, _ = batch
        best = model(items.flatten(0, 1))[:, 0].view(items.shape[:2]).argmax(1)
        return {"loss": (0.0, 0), "hits": ((best == 0).sum(), len(items))}


def test_scores_are_tried_with_samples_that_are_scored(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(World(), task={"_target_": f"{__name__}.PairsScored"}, model={"name": "mlp"})
    items = torch.randn(9, 100, 6)
    scored = ArraySource(items, torch.zeros(9, dtype=torch.int64))
    module = module_of(config, SOURCE)
    try_user_code(config, module, Splits(SOURCE, scored), "cpu")
    assert caplog.text == ""
    try_user_code(config, module, Splits(SOURCE, SOURCE), "cpu")
    assert "score() fails in a trial" in caplog.text


class Counting(nn.Module):
    """Counts what it is given."""

    def __init__(self, needs_a_row: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.needs_a_row = needs_a_row
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += len(rows)
        if self.needs_a_row:
            rows[0]
        return self.layer(rows.view(len(rows), -1))


class CentreTask(Task):
    """Keeps a running centre of all outputs, and counts samples over all processes."""

    def __init__(self) -> None:
        self.centre = torch.zeros(3, dtype=torch.float64)
        self.counts: list[int] = []

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        outputs = model(inputs)
        if model.training:
            rows, _ = all_gather(outputs.detach())
            self.centre = 0.9 * self.centre + 0.1 * rows.mean(0)
            count = torch.tensor(len(inputs))
            if dist.is_initialized():
                dist.all_reduce(count)
            self.counts.append(int(count))
        return functional.cross_entropy(outputs, labels, reduction="sum"), len(labels)


def trained(world: World, needs_a_row: bool = False, strategy: str = "ddp") -> dict[str, Any]:
    options = {"broadcast_buffers": False} if strategy == "ddp" else {}
    config = config_of(
        world,
        strategy={"name": strategy, **options},
        task={"_target_": f"{__name__}.CentreTask"},
        model={"_target_": f"{__name__}.Counting", "needs_a_row": needs_a_row},
        train={"global_batch_size": GLOBAL_BATCH, "epochs": EPOCHS},
        optimizer={"name": "sgd", "lr": 0.1},
        schedule={"name": "constant"},
        tuning={"precision": "fp64", "num_workers": 0},
    )
    job = job_of(config, world, (SOURCE, SOURCE))
    fit(job)
    module = job.module
    facts = PlanFacts(config, job.plan, module.task, 0.1, stand_ins_count=job.stand_ins_count)
    return {
        "weights": module.model.layer.weight.detach().clone(),
        "centre": module.task.centre,
        "counts": module.task.counts,
        "seen": float(module.model.seen),
        "loss": job.stepper.mean_loss().value,
        "row": plan_rows(facts).get("empty batches", ""),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return trained(World(), strategy="single")


@pytest.mark.parametrize("processes", [3, 4])
def test_own_counts_have_no_sample_of_an_empty_process(
    alone: dict[str, Any], processes: int
) -> None:
    of_ranks = on_ranks(processes, trained)
    assert alone["counts"] == [6, 6, 6, 2] * EPOCHS
    for found in of_ranks:
        assert found["counts"] == alone["counts"] and found["row"] == ""
        torch.testing.assert_close(found["centre"], alone["centre"], rtol=0, atol=1e-13)
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=1e-13)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-13)
    assert sum(found["seen"] for found in of_ranks) == alone["seen"] == EPOCHS * SAMPLES


def test_model_that_needs_a_row_gets_a_stand_in_and_the_plan_says_so(
    alone: dict[str, Any],
) -> None:
    of_ranks = on_ranks(3, trained, True)
    for found in of_ranks:
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=1e-13)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-13)
        assert "samples that your code counts are too many" in found["row"]
        assert found["counts"] == [6, 6, 6, 3] * EPOCHS, "what the plan's line warns of"
