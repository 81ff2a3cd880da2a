"""States of a configured run that turn into something else in training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import checkpoints, read, run

CODE = """
import numpy as np
import torch


class Best:
    def __init__(self, job, run_dir, world):
        self.value = 0.0

    def due(self, job):
        return job.step + 1

    def act(self, job):
        self.value = np.float64(job.step)
        if job.step == 6:
            self.value = self.of_step_6()

    def of_step_6(self):
        return self.value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Array(Best):
    def of_step_6(self):
        return np.ones(2)


class Killed(Best):
    def of_step_6(self):
        raise ValueError("boom")


class Scaled(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["scale"] = np.float64(0.5)
"""


def train(folder: Path, hook: str, processes: int) -> tuple[int, str, Path]:
    (folder / "plain_hooks.py").write_text(CODE)
    run_dir = folder / f"{hook}_{processes}"
    done = run(
        f"hooks=[plain_hooks.{hook}]",
        "optimizer._target_=plain_hooks.Scaled",
        "trusted_modules=[plain_hooks]",
        "model=mlp",
        "data=digits",
        "data.limit=60",
        "train.global_batch_size=15",
        "train.epochs=3",
        f"launch.nproc_per_node={processes}",
        f"run_dir={run_dir}",
        env={"PYTHONPATH": str(folder)},
    )
    return done.returncode, done.stdout + done.stderr, run_dir


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_hooks_and_optimizers_save_numbers_of_numpy(tmp_path: Path, processes: int) -> None:
    code, said, run_dir = train(tmp_path, "Best", processes)
    assert code == 0 and "corrupt" not in said, said
    assert checkpoints(run_dir)[-1] == "step_00000012"
    code, said, run_dir = train(tmp_path, "Killed", processes)
    assert code == 70 and "saved step 6" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_an_array_of_a_hook_ends_the_run_with_its_place(tmp_path: Path, processes: int) -> None:
    code, said, run_dir = train(tmp_path, "Array", processes)
    assert code == 65, said
    failure = read(run_dir, "failure.json")
    assert failure["kind"] == "state" and failure["step"] == 6
    place = "plain_hooks.Array.state_dict() is not plain data: ['value'] is a ndarray"
    assert failure["detail"] == place
    assert "use only tensors, numbers and texts" in failure["remedy"]
    assert checkpoints(run_dir)[-1] in ("step_00000005", "step_00000006"), said
