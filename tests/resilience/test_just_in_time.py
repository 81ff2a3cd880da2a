"""A rank is killed and no step is lost: what is published, who saves, and whole runs that end in
the same bytes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_train.data.batch_plan import MicroBatch
from ddp_train.distributed.process_group import buffer_places
from ddp_train.errors import LaunchError, PeersLostError
from ddp_train.optim.nan_guard import DeviceNonFiniteCheck, NonFiniteCheck
from ddp_train.recovery import rank_state
from ddp_train.recovery.just_in_time import RecoveryHook
from ddp_train.recovery.rank_state import KnownState, PublishedState, Row
from ddp_train.resilience.failure import is_peer_error
from ddp_train.resilience.heartbeat import (
    NOT_SAVED,
    SAVE,
    SAVED,
    STOP,
    STOPPED,
    TRAINING,
    RankStatus,
    StatusBoard,
)
from ddp_train.resilience.lost_ranks import LATE_SECONDS, Loss, save_by_survivor
from ddp_train.tasks.mean_loss import Mean, RunningLoss
from tests.campaigns.lost_ranks import Kill, Outcome, board_of, differences, kill, outcome, ranks_of
from tests.support.commands import checkpoints, read, run, running, wait_until


class Sharded(torch.optim.SGD):
    """Somebody's own: it may exchange numbers in the middle of an update."""


def test_a_row_keeps_the_last_three_steps() -> None:
    tensors = [
        torch.zeros(3),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(2, 2, dtype=torch.float64),
    ]
    with closing(StatusBoard.create(1)) as board:
        empty = [torch.zeros(0), torch.ones(2)]
        row = Row(board.row(0, Row.size(empty)), empty)
        row.write(1, Mean(), empty)
        assert [tensor.tolist() for tensor in (row.read(1) or pytest.fail("it is there"))[1]] == [
            [],
            [1.0, 1.0],
        ]
    with closing(StatusBoard.create(2)) as board:
        row = Row(board.row(1, Row.size(tensors)), tensors)
        assert row.read(0) is None, "nothing was written yet"
        for step in range(5):
            for number, tensor in enumerate(tensors):
                tensor.fill_(10 * step + number)
            row.write(step, Mean(step / 3, step), tensors)
        seen_by_another = Row(board.row(1, Row.size(tensors)), tensors)
        assert seen_by_another.read(1) is None and seen_by_another.read(5) is None
        for step in (2, 3, 4):
            loss, found = seen_by_another.read(step) or pytest.fail("it is there")
            assert loss == Mean(step / 3, step)
            assert [tensor.unique().item() for tensor in found] == [
                10 * step,
                10 * step + 1,
                10 * step + 2,
            ]
            assert [(tensor.shape, tensor.dtype) for tensor in found] == [
                (one.shape, one.dtype) for one in tensors
            ]
        Row.head.pack_into(
            row.memory, row.begins[5 % 3], 0, 1.0, 1.0
        )  # killed while it wrote step 5
        assert row.read(2) is None and row.read(5) is None and row.read(4)


def test_buffers_are_looked_up_where_a_model_may_replace_them() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(3)))
    model.append(model[0])  # the same once more: it is one buffer
    places = buffer_places(model)
    found = [holder[name] for holder, name in places]
    assert len(found) == 6 and all(
        one is other for one, other in zip(found, model.buffers(), strict=True)
    )
    model[1][0].running_mean = torch.full((3,), 7.0)
    found = [holder[name] for holder, name in places]
    assert all(one is other for one, other in zip(found, model.buffers(), strict=True))


