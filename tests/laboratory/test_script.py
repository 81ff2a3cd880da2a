"""`ddp-train prove train.py`: scripts of a session on one process and on three."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddp_lab.prove.script import (
    CAUSES,
    DRAWN,
    DRAWN_WITHOUT_EFFECT,
    IN_FLOAT32,
    Record,
    cause_beside_draws,
    check_arguments,
    differences_of,
    prove_script,
    read,
    verdict,
)
from ddp_lab.prove.tolerances import SCRIPT_ALLOWED
from ddp_train.commands.table import load
from ddp_train.distributed.child_environments import proof_environment
from ddp_train.distributed.environment import GRADIENTS
from ddp_train.errors import ConfigError
from ddp_train.resilience.preemption import SAVED
from tests.support import zygote
from tests.support.commands import LIMIT_SECONDS, ROOT, environment

LOOP = """
import sys
import torch
from torch import nn
import ddp_train

class Scaled(torch.optim.AdamW):
    scale = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        before = [weight.clone() for weight in net.parameters()]
        super().step(closure)
        for weight, old in zip(net.parameters(), before):
            weight.copy_(old + self.scale * (weight - old))


rows = torch.randn(26, 5, generator=torch.Generator().manual_seed(0))
if sys.argv[2] == "double":
    rows = rows.double()
