"""What only a GPU can show: recorded steps, flags on the device, data held there. `pytest
tests/end_to_end/test_gpu.py`."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
import math
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.models
from torch import Tensor, nn
from torchvision.models import list_models, resnet18, resnet50

from ddp_train.assembly.model import AUTOCAST
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.data.config import DigitsConfig
from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Job, evaluate, train
from ddp_train.errors import NonFiniteLossError
from ddp_train.hardware import Hardware
from ddp_train.kernels.conv_sums import ConvSums
from ddp_train.kernels.conv_sums_operators import conv_sums
from ddp_train.kernels.genstats import Case, fastest_kernel, milliseconds_saved
from ddp_train.models.gpt.network import Gpt
from ddp_train.options.sections import TuningConfig
from ddp_train.performance import worth_capturing
from ddp_train.performance.activation_checkpointing import checkpoint_blocks
from ddp_train.performance.cuda_graph import GraphedStepper
from ddp_train.performance.switches import tune_model
from ddp_train.performance.worth_capturing import CaptureTrial
from ddp_train.tasks.builtin import Classification, Segmentation
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.task import ModelWithTask
from ddp_train.telemetry.hardware_monitor import HardwareMonitor, hardware_monitor_for
from tests.campaigns import lost_gpus
from tests.campaigns.lost_ranks import ranks_of
from tests.kernels import triton_kernels
from tests.launcher.test_resize import WORDS, ask, assert_close, slow_net
from tests.resilience.test_hangs import WAYWARD
from tests.support.commands import (
    ONE,
    ROOT,
    environment,
    metrics,
    processes_of,
    read,
    run,
    running,
    wait_until,
)
from tests.support.jobs import config_of, datasets_of, job_of, largest_difference, loader_of
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is false"
    ),
    pytest.mark.timeout(
        300
    ),  # two commands, each of which may take tests.support.commands.LIMIT_SECONDS
]

VISIBLE = {
    "CUDA_VISIBLE_DEVICES": os.environ.get(
        "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))
    )
}
"""For commands, from which tests/support/commands.py hides all GPUs."""

CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd"}},
    "adamw, clipped": {"optimizer": {"name": "adamw"}, "train": {"max_grad_norm": 0.5}},
    "bf16, dropout": {"tuning": {"precision": "bf16"}, "model": {"dropout": 0.3}},
    "fp16": {"tuning": {"precision": "fp16"}},
    "batch norm": {"model": {"norm": "batch"}},
    "lars": {"optimizer": {"name": "lars", "trust_coefficient": 0.02}},
    "mixed, average": {
        "data": {"mixup": 0.4, "cutmix": 1.0, "random_erasing": 0.5},
        "model": {"norm": "batch"},
        "train": {"ema_decay": 0.9},
    },
    "average, fp16": {
        "tuning": {"precision": "fp16"},
        "train": {"ema_decay": 0.9, "ema_warmup": True},
    },
    "lamb, fp16": {"optimizer": {"name": "lamb"}, "tuning": {"precision": "fp16"}},
    "muon": {"optimizer": {"name": "muon"}, "model": {"norm": "batch"}},
    "muon, fp16": {
        "optimizer": {"name": "muon"},
        "tuning": {"precision": "fp16"},
        "train": {"max_grad_norm": 0.5},
    },
}


@pytest.fixture(autouse=True)
def as_it_was(leaves_nothing: None) -> Iterator[None]:
    """The flags that `job` sets, and the processes in which torch.compile builds kernels, do not
    outlive a test."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    if inductor := sys.modules.get("torch._inductor.async_compile"):
        inductor.shutdown_compile_workers()


def inner(job: Job) -> Any:
    """The stepper, whose class depends on the case."""
    return job.stepper


