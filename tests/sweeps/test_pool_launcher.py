"""`hydra/launcher=pool`: jobs of any Hydra application on all devices at once."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from ddp_train.linux import children_of, state_of
from hydra_plugins.ddp_train_pool import SweepListener, _jobs
from hydra_plugins.ddp_train_pool._devices import Devices, Locks
from hydra_plugins.ddp_train_pool._runner import Application, JobRunner, ListedJobs
from hydra_plugins.ddp_train_pool._signals import StopSignals
from tests.support.commands import (
    ROOT,
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
def test_two_sweeps_share_devices(tmp_path: Path) -> None:
    sweeps = [app(tmp_path, f"+x={names}", "+seconds=0.2") for names in ("1,bad,2,3", "4,5,6")]
    said = [end_of(sweep) for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [1, 0], said
    assert 'app.py", line 13, in main\n    raise ValueError("a bad one")' in said[0], (
        "its traceback"
    )
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
    said = next((line for line in sweep.stdout if "note: waiting for" in line), "")
    assert (
        said == "note: waiting for devices that other sweeps use: 1 of a, b\n"
        and held[0] is not None
    )
    os.close(held[0])
    assert end_of(sweep).count("note: ") == 0 and [job[1] for job in ledger(tmp_path)] == ["a"]


@pytest.mark.slow
def test_a_mistake_in_any_application_is_a_line(tmp_path: Path) -> None:
    wrong = app(tmp_path, "+x=1,2", "hydra.launcher.gpus_per_trial=3")
    assert "gpus_per_trial=3: the number of devices is 2; use hydra.launcher" in (
        said := end_of(wrong)
    )
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
    assert "problem hydra.launcher.gpus_per_trial=3: the number of devices is 2" in said, said
    assert refused.returncode == 7
