"""States of a session that turn into something else in training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, checkpoints, read, run, weights

SCRIPT = """
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ddp_train

folder, kind, processes = sys.argv[1:]


class Best:
    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def rate(step):
    return 0.05 * (1 + np.cos(np.pi * step / 12))


with ddp_train.session(folder, processes=int(processes), device="cpu") as run:
    killed = Path(folder, "killed")
    torch.manual_seed(0)
    model = run.wrap(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best = Best()
    inputs = torch.randn(36, 3, generator=torch.Generator().manual_seed(1))
    loader = run.loader(torch.utils.data.TensorDataset(inputs), global_batch_size=9)
    run.resume(model=model, optimizer=optimizer, best=best)
    for epoch in run.epochs(3):
        for (batch,) in loader:
            lr = rate(run.step)
            optimizer.param_groups[0]["lr"] = float(lr) if kind == "plain" else lr
            optimizer.zero_grad()
            run.mean((model(batch) - 1).square()[:, 0]).backward()
            optimizer.step()
            if kind == "kill" and run.step == 6 and not killed.exists():
                if run.rank == int(processes) - 1:
                    while not Path(folder, "checkpoints/step_00000004").exists():
                        time.sleep(0.01)
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            best.value = np.float32(run.step) if kind != "plain" else float(run.step)
            if kind == "array" and run.step >= 6:
                best.value = np.ones(3)
"""

LAST_GOOD = {1: 4, 3: 6}
"""The step that is resumed from, by the number of processes: one alone has its checkpoints, each
of several keeps the step before too."""


def train(folder: Path, kind: str, processes: int) -> tuple[int, str, Path]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    run_dir = folder / f"{kind}_{processes}"
    command = [sys.executable, str(script)]
    done = run(str(run_dir), kind, str(processes), command=command, env={"PYTHONPATH": str(ROOT)})
    return done.returncode, done.stdout + done.stderr, run_dir


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_numbers_of_numpy_are_saved_kept_and_rescued(tmp_path: Path, processes: int) -> None:
    """A rate by numpy's cosine, and a mean of numpy's."""
    _, _, plain = train(tmp_path, "plain", processes)
    code, said, numbers = train(tmp_path, "numbers", processes)
    assert code == 0 and "corrupt" not in said, said
    assert checkpoints(numbers) == ["step_00000008", "step_00000012"]
    assert weights(numbers) == weights(plain)
    code, said, _ = train(tmp_path, "kill", processes)
    assert code != 0
    code, again, killed = train(tmp_path, "kill", processes)
    assert code == 0 and f"resumed from step {LAST_GOOD[processes]} " in again, said + again
    assert weights(killed) == weights(plain)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_an_array_ends_the_run_with_its_place_and_the_step_before(
    tmp_path: Path, processes: int
) -> None:
    code, said, run_dir = train(tmp_path, "array", processes)
    assert code == 65, said
    failure = read(run_dir, "failure.json")
    assert failure["kind"] == "state"
    assert failure["detail"] == "the state_dict of best is not plain data: ['value'] is a ndarray"
    assert "use only tensors, numbers and texts" in failure["remedy"]
    assert "check the disk" not in said and "\x1b" not in said
    assert checkpoints(run_dir)[-1] == f"step_{LAST_GOOD[processes]:08}", said
    code, said, _ = train(tmp_path, "array", processes)
    assert code == 65 and f"resumed from step {LAST_GOOD[processes]} " in said, said
