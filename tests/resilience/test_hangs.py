"""Ranks that stop moving, that are slow, or that leave: who is guilty, and that nothing is left
behind."""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.utils.data import DataLoader, IterableDataset

from ddp_train.data.numbered_stream import NumberedStream
from ddp_train.distributed.agent import write_torchrun_error_file
from ddp_train.errors import DataError
from ddp_train.linux import children_of
from ddp_train.resilience import collectives, hang_detector
from ddp_train.resilience.failure import (
    failure_from,
)
from ddp_train.resilience.failure_report import headline
from ddp_train.resilience.hang_detector import HangDetector
from ddp_train.resilience.heartbeat import RankStatus, StatusBoard
from ddp_train.resilience.whole_files import part_of
from tests.support.commands import (
    LAUNCH,
    ONE,
    ROOT,
    SMALL,
    THREE,
    environment,
    fatal_lines,
    processes_of,
    read,
    run,
    running,
    torchrun,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)  # the machine may be busy

TIMEOUT_SECONDS = 6.0
WAYWARD = '''
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

RANK = int(os.environ["RANK"])


def misbehave(how):
    if how == "sleep":
        time.sleep(1000)
    elif how == "gil":
        ctypes.PyDLL(None).sleep(1000)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "abort":
        os.abort()
    elif how == "exit":
        sys.exit(0)
    elif how == "vanish":
        os._exit(0)
    elif how == "memory":
        torch.empty(2**60)
    elif how == "raise":
        raise ValueError("boom")
    elif how == "stuck loaders":
        os.register_at_fork(after_in_child=lambda: misbehave("sleep"))
    elif how == "killed loader":
        assert multiprocessing.parent_process(), "this is a loader process"
        os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    """Goes astray on one rank at its given training step, in `where`. Every forward pass takes `delay` seconds there.

    daemon: what stands on the command line of a process that leaves the session of this one.
    """

    def __init__(self, how="", where="forward", rank=1, step=3, delay=0.0, daemon=""):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))
        self.how, self.where, self.mine, self.step, self.delay = how, where, rank == RANK, step, delay
        self.calls = 0
        self.layers[1].weight.register_hook(self.in_backward)
        if daemon:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", daemon], start_new_session=True)

    def now(self, where):
        if self.mine and self.where == where and self.calls >= self.step:
            misbehave(self.how)

    def in_backward(self, gradient):
        self.now("all-reduce")

    def state_dict(self, *arguments, **more):
        self.now("checkpoint")
        return super().state_dict(*arguments, **more)

    def forward(self, images):
        if self.training:
            self.calls += 1
            self.now("forward")
            if self.mine:
                time.sleep(self.delay)
        else:
            self.now("evaluation")
        return self.layers(images)


class Late:
    """A hook that one rank never leaves, after its last step."""

    def __init__(self, job, run_dir, world):
        self.mine = world.rank == 1

    def __enter__(self):
        pass

    def __exit__(self, *_):
        if self.mine:
            misbehave("sleep")


class Rows(Dataset):
    """Random rows of 64 numbers; fetching the given one goes astray on one rank."""

    classes = ("left", "right")

    def __init__(self, train, how="", rank=1, reads=0):
        self.rows = torch.randn(3000 if train else 300, 64, generator=torch.Generator().manual_seed(int(train)))
        self.how, self.mine, self.reads = how, train and rank == RANK, reads

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        if self.mine:
            self.reads -= 1
            if self.reads == -1:
                misbehave(self.how)
        return self.rows[number], number % 2
'''


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """In which the module `wayward` can be imported."""
    (tmp_path / "wayward.py").write_text(WAYWARD)
    return {"PYTHONPATH": str(tmp_path)}


def words(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None) -> list[str]:
    """wayward.Net on wayward.Rows, with arguments; 3 ranks, 32 samples each per step."""
    given = [
        f"+{section}.{name}='{value}'" if isinstance(value, str) else f"+{section}.{name}={value}"
        for section, arguments in (("model", model), ("data", data))
        for name, value in (arguments or {}).items()
    ]
    named = [
        "model._target_=wayward.Net",
        "data._target_=wayward.Rows",
        "trusted_modules=[wayward]",
    ]
    fixed = [
        "schedule=constant",
        "tuning.num_workers=0",
        "deterministic=false",
        THREE,
    ]  # no passes before the first step
    return [*named, *fixed, *given]


# --- a rank stands still --------------------------------------------------------------------------


