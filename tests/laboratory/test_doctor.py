"""mode=doctor from the command line, on this host."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from ddp_lab.doctor.findings import FAILURE, OK
from ddp_train.linux import children_of, state_of
from tests.support.commands import (
    read,
    run,
    running,
    wait_until,
)
from tests.support.doctor import (
    DOCTOR,
)

pytestmark = pytest.mark.timeout(300)  # several commands each, on a machine that may be busy


def probes_of(launcher: int) -> list[int]:
    """Process ids by rank: the kernel numbers processes in the order of their start."""
    found = []
    for pid in children_of(launcher):
        with contextlib.suppress(OSError):  # it ended in between
            if b"ddp_lab.doctor.collective_test" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.slow
def test_a_process_that_is_stopped_is_a_finding_and_nobody_hangs(tmp_path: Path) -> None:
    with running(
        tmp_path / "run", *DOCTOR, "launch.nproc_per_node=3", "launch.timeout_seconds=2"
    ) as job:
        wait_until(lambda: len(probes_of(job.process.pid)) == 3, "three probes")
        pids = probes_of(job.process.pid)
        os.kill(pids[1], signal.SIGSTOP)
        assert job.end() == 71, job.said()
        assert not any(state_of(pid) for pid in pids), "a probe was left behind"
    (finding,) = [
        f for f in read(job.run_dir, "doctor.json")["findings"] if f["check"] == "exchange"
    ]
    assert f"rank 1 on {os.uname().nodename} (process {pids[1]}, in stage" in finding["detail"]
    assert "is stopped" in finding["detail"]


@pytest.mark.slow
def test_one_host_that_is_well(tmp_path: Path) -> None:
    """In a folder where a run has been: what that left is not touched."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").write_text("{}")
    done = run(*DOCTOR, f"run_dir={tmp_path}/run", "launch.nproc_per_node=2")
    assert done.returncode == 0, done.stdout + done.stderr
    said = read(tmp_path / "run", "doctor.json")
    status = {finding["check"]: finding["status"] for finding in said["findings"]}
    assert (
        said["counts"][FAILURE] == 0
        and status["exchange"] == status["all-reduce"] == status["torch"] == OK
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "doctor.json",
        "summary.json",
    ]
    assert "| exchange" in done.stdout.replace(
        "│", "|"
    ) and f"report {tmp_path}/run/doctor.json" in done.stdout.replace("\n", "")
    sizes = next(f["numbers"]["sizes"] for f in said["findings"] if f["check"] == "all-reduce")
    assert [row["bytes"] for row in sizes] == [2**16, 2**20, 2**24] and all(
        row["seconds"] > 0 for row in sizes
    )


@pytest.mark.slow
def test_a_sweep_of_doctors_is_refused() -> None:
    done = run("-m", *DOCTOR, "seed=1,2")
    assert done.returncode == 2 and "mode=doctor: cannot be swept" in done.stderr
