"""A rank is killed and no step is lost: whole runs that end in the same bytes."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from ddp_train.checkpoints.reader import load_training
from ddp_train.telemetry.metrics_log import last_step
from tests.campaigns.lost_ranks import Kill, Outcome, board_of, differences, kill, outcome, ranks_of
from tests.support.commands import checkpoints, read, run, running, wait_until


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return outcome(tmp_path_factory.mktemp("undisturbed"), 3, [])


@pytest.mark.slow
def test_no_step_is_lost_in_whatever_phase_a_rank_is_killed(
    undisturbed: Outcome, tmp_path: Path
) -> None:
    """Batch norm, dropout, accumulation, clipping; the only checkpoint is that of the end. Rank 0
    serves the store."""
    kills = [
        Kill(0, 3, "forward"),
        Kill(1, 5, "evaluation forward"),
        Kill(2, 12, "backward"),
        Kill(0, 18, "record"),
        Kill(1, 26, "optimizer step"),
    ]
    found = outcome(tmp_path, 3, kills)
    assert len(found.killed) >= 4, found.killed
    assert differences(found, undisturbed) == []
    assert (
        found.summary["steps_redone"] == 0
        and len(found.summary["recoveries"]) >= len(found.killed) - 1
    )
    assert {one["rank"] for one in found.summary["recoveries"]} == {0, 1, 2}
    assert all(0 < one["seconds"] < 30 for one in found.summary["recoveries"] if one["seconds"])
    assert len(checkpoints(tmp_path / "run")) <= 2, "those that survivors have saved are replaced"


@pytest.mark.slow
def test_a_second_rank_may_die_meanwhile(undisturbed: Outcome, tmp_path: Path) -> None:
    draw = random.Random(3)
    found = outcome(tmp_path, 3, [Kill(1, 8, "backward", draw), Kill(0, 20, "forward", draw)])
    assert len(found.killed) == 2 and all(" + " in one for one in found.killed), found.killed
    assert differences(found, undisturbed) == [] and found.summary["steps_redone"] == 0


@pytest.mark.slow
def test_the_best_checkpoint_of_the_same_step_keeps_its_score(tmp_path: Path) -> None:
    """A rank dies in the step after a checkpoint: that is the state, and it has been scored."""
    words = (
        *("checkpoint.every_steps=5", "checkpoint.best=true", "checkpoint.keep=99"),
        "train.epochs=4",
    )
    expected = outcome(tmp_path / "whole", 3, [], *words)
    found = outcome(tmp_path / "lost", 3, [Kill(1, 10, "forward"), Kill(0, 15, "backward")], *words)
    assert len(found.killed) == 2, found.killed
    assert differences(found, expected) == [] and found.summary["steps_redone"] == 0
    runs = tmp_path / "lost/run", tmp_path / "whole/run"
    assert len({(run_dir / "checkpoints/best").readlink() for run_dir in runs}) == 1
    for name in checkpoints(runs[1]):
        ours, theirs = (read(run_dir, f"checkpoints/{name}/manifest.json") for run_dir in runs)
        assert ours["test"] == theirs["test"]


MLP = (
    "model=mlp",
    "data.limit=200",
    "train.epochs=12",
    "train.ema_decay=0.9",
    "checkpoint.every_steps=1000000",
    "train.log_every_steps=2",
)


@pytest.mark.slow
def test_the_same_command_continues_a_run_without_restarts(tmp_path: Path) -> None:
    """The state is saved all the same, with the average of the weights."""
    whole = run(*MLP, "launch.nproc_per_node=3", f"run_dir={tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr
    with running(tmp_path / "run", *MLP, "launch.nproc_per_node=3") as job:
        assert kill(job, 3, Kill(1, 10, "backward"))
        assert job.end() == 70
        said = job.said()
    assert "FATAL died (rank 1 " in said and "LOST" not in said
    (saved,) = checkpoints(tmp_path / "run")
    step = int(saved.removeprefix("step_"))
    assert 10 <= step < 36
    saved = f"saved step {step}, which was in memory outside the processes; "
    assert f"{saved}run_dir={tmp_path}/run resumes from it" in said
    assert read(tmp_path / "run", "failure.json")["detail"].endswith(signal.SIGKILL.name)
    again = run(*MLP, "launch.nproc_per_node=3", f"run_dir={tmp_path}/run")
    assert again.returncode == 0 and f"from step {step}" in again.stdout
    for name in ("model.safetensors", "ema.safetensors"):
        place = f"checkpoints/{checkpoints(tmp_path / 'whole')[-1]}/{name}"
        assert (tmp_path / "run" / place).read_bytes() == (tmp_path / "whole" / place).read_bytes()
    ours, theirs = (read(tmp_path / name, "summary.json") for name in ("run", "whole"))
    assert ours["test"] == theirs["test"] and ours["train"]["loss"] == pytest.approx(
        theirs["train"]["loss"], rel=1e-14
    )


@pytest.mark.slow
def test_ordered_ranks_have_nothing_of_their_own(tmp_path: Path) -> None:
    words = (
        *("strategy=ordered", "strategy.virtual_shards=4", "train.accumulation_steps=1"),
        "train.epochs=4",
    )
    expected = outcome(tmp_path / "whole", 2, [], *words)
    found = outcome(tmp_path / "lost", 2, [Kill(0, 4, "forward"), Kill(1, 15, "backward")], *words)
    assert len(found.killed) == 2, found.killed
    assert differences(found, expected) == [] and found.summary["steps_redone"] == 0


PRUNING = """
import os
import pathlib
import signal
import time