with ddp_train.session("runs/mine", processes=2, max_restarts=1) as run:
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    net.register_buffer("centre", torch.zeros(3))
    model = run.wrap(net.to(rows.dtype))
    optimizer = Scaled(model.parameters(), lr=0.1)
    loader = run.loader(list(rows), global_batch_size=6)
    run.resume(model=model, optimizer=optimizer)
    for _ in run.epochs(100):
        for batch in loader:
            optimizer.zero_grad()
            outputs = model(batch)
            losses = (outputs - model.centre).square().mean(1)
            if sys.argv[1] in ("idle", "noise"):
                losses = (outputs - outputs.mean(0)).square().mean(1)
                noise = torch.rand(())
            if sys.argv[1] == "noise":
                losses = losses * noise
            if sys.argv[1] == "centre":
                model.centre += outputs.detach().mean(0)
            if sys.argv[1] == "short" and len(batch) < 2:
                losses = losses * 1.0001
            run.mean(losses).backward()
            size = outputs.detach().abs().mean().item() if len(outputs) else 0.0
            if sys.argv[1] == "own optimizer":
                optimizer.scale = 1 / run.processes
            if sys.argv[1] == "apart":
                optimizer.scale = size
            optimizer.step()
            if sys.argv[1] in ("own decay", "alike"):
                factor = 1 / run.processes if sys.argv[1] == "own decay" else 1.0
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.mul_(1 - 0.1 * factor)
"""


ALLOWED = SCRIPT_ALLOWED["fp32"]


def record(**arrays: list[float]) -> Record:
    named = {name.replace("_", " "): np.array(values) for name, values in arrays.items()}
    return Record(named, draws_by_process=False)


def test_the_first_update_that_differs_comes_first() -> None:
    one = record(update_1_a=[1.0, 2.0], update_2_a=[1.0, 1.0], update_2_b=[4.0], buffer_c=[1.0])
    other = record(update_1_a=[1.0, 2.0], update_2_a=[1.0, 1.5], update_2_b=[0.0], buffer_c=[9.0])
    found = [
        (difference.name, difference.share) for difference in differences_of(one, other, ALLOWED)
    ]
    assert [name for name, _ in found] == ["update 2 b", "update 2 a", "buffer c", "update 1 a"]
    assert found[0][1] == 1.0
    assert found[-1][1] == 0.0
    assert "update 2 b differs by 100.0%" in verdict(
        differences_of(one, other, ALLOWED), CAUSES, ALLOWED
    )


def test_draws_are_blamed_where_others_have_another_result() -> None:
    one = record(update_1_a=[1.0, 2.0])
    other = record(update_1_a=[1.0, 2.5])
    assert cause_beside_draws(one, other, ALLOWED) == DRAWN
    assert CAUSES in cause_beside_draws(one, one, ALLOWED)
    assert DRAWN_WITHOUT_EFFECT in cause_beside_draws(one, one, ALLOWED)


def test_rounding_of_gradients_that_vanish_is_no_difference() -> None:
    one = record(update_1_a=[1.0], update_1_bias=[1e-9])
    other = record(update_1_a=[1.0 + 1e-7], update_1_bias=[-1e-9])
    (worst, *_) = differences_of(one, other, ALLOWED)
    assert worst.share < ALLOWED
    assert verdict([worst], CAUSES, ALLOWED).startswith(
        "the same on 3 processes as on 1: the gradients of update 1 differ by"
    )


def test_float64_is_allowed_less() -> None:
    one = record(update_1_a=[1.0], update_2_a=[1.0])
    assert one.precision == "fp64"
    single = Record({"update 1 a": np.ones(1, np.float32), "buffer b": np.ones(1)}, False)
    assert single.precision == "fp32"
    other = record(update_1_a=[1.0], update_2_a=[1.0 + 1e-7])
    allowed = SCRIPT_ALLOWED["fp64"]
    text = verdict(differences_of(one, other, allowed), CAUSES, allowed)
    assert "in the first 2 updates (allowed for rounding: 1e-10)" in text
    assert "update 2 a differs by 1e-07" in text
    assert IN_FLOAT32 in text


def test_changes_are_compared_where_the_gradient_is_clear() -> None:
    """The first change of Adam is the sign of a gradient, of which one may be rounding."""
    names = ["update 1 a", "weights after update 1 a"]
    values = [[1.0, 1e-12], [0.1, 0.1]], [[1.0, -1e-12], [0.1, -0.1]], [[1.0, 1e-12], [0.2, 0.1]]
    one, rounded, other = (
        Record(dict(zip(names, map(np.array, arrays), strict=True)), False) for arrays in values
    )
    allowed = SCRIPT_ALLOWED["fp64"]
    assert differences_of(one, rounded, allowed)[0].share <= allowed
    worst = differences_of(one, other, allowed)[0]
    assert worst.name == "weights after update 1 a"
    text = verdict(differences_of(one, other, allowed), CAUSES, allowed)
    assert "weights after update 1 a differs by 50.0%" in text
    assert "in update 1 (allowed" in text


def test_a_gradient_that_is_not_there_or_not_finite_differs() -> None:
    for other in (record(), record(update_1_a=[np.nan]), record(update_1_a=[1.0, 1.0])):
        assert differences_of(record(update_1_a=[1.0]), other, ALLOWED)[0].share >= 1
    same = record(update_1_a=[np.nan, 1.0])
    assert differences_of(same, same, ALLOWED)[0].share == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "no script named"),
        (["missing.py"], "there is no script missing.py"),
        (["experiment=mine"], "mode=prove in place of prove"),
        (["--fast"], "--fast is not a script"),
    ],
)
def test_what_is_no_script_is_refused(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_arguments(arguments)
    assert load("prove script") is prove_script


def proof_run(folder: Path, count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the loop on so many processes, as `ddp-train prove train.py` does."""
    script = folder / "train.py"
    script.write_text(LOOP)
    more = {**proof_environment(folder / str(count), count), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, str(script), *arguments]
    return zygote.run(argv, LIMIT_SECONDS, cwd=folder, env=environment(more), text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "first"),
    [
        ("plain", "double", ""),
        ("plain", "single", ""),
        ("centre", "double", "update 2 "),
        ("short", "double", "update 3 "),
        ("own optimizer", "double", "weights after update 1 "),
        ("own decay", "double", "weights after step 1 "),
        ("alike", "double", ""),
    ],
)
def test_scripts_that_depend_on_the_processes_are_told(
    kind: str, dtype: str, first: str, tmp_path: Path
) -> None:
    """A mean of one process's samples is used in the second step only; the short last batch, of two
    samples, comes in the third."""
    records = []
    for count in (1, 3):
        done = proof_run(tmp_path, count, kind, dtype)
        assert done.returncode == SAVED, done.stderr
        records.append(read(tmp_path / str(count) / GRADIENTS))
    assert not (tmp_path / "runs").exists()
    one, several = records
    allowed = SCRIPT_ALLOWED[one.precision]
    worst = differences_of(one, several, allowed)[0]
    assert (worst.share > allowed) is bool(first)
    if first:
        assert worst.name.startswith(first)
    else:
        assert worst.share < allowed / 100


@pytest.mark.slow
def test_weights_that_come_apart_are_told(tmp_path: Path) -> None:
    """Gradients, and updates of the process that writes them, may agree all the same."""
    done = proof_run(tmp_path, 3, "apart", "double")
    assert done.returncode == 65
    assert "the weights are not the same on all processes" in done.stderr


@pytest.mark.nightly
def test_the_command_tells_a_script_that_is_no_session(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('nothing')")
    assert prove_script([str(script)]) == 70
    assert "on 1 process the script made no update of weights" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize(
    ("kind", "said", "not_said"),
    [("idle", DRAWN_WITHOUT_EFFECT, DRAWN), ("noise", DRAWN, DRAWN_WITHOUT_EFFECT)],
)
def test_draws_without_effect_are_told_from_others(
    kind: str, said: str, not_said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    assert prove_script([str(script), kind, "double"]) == 70
    text = capfd.readouterr().out
    assert "NOT the same on 3 processes as on 1" in text
    assert said in text
    assert not_said not in text
