"""`hydra/launcher=pool`: jobs of any Hydra application on all devices at once, and the trials of
our sweeps."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import random
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from ddp_train.config.prepare import is_of_sweep
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.linux import children_of, state_of
from ddp_train.options.schema import Config
from ddp_train.options.sections import LaunchConfig, SweepConfig
from ddp_train.resilience import run_lock
from ddp_train.sweeps import plan as sweep_plan
from ddp_train.sweeps.line_file import read_lines
from ddp_train.sweeps.lock import sweep_lock
from ddp_train.sweeps.outcomes import TrialValue
from ddp_train.sweeps.plan import SweepPlan, plan_sweep
from ddp_train.sweeps.pool import (
    LauncherSettings,
    TrialPool,
    pool_of,
    read_settings,
    with_settings,
)
from ddp_train.sweeps.pool_listener import PoolListener
from ddp_train.sweeps.results import RESULTS, ResultsWriter, append_row, ended_row, read_rows
from ddp_train.sweeps.runner import TrialRunner
from ddp_train.sweeps.table import SweepTable
from ddp_train.sweeps.trial_numbers import TrialNumbers
from hydra_plugins.ddp_train_pool import SweepListener, _devices, _jobs
from hydra_plugins.ddp_train_pool._devices import EVERYBODY, Devices, Gpu, Locks, PoolError, named
from hydra_plugins.ddp_train_pool._runner import Application, JobRunner, ListedJobs
from hydra_plugins.ddp_train_pool._signals import StopSignals
from hydra_plugins.ddp_train_pool.launcher import PoolLauncher
from tests.support.commands import (
    ONE,
    PROGRAM,
    ROOT,
    fatal_lines,
    foreign_code,
    foreign_net,
    processes_of,
    run,
    running,
    wait_until,
)

APP = """
import os, subprocess, sys, time
import hydra

@hydra.main(config_path=None, config_name=None, version_base="1.3")
def main(cfg):
    assert "ddp_train" not in sys.modules
    began = time.time()
    if cfg.x == "child":
        subprocess.Popen(["sleep", "60"])
    time.sleep(cfg.seconds)
    if cfg.x == "bad":
        raise ValueError("a bad one")
    with open("ledger", "a") as file:
        file.write(f"{cfg.x} {os.environ['CUDA_VISIBLE_DEVICES']} {began} {time.time()}\\n")

main()
"""


# --- devices and locks ----------------------------------------------------------------------------


GPUS = [Gpu("GPU-a1", "H200"), Gpu("GPU-b2", "H200"), Gpu("GPU-c3", "H200", ("MIG-c", "MIG-d"))]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-a1", "GPU-b2", "MIG-c", "MIG-d"]),
        ("2, 0", ["MIG-c", "GPU-a1"]),
        ("1,9,0", ["GPU-b2"]),
        ("GPU-b", ["GPU-b2"]),
        ("GPU-c3,MIG-c,MIG-d", ["MIG-c", "MIG-d"]),
        ("MIG-elsewhere,0,0", ["MIG-elsewhere", "GPU-a1"]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_are_those_that_cuda_visible_devices_allows(
    visible: str | None, expected: list[str]
) -> None:
    assert named(visible, GPUS) == expected


def test_devices_that_are_named_by_number_are_those_named_by_uuid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or two sweeps would lock one GPU under two names."""
    monkeypatch.setattr(_devices, "present_gpus", lambda: GPUS[:2])
    monkeypatch.setattr(
        _devices, "cuda_order", lambda: pytest.fail("GPUs are alike: nobody needs to ask CUDA")
    )
    launcher = PoolLauncher(1, 1, ["1", "GPU-a1", "GPU-b2"], "unused", 0.0, None)
    monkeypatch.setattr(_devices, "Locks", lambda _: None)
    assert launcher.open_devices().names == ["GPU-b2", "GPU-a1"]
    with pytest.raises(
        PoolError, match=r"hydra\.launcher\.devices: there is no GPU 2; this host has 2"
    ):
        _devices.asked_gpus(["0", "2"])
    monkeypatch.setattr(_devices, "present_gpus", list)
    assert _devices.asked_gpus(["a", "b", "a"]) == ["a", "b"], "without a driver they are names"


