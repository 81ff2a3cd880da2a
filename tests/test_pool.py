"""`hydra/launcher=pool`: jobs of any Hydra application on all devices at once, and the trials of our sweeps."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_train.config.hardware import Hardware
from ddp_train.errors import ConfigError
from ddp_train.launcher import sweep, sweep_rows
from ddp_train.linux import children_of, state_of
from hydra_plugins.ddp_train_pool._devices import EVERYBODY, Devices, Locks, PoolError, named
from tests.commands import (
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
import os, sys, time
import hydra

@hydra.main(config_path=None, config_name=None, version_base="1.3")
def main(cfg):
    assert "ddp_train" not in sys.modules
    began = time.time()
    time.sleep(cfg.seconds)
    if cfg.x == "bad":
        raise ValueError("a bad one")
    with open("ledger", "a") as file:
        file.write(f"{cfg.x} {os.environ['CUDA_VISIBLE_DEVICES']} {began} {time.time()}\\n")

main()
"""


# --- devices and locks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-a1", "GPU-b2", "MIG-c"]),
        ("2, 0", ["MIG-c", "GPU-a1"]),
        ("1,9,0", ["GPU-b2"]),
        ("GPU-b", ["GPU-b2"]),
        ("MIG-elsewhere,0,0", ["MIG-elsewhere", "GPU-a1"]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_are_those_that_cuda_visible_devices_allows(visible: str | None, expected: list[str]) -> None:
    assert named(visible, ["GPU-a1", "GPU-b2", "MIG-c"]) == expected


def test_a_device_is_held_until_all_who_inherited_its_lock_have_ended(tmp_path: Path) -> None:
    mine, theirs = Locks(tmp_path / "locks"), Locks(tmp_path / "locks")
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == EVERYBODY
    lock = mine.take("GPU-a/../b")
    assert lock is not None and theirs.take("GPU-a/../b") is None and theirs.take("GPU-c") is not None
    holder = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
    os.close(lock)
    assert theirs.take("GPU-a/../b") is None, "the child has it"
    holder.kill()
    holder.wait()
    assert theirs.take("GPU-a/../b") is not None
    assert {path.name for path in (tmp_path / "locks").iterdir()} == {"GPU-a_.._b.lock", "GPU-c.lock"}


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
    with pool.offered(set()) as offer:
        assert offer is not None and offer[0] == ["a", "b"]
        with pool.offered(set()) as second:
            assert second is None, "one is left, and two are needed"
    with pool.offered({"a"}) as offer:
        assert offer is not None and offer[0] == ["b", "c"]
    with pytest.raises(PoolError, match=r"gpus_per_trial=4: there are 3 devices; use at most that many"):
        Devices(["a", "b", "c"], 4, 1, tmp_path / "locks")


# --- anybody's application --------------------------------------------------------------------------------------------


def app(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A sweep of an application that knows nothing of this project, on devices a and b."""
    (folder / "app.py").write_text(APP)
    if not (folder / "plugins").exists():
        (folder / "plugins").mkdir()
        (folder / "plugins/hydra_plugins").symlink_to(ROOT / "hydra_plugins")
    fixed = ("-m", "hydra/launcher=pool", "hydra.launcher.devices=[a,b]", "hydra.sweep.dir=out")
    return subprocess.Popen(
        [sys.executable, "app.py", *fixed, f"hydra.launcher.lock_folder={folder}/locks", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder / "plugins")}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ledger(folder: Path) -> list[list[str]]:
    path = folder / "ledger"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


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
        times = sorted((float(began), float(ended)) for _, own, began, ended in jobs if own == device)
        assert len(times) >= 2 and all(one[1] <= other[0] for one, other in itertools.pairwise(times))
    assert_no_lock_is_held(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a job", "the sweep", "the sweep, by Ctrl-C"])
def test_a_kill_leaves_no_process_and_no_lock(tmp_path: Path, victim: str) -> None:
    """kill -9 at a random moment: the other jobs go on, or end with the sweep."""
    sweep = app(tmp_path, "+x=1,2,3", "+seconds=1.0")
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


# --- our sweeps -------------------------------------------------------------------------------------------------------


def test_a_row_after_a_torn_one_is_found(tmp_path: Path) -> None:
    sweep_rows.append(tmp_path, {"trial": 0, "status": "completed", "words": ["a=1"]})
    with (tmp_path / sweep_rows.RESULTS).open("a") as file:
        file.write('{"trial": 1, "status": "comp')
    sweep_rows.append(tmp_path, {"trial": 1, "status": "failed", "words": ["a=2"]})
    assert [row["trial"] for row in sweep_rows.read(tmp_path)] == [0, 1]
    assert (sweep_rows.completed_before(tmp_path, ["a=1"]) or {})["trial"] == 0
    assert sweep_rows.completed_before(tmp_path, ["a=2"]) is None, "it failed: it is tried again"


@pytest.mark.slow
def test_keys_of_a_sweep_are_refused_where_they_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Hardware(cpus=8, gpus=4, gpu_name="NVIDIA H200", compute_capability=(9, 0))
    monkeypatch.setattr(sweep, "detect_hardware", lambda _: gpus)

    def words(*more: str) -> list[str]:
        return sweep.Trials(PROGRAM, None).check(["-m", "seed=1,2", f"run_dir={tmp_path}", *more], True)

    assert not any("pool" in word for word in words()), "each trial takes all GPUs"
    assert {"hydra/launcher=pool", "hydra.launcher.gpus_per_trial=2"} < set(words("sweep.gpus_per_trial=2"))
    assert not any("pool" in word for word in words("sweep.gpus_per_trial=2", "hydra/launcher=basic"))
    for given, message in (
        ("sweep.gpus_per_trial=8", "sweep.gpus_per_trial=8: this host has 4"),
        ("sweep.gpus_per_trial=1,2", "sweep.gpus_per_trial: is what all trials share, and cannot be swept"),
        ("checkpoint.mirror=file:///tmp/x", "checkpoint.mirror=file:///tmp/x: all trials would share it"),
    ):
        with pytest.raises(ConfigError, match=message):
            words(given)
    with pytest.raises(ConfigError, match=r"sweep\.gpus_per_trial=1: launch\.nproc_per_node=2 needs as many GPUs"):
        words("sweep.gpus_per_trial=1", "launch.nproc_per_node=2")


def saved(run_dir: Path) -> bool:
    """Whether a run has a whole checkpoint."""
    return any(run_dir.glob("checkpoints/*/manifest.json"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_sweep_survives_kills_and_does_nothing_twice(tmp_path: Path) -> None:
    """Trial 0 is killed, then the sweep. Started again, it repeats no trial that was completed, and resumes others."""
    sweep, env = tmp_path / "sweep", foreign_code(tmp_path)
    net = foreign_net(delay=0.1)
    words = ("-m", *net, "optimizer.lr=0.1,0.01,0.02,0.03", "train.epochs=6", ONE, "sweep.processes_at_once=2")
    with running(sweep, *words, env=env) as first:
        for trial in (0, 1):
            wait_until(lambda trial=trial: saved(sweep / str(trial)), "checkpoint")
        os.kill(json.loads((sweep / "0/lock.json").read_text())["pid"], signal.SIGKILL)
        wait_until(lambda: saved(sweep / "2") and len(sweep_rows.read(sweep)) == 2, "trial 2")
        first.process.send_signal(signal.SIGKILL)
        first.end()
        wait_until(lambda: not processes_of(sweep), "end of all processes", 10)
    died, completed = sweep_rows.read(sweep)
    assert (died["trial"], died["kind"], died["exit_code"]) == (0, "died", 70)
    assert (completed["trial"], completed["status"], completed["at_once"]) == (1, "completed", 2)

    again = run(*words, f"run_dir={sweep}", env=env)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "trial 1: completed" in again.stdout and "before" in again.stdout
    assert "trials, 2 at a time on one host" in again.stdout
    rows = sweep_rows.read(sweep)[2:]
    assert sorted(row["trial"] for row in rows) == [0, 2, 3], "trial 1 is not repeated"
    for trial in (0, 2):
        said = (sweep / f"{trial}/log.txt").read_text()
        assert said.count("processes      1 x cpu") == 2 and len(re.findall(r"epoch +1/6 ", said)) == 1, (
            "it was resumed"
        )
    assert "samples to train on" not in again.stdout, "what a trial prints is in its log"


@pytest.mark.slow
def test_a_trial_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    words = ("-m", "optimizer.lr=1e30,0.01", "model=mlp", "data.limit=200", "train.epochs=1", ONE)
    done = run(*words, "hydra/launcher=pool", "sweep.processes_at_once=2", f"run_dir={sweep}")
    assert done.returncode == 70
    (fatal,) = fatal_lines((sweep / "0/log.txt").read_text())
    assert f"trial 0: failed (70)  {fatal}  log: {sweep}/0/log.txt" in done.stdout
    assert sorted(row["status"] for row in sweep_rows.read(sweep)) == ["completed", "failed"]
    assert (sweep / "1/log.txt").read_text().count("epoch 1/1") == 1
