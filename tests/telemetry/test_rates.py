"""How fast a run is: operations counted, peaks of GPUs, units per second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_train.data.datasets import ArraySource
from ddp_train.data.rng import global_states
from ddp_train.models.gpt.network import build_gpt
from ddp_train.performance.activation_checkpointing import checkpoint_blocks
from ddp_train.performance.flops import flops_of, flops_of_samples, one_sample, peak_flops
from ddp_train.tasks.builtin import Classification
from ddp_train.tasks.language_model.task import LanguageModel
from ddp_train.tasks.task import ModelWithTask, Task
from ddp_train.tasks.user_task import complete
from ddp_train.telemetry.rates import Rates, in_words, shown_flops
from tests.support.commands import read, run

LAYERS = 2
WIDTH = 64
LENGTH = 32


def gpt() -> nn.Module:
    return build_gpt(
        (LENGTH,),
        100,
        layers=LAYERS,
        heads=2,
        width=WIDTH,
        dropout=0.1,
        vocabulary_multiple=1,
    )


IDS = torch.zeros(1, LENGTH, dtype=torch.int64)


def test_flops_of_gpt_are_six_per_weight_plus_attention() -> None:
    """6 N + 12 layers x width x length per token (PaLM, appendix B), where N are the weights of
    matrices."""
    model = gpt().train()
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "positions" not in name
    )
    expected = LENGTH * (6 * matrices + 12 * LAYERS * WIDTH * LENGTH)
    assert flops_of(model, LanguageModel(), (IDS, IDS)) == expected
    assert model.training and next(model.parameters()).device.type == "cpu", (
        "the model stays as it is"
    )
    checkpoint_blocks(model, ["Block"])
    assert flops_of(model, LanguageModel(), (IDS, IDS)) == expected, (
        "what is computed again does not count"
    )
    frozen = gpt()
    frozen.blocks.requires_grad_(False)
    assert expected / 2 < (flops_of(frozen, LanguageModel(), (IDS, IDS)) or 0) < expected


def test_operations_of_a_convolution() -> None:
    """Forward and the gradients of the weights, but not those of the images."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )
    batch = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    convolution = 2 * 2 * 64 * 3 * 8 * 9
    linear = 2 * 2 * 8 * 64 * 10
    assert flops_of(model, Classification(10), batch) == 2 * convolution + 3 * linear


class SeveralViews(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        once = super().forward(input)
        return once if self.training else once + super().forward(-input)


def test_counted_is_what_training_does() -> None:
    batch = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)
    model = nn.Sequential(nn.BatchNorm1d(4), SeveralViews(4, 2)).eval()
    assert flops_of(model, Classification(2), batch) == 3 * 2 * 4 * 2 and not model.training


class DrawsAndKeeps(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen = random.random() + np.random.rand() + torch.rand(()).item()
        return super().forward(input)


class Centred:
    """Keeps a tensor, as DINO's loss does, and has a model of its own, as a distillation."""

    def __init__(self) -> None:
        self.centre = torch.zeros(2)
        self.teacher = nn.Linear(4, 2)

    def loss(
        self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, float]:
        student = model(batch[0])
        with torch.no_grad():
            self.centre = 0.9 * self.centre + 0.1 * self.teacher(batch[0]).mean(0)
        return (student - self.centre).square().sum(), len(student)


class CentredTask(Centred, Task):
    pass


@pytest.mark.parametrize("kind", [Centred, CentredTask])
def test_counting_changes_neither_model_nor_task_nor_generators(kind: type[Centred]) -> None:
    model = DrawsAndKeeps(4, 2)
    task = kind()
    before = global_states()
    centre = task.centre
    batch = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)
    assert flops_of(model, complete(task), batch) == (2 + 1) * 2 * 4 * 2, (
        "the teacher has a forward pass alone"
    )
    assert global_states() == before
    assert task.centre is centre and not hasattr(model, "seen")
    assert task.teacher.weight.device.type == model.weight.device.type == "cpu"


