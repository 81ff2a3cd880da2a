"""Hooks of the user's own: when they act, with what arguments, and what they go on with."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ddp_train.checkpoints.training_state import TrainingState
from ddp_train.distributed.world import World
from ddp_train.engine.hook_context import HookContext
from ddp_train.engine.loop import Job
from ddp_train.engine.user_hooks import UserHook, UserHooks
from ddp_train.errors import ConfigError, StateError
from tests.support.commands import SMALL, THREE, environment, fatal_lines, metrics, run

MINE = """
import json


class Counts:
    def __init__(self, job, run_dir, world, every=100, name="counts"):
        self.every, self.file, self.steps = every, run_dir / f"{name}_{world.rank}.json", []

    def due(self, job):
        return (job.step // self.every + 1) * self.every

    def act(self, job):
        self.steps.append(job.step)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.write_text(json.dumps(self.steps))


class Epochs(Counts):
    due = property()  # without: hasattr says no


class Late:
    def __init__(self, job, run_dir, world):
        pass

    def due(self, job):
        return job.step

    def act(self, job):
        pass
"""


@pytest.mark.slow
def test_hooks_act_when_they_are_due_and_go_on_with_their_state(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    env = environment({"PYTHONPATH": str(tmp_path)})
    counts = ["{_target_: mine.Counts, every: 3}", "{_target_: mine.Counts, every: 4, name: fours}"]
    hooks = f"hooks=[{counts[0]}, {{_target_: mine.Epochs, name: epochs}}, {counts[1]}]"
    words = [
        *SMALL,
        THREE,
        hooks,
        f"run_dir={tmp_path}/run",
        "train.global_batch_size=48",
        "train.epochs=3",
    ]
    for steps in (7, 12):  # five steps an epoch
        done = run(*words, f"train.max_steps={steps}", env=env)
        assert done.returncode == 0, done.stderr
    for rank in range(3):
        names = ("counts", "epochs", "fours")
        found = {
            name: json.loads((tmp_path / f"run/{name}_{rank}.json").read_text()) for name in names
        }
        assert found == {"counts": [3, 6, 9, 12], "epochs": [5, 7, 10, 12], "fours": [4, 8, 12]}
    for hook, message in {
        "mine.Late": ("mine.Late.due(job) returned 0; return the step after which act is called"),
        "{_target_: mine.Counts, evry: 3}": "cannot be called with evry=3: ",
    }.items():
        done = run(*SMALL, THREE, f"hooks=[{hook}]", f"run_dir={tmp_path}/wrong", env=env)
        assert (
            done.returncode == 2 and message in done.stderr and len(fatal_lines(done.stderr)) == 1
        ), done.stderr


ANNEALED = """
class Annealed:
    step = 0

    def loss(self, model, batch):
        images, labels = batch
        return 0 * model(images).sum() + self.step * len(labels), len(labels)


class TellStep:
    def __init__(self, job, run_dir, world):
        self.job = job

    def __enter__(self):
        self.act(self.job)

    def __exit__(self, *error):
        pass

    def due(self, job):
        return job.step + 1

    def act(self, job):
        job.module.task.step = job.step
"""


@pytest.mark.slow
def test_a_hook_tells_the_task_the_step(tmp_path: Path) -> None:
    (tmp_path / "annealed.py").write_text(ANNEALED)
    env = environment({"PYTHONPATH": str(tmp_path)})
    words = [
        *SMALL,
        THREE,
        "task._target_=annealed.Annealed",
        "hooks=[annealed.TellStep]",
        f"run_dir={tmp_path}/run",
        "train.log_every_steps=1",
    ]
    for steps in (3, 6):  # the second run resumes
        done = run(*words, f"train.max_steps={steps}", env=env)
        assert done.returncode == 0, done.stderr
    losses = [line["loss"] for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert losses == [0, 1, 2, 3, 4, 5]


class Acts:
    def __init__(self, state: Any = None) -> None:
        self.state = state
        self.acted = []

    def act(self, job: Job) -> None:
        self.acted.append(job.step)

    def due(self, job: Job) -> int:
        return job.step + 2 - job.step % 2

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def at(step: int) -> Job:
    return Job(*cast(Any, [None] * 8), step=step)


def context_of(job: Job) -> HookContext:
    return HookContext(job, Path(), World())


def hooks_of(hooks: list[Any], paths: list[str]) -> UserHooks:
    return UserHooks(hooks, paths, context_of(at(0)))


def test_a_hook_that_is_owed_acts_only_if_it_was_due() -> None:
    """Of the processes before these, which ended between a step and its hooks."""
    for step, acted in ((4, [4]), (5, [])):
        hook = Acts()
        job = at(step)
        UserHook(hook, "mine.Acts", context_of(job)).act(job)
        assert hook.acted == acted


def test_hook_reads_the_score_and_stops_the_run(caplog: pytest.LogCaptureFixture) -> None:
    job = at(7)
    context = context_of(job)
    caplog.set_level("INFO", "ddp_train.engine")
    assert context.score is None and job.stop.allows(7)
    job.scores = {"test": cast(Any, SimpleNamespace(metrics={"loss": 0.5}))}
    assert context.score is not None and context.score.metrics == {"loss": 0.5}
    context.stop("the loss is low enough")
    assert job.stop.last_step == 7 and not job.stop.allows(7)
    assert "stops the run after step 7: the loss is low enough" in caplog.text


def test_states_find_the_hooks_of_their_class() -> None:
    saved = hooks_of(
        [Acts({"n": 1}), Acts([torch.ones(2), None]), Acts()], ["a.A", "a.A", "b.B"]
    ).state()
    made = [Acts(), Acts(), Acts("kept")]
    (note,) = hooks_of(made, ["c.C", "a.A", "b.B"]).load_state(saved)
    assert (
        note
        == "note: the checkpoint has the state of a hook a.A; this run has no such hook, and leaves the state out"
    )
    assert [hook.state for hook in made] == [None, {"n": 1}, "kept"]


def test_a_state_that_no_checkpoint_could_give_back_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"state_dict\(\) is not .*: \[.here.\]\[0\] is a SimpleN"
    ):
        hooks_of([Acts({"here": [SimpleNamespace()]})], ["a.A"])


def test_a_state_is_a_copy_and_kept_for_hooks_that_only_enter() -> None:
    """The hook goes on with its own list and tensor while a checkpoint is written."""
    numbers = [1]
    tensor = torch.zeros(2)
    hook = Acts({"numbers": numbers, "tensor": tensor})
    states = hooks_of([hook], ["a.A"]).state()
    saved = TrainingState({"user_hooks": states}, torch.empty(1, 0)).as_dict()
    ((path, state),) = saved["objects"]["user_hooks"]
    numbers.append(2)
    tensor.add_(1)
    assert states[0][1]["numbers"] == [1]
    assert path == "a.A" and state["numbers"] == [1] and state["tensor"].tolist() == [0, 0]

    enters = SimpleNamespace(state_dict=lambda: {"n": 7}, __enter__=None, __exit__=None)
    hooks = hooks_of([enters], ["a.Enters"])
    assert hooks.state() == [["a.Enters", {"n": 7}]] and hooks.acting == []


def test_the_state_of_a_module_is_a_hooks_too() -> None:
    """As an average of the weights has it: an OrderedDict."""
    module = torch.nn.BatchNorm1d(2)
    ((_, state),) = hooks_of([Acts({"average": module.state_dict()})], ["a.A"]).state()
    assert type(state["average"]) is dict
    torch.nn.BatchNorm1d(2).load_state_dict(state["average"])


def test_numbers_of_numpy_are_saved_as_pythons() -> None:
    state = {"best": [np.float64(0.5)], "seen": Counter("aab")}
    ((_, saved),) = hooks_of([Acts(state)], ["a.A"]).state()
    assert saved == state and type(saved["best"][0]) is float


def test_a_state_that_turns_into_an_array_is_named() -> None:
    hook = Acts({"best": 0.5})
    hooks = hooks_of([hook], ["a.A"])
    hook.state = {"best": np.ones(2)}
    with pytest.raises(StateError, match=r"^a.A.state_dict\(\) is not plain data: \['best'\] is a"):
        hooks.state()
