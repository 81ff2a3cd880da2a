"""The examples whose steps draw noise, against plain loops that know nothing of processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddp_train
from ddp_train.data.batch_plan import epoch_order
from ddp_train.data.datasets import ArraySource
from ddp_train.distributed.world import World
from ddp_train.engine.loop import evaluate, fit
from examples.vae import VAE, Elbo
from tests.support import zygote
from tests.support.commands import LIMIT_SECONDS, ROOT, environment
from tests.support.jobs import config_of, job_of
from tests.support.keyed_numbers import KeyedNumbers
from tests.support.ranks import on_ranks

SEED = 3
IMAGES = torch.randn(27, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
"""In batches of 12: the last one of an epoch has 3, and a rank of four has none of them."""
LABELS = torch.zeros(27, dtype=torch.int64)
Result = tuple[list[float], float, float]


def vae_job(world: World, accumulation: int, **strategy: Any) -> Any:
    config = config_of(
        world,
        seed=SEED,
        strategy=strategy,
        model={"_target_": "examples.vae.VAE", "width": 6, "code": 3},
        task={"_target_": "examples.vae.Elbo"},
        train={
            "global_batch_size": 12,
            "accumulation_steps": accumulation,
            "epochs": 2,
            "evaluate_batch_size": 5,
        },
        optimizer={"name": "sgd", "lr": 0.01},
        schedule={"name": "constant"},
        tuning={"precision": "fp64", "num_workers": 0},
        deterministic=strategy["name"] == "ordered",
        launch={"threads_per_process": 1},
    )
    source = ArraySource(IMAGES, LABELS)
    return job_of(config, world, (source, source))


def vae_on_ranks(world: World) -> list[Result]:
    """Weights, loss and error with ddp, with accumulation, and where it may with ordered."""
    jobs = [vae_job(world, accumulation, name="ddp") for accumulation in (1, 2)]
    if world.size != 3:
        jobs.append(vae_job(world, 1, name="ordered", virtual_shards=4))
    results = []
    for job in jobs:
        fit(job)
        score = evaluate(job.evaluation)
        assert score
        weights = nn.utils.parameters_to_vector(job.module.model.parameters())
        results.append((weights.tolist(), score.metrics["loss"], score.metrics["error"]))
    return results


def vae_by_hand() -> Result:
    model = vae_job(World(), 1, name="single").module.model
    assert isinstance(model, VAE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def parts(samples: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        images = IMAGES[samples].flatten(1)
        mean, log_variance = model.encoder(images).chunk(2, 1)
        decoded = model.decoder(mean + (log_variance / 2).exp() * noise)
        error = (decoded - images).square().sum(1) / 2
        return error, error + (mean**2 + log_variance.exp() - 1 - log_variance).sum(1) / 2

    step = 0
    for epoch in range(2):
        for samples in torch.as_tensor(epoch_order(SEED, epoch, len(IMAGES))).split(12):
            numbers = KeyedNumbers(samples.numpy(), SEED, epoch, step)
            optimizer.zero_grad()
            parts(samples, numbers.normal(3))[1].mean().backward()
            optimizer.step()
            step += 1
    everyone = torch.arange(len(IMAGES))
    error, loss = parts(everyone, KeyedNumbers(range(27), epoch=None).normal(3))
    weights = nn.utils.parameters_to_vector(model.parameters())
    return weights.tolist(), loss.mean().item(), error.mean().item()


@pytest.mark.slow
def test_a_vae_learns_the_same_on_any_number_of_processes() -> None:
    assert Elbo.units_are_samples
    expected = vae_by_hand()
    ordered = []
    for processes in (1, 3, 4):
        for results in on_ranks(processes, vae_on_ranks):
            ordered += results[2:]
            for weights, *scores in results:
                assert weights == pytest.approx(expected[0], rel=1e-10, abs=1e-10)
                assert scores == pytest.approx(expected[1:], rel=1e-10)
    assert len(ordered) == 5 and all(result == ordered[0] for result in ordered), "bit for bit"


class KeyedDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return ddp_train.dropout(x, self.p, self.training)


class AttentionReader(nn.Module):
    """Attention with dropout: its product written out, or a layer of torch's that was changed."""

    def __init__(self, is_torchs: bool) -> None:
        super().__init__()
        self.layer = None
        if is_torchs:
            self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.3, batch_first=True)
            self.layer.self_attn.dropout = 0.0
            for module in self.layer.modules():
                if type(module) is nn.Dropout:
                    module.__class__ = KeyedDropout
        self.projections = nn.Linear(8, 24)
        self.head = nn.Linear(8, 2)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1).unflatten(1, (8, 8))
        if self.layer is not None:
            return self.head(self.layer(rows).mean(1))
        q, k, v = self.projections(rows).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        attended = ddp_train.dropout(weights, 0.3, self.training) @ v
        return self.head(attended.transpose(1, 2).flatten(2).mean(1))