CELLS = {("sleep", "data"), ("gil", "forward"), ("sleep", "all-reduce"), ("stop", "checkpoint")}
"""Of the matrix below, in the gate: every way and every place once."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where"),
    [
        pytest.param(how, where, marks=[] if (how, where) in CELLS else pytest.mark.nightly)
        for where in ("data", "forward", "all-reduce", "checkpoint")
        for how in ("sleep", "stop", "gil")
    ],
)
def test_a_rank_that_stands_still_is_named(
    how: str, where: str, tmp_path: Path, env: dict[str, str]
) -> None:
    rank = 0 if where == "checkpoint" else 1
    if where == "data":
        faulty = words(data={"how": how, "rank": rank, "reads": 100})
    else:
        faulty = words({"how": how, "where": where, "rank": rank, "step": 4})
    limit = f"launch.timeout_seconds={TIMEOUT_SECONDS}"
    with running(tmp_path / "run", *faulty, "checkpoint.every_steps=4", limit, env=env) as job:
        began = time.monotonic()
        assert job.end() == 71, job.said()
        assert processes_of(job.run_dir) == {}
        assert time.monotonic() - began < TIMEOUT_SECONDS + 60
        failure = read(job.run_dir, "failure.json")
        phase = {"all-reduce": "backward"}.get(where, where)
        assert (failure["kind"], failure["rank"], failure["phase"]) == (
            "hang",
            rank,
            phase,
        ), failure
        # A sample or more is read before training: the step of the hundredth read is not ours to
        # know.
        assert failure["step"] in {"data": (1, 2, 3), "checkpoint": (4,)}.get(where, (3,))
        seconds = float(failure["detail"].split()[3])
        assert TIMEOUT_SECONDS - 1 <= seconds <= TIMEOUT_SECONDS + 4, failure["detail"]
        known = {"sleep": "rank", "stop": "stopped by a signal", "gil": "Python's lock (GIL)"}
        assert known[how] in failure["detail"]
        if (how, where) == ("sleep", "all-reduce"):
            called = (
                r"; ranks 0, 2 called all_reduce of Float \[\d+\] \(collective \d+\), rank 1 did"
                r" not$"
            )
            assert re.search(called, failure["detail"]), failure["detail"]
        (fatal,) = fatal_lines(job.said())
        assert f"hang (rank {rank} on" in fatal and f", step {failure['step']}, {phase})" in fatal
        assert "Traceback" not in job.said()
        log = (job.run_dir / f"logs/rank_{rank}.log").read_text()
        for text in (job.said(), log):
            assert text.count(" in misbehave") == 1, (
                "the stack, once, where the user reads and in the rank's own log"
            )


@pytest.mark.slow
def test_a_rank_that_hangs_after_its_last_step_is_named(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """The others are done, and wait for the end of the process group."""
    late = (
        "hooks=[wayward.Late]",
        "train.max_steps=2",
        f"launch.timeout_seconds={TIMEOUT_SECONDS}",
    )
    with running(tmp_path / "run", *words(), *late, env=env) as job:
        assert job.end() == 71, job.said()
        failure = read(job.run_dir, "failure.json")
        assert (failure["kind"], failure["rank"], failure["step"], failure["phase"]) == (
            "hang",
            1,
            2,
            "hook",
        ), failure
        assert job.said().count(" in misbehave") == 1 and processes_of(job.run_dir) == {}


USERS = ['  File "/home/user/wayward.py", line 26 in misbehave']
TORCHS = [
    '  File "/usr/lib/python3/site-packages/torch/autograd/graph.py", line 865 in'
    " _engine_run_backward"
]


@pytest.mark.parametrize("where", ["data", "forward", "backward", "checkpoint"])
@pytest.mark.parametrize("how", ["sleep", "stop", "gil"])
def test_the_board_tells_who_stands_still(
    how: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole matrix, with a clock and a board that nobody waits for: what real ranks show in the
    cells above."""
    now = 0.0
    stuck = 0 if where == "checkpoint" else 1
    states = ["S"] * 3
    stacks = [TORCHS] * 3
    monkeypatch.setattr(hang_detector.time, "monotonic", lambda: now)
    monkeypatch.setattr(hang_detector, "state_of", lambda pid: states[pid])
    monkeypatch.setattr(HangDetector, "stacks", lambda *_: stacks)
    monkeypatch.setattr(HangDetector, "calls", lambda *_: "")
    board = StatusBoard.create(3)
    try:
        detector = HangDetector(board, [0, 1, 2], timeout_seconds=TIMEOUT_SECONDS)
        for beat in range(
            1, 21
        ):  # four steps of a second each; nobody hangs in the last of them before its end
            now = beat * 0.2
            for status in board.ranks:
                status.beats = beat
                status.step = beat // 5
                status.batches = 1 + beat // 5
                status.phase = ("data", "forward", "backward", "backward", "optimizer step")[
                    beat % 5
                ]
            assert not detector.finds_hang()
        for rank, status in enumerate(board.ranks):
            status.phase = where if rank == stuck else "backward"
        states[stuck] = "T" if how == "stop" else "S"
        stacks[stuck] = [] if how == "stop" else USERS
        began = now
        while not detector.finds_hang():
            now += 0.2
            assert now < began + TIMEOUT_SECONDS + 1
            for rank, status in enumerate(board.ranks):
                status.beats += rank != stuck or how == "sleep"
        assert now - began >= TIMEOUT_SECONDS
        hang = detector.diagnose(Path())
    finally:
        board.close()
    assert (hang.rank, hang.snapshot.step, hang.snapshot.phase) == (stuck, 4, where)
    assert TIMEOUT_SECONDS - 1 <= hang.seconds <= TIMEOUT_SECONDS + 1
    known = {"sleep": "", "stop": "stopped by a signal", "gil": "Python's lock (GIL)"}[how]
    assert known in hang.reason and bool(known) == bool(hang.reason)
    assert hang.stack == stacks[stuck]
    assert hang.others == ", ".join(
        f"rank {rank} in backward of step 4" for rank in range(3) if rank != stuck
    )