def job(world: World, case: dict[str, Any], graph: bool, first_step: int = 0, **more: Any) -> Job:
    """A small convolutional network on digits: 15 batches an epoch, the last one short."""
    machine = Hardware(
        cpus=4, gpus=torch.cuda.device_count(), compute_capability=(9, 0), gpu_bytes=2**36
    )
    config = config_of(
        world,
        machine,
        deterministic=True,
        strategy={"name": "ddp" if torch.distributed.is_initialized() else "single"},
        model=case.get("own_model") or {"name": "cnn", "channels": 8} | case.get("model", {}),
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
        state |= {
            f"{number}.{name}": value.clone()
            for name, value in moments.items()
            if isinstance(value, Tensor)
        }
    if made.stepper.average:
        state |= {
            f"average.{number}": tensor.clone()
            for number, tensor in enumerate(made.stepper.average.average)
        }
    return state


def trained(
    world: World, case: dict[str, Any], graph: bool, steps: int = 60
) -> tuple[dict[str, Tensor], float, Any]:
    made = job(world, case, graph)
    train(made, iter(made.batches), until=steps)
    if graph:
        assert inner(made).graph is not None, "a step was recorded"
    return state_of(made), made.stepper.mean_loss(), evaluate(made.evaluation)


def test_a_trial_decides_whether_steps_are_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plain = trained(World(), CASES["batch norm"], graph=False)
    for least, captured in ((0.0, True), (1.1, False)):
        monkeypatch.setattr(worth_capturing, "HOST_SHARE", least)
        made = job(World(), CASES["batch norm"], graph=True)
        inner(made).trial = CaptureTrial("cuda:0", {})
        train(made, iter(made.batches), until=60)
        assert (inner(made).graph is not None) == captured
        assert 0 < inner(made).trial.host_share <= 1 and 0 < inner(made).trial.memory_share < 0.5
        assert largest_difference(plain[0], state_of(made)) == 0
    assert caplog.text.count("steps are not captured as a CUDA graph: the host needs only") == 1


class Reads(nn.Module):
    """A number from the GPU, in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        largest = images.abs().max().item()
        return self.layer(images.flatten(1) / max(1.0, largest))


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (["tuning=max"], 0),
        (["tuning=max", "tuning.compile=false"], 0),
        (["tuning.cuda_graph=true"], 70),
    ],
)
def test_a_forward_pass_that_waits_for_the_gpu_is_not_captured(
    words: list[str], exit_code: int, tmp_path: Path
) -> None:
    line = 1 + Path(__file__).read_text().splitlines().index(
        "        largest = images.abs().max().item()"
    )
    model = [f"model._target_={__name__}.Reads", "trusted_modules=[tests]"]
    done = run(*model, ONE, "train.max_steps=40", *words, f"run_dir={tmp_path}/run", env=VISIBLE)
    assert done.returncode == exit_code, done.stderr
    said = done.stderr + (tmp_path / "run/logs/rank_0.log").read_text()
    assert (
        f"the forward pass waits for the GPU at {Path(__file__).name}, line {line} (as .item() does"
        in said
    ), said


def test_warnings_of_a_watched_forward_pass_are_shown() -> None:
    mode = torch.cuda.get_sync_debug_mode()
    with pytest.warns(UserWarning) as seen, worth_capturing.places_that_wait() as places:
        warnings.warn("of the model", stacklevel=1)
        torch.zeros(3, device="cuda").sum()
    assert [str(one.message) for one in seen] == ["of the model"] and places == []
    assert torch.cuda.get_sync_debug_mode() == mode == 0


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
@pytest.mark.parametrize("name", ["sgd", "bf16, dropout", "lars", "muon"])
def test_recorded_steps_exchange_gradients(name: str) -> None:
    ranks = torch.cuda.device_count()
    plain, recorded = (
        on_ranks(ranks, on_nccl, CASES[name], graph, device="cuda") for graph in (False, True)
    )
    for one, other in zip(plain, recorded, strict=True):
        assert largest_difference(one, other) == 0


@pytest.mark.parametrize("arch", list_models(module=torchvision.models))
def test_each_network_of_torchvision_is_captured(arch: str) -> None:
    """As it learns kernel by kernel: with its own dropout and stochastic depth, drawn by the same
    keys. Kernels are deterministic where torch has such."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    machine = Hardware(cpus=4, gpus=1, compute_capability=(9, 0), gpu_bytes=2**36)
    losses = []
    for graph in (False, True):
        config = config_of(
            World(),
            machine,
            deterministic=True,
            strategy={"name": "single"},
            model={"name": "torchvision", "arch": arch},
            data={
                "name": "synthetic",
                "samples": 80,
                "test_samples": 4,
                "image_size": 224,
                "classes": 10,
            },
            train={"epochs": 1, "global_batch_size": 4},
            optimizer={"name": "sgd", "lr": 1e-4},
            tuning={"cuda_graph": graph, "precision": "fp32", "compile": False},
        )
        made = job_of(config, World())
        train(made, iter(made.batches), until=20)
        assert not graph or inner(made).graph is not None, inner(made).trial.why_not()
        losses.append(made.stepper.mean_loss().value)
        del made
        torch.cuda.empty_cache()
    assert math.isfinite(losses[0]) and losses[1] == pytest.approx(losses[0], rel=1e-3)


def decided_on_nccl(world: World, least: float) -> tuple[dict[str, Tensor], bool]:
    """Rank 1 alone has a slow host, if `least` is between the two shares."""
    worth_capturing.HOST_SHARE = least
    made = job(world, CASES["sgd"], graph=True)
    trial = inner(made).trial = CaptureTrial(f"cuda:{world.local_rank}", {})
    ended = trial.end

    def end() -> None:
        ended()
        trial.host_share = 0.9 if world.rank == 1 else 0.1

    trial.end = end
    train(made, iter(made.batches), until=60)
    return {name: tensor.cpu() for name, tensor in state_of(made).items()}, inner(
        made
    ).graph is not None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_capture_together_or_not_at_all() -> None:
    ranks = torch.cuda.device_count()
    plain = on_ranks(ranks, on_nccl, CASES["sgd"], False, device="cuda")
    for least, captured in ((0.5, True), (0.95, False)):
        for one, (state, has_graph) in zip(
            plain, on_ranks(ranks, decided_on_nccl, least, device="cuda"), strict=True
        ):
            assert has_graph == captured
            assert largest_difference(one, state) == 0


class Closed(nn.Module):
    """Its smallest parameter is a gate that lets nothing through, a NaN of the backward pass
    neither."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.gate = nn.Parameter(torch.tensor([-100.0]))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1)) + torch.relu(self.gate)


@pytest.mark.parametrize(
    "own_model", [{}, {"_target_": f"{__name__}.Closed"}], ids=["cnn", "a closed gate"]
)
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", "sgd"), ("fp16", "sgd"), ("fp32", "lamb"), ("fp16", "lars")],
)
def test_bad_loss_stays_out_of_the_weights(
    graph: bool, precision: str, optimizer: str, own_model: dict[str, Any]
) -> None:
    sources = datasets_of(DigitsConfig(), 0)
    poisoned = 700
    sources[0].inputs[poisoned] = math.nan  # pyright: ignore[reportAttributeAccessIssue]
    case = {
        "tuning": {"precision": precision},
        "optimizer": {"name": optimizer},
        "own_model": own_model,
    }
    made = job(World(), case, graph, sources=sources)
    bad = [step for step in range(15, 45) if poisoned in made.plan.global_batch(step)]
    if not graph:
        made.stepper.losses.passes.clear()
    first = next(step for step in range(15) if poisoned in made.plan.global_batch(step))
    batches = iter(made.batches)
    train(made, batches, until=first)
    made.stepper.mean_loss()
    before = state_of(made)
    train(made, batches, until=first + 1)
    assert made.step == first + 1 and bad, "nobody waited"
    assert largest_difference(before, state_of(made)) == 0
    with pytest.raises(
        NonFiniteLossError,
        match=f"step {first}: the loss is not finite on rank 0; samples of this rank: .*",
    ):
        made.stepper.mean_loss()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_host_waits_once_for_all_losses(precision: str) -> None:
    made = job(World(), {"tuning": {"precision": precision}}, graph=False)
    train(made, iter(made.batches), until=5)
    made.stepper.mean_loss()
    train(made, iter(made.batches), until=10)
    with worth_capturing.places_that_wait() as places:
        assert made.stepper.mean_loss(HardwareMonitor()).units == 5 * made.plan.global_batch_size
    assert len(places) == 1, places


@pytest.mark.parametrize("graph", [False, True])
def test_a_run_goes_on_from_a_checkpoint_in_the_same_bytes(graph: bool) -> None:
    case = CASES["bf16, dropout"] | {"optimizer": {"name": "adamw"}}
    whole = trained(World(), case, graph)[0]
    made = job(World(), case, graph)
    train(made, iter(made.batches), until=33)
    weights = made.module.model.state_dict()
    training = made.stepper.state()
    again = job(World(), case, graph, first_step=33)
    again.module.model.load_state_dict(weights)
    again.stepper.load_state(training)
    again.stepper.continue_from(33)
    train(again, iter(again.batches), until=60)
    assert largest_difference(whole, state_of(again)) == 0


def pixels() -> ArraySource:
    """uint8, three channels, each with a mean and a deviation of its own."""
    images = torch.randint(
        0, 256, (1433, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return ArraySource(images, torch.arange(1433) % 10, (0.49, 0.46, 0.41), (0.23, 0.22, 0.24))


@pytest.mark.parametrize("name", ["digits", "digits, augmented", "pixels"])
def test_data_on_the_device_are_those_of_the_host(name: str) -> None:
    if name == "pixels":
        source = pixels()
    else:
        source = datasets_of(DigitsConfig(augment="augmented" in name), 0)[0]
    plan = BatchPlan(
        samples=len(source), global_batch_size=96, accumulation_steps=1, steps=40, seed=0
    )
    plain = {
        "num_workers": 0,
        "pin_memory": False,
        "non_blocking": False,
        "channels_last": True,
        "precision": "fp32",
    }
    tuned = TuningConfig(**plain, triton_kernels=False), TuningConfig(**plain, triton_kernels=True)
    on_host, *held = (
        loader_of(source, list(plan.micro_batches()), tuning, "cuda:0", resident)
        for tuning, resident in ((tuned[0], False), (tuned[0], True), (tuned[1], True))
    )
    for batch, other, fetched in zip(on_host, *held, strict=True):
        assert (
            torch.equal(other.inputs, fetched.inputs)
            and other.inputs.stride() == fetched.inputs.stride()
        )
        assert np.array_equal(batch.micro_batch.indices, other.micro_batch.indices)
        assert batch.inputs.is_cuda and other.inputs.is_contiguous(
            memory_format=torch.channels_last
        )
        assert torch.equal(batch.inputs, other.inputs) and torch.equal(batch.targets, other.targets)


def test_pixels_have_a_deterministic_loss() -> None:
    """torch's own kernel for images is refused then."""
    torch.use_deterministic_algorithms(True)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, 32, 32, generator=draw)
    masks = torch.randint(0, 5, (4, 32, 32), generator=draw)
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
    """Training's stream is kept busy, so that every batch is used long after the next ones were
    sent."""
    pixels = torch.randint(0, 255, (64, 3, 64, 64), dtype=torch.uint8)
    source = ArraySource(pixels, torch.arange(64))
    plan = BatchPlan(samples=64, global_batch_size=16, accumulation_steps=1, steps=40, seed=0)
    tuning = TuningConfig(
        num_workers=0, pin_memory=True, non_blocking=True, copy_stream=copy_stream
    )
    tuning.channels_last = True
    tuning.precision = "fp32"
    busy = torch.ones(4096, 4096, device="cuda")
    seen = []
    for batch in loader_of(source, plan.micro_batches(), tuning, "cuda:0"):
        for _ in range(20):
            busy @ busy
        seen.append((batch.inputs.clone(), batch.targets.clone(), batch.micro_batch.indices))
        assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    for inputs, targets, indices in seen:
        assert (
            torch.equal(inputs.cpu(), pixels[torch.from_numpy(indices)])
            and targets.tolist() == indices.tolist()
        )
    assert len(seen) == 40


