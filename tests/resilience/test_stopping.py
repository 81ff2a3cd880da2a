"""Signals: all processes stop after one and the same step and save there, or leave in time with
nothing lost."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from ddp_train.distributed.world import World
from ddp_train.engine.epoch_hook import EpochHook
from ddp_train.engine.loop import Job, fit
from ddp_train.engine.metrics_hook import Intervals, MetricsHook
from ddp_train.launcher import local
from ddp_train.launcher.attempt import AttemptEnd, Launch
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.options.schema import Config
from ddp_train.options.sections import LaunchConfig
from ddp_train.resilience import preemption
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.resilience.preemption import NEVER, StopController
from ddp_train.telemetry.hardware_monitor import HardwareMonitor
from ddp_train.telemetry.metrics_log import MetricsFile
from tests.support.commands import (
    ENDLESS,
    LAUNCH,
    ONE,
    THREE,
    Running,
    checkpoints,
    metrics,
    processes_of,
    read,
    run,
    running,
    torchrun,
    wait_until,
    weights,
)
from tests.support.jobs import config_of, job_of, table

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


# --- the agreement --------------------------------------------------------------------------------


class Board:
    """A key-value store for threads."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.content[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.content[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.content for key in keys)


class Racy(RankStatus):
    """Lets others run between the reading of the step and the use of it."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "step" and threading.current_thread().name == "agree":
            time.sleep(1e-4)
        return value


class Racer:
    """A rank: the real loop at full speed, with stand-ins for all that takes time."""

    def __init__(
        self, rank: int, size: int, store: Board, meet: Callable[[], Any], due_every: int
    ) -> None:
        self.status = Racy()
        self.meet = meet
        self.due_every = due_every
        self.stops: list[int] = []
        batch = SimpleNamespace(micro_batch=SimpleNamespace(is_last=True), data=None)
        self.job: Any = SimpleNamespace(
            step=0,
            stop=StopController(),
            hooks=[self],
            stepper=self,
            batches=itertools.repeat(batch),
            seed_step=lambda _: None,
            plan=SimpleNamespace(steps=NEVER, epoch_end=lambda step: step + 1_000),
            wrapped=lambda _: (None, None),
            strategy=SimpleNamespace(sync_gradients=lambda *_, **__: contextlib.nullcontext()),
            module=SimpleNamespace(train=lambda: None),
        )
        self.job.stop.patience_seconds = 1e6
        world = World(rank, size, rank, size)
        self.threads = [
            threading.Thread(target=fit, args=[self.job]),
            threading.Thread(
                name="agree", target=self.job.stop.agree, args=[self.status, world, store]
            ),
        ]
        for thread in self.threads:
            thread.daemon = True
            thread.start()

    def backward(self, *_: Any) -> None:
        self.meet()

    def step(self) -> None:
        self.status.step += 1

    def due(self, job: Any) -> int:
        return job.step + self.due_every

    def act(self, job: Any) -> None:
        if job.step >= job.stop.last_step:
            self.stops.append(job.step)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads take turns after a few instructions, and look at the store all the time."""
    monkeypatch.setattr(preemption, "LOOK_SECONDS", 1e-4)
    monkeypatch.setattr(preemption, "AGREE_SECONDS", 1e-4)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.slow