import torch

from ddp_train.recovery.run_keeper import RunKeeper

before_hooks = RunKeeper._before_hooks


class Prune:
    # Once, between step 3 and the hooks that act after it, each process waits to be killed. Later
    # one rank after the other kills itself: in a step, as it acts, in a step.

    def __init__(self, job, run_dir, world):
        self.job, self.run_dir, self.rank = job, run_dir, world.rank
        self.times = torch.zeros(1000)
        waits = pathlib.Path(run_dir, f"waits_{world.rank}")

        def wait_once(keeper, job):
            if job.step == 3 and not waits.exists():
                waits.touch()
                time.sleep(600)
            before_hooks(keeper, job)

        RunKeeper._before_hooks = wait_once

    def __enter__(self):
        self.job.observe(self)

    def __exit__(self, *error):
        pass

    def before_backward(self, loss, units, micro_batch):
        self.die_once({5: 1, 11: 2})

    def after_backward(self, micro_batch):
        pass

    def before_update(self):
        pass

    def after_update(self, steps_done):
        pass

    def die_once(self, victims):
        killed = pathlib.Path(self.run_dir, f"killed_at_{self.job.step}")
        if victims.get(self.job.step) == self.rank and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def due(self, job):
        return job.step + 1

    @torch.no_grad()
    def act(self, job):
        for weight in job.model.parameters():
            weight.mul_(0.99)
        self.times += 1
        self.die_once({8: 0})

    def state_dict(self):
        return {"times": self.times}

    def load_state_dict(self, state):
        self.times = state["times"]
"""


@pytest.mark.slow
def test_weights_that_hooks_change_are_kept_as_they_leave_them(tmp_path: Path) -> None:
    """A step is kept before its hooks act. What they did after it was lost, or done twice.

    Their own tensors are kept with the weights.
    """
    (tmp_path / "pruning.py").write_text(PRUNING)
    (tmp_path / "whole").mkdir()
    for rank in range(3):
        (tmp_path / f"whole/waits_{rank}").touch()
    for step in (5, 8, 11):
        (tmp_path / f"whole/killed_at_{step}").touch()
    words = (
        *MLP[:2],
        "train.epochs=6",
        "checkpoint.every_steps=1000000",
        "hooks=[pruning.Prune]",
        "trusted_modules=[pruning]",
        "launch.nproc_per_node=3",
    )
    env = {"PYTHONPATH": str(tmp_path)}
    whole = run(*words, f"run_dir={tmp_path}/whole", env=env)
    assert whole.returncode == 0, whole.stderr
    with running(tmp_path / "run", *words, "launch.max_restarts=9", env=env) as job:
        waiting = [job.run_dir / f"waits_{rank}" for rank in range(3)]
        wait_until(lambda: all(file.exists() for file in waiting), "step 3")
        os.kill(ranks_of(job)[1], signal.SIGKILL)
        assert job.end() == 0, job.said()
    assert len(list(job.run_dir.glob("killed_at_*"))) == 3
    last = f"checkpoints/{checkpoints(tmp_path / 'whole')[-1]}"
    name = f"{last}/model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    steps = int(last.removeprefix("checkpoints/step_"))
    for run_dir in (tmp_path / "whole", tmp_path / "run"):
        ((_, state),) = load_training(run_dir / last)["objects"]["user_hooks"]
        assert state["times"].tolist() == [steps] * 1000
    assert len(read(tmp_path / "run", "summary.json")["recoveries"]) == 4


MUTE = """
import time

from ddp_train.resilience.preemption import StopController


class Mute:
    def __init__(self, job, run_dir, world):
        self.mine = world.rank == 2

    def __enter__(self):
        if self.mine:
            StopController.propose_step = lambda self, status: time.sleep(600)

    def __exit__(self, *_):
        pass