def test_model_with_its_own_cuda_graphs_trains() -> None:
    ends = []
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        made = job(World(), {"tuning": {"compile": True, "compile_mode": mode}}, graph=False)
        train(made, iter(made.batches), until=30)
        ends.append((state_of(made), made.stepper.mean_loss()))
    assert largest_difference(ends[0][0], ends[1][0]) < 1e-5 and ends[0][1] == pytest.approx(
        ends[1][1], rel=1e-5
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_that_compute_again_take_less_memory(compiled: bool) -> None:
    ends = []
    peaks = []
    for classes in ([], ["Bottleneck"]):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = resnet50(num_classes=10).cuda().to(memory_format=torch.channels_last)
        checkpoint_blocks(model, classes)
        if compiled:
            model.compile()
        images = torch.randn(32, 3, 128, 128, generator=torch.Generator().manual_seed(0)).cuda()
        for _ in range(2):
            held = torch.cuda.memory_allocated()  # earlier tests of this process leave some
            torch.cuda.reset_peak_memory_stats()
            model(images).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated() - held)
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
        before = measured.take_interval(1.0)["gpu_memory_gib"][0]
        held = torch.empty(3 * 2**30, dtype=torch.uint8, device=f"cuda:{number}")
        began = time.perf_counter()
        while time.perf_counter() - began < 3:  # NVML looks back by up to a second
            for _ in range(20):
                square @ square
            torch.cuda.synchronize(number)
        measured.deliver([measured.collect()])
        line = {name: values[0] for name, values in measured.take_interval(3.0).items()}
        assert before is not None and line["gpu_memory_gib"] - before >= held.nbytes / 2**30
        assert line["torch_memory_gib"] >= 3 and line["gpu_utilisation"] > 30
        assert 50 < line["power_watts"] < 2000 and 10 < line["temperature_celsius"] < 110
        assert line["energy_wh"] == pytest.approx(line["power_watts"] * 3 / 3600, rel=0.5)
        assert measured.summary()["gpu_memory_gib"] == line["gpu_memory_gib"]
        del held, square


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "name", ["captured steps", "kernel by kernel, clipped", "checked on the host"]
)
def test_a_rank_that_dies_costs_no_step(name: str, tmp_path: Path) -> None:
    """tests/campaigns/lost_gpus.py kills more of them."""
    expected = lost_gpus.ended(
        tmp_path / "reference", 2, lost_gpus.CASES[name], 0, random.Random(0)
    )
    found = lost_gpus.ended(tmp_path / "killed", 2, lost_gpus.CASES[name], 1, random.Random(1))
    assert lost_gpus.compared(found, expected) == "", found["said"]