@pytest.mark.slow
def test_under_torchrun_the_peer_check_names_the_rank_that_hangs(
    tmp_path: Path, env: dict[str, str]
) -> None:
    faulty = [word for word in words({"how": "sleep", "rank": 1, "step": 4}) if word != THREE]
    done = run(
        *faulty,
        f"run_dir={tmp_path}/run",
        f"launch.timeout_seconds={TIMEOUT_SECONDS}",
        command=torchrun(),
        env=env,
    )
    assert done.returncode == 1, "torchrun's own"
    failure = read(tmp_path / "run", "failure.json")
    assert (failure["kind"], failure["rank"], failure["exit_code"]) == ("hang", 1, 71)
    assert failure["detail"].startswith("rank 1 on ")
    assert "did not respond to the peer check" in failure["detail"]
    assert failure["log"].endswith("rank_1.log")
    (fatal,) = fatal_lines(done.stderr)
    assert "hang (rank 1 on" in fatal
    wait_until(lambda: not processes_of(tmp_path / "run"), "end of the workers", seconds=10)


def test_torchruns_last_page_shows_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    failure = failure_from(
        DataError("sample 7 is spoilt", "repair it"), 1, RankStatus(step=3), Path("r1.log"), ""
    )
    write_torchrun_error_file(headline(failure).removeprefix("FATAL "))
    page = str(ChildFailedError("launch.py", {1: ProcessFailure(1, 123, 65, str(file))}))
    assert "sample 7 is spoilt" in page and "repair it" in page and "FATAL" not in page


# --- a rank is slow -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_rank_is_no_hang_but_a_straggler(tmp_path: Path, env: dict[str, str]) -> None:
    limit = f"launch.timeout_seconds={TIMEOUT_SECONDS}"
    with running(
        tmp_path / "run", *words({"rank": 2, "delay": 0.3}), "train.epochs=100000", limit, env=env
    ) as job:
        wait_until(
            lambda: "slower" in job.said(), "warning"
        )  # after two windows: longer than the limit
        assert job.process.poll() is None, job.said()
        (line,) = job.said().splitlines()
        assert (
            line.startswith("warning: rank 2 is slower than the others")
            and "mostly forward" in line
        )
        part = part_of(collectives.record_file(job.run_dir, 2))
        part.write_text('{"entr')  # as of a rank that is killed while it writes
        job.process.terminate()
        assert job.end() == 75, job.said()
        assert not part.exists()