def test_where_gpus_differ_their_numbers_are_those_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's default order is not that of the bus, which NVML has: the faster one is first."""
    monkeypatch.setattr(
        _devices, "present_gpus", lambda: [Gpu("GPU-t4", "T4"), Gpu("GPU-h2", "H200")]
    )
    monkeypatch.setattr(_devices, "cuda_order", lambda: ["GPU-h2", "GPU-t4"])
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert (_devices.visible_gpus("0"), _devices.asked_gpus(["1"])) == (["GPU-h2"], ["GPU-t4"])
    assert _devices.visible_gpus(None) == ["GPU-t4", "GPU-h2"], "all: no number is asked for"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert _devices.visible_gpus("0") == ["GPU-t4"]
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setattr(_devices, "cuda_order", list)
    with pytest.raises(PoolError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs"):
        _devices.visible_gpus("0")
    assert _devices.visible_gpus("GPU-h") == ["GPU-h2"]


@pytest.mark.skipif(not _devices.present_gpus(), reason="needs a GPU")
def test_cuda_itself_knows_the_gpus_that_the_driver_lists() -> None:
    assert sorted(_devices.cuda_order()) == sorted(
        gpu.names[0] for gpu in _devices.present_gpus() or ()
    )


def test_a_folder_of_locks_is_not_replaced_by_another_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found none, and both make it."""
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    mine = Locks(tmp_path / "locks")
    theirs = Locks(tmp_path / "locks")
    assert mine.take("a") is not None and theirs.take("a") is None
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == EVERYBODY


def test_a_device_is_held_until_all_who_inherited_its_lock_have_ended(tmp_path: Path) -> None:
    mine = Locks(tmp_path / "locks")
    theirs = Locks(tmp_path / "locks")
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == EVERYBODY
    lock = mine.take("GPU-a/../b")
    assert (
        lock is not None and theirs.take("GPU-a/../b") is None and theirs.take("GPU-c") is not None
    )
    holder = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
    os.close(lock)
    assert theirs.take("GPU-a/../b") is None, "the child has it"
    holder.kill()
    holder.wait()
    assert theirs.take("GPU-a/../b") is not None
    assert {path.name for path in (tmp_path / "locks").iterdir()} == {
        "GPU-a_.._b.lock",
        "GPU-c.lock",
    }


def test_what_somebody_else_has_put_in_the_place_of_locks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PoolError, match=r"hydra\.launcher\.lock_folder=.*/link: .*; name another"):
        Locks(tmp_path / "link")
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(PoolError, match="others may remove files in it; it needs the sticky bit"):
        Locks(tmp_path / "real")
    locks = Locks(tmp_path / "own")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "own/a.lock").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "own/b.lock")
    for name in "ab":
        with pytest.raises(PoolError, match=rf"{name}\.lock"):
            locks.take(name)


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    locks = Locks(tmp_path / "locks")
    first = locks.take("a")
    (tmp_path / "locks/a.lock").unlink()
    assert first is not None and locks.take("a") is not None, "of the file that is there now"


def test_devices_are_offered_all_or_none(tmp_path: Path) -> None:
    pool = Devices(["a", "b", "c"], 2, 1, tmp_path / "locks")
    assert pool.at_once == 1
    grant = pool.take(set())
    assert grant is not None and grant.names == ["a", "b"]
    assert pool.take(set()) is None, "one is left, and two are needed"
    grant.release()
    second = pool.take({"a"})
    assert second is not None and second.names == ["b", "c"]
    with pytest.raises(
        PoolError, match=r"gpus_per_trial=4: there are 3 devices; use at most that many"
    ):
        Devices(["a", "b", "c"], 4, 1, tmp_path / "locks")


# --- anybody's application ------------------------------------------------------------------------


def app(folder: Path, *words: str, code: str = APP) -> subprocess.Popen[str]:
    """A sweep of an application that knows nothing of this project, on devices a and b."""
    (folder / "app.py").write_text(code)
    if not (folder / "plugins").exists():
        (folder / "plugins").mkdir()
        (folder / "plugins/hydra_plugins").symlink_to(ROOT / "hydra_plugins")
    fixed = ("-m", "hydra/launcher=pool", "hydra.launcher.devices=[a,b]", "hydra.sweep.dir=out")
    return subprocess.Popen(
        [sys.executable, "app.py", *fixed, f"hydra.launcher.lock_folder={folder}/locks", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "plugins")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ledger(folder: Path) -> list[list[str]]:
    path = folder / "ledger"
    if path.exists():
        return [line.split() for line in path.read_text().splitlines()]
    return []


def end_of(sweep: subprocess.Popen[str]) -> str:
    said, _ = sweep.communicate(timeout=60)
    return said


def assert_no_lock_is_held(folder: Path) -> None:
    locks = Locks(folder / "locks")
    for name in "ab":
        lock = locks.take(name)
        assert lock is not None, name
        os.close(lock)
    locks.close()


@pytest.mark.slow
def test_two_sweeps_share_the_devices_and_a_failed_job_ends_no_other(tmp_path: Path) -> None:
    sweeps = [app(tmp_path, f"+x={names}", "+seconds=0.2") for names in ("1,bad,2,3", "4,5,6")]
    said = [end_of(sweep) for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [1, 0], said
    assert "ValueError: a bad one" in said[0]
    jobs = ledger(tmp_path)
    assert sorted(job[0] for job in jobs) == list("123456")
    for device in "ab":
        times = sorted(
            (float(began), float(ended)) for _, own, began, ended in jobs if own == device
        )
        assert len(times) >= 2 and all(
            one[1] <= other[0] for one, other in itertools.pairwise(times)
        )
    assert_no_lock_is_held(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a job", "the sweep", "the sweep, by Ctrl-C"])
def test_a_kill_leaves_no_process_and_no_lock(tmp_path: Path, victim: str) -> None:
    """kill -9 at a random moment: the other jobs go on, or end with the sweep."""
    seconds = 2.0 if victim == "a job" else 60.0
    sweep = app(tmp_path, "+x=1,2,3", f"+seconds={seconds}")
    wait_until(lambda: len(children_of(sweep.pid)) == 2, "two jobs")
    time.sleep(random.uniform(0, 0.5))
    jobs = children_of(sweep.pid)
    if victim == "a job":
        os.kill(jobs[0], signal.SIGKILL)
    else:
        sweep.send_signal(signal.SIGKILL if victim == "the sweep" else signal.SIGINT)
    said = end_of(sweep)
    wait_until(lambda: all(state_of(pid) in ("", "Z") for pid in jobs), "end of all jobs", 5)
    assert_no_lock_is_held(tmp_path)
    if victim == "a job":
        assert len(ledger(tmp_path)) == 2 and "was killed by SIGKILL, without a result" in said
    else:
        assert ledger(tmp_path) == [] and sweep.returncode != 0


@pytest.mark.slow
def test_a_device_is_not_free_while_a_process_of_its_job_lives(tmp_path: Path) -> None:
    """One that was started by exec does not hold the lock itself."""
    sweep = app(tmp_path, "+x=child,2", "+seconds=60.0")
    wait_until(lambda: len(children_of(sweep.pid)) == 2, "two jobs")
    first, second = children_of(sweep.pid)
    wait_until(lambda: children_of(first) != [], "a child of the first one")
    (child,) = children_of(first)
    locks = Locks(tmp_path / "locks")
    gone = ("", "Z")
    try:
        sweep.send_signal(signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: state_of(first) in gone, "its end")
        assert state_of(child) not in gone and locks.take("a") is None
        sweep.send_signal(signal.SIGCONT)
        wait_until(
            lambda: locks.take("a") is not None, "the device, which the second job does not hold"
        )
        assert state_of(child) == "" and state_of(second) not in gone and locks.take("b") is None
    finally:
        sweep.kill()
        end_of(sweep)


INTERRUPTED_JOB = """
import signal
import time
from hydra_plugins.ddp_train_pool import _jobs
from hydra_plugins.ddp_train_pool._devices import Grant

def run():
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        None.half_done

job = _jobs.start(0, [], Grant([], []), run, None, [])
while not job.poll():
    time.sleep(0.01)
print(job.exit_code, repr(job.returned()._return_value))
"""
"""As OmegaConf did once: a with block of its that was left by Ctrl-C found None where a config
should have been."""


def test_a_job_is_interrupted_whatever_the_interruption_raises() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_JOB],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "-2 KeyboardInterrupt()\n", done.stderr


def test_what_a_dead_job_has_left_ends_to_the_last_process() -> None:
    keep = _jobs.children()
    _jobs.adopt(True)
    try:
        job = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
        wait_until(lambda: children_of(job.pid) != [], "a child of it")
        (child,) = children_of(job.pid)
        _jobs.end_adopted(keep)
        assert state_of(job.pid) == state_of(child) == ""
    finally:
        _jobs.adopt(False)
        job.wait()


@pytest.mark.slow
def test_a_sweep_that_waits_for_others_says_so(tmp_path: Path) -> None:
    locks = Locks(tmp_path / "locks")
    held = [locks.take(name) for name in "ab"]
    sweep = app(tmp_path, "+x=1", "+seconds=0.0")
    assert sweep.stdout is not None
    said = next((line for line in sweep.stdout if "note: waits for" in line), "")
    assert said == "note: waits for 1 of a, b: other sweeps have them\n" and held[0] is not None
    os.close(held[0])
    assert end_of(sweep).count("note: ") == 0 and [job[1] for job in ledger(tmp_path)] == ["a"]


@pytest.mark.slow
def test_a_mistake_in_any_application_is_a_line(tmp_path: Path) -> None:
    wrong = app(tmp_path, "+x=1,2", "hydra.launcher.gpus_per_trial=3")
    assert "gpus_per_trial=3: there are 2 devices; use at most that many" in (said := end_of(wrong))
    assert wrong.returncode == 1 and "Traceback" not in said


def test_a_job_whose_config_cannot_be_composed_ends_no_other() -> None:
    """Grids are composed before they start; other sweepers ask for one after the other."""

    class Loader:
        def load_sweep_config(self, *_: object) -> None:
            raise ValueError("no such option")

    class Context:
        config_loader = Loader()

    class Listener(SweepListener):
        def __init__(self) -> None:
            self.ends: list[tuple[int, list[str], int]] = []

        def job_number(self, number: int, overrides: list[str]) -> int:
            return number + 10

        def job_ended(
            self,
            number: int,
            overrides: list[str],
            returned: JobReturn,
            exit_code: int,
            seconds: float,
        ) -> None:
            self.ends.append((number, overrides, exit_code))

    listener = Listener()
    jobs = ListedJobs([["x=1"]], 3)
    application = Application(Context(), lambda _: None, DictConfig({}), None)  # type: ignore
    devices = Devices([], 0, 1, None)
    runner = JobRunner(application, jobs, devices, listener, StopSignals(), 0.0)
    runner.compose_next()
    assert runner.next_job is None and str(jobs.returned[3]._return_value) == "no such option"
    assert listener.ends == [(13, ["x=1"], 1)]


LISTENING = """
import sys, hydra
from hydra_plugins.ddp_train_pool import SweepListener, listening

class Listener(SweepListener):
    def job_started(self, number, overrides, devices):
        print("started", number, overrides, devices)

    def report_problem(self, problem):
        print("problem", problem)
        return 7

@hydra.main(config_path=None, config_name=None, version_base="1.3")
def main(cfg):
    pass

with listening(Listener()):
    main()
"""


@pytest.mark.slow
def test_an_application_may_listen_to_its_sweep(tmp_path: Path) -> None:
    """Hydra imports the plugin anew at its start, which must not make another listener of it."""
    sweep = app(tmp_path, "+x=1", code=LISTENING)
    assert "started 0 ['+x=1'] ['a']" in end_of(sweep) and sweep.returncode == 0
    refused = app(tmp_path, "+x=1", "hydra.launcher.gpus_per_trial=3", code=LISTENING)
    said = end_of(refused)
    assert "problem hydra.launcher.gpus_per_trial=3: there are 2 devices" in said, said
    assert refused.returncode == 7


# --- our sweeps -----------------------------------------------------------------------------------


def claimed(folder: Path, *trials: str, total: int = 0, start: str = "") -> list[int]:
    """The numbers that a start of a sweep gives to trials, each in a word. Each then has a run in
    its folder."""
    numbers = TrialNumbers(folder, total or len(trials), start or str(random.random()))
    found = [numbers.number_of(asked, [word]) for asked, word in enumerate(trials)]
    for number in found:
        (folder / str(number)).mkdir(exist_ok=True)
        (folder / str(number) / "config.yaml").touch()
    return found


def test_a_trial_keeps_its_number_whatever_the_grid_becomes(tmp_path: Path) -> None:
    """Its folder has its run and no other: the number that Hydra gives it changes with the grid."""
    assert claimed(tmp_path, "a=1", "a=2", "a=3") == [0, 1, 2]
    assert claimed(tmp_path, "a=1", "a=2", "a=3", "a=4") == [0, 1, 2, 3], "longer"
    assert claimed(tmp_path, "a=0", "a=1", "a=2") == [4, 0, 1], "longer at its front"
    assert claimed(tmp_path, "a=3", "a=1") == [2, 0], "shorter, and in another order"
    assert claimed(tmp_path, "a=1 seed=1", "a=2 seed=1") == [5, 6], "another word that all share"
    assert claimed(tmp_path, "a=1", "a=1", "a=2", "a=2") == [
        0,
        7,
        1,
        8,
    ], "words that come twice are two trials"
    assert claimed(tmp_path, "a=1", "a=1", "a=2", "a=2") == [0, 7, 1, 8]
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"trial": 9, "wor')  # the sweep was killed while it wrote
    assert claimed(tmp_path, "a=9") == [9]
    assert claimed(tmp_path, "a=9", "a=8") == [9, 10], "and that is the end of that line alone"


def test_a_job_that_is_put_back_into_the_queue_keeps_its_number(tmp_path: Path) -> None:
    """Of SLURM: each is a process that knows nothing of the others. Words that come twice are told
    apart by it."""
    assert claimed(tmp_path, "a=1", "a=1", start="one") == [0, 1]
    assert claimed(tmp_path, "a=1", "a=1", start="one") == [0, 1]


def test_a_folder_of_unknown_words_is_nobodys(tmp_path: Path) -> None:
    """Of a sweep that an older version began: a row tells the words, a folder alone does not."""
    append_row(tmp_path, {"trial": 1, "status": "failed", "words": ["a=2"]})
    for name in "012":
        (tmp_path / name).mkdir()
    (tmp_path / "0/config.yaml").touch()
    assert claimed(tmp_path, "a=1", "a=2", "a=3") == [3, 1, 2], "0 may be another's, 2 is empty"


def test_a_disk_that_is_full_ends_no_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / RESULTS
    rows = [{"trial": number, "status": "completed"} for number in (5, 6, 7)]
    writer = ResultsWriter(tmp_path)
    numbers = TrialNumbers(tmp_path, 3, "one")
    assert writer.add(rows[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (results.stat().st_size + 10, before[1]))
    try:
        assert not writer.add(rows[1])
        assert [numbers.number_of(0, ["a=1"]), numbers.number_of(1, ["a=1"])] == [0, 1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert results.read_text().count("\n") == 1 and results.read_text().endswith("\n"), (
        "no half of a row is left"
    )
    assert writer.add(rows[2]) and read_rows(tmp_path) == rows, "nothing is lost"
    told = capsys.readouterr().err
    assert (
        told.count("note: ") == 1 and "File too large; it is tried again after each trial" in told
    )


ROW = {"trial": 0, "status": "failed", "exit_code": 70, "reason": "", "overrides": []}


def ended(listener: PoolListener, value: Any, exit_code: int = 0) -> dict[str, Any]:
    """The row of trial 0 once its job has ended."""
    listener.job_started(0, ["a=1"], [])
    returned = JobReturn(
        overrides=["a=1"], status=JobStatus.FAILED if isinstance(value, Exception) else JobStatus(1)
    )
    returned.return_value = value
    listener.job_ended(0, ["a=1"], returned, exit_code, 1.0)
    return listener.table.rows[-1]


@pytest.fixture
def listener(tmp_path: Path) -> PoolListener:
    plan = SweepPlan(tmp_path, swept=frozenset({"a"}), pool=TrialPool(2, 0))
    return PoolListener(TrialRunner(PROGRAM, SweepTable(plan), None))


def test_the_row_of_a_trial_that_ended_at_once_is_found(listener: PoolListener) -> None:
    """It may be there before the process that started the trial has done anything else."""
    append_row(listener.sweep_dir, ROW | {"mine": True})
    assert ended(listener, 0.5).get("mine")
    assert len(read_rows(listener.sweep_dir)) == 1


def test_a_row_that_could_not_be_written_comes_with_the_result(listener: PoolListener) -> None:
    value = TrialValue(0.5)
    value.row = ROW
    value.is_written = False
    assert (
        ended(listener, pickle.loads(pickle.dumps(value)))
        == value.row
        == read_rows(listener.sweep_dir)[0]
    )


def test_a_trial_that_fails_in_our_own_code_says_how(listener: PoolListener) -> None:
    row = ended(listener, ValueError("what nobody thought of"), 1)
    assert (row["kind"], row["exit_code"], row["reason"]) == (
        "died",
        70,
        "ValueError: what nobody thought of",
    )


def test_one_sweep_at_a_time_is_in_a_directory(tmp_path: Path) -> None:
    with sweep_lock(tmp_path), pytest.raises(ConfigError) as refused, sweep_lock(tmp_path):
        pass
    assert f"run_dir={tmp_path}: another sweep is in it, process {os.getpid()} on " in str(
        refused.value
    )
    left = subprocess.Popen(
        ["sleep", "60"]
    )  # of a sweep that was killed: they hold its lock until they have ended
    lock = run_lock.acquire(tmp_path / run_lock.FILE)
    lock.file.truncate(0)
    lock.file.write(json.dumps({"pid": left.pid, "host": socket.gethostname()}))
    lock.file.flush()
    left.kill()
    left.wait()
    with ThreadPoolExecutor() as threads:
        threads.submit(lambda: (time.sleep(0.3), lock.release()))
        with sweep_lock(tmp_path):
            pass


@pytest.mark.slow
def test_a_sweep_started_again_with_other_values_mixes_nothing(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ("model=mlp", "data.limit=200", "train.epochs=1", ONE)
    assert run("-m", "optimizer.lr=0.1,0.01", *words, f"run_dir={sweep}").returncode == 0
    of_another = (sweep / "0/summary.json").read_bytes()
    again = run("-m", "optimizer.lr=0.02,0.1", *words, f"run_dir={sweep}")
    assert again.returncode == 0, again.stdout + again.stderr
    rows = read_rows(sweep)
    assert [(row["trial"], row["overrides"][0]) for row in rows] == [
        (0, "optimizer.lr=0.1"),
        (1, "optimizer.lr=0.01"),
        (2, "optimizer.lr=0.02"),
    ]
    assert [Path(row["run_dir"]).name for row in rows] == ["0", "1", "2"]
    assert (sweep / "0/summary.json").read_bytes() == of_another
    assert (
        "trial 2 (1 of 2): optimizer.lr=0.02" in again.stdout
        and "trial 0 was completed before" in again.stdout
    )
    shown = json.loads((sweep / "report.json").read_text())["tables"][0]["rows"]
    assert sorted((line[0], line[2]) for line in shown) == [
        (0, "0.1"),
        (2, "0.02"),
    ], "those of this start"
    refused = run(*words, f"run_dir={sweep}")
    assert (
        refused.returncode == 2 and f"run_dir={sweep}: is the folder of a sweep" in refused.stderr
    ), refused.stderr
    assert not (sweep / "config.yaml").exists()
    (tmp_path / RESULTS).write_text('{"mine": 1}\n')
    assert is_of_sweep(sweep) and not is_of_sweep(tmp_path) and not is_of_sweep(tmp_path / "none")


def test_a_row_after_a_torn_one_is_found(tmp_path: Path) -> None:
    append_row(tmp_path, {"trial": 0, "status": "completed", "words": ["a=1"]})
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"trial": 1, "status": "comp')
    append_row(tmp_path, {"trial": 1, "status": "failed", "words": ["a=2"]})
    assert [row["trial"] for row in read_rows(tmp_path)] == [0, 1]
    assert (ended_row(tmp_path, ["a=1"], True) or {})["trial"] == 0
    assert ended_row(tmp_path, ["a=2"], True) is None, "it failed: it is tried again"


def test_what_the_launcher_is_told_directly_is_what_the_trials_share() -> None:
    """Threads and loader processes are planned for so many trials at a time."""
    gpus = Hardware(cpus=8, gpus=4, gpu_name="NVIDIA H200", compute_capability=(9, 0))

    def planned(device: str, *words: str) -> TrialPool | list[str]:
        settings, problems = read_settings([f"hydra.launcher.{word}" for word in words])
        config, more = with_settings(Config(), settings)
        resolved = dataclasses.replace(config, device=device, launch=LaunchConfig(nproc_per_node=1))
        return problems + more or pool_of(config, [resolved], 5, gpus, settings)

    assert planned("cuda", "gpus_per_trial=2") == TrialPool(2, 2)
    assert (
        planned("cuda", "gpus_per_trial=1", "devices=[0, 2]")
        == planned("cuda", "devices=[0,2]")
        == TrialPool(2, 1)
    )
    assert planned("cuda", "gpus_per_trial=0", "processes_at_once=2") == TrialPool(2, 0)
    assert planned("cpu", "processes_at_once=3") == TrialPool(3, 0)
    assert planned("cpu", "processes_at_once=null") == TrialPool(1, 0)
    assert planned("cpu", "processes_at_once=0") == [
        "hydra.launcher.processes_at_once=0: must be a number, at least 1"
    ]
    asked = Config(sweep=SweepConfig(gpus_per_trial=1))
    _, problems = with_settings(asked, LauncherSettings(gpus_per_trial=2))
    assert problems == [
        "hydra.launcher.gpus_per_trial=2: sweep.gpus_per_trial=1 says otherwise; leave one of"
        " them out"
    ]


@pytest.mark.slow
def test_keys_of_a_sweep_are_refused_where_they_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Hardware(cpus=8, gpus=4, gpu_name="NVIDIA H200", compute_capability=(9, 0))
    monkeypatch.setattr(sweep_plan, "detect_hardware", lambda _: gpus)

    def planned(*more: str) -> SweepPlan:
        return plan_sweep(PROGRAM, ["-m", "seed=1,2", f"run_dir={tmp_path}", *more])

    def words(*more: str) -> tuple[str, ...]:
        return planned(*more).hydra_arguments

    assert not any("pool" in word for word in words()), "each trial takes all GPUs"
    assert {"hydra/launcher=pool", "hydra.launcher.gpus_per_trial=2"} < set(
        words("sweep.gpus_per_trial=2")
    )
    assert not any(
        "pool" in word for word in words("sweep.gpus_per_trial=2", "hydra/launcher=basic")
    )
    for given, message in (
        ("sweep.gpus_per_trial=8", "sweep.gpus_per_trial=8: this host has 4"),
        (
            "sweep.gpus_per_trial=1,2",
            "sweep.gpus_per_trial: is what all trials share, and cannot be swept",
        ),
        (
            "checkpoint.mirror=file:///tmp/x",
            "checkpoint.mirror=file:///tmp/x: all trials would share it",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            words(given)

    with pytest.raises(ConfigError, match=r"sweep\.gpus_per_trial=8: this host has 4"):
        words("hydra.launcher.gpus_per_trial=8")
    assert planned("hydra.launcher.gpus_per_trial=1").pool == TrialPool(2, 1), "as sweep.* does"
    with pytest.raises(
        ConfigError, match=r"sweep\.gpus_per_trial=1: launch\.nproc_per_node=2 needs as many GPUs"
    ):
        words("sweep.gpus_per_trial=1", "launch.nproc_per_node=2")


def saved(run_dir: Path) -> bool:
    """Whether a run has a whole checkpoint."""
    return any(run_dir.glob("checkpoints/*/manifest.json"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_sweep_survives_kills_and_does_nothing_twice(tmp_path: Path) -> None:
    """Trial 0 is killed, then the sweep. Started again, it repeats no trial that was completed, and
    resumes others."""
    sweep = tmp_path / "sweep"
    env = foreign_code(tmp_path)
    net = foreign_net(delay=0.1)
    words = (
        "-m",
        *net,
        "optimizer.lr=0.1,0.01,0.02,0.03",
        "train.epochs=6",
        ONE,
        "sweep.processes_at_once=2",
    )
    with running(sweep, *words, env=env) as first:
        for trial in (0, 1):
            wait_until(lambda trial=trial: saved(sweep / str(trial)), "checkpoint")
        os.kill(json.loads((sweep / "0/lock.json").read_text())["pid"], signal.SIGKILL)
        wait_until(lambda: saved(sweep / "2") and len(read_rows(sweep)) == 2, "trial 2")
        first.process.send_signal(signal.SIGKILL)
        first.end()
        wait_until(lambda: not processes_of(sweep), "end of all processes", 10)
    died, completed = read_rows(sweep)
    assert (died["trial"], died["kind"], died["exit_code"]) == (0, "died", 70)
    assert (completed["trial"], completed["status"], completed["at_once"]) == (1, "completed", 2)
    begun = {entry["trial"] for entry in read_lines(sweep / "trials.jsonl")}
    fourth = (
        3 if 3 in begun else 4
    )  # began in the moment before the kill; else new, and 0 to 3 are names of this start

    words = (
        *words,
        "optimizer.lr=0.03,0.02,0.01,0.1",
    )  # in another order: each goes on in its own folder
    again = run(
        *(word for word in words if word != "optimizer.lr=0.1,0.01,0.02,0.03"),
        f"run_dir={sweep}",
        env=env,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trial 1 was completed before: " in again.stdout
    assert "trials, 2 at a time on one host" in again.stdout
    rows = read_rows(sweep)[2:]
    assert sorted(row["trial"] for row in rows) == [0, 2, fourth], "trial 1 is not repeated"
    for trial in (0, 2):
        said = (sweep / f"{trial}/log.txt").read_text()
        assert (
            said.count("processes      1 x cpu") == 2 and len(re.findall(r"epoch +1/6 ", said)) == 1
        ), "it was resumed"
    assert "samples to train on" not in again.stdout, "what a trial prints is in its log"


@pytest.mark.slow
def test_a_trial_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ("-m", "optimizer.lr=1e30,0.01", "model=mlp", "data.limit=200", "train.epochs=1", ONE)
    done = run(*words, "hydra/launcher=pool", "sweep.processes_at_once=2", f"run_dir={sweep}")
    assert done.returncode == 70
    (fatal,) = fatal_lines((sweep / "0/log.txt").read_text())
    assert f"trial 0: failed (70)  {fatal}  log: {sweep}/0/log.txt" in done.stdout
    assert sorted(row["status"] for row in read_rows(sweep)) == ["completed", "failed"]
    assert (sweep / "1/log.txt").read_text().count("epoch 1/1") == 1


FAULTY = """
import os, signal, time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, fault=""):
        super().__init__()
        self.layers, self.fault, self.calls = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), fault, 0

    def forward(self, images):
        self.calls += 1
        if self.fault == "hang" and self.calls == 2:
            time.sleep(600)
        if self.fault == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
        if self.fault == "killed":
            os.kill(os.getppid(), signal.SIGKILL)
        return self.layers(images)
"""


@pytest.mark.slow
def test_a_trial_that_hangs_or_has_no_memory_keeps_its_row_and_gives_its_device_back(
    tmp_path: Path,
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    done = run(
        "-m",
        "model._target_=faulty.Net",
        "trusted_modules=[faulty]",
        "data.limit=100",
        "train.epochs=1",
        ONE,
        "+model.fault=hang,oom,killed,none",
        "launch.timeout_seconds=3",
        "hydra.launcher.gpus_per_trial=1",
        "hydra.launcher.devices=[a]",
        f"hydra.launcher.lock_folder={tmp_path}/locks",
        f"run_dir={tmp_path}/sweep",
        env={"PYTHONPATH": str(tmp_path)},
    )
    rows = read_rows(tmp_path / "sweep")
    assert [(row.get("kind"), row["status"]) for row in rows] == [
        ("hang", "failed"),
        ("oom", "failed"),
        ("died", "failed"),
        (None, "completed"),
    ], done.stdout + done.stderr
    assert [row["exit_code"] for row in rows] == [71, 70, 70, 0] and done.returncode == 71
    locks = Locks(tmp_path / "locks")
    assert locks.take("a") is not None