@pytest.mark.parametrize(
    ("phase", "of_peer", "buffers_differ", "optimizer", "intact"),
    [
        ("backward", True, True, torch.optim.AdamW, True),
        ("evaluation forward", True, False, torch.optim.AdamW, True),
        ("optimizer step", True, True, torch.optim.AdamW, True),
        ("optimizer step", True, True, Sharded, False),
        ("optimizer step", True, False, torch.optim.AdamW, False),
        ("backward", False, True, torch.optim.AdamW, True),
        ("optimizer step", False, True, torch.optim.AdamW, False),
        ("evaluation forward", False, True, torch.optim.AdamW, False),
    ],
)
def test_a_state_in_the_middle_of_an_update_is_not_believed(
    phase: str, of_peer: bool, buffers_differ: bool, optimizer: type[torch.optim.SGD], intact: bool
) -> None:
    stepper = SimpleNamespace(optimizer=optimizer([nn.Parameter(torch.zeros(1))], lr=0.1))
    job: Any = SimpleNamespace(
        stepper=stepper, strategy=SimpleNamespace(buffers_differ=buffers_differ)
    )
    with closing(StatusBoard.create(1)) as board:
        assert PublishedState(board, 0).is_intact(job, phase, of_peer) == intact


def test_the_thread_that_beats_obeys_the_launcher() -> None:
    """The worker and what saves its state ask the board for the same rank, each for itself."""
    with closing(StatusBoard.create(2)) as board:
        called: list[int] = []
        board.ranks[1].on_stop = lambda: called.append(1)
        board.ranks[1].obey_launcher()
        assert not called, "no order yet"
        board.ranks[1].recovery.order = STOP
        board.ranks[1].obey_launcher()
        board.ranks[1].obey_launcher()
        assert called == [1]


class Flag:
    """A StopFlag whose memory is the CPU's."""

    def __init__(self) -> None:
        self.on_device = torch.zeros(())

    @property
    def is_set(self) -> bool:
        return bool(self.on_device)


def test_no_update_is_made_of_what_an_aborted_exchange_left() -> None:
    weight = nn.Parameter(torch.ones(3))
    flag = Flag()
    optimizer = torch.optim.AdamW([{"params": [weight], "initial_lr": 0.1}], lr=0.1, fused=True)
    check = DeviceNonFiniteCheck(optimizer, RunningLoss())
    check.peers = flag  # type: ignore[assignment]
    for step in range(5):
        if step == 3:
            before = weight.detach().clone(), optimizer.state[weight]["exp_avg"].clone()
            flag.on_device.fill_(1)  # gradients are finite, and garbage
        weight.grad = torch.full((3,), step + 1.0)
        assert check.allows(step, None), "the host does not wait"
        optimizer.step()
    assert torch.equal(weight, before[0]) and torch.equal(
        optimizer.state[weight]["exp_avg"], before[1]
    )
    assert optimizer.state[weight]["step"] == check.steps_taken(5) == 3


def test_the_host_asks_before_an_update_too() -> None:
    weight = nn.Parameter(torch.ones(3))
    flag = Flag()
    optimizer = torch.optim.RMSprop([{"params": [weight], "initial_lr": 0.1}], lr=0.1)
    check = NonFiniteCheck(optimizer, RunningLoss())
    check.peers = flag  # type: ignore[assignment]
    weight.grad = torch.ones(3)
    assert check.allows(0, None) and check.steps_taken(7) == 7
    flag.on_device.fill_(1)
    weight.grad = torch.full(
        (3,), torch.nan
    )  # PeersLostError all the same, and no NonFiniteLossError
    with pytest.raises(PeersLostError, match="remote process exited") as caught:
        check.allows(1, None)
    assert is_peer_error(caught.value)