def readers_on_ranks(world: World) -> list[list[float]]:
    """The weights of both kinds of attention."""
    weights = []
    for is_torchs in (True, False):
        config = config_of(
            world,
            seed=SEED,
            model={
                "_target_": "tests.house.test_noise_examples.AttentionReader",
                "is_torchs": is_torchs,
            },
            task={"name": "classification"},
            train={"global_batch_size": 12, "epochs": 2},
            tuning={"precision": "fp64", "num_workers": 0},
            launch={"threads_per_process": 1},
            strategy={"name": "ddp", "find_unused_parameters": True},
        )
        source = ArraySource(IMAGES, LABELS)
        job = job_of(config, world, (source, source))
        fit(job)
        weights.append(nn.utils.parameters_to_vector(job.module.model.parameters()).tolist())
    return weights


@pytest.mark.slow
def test_dropout_in_attention_is_the_same_on_any_number_of_processes() -> None:
    """As docs/guides/noise.md writes it."""
    (alone,) = on_ranks(1, readers_on_ranks)
    for weights in on_ranks(3, readers_on_ranks):
        for one, other in zip(weights, alone, strict=True):
            assert one == pytest.approx(other, rel=1e-10, abs=1e-10)


DIFFUSION = """
import json
import sys

import torch
from torch.utils.data import TensorDataset

import ddp_train
from examples import diffusion

torch.set_default_dtype(torch.float64)
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(40, 1, 8, 8, generator=GENERATOR)
DATA = TensorDataset(IMAGES, torch.arange(40))
TEST = TensorDataset(IMAGES[:11], torch.arange(11))
diffusion.GLOBAL_BATCH = 19
"""
DIFFUSION_SESSION = """
with ddp_train.session(sys.argv[1], seed=3) as run:
    model = diffusion.train(run, DATA, TEST, epochs=2, width=4)
    with open(f"{sys.argv[1]}/weights_{run.rank}", "w") as file:
        json.dump([weight.flatten().tolist() for weight in model.parameters()], file)
"""


def diffusion_by_hand() -> tuple[list[list[float]], list[float]]:
    names: dict[str, Any] = {}
    exec(DIFFUSION, names)
    try:
        diffusion = names["diffusion"]
        images = names["IMAGES"]
        torch.manual_seed(0)
        model = diffusion.UNet(4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

        def losses(samples: Tensor, numbers: KeyedNumbers) -> Tensor:
            steps = numbers.whole(0, diffusion.STEPS, 1).flatten()
            noise = numbers.normal(1, 8, 8)
            share = diffusion.share_of_image(steps, torch.float64)
            noisy = share.sqrt() * images[samples] + (1 - share).sqrt() * noise
            return (model(noisy, steps) - noise).square().mean((1, 2, 3))

        scores = []
        step = 0
        for epoch in range(2):
            for samples in torch.as_tensor(epoch_order(SEED, epoch, len(images))).split(19):
                optimizer.zero_grad()
                numbers = KeyedNumbers(samples.numpy(), SEED, epoch, step)
                losses(samples, numbers).mean().backward()
                optimizer.step()
                step += 1
            tested = torch.arange(11)
            with torch.no_grad():
                scores.append(losses(tested, KeyedNumbers(range(11), epoch=None)).mean().item())
        return [weight.flatten().tolist() for weight in model.parameters()], scores
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes",
    [3, pytest.param(1, marks=pytest.mark.nightly), pytest.param(4, marks=pytest.mark.nightly)],
)
def test_diffusion_in_a_session_is_the_loop_by_hand(processes: int, tmp_path: Path) -> None:
    weights, scores = diffusion_by_hand()
    done = session(tmp_path, processes)
    assert done.returncode == 0, done.stderr
    assert "random numbers" not in done.stderr, "all noise is keyed"
    lines = [f"epoch {epoch}: test error {score:.4f}" for epoch, score in enumerate(scores)]
    assert done.stdout.splitlines() == lines
    for rank in range(processes):
        found = json.loads((tmp_path / f"run/weights_{rank}").read_text())
        for one, other in zip(found, weights, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-11)


def session(folder: Path, processes: int) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(DIFFUSION + DIFFUSION_SESSION)
    env = environment({"PYTHONPATH": str(ROOT), "DDP_TRAIN_PROCESSES": str(processes)})
    argv = [sys.executable, str(folder / "train.py"), str(folder / "run")]
    return zygote.run(argv, LIMIT_SECONDS, cwd=folder, env=env, text=True)
