"""One run at a time in a run directory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from ddp_train.errors import OwnershipLostError
from ddp_train.resilience import run_lock
from tests.support.commands import (
    ENDLESS,
    ONE,
    SMALL,
    checkpoints,
    read,
    run,
    running,
    weights,
)

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


@pytest.mark.slow
def test_second_run_in_a_directory_is_refused(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ENDLESS, ONE) as job:
        job.wait_for_step()
        frozen = (job.run_dir / "config.yaml").read_bytes()
        second = run(*ENDLESS, ONE, f"run_dir={job.run_dir}", "seed=7")
        assert second.returncode == 2
        assert (
            f"another run is in it, process {job.process.pid} on {os.uname().nodename}, since "
            in second.stderr
        )
        assert (job.run_dir / "config.yaml").read_bytes() == frozen, (
            "the second one wrote before it was refused"
        )
        assert len(job.workers()) == 1
        job.process.send_signal(signal.SIGKILL)
        job.process.wait()
    assert run_lock.owner(job.run_dir / run_lock.FILE)["pid"] == job.process.pid
    third = run(*SMALL, ONE, f"run_dir={job.run_dir}", "train.max_steps=2")
    assert third.returncode == 0, "the lock of a dead process is taken over"


def test_removed_lock_file_is_owned_by_nobody_else(tmp_path: Path) -> None:
    """The run went on for hours, and then said that "process ? on ?" owned its directory."""
    path = tmp_path / run_lock.FILE
    with contextlib.closing(run_lock.acquire(path).file):
        expected = run_lock.owner(path)
        path.unlink()
        run_lock.check_owner(tmp_path, expected)
        path.touch()  # somebody is about to write who he is
        with pytest.raises(OwnershipLostError):
            run_lock.check_owner(tmp_path, expected)


@pytest.mark.slow
def test_no_checkpoint_after_lock_is_lost(tmp_path: Path) -> None:
    words = [
        "model=mlp",
        "train.epochs=1000000",
        "train.evaluate_every_epochs=1000000",
        "checkpoint.every_steps=20",
    ]
    with running(tmp_path / "run", *words, ONE, "checkpoint.keep=100000") as job:
        job.wait_for_file("checkpoints/step_00000020")
        # As a network file system does when this host was cut off: the lock is another's, and
        # nobody told us.
        taken = {"pid": 1, "host": "elsewhere", "since": "now", "id": "other"}
        by_another = tmp_path / "by_another"
        by_another.write_text(json.dumps(taken))
        by_another.replace(job.run_dir / run_lock.FILE)  # at once: the run reads it meanwhile
        assert job.end() == 73, job.said()
        failure = read(job.run_dir, "failure.json")
        assert "belongs to another run now: process 1 on elsewhere" in failure["detail"]
        kept = checkpoints(job.run_dir)
        assert failure["step"] > int(kept[-1].removeprefix("step_"))
        assert all(name.endswith("0") and len(name) == 13 for name in kept), "nothing half-written"
        assert weights(job.run_dir)