def test_a_survivor_goes_back_to_the_last_completed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has queued 9 steps, of which the device has done 6; hooks acted after 4. All but the
    GPU is real."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(rank_state, "break_connections", lambda: None)
    module = nn.Sequential(nn.Linear(1, 1))
    losses = RunningLoss()
    module.register_buffer("mask", torch.tensor([1.0, 0.0]))
    module.register_buffer(
        "unset", torch.full((2,), torch.nan, dtype=torch.bfloat16)
    )  # which numpy does not know
    for step in range(4, 9):
        part = MicroBatch(0, step, np.arange(2), 2, 1.0, True)
        losses.add(torch.tensor(float(step)), 2, part)
    losses.add(
        torch.tensor(100.0), 2, MicroBatch(0, 5, np.arange(2), 0, 1.0, True)
    )  # stands in, and does not count
    check = SimpleNamespace(steps_taken=lambda done: done - 3)
    stepper = SimpleNamespace(losses=losses, check_finite=check, steps_done=9, norm=torch.ones(()))
    job: Any = SimpleNamespace(module=module, stepper=stepper, step=9)
    with closing(StatusBoard.create(3)) as board:
        own = rank_state.StateOnDevice(board, 1, "cuda:1")
        own.before = [buffer.clone() for buffer in module.buffers()]
        own.roll_back(job)
        assert job.step == stepper.steps_done == board.ranks[1].step == 6 and stepper.norm is None
        known = own.states_of_ranks(6)
        assert [one and one.loss for one in known] == [Mean(), Mean(4.0 + 5.0, 4), Mean()]
        assert all(one and torch.equal(one.buffers[0], torch.tensor([1.0, 0.0])) for one in known)
        own.keep_losses(SimpleNamespace(step=6, stepper=SimpleNamespace(losses=RunningLoss())))  # type: ignore[arg-type]
        job.step = stepper.steps_done = 9
        own.roll_back(job)
        assert own.states_of_ranks(6)[1] == KnownState(Mean(), own.before), (
            "the noted ones count: hooks had begun after step 6"
        )
        module.mask += 1
        with pytest.raises(LaunchError, match="the buffer mask changes in training"):
            own.roll_back(job)


@contextmanager
def survivors(
    *steps: int | None, answer: Callable[[int], int] = lambda _: SAVED, deaf: int = -1
) -> Iterator[tuple[StatusBoard, set]]:
    """Ranks that have completed so many steps, stop when they are told and answer an order to save;
    None: dead. deaf: a rank that does not stop. Yields the board and the ranks that are alive."""
    over = threading.Event()
    with closing(StatusBoard.create(len(steps))) as board:
        alive = {rank for rank, step in enumerate(steps) if step is not None}

        def live(rank: int, status: RankStatus) -> None:
            while not over.wait(0.001):
                if (
                    status.recovery.order == STOP
                    and status.recovery.state == TRAINING
                    and rank != deaf
                ):
                    status.recovery.state = STOPPED
                if status.recovery.order == SAVE and status.recovery.state == STOPPED:
                    status.recovery.state = answer(rank)

        threads = []
        for rank, step in enumerate(steps):
            board.ranks[rank].recovery.state = TRAINING
            board.ranks[rank].step = step or 0
            if rank in alive:
                threads.append(threading.Thread(target=live, args=(rank, board.ranks[rank])))
                threads[-1].start()
        try:
            yield board, alive
        finally:
            over.set()
            for thread in threads:
                thread.join()


def test_the_survivor_that_is_furthest_saves() -> None:
    with survivors(7, None, 8, 8) as (board, alive):
        assert save_by_survivor(board, alive.__contains__, 5.0, lambda: False) == 8
        assert [status.recovery.state for status in board.ranks] == [
            STOPPED,
            TRAINING,
            SAVED,
            STOPPED,
        ]


def test_the_next_best_saves_if_the_first_cannot() -> None:
    with survivors(7, None, 8, 8, answer=lambda rank: NOT_SAVED if rank == 2 else SAVED) as (
        board,
        alive,
    ):
        assert save_by_survivor(board, alive.__contains__, 5.0, lambda: False) == 8
        assert board.ranks[3].recovery.state == SAVED
    with survivors(7, 8, None, answer=lambda _: NOT_SAVED) as (board, alive):
        assert save_by_survivor(board, alive.__contains__, 5.0, lambda: False) is None


