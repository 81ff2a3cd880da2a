"""What only a GPU can show: recorded steps, flags on the device, data held there. `pytest tests/test_gpu.py`."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet50

from ddp_train.config.hardware import Hardware
from ddp_train.config.options.data import DigitsConfig
from ddp_train.config.schema import TuningConfig
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.world import World
from ddp_train.errors import NonFiniteLossError
from ddp_train.performance.activation_checkpointing import checkpoint_blocks
from ddp_train.performance.cuda_graph import GraphedStepper
from ddp_train.tasks.builtin import Segmentation
from ddp_train.telemetry.hardware_monitor import hardware_monitor_for
from ddp_train.training.loop import Job, evaluate, train
from tests import lost_gpus
from tests.jobs import config_of, datasets_of, job_of, largest_difference, loader_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is false")

CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd"}},
    "adamw, clipped": {"optimizer": {"name": "adamw"}, "train": {"max_grad_norm": 0.5}},
    "bf16, dropout": {"tuning": {"precision": "bf16"}, "model": {"dropout": 0.3}},
    "fp16": {"tuning": {"precision": "fp16"}},
    "batch norm": {"model": {"norm": "batch"}},
    "lars": {"optimizer": {"name": "lars", "trust_coefficient": 0.02}},
    "mixed, average": {"data": {"mixup": 0.4, "cutmix": 1.0, "random_erasing": 0.5}, "model": {"norm": "batch"},
                       "train": {"ema_decay": 0.9}},
    "average, fp16": {"tuning": {"precision": "fp16"}, "train": {"ema_decay": 0.9, "ema_warmup": True}},
    "lamb, fp16": {"optimizer": {"name": "lamb"}, "tuning": {"precision": "fp16"}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was(leaves_nothing: None) -> Iterator[None]:
    """The flags that `job` sets, and the processes in which torch.compile builds kernels, do not outlive a test."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    if inductor := sys.modules.get("torch._inductor.async_compile"):
        inductor.shutdown_compile_workers()


def inner(job: Job) -> Any:
    """The stepper inside the one that reports phases."""
    stepper: Any = job.stepper
    return stepper._stepper


def job(world: World, case: dict[str, Any], graph: bool, first_step: int = 0, **more: Any) -> Job:
    """A small convolutional network on digits: 15 batches an epoch, the last one short."""
    machine = Hardware(cpus=4, gpus=torch.cuda.device_count(), compute_capability=(9, 0), gpu_bytes=2**36)
    config = config_of(
        world,
        machine,
        deterministic=True,
        strategy={"name": "ddp" if torch.distributed.is_initialized() else "single"},
        model={"name": "cnn", "channels": 8} | case.get("model", {}),
        data={"name": "digits"} | case.get("data", {}),
        train={"epochs": 4} | case.get("train", {}),
        optimizer=case.get("optimizer", {"name": "sgd"}),
        schedule={"name": "cosine", "warmup_steps": 5},
        tuning={"cuda_graph": graph, "precision": "fp32"} | case.get("tuning", {}),
    )
    assert config.data.placement == "device" and config.device == "cuda"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    made = job_of(config, world, first_step=first_step, **more)
    assert isinstance(inner(made), GraphedStepper) == graph
    return made


def state_of(made: Job) -> dict[str, Tensor]:
    """Weights, buffers and moments."""
    torch.cuda.synchronize()
    state = {name: tensor.clone() for name, tensor in made.module.model.state_dict().items()}
    for number, moments in made.stepper.optimizer.state_dict()["state"].items():
        state |= {f"{number}.{name}": value.clone() for name, value in moments.items() if isinstance(value, Tensor)}
    if made.stepper.average:
        state |= {f"average.{number}": tensor.clone() for number, tensor in enumerate(made.stepper.average.average)}
    return state


def trained(world: World, case: dict[str, Any], graph: bool, steps: int = 60) -> tuple[dict[str, Tensor], float, Any]:
    made = job(world, case, graph)
    train(made, iter(made.batches), until=steps)
    if graph:
        assert inner(made).graph is not None, "a step was recorded"
    return state_of(made), made.stepper.mean_loss(), evaluate(made.evaluation)


@pytest.mark.parametrize("name", CASES)
def test_recorded_steps_are_those_of_kernels_one_by_one(name: str) -> None:
    plain, loss, score = trained(World(), CASES[name], graph=False)
    recorded, recorded_loss, recorded_score = trained(World(), CASES[name], graph=True)
    assert largest_difference(plain, recorded) == 0
    assert (loss, score) == (recorded_loss, recorded_score)
    assert recorded_score.metrics["accuracy"] > 0.5, "something was learnt"