def test_a_rank_that_dies_of_the_question_has_hung_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python's faulthandler may crash a process whose other threads run: none is asked to while its
    stack is taken."""
    board = StatusBoard.create(2)
    examined: list[int] = []
    monkeypatch.setattr(hang_detector, "state_of", lambda pid: "" if examined else "S")
    try:
        for rank, status in enumerate(board.ranks):
            status.beats = 1
            status.step = 5 - rank
            status.phase = "forward"
        detector = HangDetector(board, [0, 1], timeout_seconds=TIMEOUT_SECONDS)

        def stacks(run_dir: Path) -> list[list[str]]:
            examined.extend(status.is_examined for status in board.ranks)
            return [[], []]

        monkeypatch.setattr(detector, "stacks", stacks)
        hang = detector.diagnose(tmp_path)
        assert examined == [0, 0] and [status.is_examined for status in board.ranks] == [1, 1]
        assert (hang.rank, hang.snapshot.phase, hang.stack, hang.called) == (1, "forward", [], "")
    finally:
        board.close()


@pytest.mark.slow
def test_a_run_that_was_suspended_as_a_whole_goes_on(tmp_path: Path, env: dict[str, str]) -> None:
    """As `scontrol suspend` and `docker pause` do. Two ranks wait for the slow one, most of the
    time."""
    limits = (
        "train.epochs=100000",
        "train.log_every_steps=1",
        f"launch.timeout_seconds={TIMEOUT_SECONDS}",
    )
    with running(tmp_path / "run", *words({"rank": 2, "delay": 2.0}), *limits, env=env) as job:

        def steps() -> int:
            assert job.process.poll() is None, job.said()
            return (job.run_dir / "metrics.jsonl").read_text().count("\n")

        job.wait_for_step()
        wait_until(lambda: steps() >= 3, "the limit applies from the second batch on")
        pids = sorted(
            processes_of(job.run_dir), key=lambda pid: pid != job.process.pid
        )  # the launcher first
        assert len(pids) == 4
        time.sleep(
            0.7
        )  # the launcher has seen the last progress, and all are in the middle of a step
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        before = steps()
        time.sleep(TIMEOUT_SECONDS + 1)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)  # the launcher looks before the ranks go on
        wait_until(lambda: steps() > before + 2, "three more steps")


class Slow(IterableDataset):
    """Forty samples, which take a while; one of them may take for ever."""

    def __init__(self, still_at: int) -> None:
        self.still_at = still_at

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        for number in range(40):
            time.sleep(1000 if number == self.still_at else 0.1)
            yield number


def begun(board: StatusBoard, rank: int) -> RankStatus:
    """The status of a rank that has done two batches: before, it may take two minutes."""
    status = board.ranks[rank]
    status.beats = 1
    status.batches = 2
    status.phase = "data"
    return status


def wait_for_the_others(board: StatusBoard, rank: int) -> None:
    begun(board, rank)
    time.sleep(1000)


def read_the_last(board: StatusBoard, still_at: int, loader_processes: int) -> None:
    status = begun(board, 1)
    stream: Any = NumberedStream(Slow(still_at), seed=0, status=status)
    loader = DataLoader(stream, batch_size=None, sampler=[39], num_workers=loader_processes)
    assert list(loader) == [39]


@pytest.mark.parametrize("loader_processes", [0, 1])
@pytest.mark.parametrize("still_at", [None, 12], ids=["reads on", "stands still"])
def test_reading_past_a_stream_is_no_hang_unless_it_stands_still(
    still_at: int | None, loader_processes: int
) -> None:
    board = StatusBoard.create(3)
    start = multiprocessing.get_context("fork").Process
    reader = start(target=read_the_last, args=(board, still_at, loader_processes))
    waiting = [start(target=wait_for_the_others, args=(board, rank)) for rank in (0, 2)]
    processes = [waiting[0], reader, waiting[1]]
    for process in processes:
        process.start()
    pids = [process.pid or 0 for process in processes]
    try:
        wait_until(lambda: all(status.beats for status in board.ranks), "all have begun")
        detector = HangDetector(board, pids, timeout_seconds=2.0)
        while reader.is_alive() and not detector.finds_hang():
            time.sleep(0.05)
        assert reader.is_alive() == (still_at is not None)
        assert board.ranks[1].samples_passed == (39 if still_at is None else still_at)
    finally:
        for child in children_of(pids[1]):
            os.kill(child, signal.SIGKILL)
        for process in processes:
            process.kill()
            process.join()
        board.close()


def test_what_spawned_loader_processes_read_past_is_counted() -> None:
    board = StatusBoard.create(3)
    try:
        stream: Any = NumberedStream(Slow(-1), seed=0, status=begun(board, 1))
        loader = DataLoader(
            stream,
            batch_size=None,
            sampler=[39],
            num_workers=1,
            multiprocessing_context="spawn",
        )
        assert list(loader) == [39]
        assert [status.samples_passed for status in board.ranks] == [0, 39, 0]
        assert copy.deepcopy(stream)[10] == 10
        assert board.ranks[1].samples_passed == 39, "a copy reports to nobody"
    finally:
        board.close()


def watched(
    shares: list[float], monkeypatch: pytest.MonkeyPatch, later: list[float] | None = None
) -> bool:
    """Whether a rank ever stood still, of ranks that spend these shares of their time in forward.
    later: theirs after the first window."""
    now = 0.0
    monkeypatch.setattr(hang_detector.time, "monotonic", lambda: now)
    board = StatusBoard.create(len(shares))
    try:
        eye = HangDetector(board, [os.getpid()] * len(shares), timeout_seconds=5.0)
        hung = False
        for beat in range(1, 200):
            now = beat * 0.2
            for rank, share in enumerate(
                later if later and now > hang_detector.WINDOW_SECONDS else shares
            ):
                status = board.ranks[rank]
                status.beats = beat
                status.step = beat // 4
                status.batches = beat
                status.phase = "forward" if beat % 10 < round(share * 10) else "backward"
            hung |= eye.finds_hang()
        return hung
    finally:
        board.close()


def test_ranks_that_differ_a_little_are_not_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not watched([0.4, 0.5, 0.3], monkeypatch)
    assert capsys.readouterr().err == ""
    assert not watched([0.4, 0.5, 0.8], monkeypatch)
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "rank 2 is slower" in line and "80% of its time in data and forward, mostly forward" in line
    )
    assert not watched([0.4, 0.5, 0.8], monkeypatch, later=[0.8, 0.5, 0.4])
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 0 is slower" in line, "the first of two windows in a row"
    assert not watched([0.4, 0.5, 1.0], monkeypatch)
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 2 is slower" in line and "100% of its time" in line, (
        "it is never seen to wait, but does steps"
    )
    assert not watched([0.4, 0.5, 0.8], monkeypatch, later=[0.4, 0.5, 0.3])
    assert capsys.readouterr().err == "", "the host's other work may hold up a rank for ten seconds"


# --- a rank leaves --------------------------------------------------------------------------------

LEAVING = {
    "segfault": ("died", "killed by SIGSEGV"),
    "abort": ("died", "killed by SIGABRT"),
    "exit": ("exit", r"sys\.exit\(0\) was called"),
    "vanish": ("died", "exited with code 0 before the run was done"),
    "memory": ("oom", r"memory at that time: rank 0 \d+\.\d\d GiB, rank 1 \d+\.\d\d GiB, rank 2 "),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.nightly] * (how == "abort")) for how in LEAVING]
)
def test_a_rank_that_leaves_is_named_with_what_it_died_of(
    how: str, tmp_path: Path, env: dict[str, str]
) -> None:
    with running(tmp_path / "run", *words({"how": how, "rank": 1, "step": 4}), env=env) as job:
        assert job.end() == 70, job.said()
        assert processes_of(job.run_dir) == {}
        failure, (kind, detail) = read(job.run_dir, "failure.json"), LEAVING[how]
        assert (failure["kind"], failure["rank"], failure["step"], failure["phase"]) == (
            kind,
            1,
            3,
            "forward",
        ), failure
        assert re.search(detail, failure["detail"]), failure["detail"]
        (fatal,) = fatal_lines(job.said())
        assert f"{kind} (rank 1 on" in fatal
        # Where it happened: from faulthandler, or as a traceback. os._exit() leaves no trace.
        assert job.said().count(" in misbehave") == (how != "vanish")


@pytest.mark.slow
def test_a_killed_loader_is_named_with_its_samples(tmp_path: Path, env: dict[str, str]) -> None:
    faulty = words(data={"how": "killed loader", "rank": 1, "reads": 64})
    with running(tmp_path / "run", *faulty, "tuning.num_workers=2", env=env) as job:
        assert job.end() == 70, job.said()
        assert processes_of(job.run_dir) == {}
        failure = read(job.run_dir, "failure.json")
        assert (failure["kind"], failure["rank"]) == ("data_worker", 1)
        # By who is first to notice: torch's signal handler, the wait for a batch, or the fetching
        # of one.
        assert re.search(r"a loader process died: .*samples \[\d+, ", failure["detail"]), failure[
            "detail"
        ]
        assert "tuning.num_workers=0" in failure["remedy"]
        assert len(fatal_lines(job.said())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data", "phase", "state"),
    [
        ({}, {"how": "sleep", "rank": 1, "reads": 100}, "data", ""),
        ({}, {"how": "stop", "rank": 1, "reads": 100}, "data", "stopped by a signal"),
        (
            {"how": "stuck loaders", "rank": 1, "step": 3},
            {},
            "evaluation data",
            "",
        ),  # before they run Python
    ],
)
def test_a_rank_that_waits_for_loaders_shows_their_stacks(
    model: dict[str, Any],
    data: dict[str, Any],
    phase: str,
    state: str,
    tmp_path: Path,
    env: dict[str, str],
) -> None:
    limit = (f"launch.timeout_seconds={TIMEOUT_SECONDS}", "tuning.num_workers=2")
    with running(tmp_path / "run", *words(model, data), *limit, env=env) as job:
        assert job.end() == 71, job.said()
        assert processes_of(job.run_dir) == {}
        failure = read(job.run_dir, "failure.json")
        said = job.said()
    assert (failure["kind"], failure["rank"], failure["phase"]) == ("hang", 1, phase), failure
    loaders = re.findall(r"^its loader process \d+ \((.*)\):?$", said, re.MULTILINE)
    assert len(loaders) == (4 if phase == "evaluation data" else 2), (
        said
    )  # those of training wait for their next task
    assert (state in loaders) == bool(state), said
    assert state or " in misbehave" in said
    assert (job.run_dir / "logs/rank_1.log").read_text().count("its loader process ") == len(
        loaders
    )


# --- nothing is left behind -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_loader_processes_do_not_outlive_a_killed_process(
    victim: str, tmp_path: Path, env: dict[str, str]
) -> None:
    with running(
        tmp_path / "run", *words(), "train.epochs=100000", "tuning.num_workers=2", env=env
    ) as job:
        job.wait_for_step()
        wait_until(
            lambda: len(processes_of(job.run_dir)) >= 1 + 3 + 6,
            "launcher, ranks and loader processes",
        )
        if victim == "launcher":
            job.process.kill()
            job.process.wait()
        else:
            os.kill(rank_process(job, 2), signal.SIGKILL)
        wait_until(
            lambda: not processes_of(job.run_dir), "end of the loader processes", seconds=2 * 3
        )
        assert victim == "launcher" or job.end() == 70


def rank_process(job: Any, rank: int) -> int:
    """The worker itself, of all processes that carry its rank: the one that the launcher
    started."""
    pids = [pid for pid, its in processes_of(job.run_dir).items() if its == rank]
    (pid,) = [
        pid
        for pid in pids
        if f"PPid:\t{job.process.pid}\n" in Path(f"/proc/{pid}/status").read_text()
    ]
    return pid


@pytest.mark.slow
def test_a_process_that_left_its_session_ends_with_the_run(
    tmp_path: Path, env: dict[str, str]
) -> None:
    run_dir = tmp_path / "run"
    done = run(
        *words({"daemon": f"daemon of {run_dir}"}),
        "train.max_steps=3",
        f"run_dir={run_dir}",
        env=env,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert processes_of(run_dir) == {}


# --- nobody listens, nothing can be written -------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path: Path) -> None:
    words = (*SMALL, ONE, "launch.threads_per_process=1", "train.epochs=20")
    command = [*LAUNCH, *words, f"run_dir={tmp_path}/run"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        assert job.stdout and job.stderr
        assert job.stdout.readline().startswith(b"processes")
        job.stdout.close()
        assert job.stderr.read() == b""
        assert job.wait(60) == 0
    assert read(tmp_path / "run", "summary.json")["steps"] == 60
    assert "output is lost" in (tmp_path / "run/logs/rank_0.log").read_text()


def test_help_may_be_cut_short() -> None:
    with subprocess.Popen(
        [*LAUNCH, "--help"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        assert job.stdout and job.stderr
        job.stdout.close()
        assert job.stderr.read() == b""
        assert job.wait(60) == 0


@pytest.mark.slow
def test_a_full_disk_under_the_logs_is_a_warning(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "logs/rank_0.log", "logs/rank_1.log"):
        (run_dir / name).symlink_to("/dev/full")  # every write ends in ENOSPC
    done = run(*SMALL, "train.epochs=2", "train.log_every_steps=1", f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert sorted(line.split()[1] for line in lines) == [
        f"{run_dir}/logs/rank_0.log",
        f"{run_dir}/metrics.jsonl",
    ]
    assert all(line.startswith("warning: ") and "No space left on device" in line for line in lines)
    assert read(run_dir, "summary.json")["status"] == "completed"