@pytest.mark.slow
def test_a_late_survivor_is_waited_for_only_if_it_is_ahead() -> None:
    for steps, at_least in (((8, None, 8, 7), LATE_SECONDS), ((9, None, 8, 8), 3.0)):
        late: list[int] = []
        began = time.monotonic()
        with survivors(*steps, deaf=0) as (board, alive):
            assert (
                save_by_survivor(board, alive.__contains__, 3.0, lambda: False, on_late=late.extend)
                == 8
            )
            assert [board.ranks[0].recovery.state, board.ranks[2].recovery.state, late] == [
                TRAINING,
                SAVED,
                [0],
            ]
        assert at_least <= time.monotonic() - began < at_least + 0.9


def test_losses_before_a_checkpoint_are_kept() -> None:
    first = Loss(rank=1, step=3, at=1.0, kind="hang")
    second = Loss(rank=2, step=6, at=2.0).after(first)
    third = Loss(rank=0, step=9, at=3.0).after(second)
    assert [loss.step for loss in third.before] == [3, 6]
    assert all(not loss.before for loss in third.before)
    hook = SimpleNamespace(recoveries=[{"rank": 7}])
    RecoveryHook(hook, third.as_dict(), first_step=2)  # type: ignore[arg-type]
    found = [(one["rank"], one.get("kind"), one.get("steps_redone")) for one in hook.recoveries]
    assert found == [(7, None, None), (1, "hang", 1), (2, "died", 4), (0, "died", 7)]


def test_nobody_is_waited_for_in_vain() -> None:
    """For ranks that have not begun to train, for dead ones, and after a second request to stop."""
    began = time.monotonic()
    with closing(StatusBoard.create(3)) as board:
        assert save_by_survivor(board, lambda _: True, 60.0, lambda: False) is None
    with survivors(5, 5) as (board, alive):
        alive.clear()
        board.ranks[0].recovery.state = board.ranks[1].recovery.state = TRAINING
        assert save_by_survivor(board, alive.__contains__, 60.0, lambda: True) is None
    assert time.monotonic() - began < 3


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
        assert ours["test"] == theirs["test"] and "just_in_time" not in ours


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
    assert (
        10 <= step < 36
        and f"saved step {step} from a surviving rank; the same command resumes there" in said
    )
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
    assert (
        len(steps) == 1
        and f"saved step {steps.pop()} from a surviving rank; the same command resumes" in said
    ), said


DEAF = """
import time

class Deaf:
    def __init__(self, job, run_dir, world):
        self.job, self.mine = job, world.rank == 0

    def __enter__(self):
        wrapped = self.job.wrapped

        def call(data):
            if self.mine and self.job.step == 5:
                stand_still()
            return wrapped(data)

        self.job.wrapped = call

    def __exit__(self, *_):
        pass

def stand_still():
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_survivor_stuck_in_user_code_costs_no_grace(
    tmp_path: Path,
) -> None:
    """Broken connections do not wake it. Rank 0, which serves the store."""
    (tmp_path / "deaf.py").write_text(DEAF)
    words = (*MLP, "launch.nproc_per_node=3", "hooks=[deaf.Deaf]", "trusted_modules=[deaf]")
    with running(tmp_path / "run", *words, env={"PYTHONPATH": str(tmp_path)}) as job:
        board = board_of(job, 3)
        wait_until(lambda: all(status.step == 5 for status in board.ranks), "step 5", seconds=60)
        board.close()
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(ranks_of(job)[2], signal.SIGKILL)
        assert job.end() == 70, job.said()
        assert time.monotonic() - began < 10, "launch.grace_seconds are 30"
        said = job.said()
    assert "saved step 5 from a surviving rank; the same command resumes there" in said
    log = (tmp_path / "run/logs/rank_0.log").read_text()
    assert (
        "a rank is lost, and this one, in forward of step 5, has not stopped for it" in log
        and "stand_still" in log
    )


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