@pytest.mark.parametrize("in_step", [True, False], ids=["with collectives", "each at its own pace"])
def test_ranks_at_full_speed_stop_after_one_and_the_same_step(in_step: bool, hurried: None) -> None:
    for number in range(40):
        store = Board()
        barrier = threading.Barrier(3)
        meet = barrier.wait if in_step else lambda: None
        racers = [Racer(rank, 3, store, meet, due_every=1 + number % 4) for rank in range(3)]
        time.sleep(0.0005 * (number % 5))
        for rank in {0: [0], 1: [1], 2: [2], 3: [0, 1, 2]}[number % 4]:  # one is told, or all
            racers[rank].job.stop.request_stop(signal.SIGTERM)
        for racer in racers:
            for thread in racer.threads:
                thread.join(30)
                assert not thread.is_alive(), f"round {number}: a rank waits for ever"
        assert len({racer.job.step for racer in racers}) == 1, number
        for racer in racers:
            assert (
                racer.stops == [racer.job.step] == [racer.job.stop.last_step] == [racer.status.step]
            ), number


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back what `listening` leaves behind: in a worker it is for good."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in preemption.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 143), (signal.SIGHUP, 130)])
def test_a_silent_peer_is_waited_for_with_patience(number: int, code: int, handlers: None) -> None:
    left: list[int] = []
    stop = StopController()
    with stop.listening(RankStatus(), World(0, 2, 0, 2), Board(), 0.3, left.append):
        os.kill(os.getpid(), number)
        assert wait_until(lambda: bool(left), "end") > 0.25
        assert left == [code]
        assert not stop.settled.is_set()


def test_signals_that_come_together_are_one_request(
    handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    stop = StopController()
    with stop.listening(RankStatus(), World(0, 2, 0, 2), Board(), 1e6, left.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(stop.requested.is_set, "request")
        time.sleep(0.2)
        assert left == []
        time.sleep(preemption.SAME_REQUEST_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: left == [143], "end")
    os.kill(os.getpid(), signal.SIGTERM)  # the work is done: nothing to stop


def test_an_ignored_signal_stays_ignored(handlers: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
    stop = StopController()
    status = RankStatus(step=7)
    with stop.listening(status, World(), None, 1e6, os._exit):
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.1)
        assert stop.allows(10**9) and not stop.requested.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.settled.wait(5)
        assert (stop.allows(7), stop.allows(8)) == (True, False)


def test_a_stop_before_anything_was_started_is_told() -> None:
    stopped = (
        "import ddp_train.__main__ as it; it.main = lambda *_: (_ for _ in"
        " ()).throw(KeyboardInterrupt); it.run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", stopped], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        130,
        "stopped by SIGINT before anything was started\n",
    )


def test_a_signal_after_the_end_does_not_hide_the_exit_code(handlers: None) -> None:
    """It came while the interpreter of a run ended that was saved: 143, and no scheduler would have
    gone on with it."""
    with StopRequests().listening():
        pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "a sweep goes on"
    with StopRequests(program_ends=True).listening():
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("stop_comes_late", "expected"), [(True, 143), (False, 70)])
def test_a_stop_after_a_restart_is_of_the_next_attempt(
    stop_comes_late: bool, expected: int, tmp_path: Path
) -> None:
    """Else it ended with 70, and nothing on the screen was FATAL."""
    stop = StopRequests()
    ends = [AttemptEnd(70), AttemptEnd(preemption.UNSAVED)]

    def attempt(launch: Launch, number: int, *before: object) -> mock.Mock:
        if number == int(stop_comes_late):
            stop.received.append(signal.SIGTERM)
        return mock.Mock(**{"run.return_value": ends[number]})

    limits = LaunchConfig(nproc_per_node=1, max_restarts=1)
    config = Config(run_dir=str(tmp_path), launch=limits)
    with mock.patch.object(local, "Attempt", attempt):
        assert local.launch(config, tmp_path, stop) == expected


def test_an_evaluation_that_is_cut_off_ends_training() -> None:
    for agreed_before in (True, False):
        stop = StopController()
        stop.patience_seconds = 1e6
        status = RankStatus(step=3)
        if agreed_before:
            stop.request_stop(signal.SIGTERM)
            stop.agree(status, World(), None)
            assert stop.last_step == 4
        stop.end_at(3)
        if not agreed_before:  # this rank hears of the request only now
            stop.request_stop(signal.SIGTERM)
            stop.agree(status, World(), None)
        assert (stop.limit, stop.last_step, stop.allows(3)) == (3, 3, False)