"""


@pytest.mark.slow
def test_a_death_before_an_agreed_stop_costs_no_step(
    tmp_path: Path,
) -> None:
    """The others wait for its answer, and not in a collective: breaking connections does not wake
    them. They left without saving after half of launch.grace_seconds."""
    (tmp_path / "mute.py").write_text(MUTE)
    words = (
        *MLP[:2],
        MLP[-2],
        "train.epochs=100000",
        "train.log_every_steps=2",
        "launch.nproc_per_node=4",
        "train.evaluate_every_epochs=99999",
        "hooks=[mute.Mute]",
        "trusted_modules=[mute]",
    )
    with running(tmp_path / "run", *words, env={"PYTHONPATH": str(tmp_path)}) as job:
        job.wait_for_step()
        job.process.send_signal(signal.SIGTERM)
        board = board_of(job, 4)
        wait_until(
            lambda: "asked to stop" in (tmp_path / "run/logs/rank_3.log").read_text(),
            "the request",
            seconds=10,
        )
        time.sleep(
            1
        )  # all others stand at the step after which they would stop; evaluations end at once
        began = time.monotonic()
        steps = {status.step for status in board.ranks}
        board.close()
        os.kill(ranks_of(job)[2], signal.SIGKILL)
        assert job.end() == 70, job.said()
        assert time.monotonic() - began < 10, "launch.grace_seconds are 30"
        said = job.said()
    assert len(steps) == 1
    saved = f"saved step {steps.pop()}, which was in memory outside the processes; "
    to_resume = f"run_dir={tmp_path}/run 'trusted_modules=[mute]'"
    assert f"{saved}{to_resume} resumes from it" in said, said


MOURNED = """
import pathlib, weakref
import torch.distributed

class Watch:
    def __init__(self, job, run_dir, world):
        place = pathlib.Path(run_dir, f"collected_{world.rank}")
        weakref.finalize(job.wrapped, lambda: place.write_text(str(torch.distributed.is_initialized())))

    def due(self, job):
        return job.step + 1

    def act(self, job):
        pass
"""


@pytest.mark.slow
def test_ddp_does_not_outlive_its_process_group(tmp_path: Path) -> None:
    """Since steps are captured with its collectives: NCCL does not close before such a graph is
    gone."""
    (tmp_path / "mourned.py").write_text(MOURNED)
    words = (
        *MLP[:2],
        "train.max_steps=3",
        "launch.nproc_per_node=3",
        "hooks=[mourned.Watch]",
        "trusted_modules=[mourned]",
        "launch.max_restarts=1",
    )
    done = run(*words, f"run_dir={tmp_path}/run", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"run/collected_{rank}").read_text() for rank in range(3)] == ["True"] * 3


ODD = """
import torch
from torch import nn


class Net(nn.Module):
    # Puts a buffer elsewhere in each step, and has a state that it makes anew.

    def __init__(self, parts=3):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(parts - 1)])
        self.last = nn.Linear(64, 10, bias=False)
        self.register_buffer("seen", torch.zeros(1))
        self.steps = 0

    def get_extra_state(self):
        return torch.tensor(self.steps)

    def set_extra_state(self, state):
        self.steps = int(state)

    def forward(self, images):
        if self.training:
            self.steps += 1
            self.seen = self.seen + 1
        return self.last(self.layers(images.flatten(1))) + 0 * self.steps