def on_nccl(world: World, case: dict[str, Any], graph: bool) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in trained(world, case, graph)[0].items()}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["sgd", "bf16, dropout", "lars"])
def test_recorded_steps_exchange_gradients(name: str) -> None:
    ranks = torch.cuda.device_count()
    plain, recorded = (on_ranks(ranks, on_nccl, CASES[name], graph, device="cuda") for graph in (False, True))
    for one, other in zip(plain, recorded, strict=True):
        assert largest_difference(one, other) == 0


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("precision", "optimizer"), [("fp32", "sgd"), ("fp16", "sgd"), ("fp32", "lamb"), ("fp16", "lars")]
)
def test_a_bad_loss_stays_out_of_the_weights_until_the_host_looks(graph: bool, precision: str, optimizer: str) -> None:
    sources = datasets_of(DigitsConfig(), 0)
    poisoned = 700
    sources[0].inputs[poisoned] = math.nan  # pyright: ignore[reportAttributeAccessIssue]
    case = {"tuning": {"precision": precision}, "optimizer": {"name": optimizer}}
    made = job(World(), case, graph, sources=sources)
    bad = [step for step in range(15, 45) if poisoned in made.plan.global_batch(step)]
    if not graph:
        made.stepper.losses.seen.clear()
    first = next(step for step in range(15) if poisoned in made.plan.global_batch(step))
    batches = iter(made.batches)
    train(made, batches, until=first)
    made.stepper.mean_loss()
    before = state_of(made)
    train(made, batches, until=first + 1)
    assert made.step == first + 1 and bad, "nobody waited"
    assert largest_difference(before, state_of(made)) == 0
    with pytest.raises(NonFiniteLossError, match=f"step {first}: the loss is not finite on rank 0; samples here: .*"):
        made.stepper.mean_loss()


@pytest.mark.parametrize("graph", [False, True])
def test_a_run_goes_on_from_a_checkpoint_in_the_same_bytes(graph: bool) -> None:
    case = CASES["bf16, dropout"] | {"optimizer": {"name": "adamw"}}
    whole = trained(World(), case, graph)[0]
    made = job(World(), case, graph)
    train(made, iter(made.batches), until=33)
    weights, training = made.module.model.state_dict(), made.stepper.state()
    again = job(World(), case, graph, first_step=33)
    again.module.model.load_state_dict(weights)
    again.stepper.load_state(training)
    again.stepper.continue_from(33)
    train(again, iter(again.batches), until=60)
    assert largest_difference(whole, state_of(again)) == 0