class CutOff:
    """The batches of an evaluation in which a stop is requested."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.batches = job.evaluation.batches

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            if number == 1:
                self.job.stop.requested.set()
            yield batch


def recorded(
    job: Job,
    run_dir: Path,
    display: mock.Mock,
    state: dict[str, Any] | None = None,
    every_steps: int | None = None,
) -> MetricsHook:
    log = MetricsFile(run_dir, True, job.step)
    intervals = Intervals(epochs=2, log_every_steps=100, evaluate_every_steps=every_steps)
    record = MetricsHook(display, log, HardwareMonitor(), intervals)
    if state:
        record.load_state(state)
    job.hooks = [record, EpochHook(record)]
    job.evaluation.stop = job.stop
    return record


def test_a_resumed_run_makes_up_for_its_evaluation(
    tmp_path: Path,
) -> None:
    """The score was lost for good, with what depends on it: the best checkpoint, early stopping."""
    options = {"global_batch_size": 8, "epochs": 2, "evaluate_batch_size": 4}
    config = config_of(World(), strategy={"name": "single"}, model={"name": "mlp"}, train=options)
    job = job_of(config, World(), (table(24), table(12)))
    display = mock.Mock()
    record = recorded(job, tmp_path, display)
    job.evaluation.batches = CutOff(job)
    fit(job)
    assert (job.step, job.stop.last_step, job.score) == (3, 3, None)
    assert [line["kind"] for line in metrics(tmp_path)] == ["train"]
    again = job_of(config, World(), (table(24), table(12)), first_step=3)
    record = recorded(again, tmp_path, display, record.state())
    assert record.owes_score
    for hook in again.hooks:
        hook.act(again)
    assert not record.owes_score and again.score
    assert [(line["kind"], line["step"]) for line in metrics(tmp_path)] == [
        ("train", 3),
        ("test", 3),
    ]
    fit(again)
    assert [(line["kind"], line["step"]) for line in metrics(tmp_path)][2:] == [
        ("train", 6),
        ("test", 6),
    ]
    assert len(record.epoch_seconds) == 2


def test_a_cut_off_evaluation_within_an_epoch_is_made_up_for(tmp_path: Path) -> None:
    options = {"global_batch_size": 8, "epochs": 2, "evaluate_batch_size": 4}
    config = config_of(World(), strategy={"name": "single"}, model={"name": "mlp"}, train=options)
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = job_of(config, World(), (table(24), table(12)))
    record = recorded(whole, tmp_path / "whole", mock.Mock(), every_steps=2)
    fit(whole)
    job = job_of(config, World(), (table(24), table(12)))
    cut = recorded(job, tmp_path / "cut", mock.Mock(), every_steps=2)
    job.evaluation.batches = CutOff(job)
    fit(job)
    assert (job.step, job.stop.last_step, cut.owes_score) == (2, 2, True)
    weights = job.module.model.state_dict()
    momenta = job.stepper.optimizer.state_dict()
    again = job_of(config, World(), (table(24), table(12)), first_step=2)
    again.module.model.load_state_dict(weights)
    again.stepper.optimizer.load_state_dict(momenta)
    again.stepper.continue_from(2)
    resumed = recorded(again, tmp_path / "cut", mock.Mock(), cut.state(), every_steps=2)
    for hook in again.hooks:
        hook.act(again)
    fit(again)
    lines, expected = (timeless(metrics(tmp_path / name)) for name in ("cut", "whole"))
    assert [(line["kind"], line["step"]) for line in expected] == [
        *(("train", 2), ("test", 2), ("train", 3), ("train", 4), ("test", 4)),
        *(("train", 6), ("test", 6)),
    ]
    assert lines == expected
    assert resumed.last_epoch_loss == record.last_epoch_loss
    assert len(resumed.epoch_seconds) == len(record.epoch_seconds) == 2


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without what a clock has measured."""
    measured = ("time", "figures", "samples_per_second")
    return [{name: line[name] for name in line if name not in measured} for line in lines]


# --- the real thing -------------------------------------------------------------------------------