class Drawing(ArraySource):
    def get_batch(self, *arguments: Any) -> Any:
        random.random()
        return super().get_batch(*arguments)


class LooksAtValues(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input if input.sum() > 0 else -input)


def test_a_sample_is_counted_as_training_sees_it() -> None:
    """Pixels in the model's precision; nothing of the data set's draws is left."""
    pixels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    source = Drawing(pixels, torch.arange(3))
    flat = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    module = ModelWithTask(flat.double(), Classification(3), "cpu", None)
    before = global_states()
    assert one_sample(source, flat)[0].dtype == torch.float64 and global_states() == before
    assert [flops_of_samples(module, source, count) for count in (1, 2.5, 0)] == [48, 120, None]


def test_what_cannot_be_counted_is_left_out() -> None:
    module = ModelWithTask(LooksAtValues(4, 2), Classification(2), "cpu", None)
    assert (
        flops_of_samples(module, ArraySource(torch.zeros(1, 4), torch.zeros(1).long()), 5) is None
    )
    assert (
        flops_of(LooksAtValues(4, 2), Classification(2), (torch.zeros(1, 4), torch.zeros(1).long()))
        is None
    )
    assert Rates().of(100, 0, 2.0) == {"samples_per_second": 50.0}


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "tera"),
    [
        ("NVIDIA H200", "bf16", True, 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", True, 989.4),
        ("NVIDIA H100 PCIe", "bf16", True, 756),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5),
        ("NVIDIA L4", "bf16", True, 121),
        ("NVIDIA L40S", "bf16", True, 362),
        ("Tesla V100-SXM2-16GB", "fp32", True, 15.7),
        ("Tesla T4", "fp16", False, 65),
        ("Tesla T4", "bf16", False, None),
        ("NVIDIA H200", "fp64", False, None),
        ("Some other card", "bf16", True, None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(
    name: str, precision: str, tf32: bool, tera: float | None
) -> None:
    found = peak_flops(name, precision, tf32)
    assert found == (tera and pytest.approx(tera * 1e12))


def test_speeds_in_words() -> None:
    rates = Rates("token", 3.3e8, 1e11).of(samples=200, units=25_600, seconds=2.0)
    assert rates == {
        "samples_per_second": 100,
        "tokens_per_second": 12_800,
        "flops_per_second": 3.3e10,
        "mfu": pytest.approx(0.33),
    }
    assert in_words(rates) == "100 samples/s  12,800 tokens/s  33 GFLOP/s  MFU 33.0%"
    assert in_words({"samples_per_second": None}) == "" and shown_flops(12.0) == "12 FLOP"


@pytest.mark.slow
def test_a_run_counts_its_tokens_across_a_resume(tmp_path: Path) -> None:
    """Windows of the test split are not among them; and the tokens of both parts of the run are."""
    (tmp_path / "text.txt").write_text("some words\n" * 400)
    words = [
        "data=text",
        f"data.path={tmp_path}/text.txt",
        "data.length=16",
        "model=gpt",
        "model.width=16",
        "train.global_batch_size=24",
        "train.log_every_steps=2",
        "checkpoint.every_steps=3",
        f"run_dir={tmp_path}/run",
        "schedule=constant",
    ]
    assert run(*words, "train.epochs=1", "train.max_steps=3").returncode == 0
    done = run(*words, "train.epochs=1")
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout and "FLOP" not in done.stdout, (
        "on the CPU utilisation says nothing"
    )
    summary = read(tmp_path / "run", "summary.json")
    assert summary["tokens_per_second"] == pytest.approx(16 * summary["samples_per_second"])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for line in (line for line in lines if line["kind"] == "train"):
        assert line["tokens_per_second"] == pytest.approx(16 * line["samples_per_second"])
        assert "flops_per_second" not in line and "mfu" not in line