# --- what a run says when it is out of memory, hangs or is traced ---------------------------------


class Greedy(nn.Module):
    """More than a GPU has, in the second training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 1:
            torch.empty(2**40, device="cuda")
        return self.layer(images.flatten(1))


@pytest.mark.parametrize("history", [False, True])
def test_a_gpu_that_is_out_of_memory_leaves_a_snapshot(history: bool, tmp_path: Path) -> None:
    words = [
        f"model._target_={__name__}.Greedy",
        "trusted_modules=[tests]",
        ONE,
        "tuning.cuda_graph=false",
    ]
    done = run(
        *words,
        f"train.memory_history={str(history).lower()}",
        f"run_dir={tmp_path}/run",
        env=VISIBLE,
    )
    failure = read(tmp_path / "run", "failure.json")
    snapshot = tmp_path / "run/memory/rank_0.pickle"
    assert (done.returncode, failure["kind"]) == (70, "oom"), done.stderr
    assert (
        f"a snapshot of the GPU's memory is in {snapshot} (open it at https://pytorch.org/memory_viz)"
        in failure["detail"]
    )
    found = pickle.loads(snapshot.read_bytes())
    assert found["segments"] and sum(map(len, found["device_traces"])) == 0 if not history else True
    if history:
        frames = [frame["name"] for one in found["device_traces"][0] for frame in one["frames"]]
        assert "forward" in frames and found["device_traces"][0][-1]["action"] in (
            "oom",
            "snapshot",
        )


@pytest.mark.parametrize("captured", [False, True])
def test_a_trace_has_the_kernels_of_its_steps(captured: bool, tmp_path: Path) -> None:
    words = ["model=mlp", ONE, f"tuning.cuda_graph={str(captured).lower()}", "train.max_steps=40"]
    done = run(*words, "train.profile_steps=30:32", f"run_dir={tmp_path}/run", env=VISIBLE)
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress((tmp_path / "run/profile/rank_0.json.gz").read_bytes()))[
        "traceEvents"
    ]
    assert {event["name"] for event in events if str(event.get("name")).startswith("step ")} >= {
        "step 30",
        "step 31",
        "step 32",
    }
    assert sum(event.get("cat") == "kernel" for event in events) >= 15


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rank_that_hangs_before_nccl_is_named(tmp_path: Path) -> None:
    (tmp_path / "wayward.py").write_text(WAYWARD)
    words = [
        "model._target_=wayward.Net",
        "data._target_=wayward.Rows",
        "trusted_modules=[wayward]",
    ]
    words += [
        "+model.how=sleep",
        "+model.where=all-reduce",
        "+model.step=4",
        "launch.nproc_per_node=2",
    ]
    words += ["tuning.num_workers=0", "tuning.cuda_graph=false", "launch.timeout_seconds=6"]
    done = run(*words, f"run_dir={tmp_path}/run", env={"PYTHONPATH": str(tmp_path), **VISIBLE})
    failure = read(tmp_path / "run", "failure.json")
    assert (done.returncode, failure["kind"], failure["rank"]) == (71, "hang", 1), done.stderr
    assert re.search(
        r"; rank 0 called \S+ of .*\(collective \d+\), rank 1 did not$", failure["detail"]
    ), failure


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("captured", [False, True])
def test_a_run_on_gpus_that_was_suspended_as_a_whole_goes_on(
    captured: bool, tmp_path: Path
) -> None:
    """For longer than the limit, in the middle of exchanges over NCCL."""
    limits = (
        "train.epochs=100000",
        "train.log_every_steps=20",
        "launch.timeout_seconds=6",
        "launch.nproc_per_node=2",
    )
    words = ("model=cnn", f"tuning.cuda_graph={str(captured).lower()}", *limits)
    with running(tmp_path / "run", *words, env=VISIBLE) as suspended:

        def steps() -> int:
            assert suspended.process.poll() is None, suspended.said()
            return metrics(suspended.run_dir)[-1]["step"]

        suspended.wait_for_step()
        wait_until(lambda: steps() >= 100, "a hundred steps")
        launcher = suspended.process.pid
        pids = sorted(processes_of(suspended.run_dir), key=lambda pid: pid != launcher)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        before = steps()
        time.sleep(20)
        assert steps() == before
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)
        wait_until(lambda: steps() > before + 100, "a hundred more")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_go_and_come_back_and_nothing_but_the_speed_changes(tmp_path: Path) -> None:
    """As asked for, and since one fails again and again."""
    env = slow_net(tmp_path) | VISIBLE
    place = tmp_path / "run"
    gone = tmp_path / "gone"
    words = (*WORDS, "train.epochs=40", "launch.max_restarts=1")
    with running(
        tmp_path / "calm", *words, "launch.nproc_per_node=2", "+model.delay=0", env=env
    ) as calm:
        assert calm.end() == 0, calm.said()
    more = ("launch.nproc_per_node=1:2", "+model.rank=1", f"+model.gone={gone}")
    with running(place, *words, *more, env=env) as job:
        job.wait_for_step()
        ask(job, 1)
        assert len(ranks_of(job)) == 1
        ask(job, 2)
        gone.touch()
        os.kill(ranks_of(job)[1], signal.SIGKILL)
        wait_until(lambda: len(read_changes(place)) == 3, "change", seconds=60)
        gone.unlink()
        ask(job, 2)
        assert job.end() == 0, job.said()
    assert_close(place, tmp_path / "calm")
    summary = read(place, "summary.json")
    print("resizes", summary["resizes"], "recoveries", summary["recoveries"])
    assert [(one["from"], one["to"]) for one in summary["resizes"]] == [
        (2, 1),
        (1, 2),
        (2, 1),
        (1, 2),
    ]
    assert summary["world_size"] == 2


def read_changes(place: Path) -> list[Any]:
    return [line for line in metrics(place) if line["kind"] == "resize"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_session_learns_on_two_gpus_as_on_one_and_on_the_cpu(tmp_path: Path) -> None:
    said = {}
    for name, env in {
        "two": {"DDP_TRAIN_PROCESSES": "2", **VISIBLE},
        "one": {"DDP_TRAIN_PROCESSES": "1", **VISIBLE},
        "cpu": {"DDP_TRAIN_PROCESSES": "1"},
    }.items():
        (tmp_path / name).mkdir()
        command = [sys.executable, str(ROOT / "examples/own_loop_after.py")]
        done = subprocess.run(
            command,
            cwd=tmp_path / name,
            env=environment({**env, "PYTHONPATH": str(ROOT)}),
            text=True,
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said[name] = [int(word) for word in re.findall(r": (\d+) of 297", done.stdout)]
    assert all(len(right) == 10 and min(right[-3:]) >= 270 for right in said.values()), said


def test_a_job_is_proved_on_a_host_with_gpus(tmp_path: Path) -> None:
    done = run(
        "mode=prove", "model=cnn", "model.channels=4", f"run_dir={tmp_path}/proof", env=VISIBLE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_our_kernels_compute_what_torchs_do(dtype: torch.dtype) -> None:
    triton_kernels.check_max_pool("cuda", dtype)
    triton_kernels.check_cross_entropy("cuda", dtype)
    triton_kernels.check_fetch("cuda")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_learns_the_same_by_our_kernels(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, without TF32: to the rounding of sums in another order."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch._dynamo.reset()
    torch.manual_seed(0)
    images = torch.randn(8, 3, 96, 96, device="cuda").contiguous(memory_format=torch.channels_last)
    ids = torch.randint(0, 5000, (4, 33), device="cuda")
    for task, model, batch in (
        (
            Classification(classes=10),
            resnet18(num_classes=10),
            (images, torch.arange(8, device="cuda")),
        ),
        (LanguageModel(), Gpt(5000, 32, layers=1, heads=2, width=32), ids),
    ):
        gradients = []
        for kernels in (False, True):
            module = ModelWithTask(copy.deepcopy(model), task, "cuda", None).cuda()
            mode = "default" if compiled else None
            tune_model(module, channels_last=True, compile_mode=mode, triton_kernels=kernels)
            module(batch)[0].backward()
            gradients.append(
                {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            )
        for name, gradient in gradients[0].items():
            difference = (gradients[1][name] - gradient).norm() / gradient.norm()
            assert difference < 2e-3, f"{name}: {difference}"
    assert (
        isinstance(task, LanguageModel) and task.cross_entropy_sum.__name__ == "cross_entropy_sum"
    )


@pytest.mark.skipif(
    not importlib.util.find_spec("cudnn"), reason="needs the package nvidia-cudnn-frontend"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_convolutions_sum_up_their_outputs(dtype: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    for shape, filters, stride, padding, dilation in (
        ((4, 64, 56, 56), (256, 64, 1, 1), 1, 0, 1),
        ((4, 64, 57, 31), (64, 64, 3, 3), 2, 1, 1),
        ((3, 24, 15, 15), (40, 24, 3, 3), 1, 2, 2),
        ((2, 2048, 7, 7), (512, 2048, 1, 1), 1, 0, 1),
        ((2, 16, 32, 32), (8, 16, 5, 5), 1, 2, 1),
    ):
        x = (
            torch.randn(shape, device="cuda", generator=draw)
            .to(dtype)
            .contiguous(memory_format=torch.channels_last)
        )
        weight = torch.randn(filters, device="cuda", generator=draw).to(dtype) / math.sqrt(
            math.prod(filters[1:])
        )
        window = [stride] * 2, [padding] * 2, [dilation] * 2
        assert fastest_kernel(Case(x.device, dtype, x.shape, weight.shape, *map(tuple, window)))
        y, sums = conv_sums(x, weight, *window)
        expected = torch.conv2d(x, weight, None, stride, padding, dilation).float()
        torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
        count = y.numel() / len(weight)
        for found, powers in zip(sums, (y.float(), y.float().square()), strict=True):
            torch.testing.assert_close(found / count, powers.mean((0, 2, 3)), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(
    not importlib.util.find_spec("cudnn"), reason="needs the package nvidia-cudnn-frontend"
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resnet_learns_the_same_with_conv_sums(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients and running averages as near to those in 32 bits as by two passes."""
    monkeypatch.setattr("ddp_train.kernels.conv_sums.ConvSums", partial(ConvSums, always=True))
    torch.manual_seed(0)
    net = resnet18(num_classes=10)
    images = torch.randn(32, 3, 128, 128, device="cuda")
    batch = (
        images.contiguous(memory_format=torch.channels_last),
        torch.arange(32, device="cuda") % 10,
    )
    found = []
    for autocast, conv in (
        (None, False),
        (AUTOCAST[precision], False),
        (AUTOCAST[precision], True),
    ):
        torch._dynamo.reset()
        module = ModelWithTask(
            copy.deepcopy(net), Classification(classes=10), "cuda", autocast
        ).cuda()
        tune_model(module, channels_last=True, compile_mode="default", conv_sums=conv)
        (module(batch)[0] * 8).backward()  # half a loss scale
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        found.append(gradients | {n: b for n, b in module.named_buffers() if b.is_floating_point()})
    errors = []
    for other in found[1:]:
        shares = [(other[name] - one).norm() / one.norm() for name, one in found[0].items()]
        errors.append(torch.stack(shares).square().mean().sqrt().item())
    print(precision, errors)
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.skipif(
    not importlib.util.find_spec("cudnn"), reason="needs the package nvidia-cudnn-frontend"
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_convolutions_are_chosen_by_the_sums_that_save_time(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    """How many of a ResNet-50's is for the GPU to say; its numbers are printed."""
    torch._dynamo.reset()
    milliseconds_saved.cache_clear()
    net = resnet50(num_classes=10)
    images = torch.randn(256, 3, 224, 224, device="cuda")
    module = ModelWithTask(net, Classification(classes=10), "cuda", AUTOCAST[precision]).cuda()
    tune_model(module, channels_last=True, compile_mode="default", conv_sums=True)
    with caplog.at_level("INFO", "ddp_train.kernels.conv_sums"):
        (module((images, torch.arange(256, device="cuda") % 10))[0] * 8).backward()
    print(
        said := re.findall(
            r"cuDNN sums up (\d+) of (\d+) convolutions, which saves ([\d.]+) ms", caplog.text
        )
    )
    ((summed, convolutions, milliseconds),) = said
    assert int(convolutions) == 52 and (int(summed) > 0) == (float(milliseconds) > 0)


def test_a_target_that_is_no_class_is_told() -> None:
    """By an assertion of the device, as torch's own loss does; the process cannot use its GPU any
    more."""
    code = (
        "import torch; from ddp_train.kernels.cross_entropy import cross_entropy_sum as f; "
        "f(torch.zeros(2, 5000, device='cuda'), torch.tensor([3, 5000], device='cuda')).item()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "a target is neither in 0 to 4999 nor -100" in done.stderr