CODE = '''
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

seconds = json.loads(os.environ["SECONDS"])
seen = []
"""Sample numbers of the last forward pass in training."""
learned = []
"""Those of all steps since the start."""


class Net(nn.Module):
    """Takes its time where it is told to; `marks` is the start of the names of files that say where it is."""

    def __init__(self, marks):
        super().__init__()
        self.layer = nn.Linear(7, 3)
        self.marks = marks
        self.pause("building")
        # After the first step the layout of the state is asked for, and nothing saved.
        is_later = lambda: len(learned) > len(seen)
        self.register_state_dict_pre_hook(lambda *_: self.pause("saving") if is_later() else None)

    def pause(self, where):
        if where in seconds:
            Path(f"{self.marks}.{where}").touch()
            time.sleep(seconds[where])

    def forward(self, rows):
        if self.training:
            seen[:] = rows[:, 0].int().tolist()
        if self.training or seen:  # a run tries a model before it trains it
            self.pause("training" if self.training else "evaluating")
        return self.layer(rows[:, 1:])


class Sgd(torch.optim.SGD):
    """Keeps a ledger: the samples of each step that this rank took."""

    def __init__(self, parameters, ledger, **more):
        super().__init__(parameters, momentum=0.9, **more)
        self.ledger = f"{ledger}.{os.environ['RANK']}"

    def step(self, closure=None):
        learned.extend(seen)
        with open(self.ledger, "a") as file:
            file.write(" ".join(map(str, seen)) + "\\n")
        return super().step(closure)


class Rows(Dataset):
    """160 rows (60 to test): a number and 7 random features. Two steps per epoch."""

    def __init__(self, train):
        self.rows = torch.randn(160 if train else 60, 8, generator=torch.Generator().manual_seed(int(train)))
        self.rows[:, 0] = torch.arange(len(self.rows))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number], int(self.rows[number, 1:].abs().argmax()) % 3
'''


