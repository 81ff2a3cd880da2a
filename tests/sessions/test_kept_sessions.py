"""Processes of a session are killed or hang: what `run.resume` got lies outside of them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.campaigns.lost_session import (
    SCRIPT,
    Blow,
    Outcome,
    Size,
    attempts_of,
    differences,
    ledgers_of,
    outcome,
)
from tests.support.commands import ROOT, checkpoints, running, wait_until, weights

ALL = (0, 1, 2)
SMALL = Size(epochs=3, hang_seconds=3)
"""Three epochs of nine steps, and one checkpoint, at the end."""
SAVING = Size(epochs=3, save_every=2)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Outcome:
    return outcome(folder / "undisturbed", "plain", 3, SMALL)


def test_one_or_all_are_killed_in_training(folder: Path, undisturbed: Outcome) -> None:
    """Batch norm by process, a schedule, a moving average, a scale, and an object with plain state
    and a tensor that it makes anew."""
    blows = [Blow(2, (1,)), Blow(1, (0,)), Blow(2, ALL)]
    found = outcome(folder / "killed", "plain", 3, SMALL, blows)
    assert differences(found, undisturbed) == [], found.said
    assert found.redone == 0
    assert found.said.count("no step is lost") == found.said.count("LOST") == len(blows), found.said


def test_a_death_in_an_evaluation_costs_the_last_step_before_it(
    folder: Path, undisturbed: Outcome
) -> None:
    """What follows the loop over batches belongs to its last step: it is never resumed without a
    batch."""
    found = outcome(folder / "scored", "plain", 3, SMALL, [Blow(0, (2,), moment="evaluation")])
    assert differences(found, undisturbed) == [], found.said
    before, after = attempts_of(found.ledgers[0])
    assert after[0] == before[-1] == 8


def test_a_process_that_hangs(folder: Path, undisturbed: Outcome) -> None:
    blows = [Blow(3, (1,), signal.SIGSTOP)]
    found = outcome(folder / "hung", "plain", 3, SMALL, blows)
    assert differences(found, undisturbed) == [], found.said
    assert found.redone == 0 and "LOST hang (rank 1 " in found.said, found.said


def test_a_checkpoint_is_being_written(folder: Path) -> None:
    expected = outcome(folder / "saving", "plain", 3, SAVING)
    blows = [Blow(0, (0,), moment="saving"), Blow(0, ALL, moment="saving")]
    found = outcome(folder / "saving_killed", "plain", 3, SAVING, blows)
    assert len(found.dead) == 2 and found.redone == 0
    assert differences(found, expected) == [], found.said


@pytest.mark.parametrize("kind", ["accumulate", "gan"])
def test_windows_of_gradients_and_two_models(kind: str, folder: Path) -> None:
    expected = outcome(folder / kind, kind, 3, SMALL)
    blows = [Blow(2, (2,)), Blow(1, ALL)]
    found = outcome(folder / f"{kind}_killed", kind, 3, SMALL, blows)
    assert len(found.dead) == 2 and found.redone == 0
    assert differences(found, expected) == [], found.said


def test_the_same_command_goes_on_where_no_restart_is_left(
    folder: Path, undisturbed: Outcome
) -> None:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = {"DDP_TRAIN_PROCESSES": "3", "PYTHONPATH": str(ROOT), "RESTARTS": "0"}
    command = [sys.executable, str(script)]
    words = ["plain", *SMALL.words()]
    run_dir = folder / "again"

    def has_begun() -> bool:
        return all(len(ledger) > 4 for ledger in ledgers_of(run_dir, 3))

    with running(run_dir, *words, env=env, command=command) as job:
        wait_until(has_begun, "steps")
        os.kill(ledgers_of(run_dir, 3)[2][-1].process, signal.SIGKILL)
        assert job.end() == 70
        said = job.said()
    (saved,) = checkpoints(run_dir)
    step = int(saved.removeprefix("step_"))
    assert (
        f"saved step {step}, which was in memory outside the processes; the same command resumes"
        in said
    )
    with running(run_dir, *words, env=env, command=command) as job:
        assert job.end() == 0, job.said()
        assert f"resumed from step {step} " in job.said()
    assert weights(run_dir) == undisturbed.weights


DAMAGED = """
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import ddp_train

run_dir = sys.argv[1].removeprefix("run_dir=")
damage = sys.argv[2]
with ddp_train.session(run_dir, max_restarts=9) as run:
    model = run.wrap(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(torch.utils.data.TensorDataset(torch.ones(60, 3)), global_batch_size=6)
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(2):
        for (inputs,) in loader:
            killed = Path(f"{run_dir}.killed")
            if run.step == 14 and run.rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            run.mean(model(inputs).squeeze(1)).backward()
            optimizer.step()
            if run.step == 12 and not killed.exists():
                with torch.no_grad():
                    if damage == "nan":
                        model.weight.mul_(torch.nan)
                    elif run.rank == 1:
                        model.weight.add_(1)
"""


LARGE = """
import sys

import torch
from torch import nn

import ddp_train


class Corpus:
    def __init__(self):
        self.text = "x" * 2**24

    def state_dict(self):
        return {"text": self.text}

    def load_state_dict(self, state):
        self.text = state["text"]


with ddp_train.session(sys.argv[1].removeprefix("run_dir="), processes=2) as run:
    model = run.wrap(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(torch.utils.data.TensorDataset(torch.ones(240, 3)), global_batch_size=6)
    run.resume(model=model, optimizer=optimizer, corpus=Corpus())
    for epoch in run.epochs(1):
        for (inputs,) in loader:
            optimizer.zero_grad()
            run.mean(model(inputs).squeeze(1)).backward()
            optimizer.step()
"""


def test_what_is_large_and_no_tensor_is_kept_at_a_pace(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LARGE)
    command = [sys.executable, str(script)]
    with running(tmp_path / "run", env={"PYTHONPATH": str(ROOT)}, command=command) as job:
        assert job.end() == 0, job.said()
        said = job.said()
    assert (
        said.count(
            "note: ddp_train.session: copying a step into memory, for a restart after a failure, "
        )
        == 1
    ), said
    assert "(corpus has 16 MiB that are not tensors). So only one step in " in said, said


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        ("apart", "the last step cannot be saved: the weights are not the same on all processes"),
        ("nan", "the last step is not saved: a loss or a weight is not finite"),
    ],
)
def test_weights_that_nobody_saves(damage: str, cause: str, tmp_path: Path) -> None:
    """Each rank keeps a part of them: of weights that have come apart, together they are
    nobody's."""
    script = tmp_path / "train.py"
    script.write_text(DAMAGED)
    env = {"DDP_TRAIN_PROCESSES": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    with running(tmp_path / "run", damage, env=env, command=command) as job:
        assert job.end() == 0, job.said()
        said = job.said()
    assert cause in said and "resumed from step 10 " in said, said
