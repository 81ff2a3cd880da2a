"""`ddp_train.all_gather`: a loss that compares samples has the same gradient on any number of
processes."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddp_train import all_gather
from ddp_train.config.auto import resolve
from ddp_train.config.bind import bind
from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.exchange import tensors_from_all_ranks
from ddp_train.distributed.training_step import CURRENT, TrainingStep
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate, fit
from ddp_train.errors import ConfigError, DataError
from ddp_train.hardware import Hardware
from ddp_train.parallel.strategy import DataParallel
from tests.support.jobs import config_of, job_of, largest_difference
from tests.support.ranks import on_ranks

ROOT = Path(__file__).resolve().parents[2]
(EXAMPLE,) = re.findall(
    r"```python\n(# contrastive\.py\n.*?)```", (ROOT / "docs/guides/tasks.md").read_text(), re.S
)
"""The example of the docs, as a user would copy it."""
SAMPLES = 27
GLOBAL_BATCH = 12
STEPS = 6
"""The last batch of an epoch has 3 samples: 2 and 1 on two processes, and a stand-in on the last of
four."""
IMAGES = torch.randn(SAMPLES, 1, 4, 4, generator=torch.Generator().manual_seed(0))
SOURCE = ArraySource(IMAGES, torch.zeros(SAMPLES, dtype=torch.int64))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class SimCLR:
    """NT-Xent (arXiv:2002.05709): each view of an image against all other views of all images, with
    a temperature that is learned, behind the gather."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        images, _ = batch
        mine = functional.normalize(
            torch.cat([model(images), model(images.flip(-1))], 1).view(len(images), 2, -1), dim=-1
        )
        rows, own = all_gather(mine)
        mine = mine.transpose(0, 1).flatten(0, 1)
        rows = rows.transpose(0, 1).flatten(0, 1)
        place = torch.cat([own, own + len(rows) // 2])
        count = len(rows) // 2
        logits = (mine @ rows.T * model.scale).scatter(1, place[:, None], -torch.inf)
        return functional.cross_entropy(
            logits, (place + count) % (2 * count), reduction="sum"
        ), len(mine)


class Scaled(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(5.0))


def made(world: World, task: str, strategy: str = "ddp", accumulation: int = 1, **more: Any) -> Any:
    module = types.ModuleType("contrastive")
    sys.modules["contrastive"] = module
    exec(EXAMPLE, vars(module))
    target = f"{__name__}.SimCLR" if task == "SimCLR" else "contrastive.InfoNCE"
    config = config_of(
        world,
        strategy={"name": strategy, **more},
        task={"_target_": target},
        model={"_target_": f"{__name__}.{'Scaled' if task == 'SimCLR' else 'Encoder'}"},
        train={
            "global_batch_size": GLOBAL_BATCH,
            "accumulation_steps": accumulation,
            "epochs": 2,
            "evaluate_batch_size": 5,
        },
        optimizer={"name": "sgd", "lr": 0.1},
        schedule={"name": "constant"},
        tuning={"precision": "fp64", "num_workers": 0},
        deterministic=False,
    )
    return job_of(config, world, (SOURCE, SOURCE))


def by_hand(task: str) -> dict[str, Tensor]:
    """Plain PyTorch, each global batch in one pass, by the formulas of the papers."""
    job = made(World(), task, "single")
    model = job.module.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        images = IMAGES.double()[job.plan.global_batch(step)]
        one = functional.normalize(model(images))
        other = functional.normalize(model(images.flip(-1)))
        if task == "SimCLR":
            views = torch.cat([one, other])
            similar = views @ views.T * model.scale
            others = similar.masked_fill(torch.eye(len(views), dtype=torch.bool), -torch.inf)
            partner = similar[torch.arange(len(views)), torch.arange(len(views)).roll(len(images))]
            loss = (others.logsumexp(1) - partner).mean()
        else:
            similar = one @ other.T / 0.1
            loss = (similar.logsumexp(1) - similar.diagonal()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def ladder(world: World) -> dict[str, Any]:
    found = {}
    for task in ("InfoNCE", "SimCLR"):
        job = made(world, task)
        fit(job)
        weights = {key: tensor.clone() for key, tensor in job.module.model.state_dict().items()}
        found[task] = weights, job.stepper.mean_loss().value, evaluate(job.evaluation)
    return found


@pytest.mark.slow
def test_contrastive_losses_are_those_of_the_whole_batch() -> None:
    expected = {task: by_hand(task) for task in ("InfoNCE", "SimCLR")}
    (alone,) = on_ranks(1, ladder)
    for task, weights in expected.items():
        assert (
            largest_difference(weights, made(World(), task, "single").module.model.state_dict())
            > 1e-2
        ), "idle"
    assert set(alone["InfoNCE"][2].metrics) == {"loss", "top1"}
    for of_ranks in ([alone], *(on_ranks(ranks, ladder) for ranks in (2, 3, 4))):
        for found in of_ranks:
            for task, (weights, loss, score) in found.items():
                assert largest_difference(weights, expected[task]) < 1e-10, (len(of_ranks), task)
                assert loss == pytest.approx(alone[task][1], rel=1e-10)
                assert score.metrics == pytest.approx(alone[task][2].metrics, rel=1e-10), (
                    "by batches of 5 everywhere"
                )


# --- rows -----------------------------------------------------------------------------------------


def rows_of(world: World) -> dict[str, Any]:
    """Rank 0 has 2 rows, rank 1 a stand-in, rank 2 three rows."""
    sizes = [2, 0, 3]
    count = max(1, sizes[world.rank])
    counts = sizes[world.rank] > 0
    mine = torch.arange(count)[:, None] + 10 * world.rank + torch.tensor([0.0, 0.5])
    found: dict[str, Any] = {"outside": all_gather(mine), "mine": mine}
    with TrainingStep(counts):
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
            found[str(dtype)] = all_gather(mine.to(dtype))
        found["flat"] = all_gather(mine[:, 0])[0]
        leaf = mine.clone().requires_grad_()
        for half in (False, True):
            rows, own = all_gather(leaf.bfloat16() if half else leaf)
            assert torch.equal(rows[own].float(), mine)
            leaf.grad = None
            (rows * (world.rank + 1) * float(counts)).sum().backward()
            found["gradient", half] = leaf.grad
        try:
            all_gather(mine if world.rank else mine[:, :1])
        except DataError as error:
            found["error"] = str(error)
    given = [torch.full((world.rank, 2), 1.5), torch.tensor(True), torch.arange(3)]
    exchanged = tensors_from_all_ranks([world.rank, "text"], given, "cpu")
    found["exchanged"] = [
        (facts, [tensor.clone() for tensor in tensors]) for facts, tensors in exchanged
    ]
    for nothing in (
        [],
        [torch.empty(0), torch.empty(2, 0, dtype=torch.int64)],
    ):  # no bytes on any process
        for facts, tensors in tensors_from_all_ranks(["none"], nothing, "cpu"):
            assert facts == ["none"] and [(t.shape, t.dtype) for t in tensors] == [
                (t.shape, t.dtype) for t in nothing
            ]
    return found


def test_rows_are_ordered_and_stand_ins_do_not_count() -> None:
    found = on_ranks(3, rows_of)
    whole = torch.cat([found[0]["mine"], found[2]["mine"]])
    for rank, of_rank in enumerate(found):
        mine = of_rank["mine"]
        rows, own = of_rank["outside"]
        assert torch.equal(rows, mine) and torch.equal(own, torch.arange(len(mine)))
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
            rows, own = of_rank[str(dtype)]
            assert rows.dtype == dtype and torch.equal(rows[:5], whole.to(dtype)), dtype
            assert len(rows) == 5 + (rank == 1) and torch.equal(rows[own], mine.to(dtype))
        assert torch.equal(of_rank["flat"][:5], whole[:, 0])
        for half in (False, True):
            # 1 from rank 0 and 3 from rank 2: the loss of the stand-in has weight zero, and nobody
            # else sees its row.
            assert torch.equal(
                of_rank["gradient", half], torch.full_like(mine, 0.0 if rank == 1 else 4.0)
            )
        assert (
            "the rows of the processes differ in shape or dtype; here they are" in of_rank["error"]
        )
        for other, (facts, (ones, true, numbers)) in enumerate(of_rank["exchanged"]):
            assert (
                facts == [other, "text"] and true.item() is True and numbers.tolist() == [0, 1, 2]
            )
            assert torch.equal(ones, torch.full((other, 2), 1.5))


class Uneven(nn.Module):
    """A parameter that only the first process uses, whose bucket is therefore sent early by the
    others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.shared = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        inputs = images.flatten(1)
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        return self.shared(inputs + self.first(inputs) if is_first else inputs)


def with_unused_parameters(world: World) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Uneven().double()
    wrapped = nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=True, bucket_cap_mb=0.0001
    )
    mine = IMAGES[: 2 * world.size].double().chunk(world.size)[world.rank]
    for _ in range(3):
        wrapped.zero_grad()
        with TrainingStep():
            outputs = wrapped(mine)
            rows, own = all_gather(outputs)
            functional.cross_entropy(outputs @ rows.T, own, reduction="sum").backward()
    return {name: parameter.grad * world.size for name, parameter in model.named_parameters()}


def test_processes_may_use_different_parameters() -> None:
    torch.manual_seed(0)
    model = Uneven().double()
    images = IMAGES[:6].double().flatten(1)
    outputs = model.shared(torch.cat([images[:2] + model.first(images[:2]), images[2:]]))
    functional.cross_entropy(outputs @ outputs.T, torch.arange(6), reduction="sum").backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found in on_ranks(3, with_unused_parameters):
        assert largest_difference(found, expected) < 1e-12


# --- where it is refused --------------------------------------------------------------------------


def test_it_is_refused_where_it_would_not_see_the_global_batch() -> None:
    for accumulation, strategy, more, message in (
        (2, "single", {}, "use train.accumulation_steps=1"),
        (
            1,
            "ordered",
            {"virtual_shards": 2},
            "strategy=ordered: computes each virtual shard separately",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(made(World(), "InfoNCE", strategy, accumulation, **more))
        assert CURRENT.step is None
    with pytest.raises(DataError, match="without dimensions"):
        all_gather(torch.tensor(1.0))


def test_it_is_refused_on_the_gpus_of_dataparallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = made(World(), "InfoNCE", "single").plan
    micro_batch = next(plan.micro_batches())
    with (
        DataParallel("cuda:0").sync_gradients(micro_batch),
        pytest.raises(ConfigError, match="use strategy=ddp"),
    ):
        all_gather(torch.ones(2))
    with DataParallel("cpu").sync_gradients(micro_batch):
        assert len(all_gather(torch.ones(2))[0]) == 2


def test_steps_of_a_task_of_ones_own_are_not_captured_unasked() -> None:
    gpu = Hardware(cpus=8, gpus=1, gpu_name="NVIDIA H200", compute_capability=(9, 0))
    for task, captured in (({"name": "auto"}, True), ({"_target_": "contrastive.InfoNCE"}, False)):
        config, _ = bind({"task": task, "strategy": {"name": "single"}})
        assert resolve(config, gpu, None).tuning.cuda_graph is captured


def test_the_package_offers_it_without_importing_torch() -> None:
    code = (
        "import ddp_train, sys; sys.exit('torch' in sys.modules or not {'Task', 'all_gather'} <="
        " set(dir(ddp_train)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