class Slowly:
    """The command line of a run of the module above, in a folder."""

    def __init__(self, folder: Path) -> None:
        (folder / "slowly.py").write_text(CODE)
        self.env = {"PYTHONPATH": str(folder), "SECONDS": "{}"}
        self.run_dir = folder / "run"
        self.marks = folder / "mark"
        self.ledger = folder / "ledger"

    def words(self, *more: str) -> list[str]:
        return [
            "model._target_=slowly.Net",
            f"+model.marks={self.marks}",
            "data._target_=slowly.Rows",
            "optimizer._target_=slowly.Sgd",
            "optimizer.lr=0.01",
            f"+optimizer.ledger={self.ledger}",
            "trusted_modules=[slowly]",
            "schedule=constant",
            "train.evaluate_every_epochs=100000",
            "checkpoint.every_steps=100000",
            *more,
        ]

    def running(
        self, *more: str, command: list[str] = LAUNCH, **seconds: float
    ) -> contextlib.AbstractContextManager[Running]:
        words = self.words(*more, *([THREE] if command == LAUNCH else []))
        env = {
            **self.env,
            "SECONDS": json.dumps(seconds),
        }  # no config: that of a run does not change
        return running(self.run_dir, *words, env=env, command=command)

    def steps(self, rank: int = 0) -> list[list[int]]:
        """The samples of each step that a rank took, in all its lives."""
        path = Path(f"{self.ledger}.{rank}")
        if path.exists():
            return [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
        return []

    def wait_for_steps(self, job: Running, more: int) -> None:
        """Until some more steps are taken."""
        before = len(self.steps())

        def taken() -> bool:
            assert job.process.poll() is None, job.said()
            return len(self.steps()) >= before + more

        wait_until(taken, "steps")

    def wait_for(self, job: Running, where: str) -> None:
        job.wait_for_file(f"../mark.{where}")


@pytest.fixture
def slowly(tmp_path: Path) -> Slowly:
    return Slowly(tmp_path)


def stopped_step(job: Running, more_than: int = 0) -> int:
    """The step after which a run says that it stopped. What it left says the same, and no process
    is left."""
    assert processes_of(job.run_dir) == {}
    (step,) = re.findall(
        r"^stopped after step (\d+) and saved; resume with run_dir=", job.output.read_text(), re.M
    )
    summary = read(job.run_dir, "summary.json")
    assert (summary["status"], summary["steps"], summary["test"]) == ("preempted", int(step), None)
    assert checkpoints(job.run_dir)[-1] == f"step_{int(step):08d}"
    assert weights(job.run_dir)
    assert not (job.run_dir / "failure.json").exists()
    assert metrics(job.run_dir)[-1]["step"] == int(step) > more_than
    return int(step)


SOME_STEPS = 3
EPOCHS = 60


WAYS = [(signal.SIGUSR1, 0, 75), (signal.SIGHUP, None, 130)]
"""The signal, the rank that it is sent to (None: the launcher), the exit code."""
MORE_WAYS = [
    (signal.SIGTERM, None, 75),
    (signal.SIGTERM, 2, 75),
    (signal.SIGUSR1, None, 75),
    (signal.SIGINT, None, 130),
]


@pytest.mark.slow
@pytest.mark.timeout(900)  # six or ten starts
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(WAYS, id="gate"),
        pytest.param(WAYS + MORE_WAYS, id="all", marks=pytest.mark.nightly),
    ],
)
def test_a_run_stopped_in_every_way_ends_in_the_same_state(
    ways: list[tuple[signal.Signals, int | None, int]], slowly: Slowly
) -> None:
    step = 0
    for number, rank, code in ways:
        with slowly.running(f"train.epochs={EPOCHS}", training=0.05) as job:
            slowly.wait_for_steps(job, SOME_STEPS)
            os.kill(job.process.pid if rank is None else job.workers()[rank], number)
            assert job.end() == code, (number, rank, job.said())
            step = stopped_step(job, more_than=step)
            assert job.said() == "", "one line, and that on standard output"

    with slowly.running(
        f"train.epochs={EPOCHS}", "checkpoint.every_steps=2", training=0.05, saving=1.0
    ) as job:
        slowly.wait_for(job, "saving")
        job.process.terminate()
        assert job.end() == 75, job.said()
        step = stopped_step(job, more_than=step)

    with slowly.running(
        f"train.epochs={EPOCHS}", "tuning.num_workers=1", command=torchrun(), training=0.05
    ) as job:
        slowly.wait_for_steps(job, SOME_STEPS)
        # the agent hands it to whole process groups, loader processes among them
        job.process.terminate()
        assert job.end() != 0
        step = stopped_step(job, more_than=step)
        assert "FATAL" not in job.said()

    assert step < 2 * EPOCHS, "the rest is left to be trained"
    with slowly.running(f"train.epochs={EPOCHS}") as job:
        assert job.end() == 0, job.said()
    assert read(slowly.run_dir, "summary.json")["status"] == "completed"
    assert len(slowly.steps()) == 2 * EPOCHS
    learned = Counter(
        number for rank in range(3) for indices in slowly.steps(rank) for number in indices
    )
    assert learned == dict.fromkeys(range(160), EPOCHS), "every sample once per epoch"
    steps = [line["step"] for line in metrics(slowly.run_dir) if line["kind"] == "train"]
    assert steps == sorted(set(steps))

    undisturbed = slowly.run_dir.with_name("undisturbed")
    done = run(
        f"run_dir={undisturbed}", THREE, *slowly.words(f"train.epochs={EPOCHS}"), env=slowly.env
    )
    assert done.returncode == 0, done.stderr
    assert weights(slowly.run_dir) == weights(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("validation", [pytest.param("0", marks=pytest.mark.nightly), "0.2"])
def test_a_stop_leaves_the_last_evaluation_to_the_next_start(
    slowly: Slowly, validation: str
) -> None:
    words = ("train.max_steps=2", "train.evaluate_batch_size=1", f"data.validation={validation}")
    with slowly.running(*words, evaluating=1.0) as job:
        slowly.wait_for(job, "evaluating")
        job.process.terminate()
        began = time.monotonic()
        assert job.end() == 75, job.said()
        assert time.monotonic() - began < 10, "20 batches of a second each"
        assert stopped_step(job) == 2
        assert [line["kind"] for line in metrics(job.run_dir)] == ["train"]
    with slowly.running(*words) as job:
        assert job.end() == 0, job.said()
        assert read(job.run_dir, "summary.json")["test"]["samples"] == 60
        assert len(slowly.steps()) == 2


@pytest.mark.slow
def test_a_stop_as_the_run_completes_changes_nothing(slowly: Slowly) -> None:
    with slowly.running(
        "train.max_steps=2", "launch.grace_seconds=8", saving=5.0
    ) as job:  # half the grace is less
        slowly.wait_for(job, "saving")
        job.process.terminate()
        assert job.end() == 0, job.said()
        assert processes_of(job.run_dir) == {}
        assert read(job.run_dir, "summary.json")["status"] == "completed"
        assert "stopped" not in job.output.read_text() + job.said()


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "rank 1"])
def test_a_stop_before_the_first_step_leaves_at_once(whom: str, slowly: Slowly) -> None:
    with slowly.running(building=60.0) as job:
        slowly.wait_for(job, "building")
        os.kill(job.process.pid if whom == "launcher" else job.workers()[1], signal.SIGTERM)
        began = time.monotonic()
        assert job.end() == 143
        assert time.monotonic() - began < 3
        assert processes_of(job.run_dir) == {}
        assert job.said().startswith("stopped") and job.said().count("\n") == 1
        assert not (job.run_dir / "failure.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_stopped_peer_is_waited_for_half_the_grace_time(rank: int, slowly: Slowly) -> None:
    """Rank 0 serves the store: the others cannot even ask."""
    words = ("launch.grace_seconds=8", "train.epochs=100000", "checkpoint.every_steps=3")
    with slowly.running(*words, training=0.02) as job:
        job.wait_for_file("checkpoints/step_00000003/manifest.json")
        os.kill(job.workers()[rank], signal.SIGSTOP)
        time.sleep(0.5)  # the others are in a collective by now
        job.process.terminate()
        began = time.monotonic()
        # 75: what was kept of the last step is saved; 143: a checkpoint has it already.
        assert job.end() in (75, 143)
        assert 3.5 < time.monotonic() - began < 8
        assert processes_of(job.run_dir) == {}
        assert job.said().startswith("stopped by SIGTERM") and job.said().count("\n") == 1
        assert weights(job.run_dir), "the old checkpoint is intact"


@pytest.mark.slow
def test_a_second_signal_ends_it_within_two_seconds(slowly: Slowly) -> None:
    with slowly.running("train.epochs=100000", "checkpoint.every_steps=3", training=0.02) as job:
        job.wait_for_file("checkpoints/step_00000003/manifest.json")
        os.kill(job.workers()[2], signal.SIGSTOP)
        job.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert job.process.poll() is None, "the first one waits for the peer"
        job.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert job.end() == 130
        assert time.monotonic() - began < 2
        assert processes_of(job.run_dir) == {}
        assert job.said().startswith("stopped by SIGINT") and job.said().count("\n") == 1
        assert weights(job.run_dir), "the old checkpoint is intact"


@pytest.mark.slow
def test_a_stop_ends_a_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    with running(sweep, "-m", "optimizer.lr=0.01,0.02", *ENDLESS, ONE) as job:
        job.wait_for_file("0/metrics.jsonl")
        wait_until(
            lambda: (sweep / "0/metrics.jsonl").stat().st_size > 0, "a line in metrics.jsonl"
        )
        job.process.terminate()
        assert job.end() == 75, job.said()
        assert processes_of(sweep) == {}
        assert (sweep / "results.jsonl").read_text().count("\n") == 1
        assert not (sweep / "1").exists()
        assert "Traceback" not in job.said()
