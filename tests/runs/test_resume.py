"""Exact resume: the same bytes after a stop at any step, with any loader; the same samples on
another world size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.campaigns import chaos
from tests.support.commands import read, run, weights


def forget_after(run_dir: Path, step: int) -> None:
    """As if the run had been lost after that step."""
    for place in (run_dir / "checkpoints").iterdir():
        if int(place.name.removeprefix("step_")) > step:
            shutil.rmtree(place)


@pytest.fixture(
    scope="module",
    params=[3, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (1, 2, 4))],
)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, str]:
    """A run that kept all its checkpoints: its folder, the number of its ranks, the hash of its
    end."""
    folder = tmp_path_factory.mktemp(f"whole_{request.param}")
    return folder, request.param, chaos.undisturbed(folder, request.param, "checkpoint.keep=99")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "workers"),
    [
        pytest.param(8, 0, marks=pytest.mark.nightly),
        pytest.param(12, 1, marks=pytest.mark.nightly),
        (20, 3),
    ],
)  # 20 is the end of an epoch
def test_a_resumed_run_ends_in_the_same_bytes(
    whole: tuple[Path, int, str], step: int, workers: int, tmp_path: Path
) -> None:
    folder, ranks, expected = whole
    if workers and ranks != 3:
        pytest.skip("loader processes are tried on three ranks, for time")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    forget_after(tmp_path / "run", step)
    command, env = chaos.words(
        tmp_path, ranks, "checkpoint.keep=99", f"tuning.num_workers={workers}"
    )
    done = run(f"run_dir={tmp_path}/run", *command, env=env)
    assert done.returncode == 0, done.stderr
    assert f"from step {step}" in done.stdout
    assert chaos.state_of(tmp_path / "run") == expected
    chaos.check_ledger(tmp_path, ranks)
    ours, theirs = (read(place / "run", "summary.json") for place in (tmp_path, folder))
    assert ours["test"] == theirs["test"] and len(ours["epoch_seconds"]) == chaos.EPOCHS


@pytest.mark.slow
def test_run_on_four_then_two_then_three_processes_is_the_same(tmp_path: Path) -> None:
    """No batch norm and no dropout, which depend on who computes what; in float64, where rounding
    does not grow."""
    fixed = [
        "model=mlp",
        "data.limit=200",
        "tuning.precision=fp64",
        "train.epochs=4",
        "optimizer=adamw",
        "checkpoint.every_steps=3",
        "train.log_every_steps=1",
    ]
    reference = run(*fixed, f"run_dir={tmp_path}/reference", "launch.nproc_per_node=1")
    assert reference.returncode == 0, reference.stderr
    for ranks, until in ((4, 3), (2, 8), (3, 12)):
        done = run(
            *fixed,
            f"run_dir={tmp_path}/run",
            f"launch.nproc_per_node={ranks}",
            "checkpoint.keep=99",
        )
        assert done.returncode == 0, done.stderr
        forget_after(tmp_path / "run", until)
    ours, theirs = (load(weights(tmp_path / name)) for name in ("run", "reference"))
    differences = [(ours[name] - theirs[name]).abs().max().item() for name in theirs]
    assert 0 < max(differences) < 1e-10, (
        "another world sums in another order, and no more than that"
    )


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 2), (3, 3)])
def test_random_kills_do_not_change_a_byte(ranks: int, seed: int, tmp_path: Path) -> None:
    """A few of `make chaos`."""
    expected, seconds = chaos.undisturbed(tmp_path / "reference", ranks)
    found, killed = chaos.disturbed(tmp_path / "disturbed", ranks, seed, seconds)
    assert killed, "nobody was killed"
    chaos.check_ledger(tmp_path / "disturbed", ranks)
    assert found == expected, f"seed {seed}, killed {killed}"


def test_three_ranks_would_differ_without_the_warm_up_passes() -> None:
    """What they are for: see strategy.warm_up_ddp_buckets. If this fails, torch has mended it, and
    they can go."""
    from tests.support.ranks import on_ranks

    first, second = on_ranks(3, one_step_of_a_fresh_and_of_a_used_ddp)[0]
    assert not torch.equal(first, second)


def one_step_of_a_fresh_and_of_a_used_ddp(world: object) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(33, 33) for _ in range(6)))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + getattr(world, "rank", 0))
    inputs = torch.randn(7, 33)
    results = []
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(inputs).pow(2).sum().backward()
        results.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return results[0], results[2]