def pixels() -> ArraySource:
    """uint8, three channels, each with a mean and a deviation of its own."""
    images = torch.randint(0, 256, (1433, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ArraySource(images, torch.arange(1433) % 10, (0.49, 0.46, 0.41), (0.23, 0.22, 0.24))


@pytest.mark.parametrize("name", ["digits", "digits, augmented", "pixels"])
def test_data_on_the_device_are_those_of_the_host(name: str) -> None:
    source = pixels() if name == "pixels" else datasets_of(DigitsConfig(augment="augmented" in name), 0)[0]
    plan = BatchPlan(samples=len(source), global_batch_size=96, accumulation_steps=1, steps=40, seed=0)
    tuning = TuningConfig(num_workers=0, pin_memory=False, non_blocking=False, channels_last=True, precision="fp32")
    made = [loader_of(source, list(plan.micro_batches()), tuning, "cuda:0", resident=r) for r in (False, True)]
    for batch, other in zip(*made, strict=True):
        assert np.array_equal(batch.micro_batch.indices, other.micro_batch.indices)
        assert batch.inputs.is_cuda and other.inputs.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(batch.inputs, other.inputs) and torch.equal(batch.targets, other.targets)


def test_pixels_have_a_deterministic_loss() -> None:
    """torch's own kernel for images is refused then."""
    torch.use_deterministic_algorithms(True)
    draw = torch.Generator().manual_seed(0)
    logits, masks = torch.randn(4, 5, 32, 32, generator=draw), torch.randint(0, 5, (4, 32, 32), generator=draw)
    found = []
    for device in ("cpu", "cuda", "cuda"):
        outputs = logits.to(device).detach().requires_grad_()
        task = Segmentation(ignore_index=4, class_weights=[1.0, 2.0, 3.0, 4.0, 5.0])
        loss, pixels = task.loss(nn.Identity(), (outputs, masks.to(device)))
        loss.backward()
        assert pixels == (masks != 4).sum() and outputs.grad is not None
        found.append((loss.detach().cpu(), outputs.grad.cpu()))
    torch.testing.assert_close(found[1], found[0])
    assert all(torch.equal(one, again) for one, again in zip(found[1], found[2], strict=True))


@pytest.mark.parametrize("copy_stream", [False, True])
def test_batches_are_whole_however_late_they_are_read(copy_stream: bool) -> None:
    """Training's stream is kept busy, so that every batch is used long after the next ones were sent."""
    pixels = torch.randint(0, 255, (64, 3, 64, 64), dtype=torch.uint8)
    source = ArraySource(pixels, torch.arange(64))
    plan = BatchPlan(samples=64, global_batch_size=16, accumulation_steps=1, steps=40, seed=0)
    tuning = TuningConfig(num_workers=0, pin_memory=True, non_blocking=True, copy_stream=copy_stream)
    tuning.channels_last, tuning.precision = True, "fp32"
    busy, seen = torch.ones(4096, 4096, device="cuda"), []
    for batch in loader_of(source, plan.micro_batches(), tuning, "cuda:0"):
        for _ in range(20):
            busy @ busy
        seen.append((batch.inputs.clone(), batch.targets.clone(), batch.micro_batch.indices))
        assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    for inputs, targets, indices in seen:
        assert torch.equal(inputs.cpu(), pixels[torch.from_numpy(indices)]) and targets.tolist() == indices.tolist()
    assert len(seen) == 40


def test_a_model_that_records_graphs_of_its_own_trains_as_others_do() -> None:
    ends = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        made = job(World(), {"tuning": {"compile": True, "compile_mode": mode}}, graph=False)
        train(made, iter(made.batches), until=30)
        ends.append((state_of(made), made.stepper.mean_loss()))
    assert largest_difference(ends[0][0], ends[1][0]) < 1e-5 and ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_that_compute_again_take_less_memory(compiled: bool) -> None:
    ends, peaks = [], []
    for classes in ([], ["Bottleneck"]):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = resnet50(num_classes=10).cuda().to(memory_format=torch.channels_last)
        checkpoint_blocks(model, classes)
        if compiled:
            model.compile()
        images = torch.randn(32, 3, 128, 128, generator=torch.Generator().manual_seed(0)).cuda()
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(images).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        ends.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        del model
    assert peaks[1] < 0.8 * peaks[0]
    assert ends[0]["bn1.num_batches_tracked"] == ends[1]["layer3.1.bn2.num_batches_tracked"] == 2
    assert largest_difference(*ends) < 1e-2


def test_figures_are_of_the_gpu_that_computes() -> None:
    for number in range(torch.cuda.device_count()):
        square = torch.randn(8192, 8192, device=f"cuda:{number}", dtype=torch.bfloat16)
        measured = hardware_monitor_for(f"cuda:{number}", all_gpus=False)
        first = measured.collect()
        measured.deliver([first])
        before = measured.interval(1.0)["gpu_memory_gib"][0]
        held = torch.empty(3 * 2**30, dtype=torch.uint8, device=f"cuda:{number}")
        began = time.perf_counter()
        while time.perf_counter() - began < 3:  # NVML looks back by up to a second
            for _ in range(20):
                square @ square
            torch.cuda.synchronize(number)
        measured.deliver([measured.collect()])
        line = {name: values[0] for name, values in measured.interval(3.0).items()}
        assert before is not None and line["gpu_memory_gib"] - before >= held.nbytes / 2**30
        assert line["torch_memory_gib"] >= 3 and line["gpu_utilisation"] > 30
        assert 50 < line["power_watts"] < 2000 and 10 < line["temperature_celsius"] < 110
        assert line["energy_wh"] == pytest.approx(line["power_watts"] * 3 / 3600, rel=0.5)
        assert measured.summary()["gpu_memory_gib"] == line["gpu_memory_gib"]
        del held, square


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["captured steps", "kernel by kernel, clipped", "checked on the host"])
def test_a_rank_that_dies_costs_no_step(name: str, tmp_path: Path) -> None:
    """tests/lost_gpus.py kills more of them."""
    expected = lost_gpus.ended(tmp_path / "reference", 2, lost_gpus.CASES[name], 0, random.Random(0))
    found = lost_gpus.ended(tmp_path / "killed", 2, lost_gpus.CASES[name], 1, random.Random(1))
    assert lost_gpus.compared(found, expected) == "" and found["summary"]["steps_redone"] == 0, found["said"]