class Own(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data = weight.data.clone()
"""


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_states_that_lie_elsewhere_after_each_step_are_kept(parts: int, tmp_path: Path) -> None:
    """Of one weight, two of three ranks have nothing to keep."""
    (tmp_path / "odd.py").write_text(ODD)
    words = (
        *("model._target_=odd.Net", f"model.parts={parts}", "data.limit=200", "train.epochs=25"),
        *("optimizer._target_=odd.Own", "checkpoint.every_steps=1000000"),
        *("trusted_modules=[odd]", "launch.nproc_per_node=3"),
    )
    env = {"PYTHONPATH": str(tmp_path)}
    whole = run(*words, f"run_dir={tmp_path}/whole", env=env)
    assert whole.returncode == 0, whole.stderr
    with running(tmp_path / "run", *words, "launch.max_restarts=9", env=env) as job:
        for step, phase in ((4, "forward"), (9, "backward")):
            assert kill(job, 3, Kill(1, step, phase))
        assert job.end() == 0, job.said()
    assert read(tmp_path / "run", "summary.json")["recoveries"]
    name = f"checkpoints/{checkpoints(tmp_path / 'whole')[-1]}/model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


HOLES = """
import torch


class Holes:
    classes = [str(number) for number in range(10)]

    def __init__(self, train: bool):
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.rand(240, 1, 8, 8, generator=draw)
        self.targets = torch.randint(10, (240,), generator=draw)
        if train:
            self.inputs[:3] = torch.nan

    def __len__(self):
        return 240

    def __getitem__(self, number):
        return self.inputs[number], self.targets[number]
"""


@pytest.mark.slow
def test_skipped_steps_are_counted_past_a_kill_and_a_resume(tmp_path: Path) -> None:
    (tmp_path / "holes.py").write_text(HOLES)
    holes = {"PYTHONPATH": str(tmp_path)}
    words = [
        "data._target_=holes.Holes",
        "trusted_modules=[holes]",
        "model=mlp",
        "launch.nproc_per_node=3",
    ]
    words += [
        "train.log_every_steps=5",
        "train.global_batch_size=24",
        "train.epochs=20",
        "train.on_non_finite=skip",
    ]
    whole = run(*words, f"run_dir={tmp_path}/whole", env=holes)
    assert whole.returncode == 0, whole.stderr
    expected = read(tmp_path / "whole", "summary.json")["steps_skipped"]
    assert f"{expected} of 200 steps skipped: " in whole.stdout
    assert f"{expected} of 200 steps skipped: " in (tmp_path / "whole/report.html").read_text()
    with running(tmp_path / "run", *words, "launch.max_restarts=2", env=holes) as job:
        for killed in (Kill(1, 12, "backward"), Kill(0, 22, "forward")):
            assert kill(job, 3, killed)
        wait_until(lambda: job.said().count("restarting (") == 2, "both restarts")
        restarted_at = last_step(tmp_path / "run")
        wait_until(lambda: last_step(tmp_path / "run") > restarted_at, "a line after the kills")
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 75, job.said()
    resumed = run(*words, f"run_dir={tmp_path}/run", env=holes)
    assert resumed.returncode == 0, resumed.stderr
    summary = read(tmp_path / "run", "summary.json")
    assert (len(summary["recoveries"]), summary["steps_skipped"]) == (2, expected)
    assert expected > 20


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
def test_weights_that_have_diverged_are_not_saved(skip: bool, tmp_path: Path) -> None:
    """The last step before a loss that is not finite is whole, but training cannot go on from
    there."""
    run_dir = tmp_path / "run"
    words = ["model=mlp", "data.limit=200", "train.epochs=2", "launch.nproc_per_node=3"]
    fails = ["optimizer.lr=1e20"]
    if skip:
        fails += ["train.on_non_finite=skip", "checkpoint.every_steps=2"]
    failed = run(*words, *fails, f"run_dir={run_dir}")
    assert failed.returncode == 70 and "FATAL non_finite_loss" in failed.stderr, failed.stderr
    assert not (run_dir / "checkpoints").exists()
    assert failed.stderr.endswith(f"the same command with run_dir={run_dir} starts over\n")
    again = run(*words, "optimizer.lr=0.01", f"run_dir={run_dir}")
    assert again.returncode == 0, again.stderr


COUNTS = """
import os
import signal

import numpy
import torch


class Counts:
    \"\"\"Counts updates by a hook of the optimizer and by an observer, and acts once an epoch.

    Its table changes in two steps: before a kill, and two steps before another one.
    \"\"\"

    def __init__(self, job, run_dir, world):
        self.job, self.run_dir, self.rank = job, run_dir, world.rank
        self.counts = {"post hook": 0, "observer": 0}
        self.table = numpy.zeros(10**6)

    def __enter__(self):
        self.job.observe(self)
        self.handle = self.job.optimizer.register_step_post_hook(self.see_step)

    def __exit__(self, *error):
        self.handle.remove()

    def see_step(self, optimizer, args, kwargs):
        self.counts["post hook"] += 1

    def before_backward(self, loss, units, micro_batch):
        victim = {11: 1, 17: 0, 23: 2}.get(self.job.step)
        done = self.run_dir / f"killed at {self.job.step}"
        if self.rank == victim and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def after_backward(self, micro_batch):
        pass

    def before_update(self):
        pass

    def after_update(self, steps_done):
        self.counts["observer"] += 1
        if steps_done in (17, 21):
            self.table[-1] += steps_done

    def act(self, job):
        if self.rank == 0:
            print(f"step {job.step}: {self.counts}, {self.table.sum()}", flush=True)

    def state_dict(self):
        return {"counts": self.counts, "table": torch.as_tensor(self.table)}

    def load_state_dict(self, state):
        self.counts = dict(state["counts"])
        self.table = state["table"].numpy()
"""


@pytest.mark.slow
def test_what_hooks_count_in_each_step_is_kept_with_it(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(COUNTS)
    words = ["model=mlp", "data.limit=210", "train.global_batch_size=21", "train.epochs=3"]
    words += ["hooks=[counts.Counts]", "launch.nproc_per_node=3", "launch.max_restarts=3"]
    done = run(*words, f"run_dir={tmp_path}/run", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no step is lost") == 3, done.stderr
    for step, table in ((10, 0.0), (20, 17.0), (30, 38.0)):
        counts = {"post hook": step, "observer": step}
        assert f"step {step}: {counts}, {table}\n" in done.stdout, done.stdout
