"""Commands that the zygote forks are what real ones are: see tests/support/zygote.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support import zygote
from tests.support.commands import (
    ENDLESS,
    LAUNCH,
    ONE,
    ROOT,
    THREE,
    environment,
    run,
    running,
    torchrun,
    wait_until,
)

pytestmark = pytest.mark.timeout(300)  # the machine may be busy


def test_command_is_a_child_with_its_own_command_line(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ENDLESS, THREE) as job:
        job.wait_for_step()
        line = (
            Path(f"/proc/{job.process.pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
        )
        assert line == [*LAUNCH, f"run_dir={tmp_path}/run", *ENDLESS, THREE]
        assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{job.process.pid}/status").read_text()
        assert (os.getsid(job.process.pid), os.getpgid(job.process.pid)) == (
            os.getsid(0),
            os.getpgid(0),
        )
        assert Path(f"/proc/{job.process.pid}/cwd").resolve() == ROOT
        job.process.send_signal(signal.SIGKILL)
        assert job.end() == -signal.SIGKILL


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ or Path("/dev/nvidiactl").exists(),
    reason="test processes are forked by pytest-xdist (-n), and without GPUs",
)
def test_a_test_process_is_forked_and_does_not_import_torch_itself() -> None:
    """If it were not, nothing would fail, and the gate take half a minute more."""
    line = Path("/proc/self/cmdline").read_bytes()
    assert len(line) > zygote.ROOM or not zygote._fits(environment()), "it shows it as commands do"


def test_what_reads_its_settings_at_import_is_started_for_real(tmp_path: Path) -> None:
    assert zygote._fits(environment())
    for name, value in {
        "TORCH_LOGS": "recompiles",
        "OMP_NUM_THREADS": "3",
        "PYTHONHASHSEED": "1",
        "CUDA_VISIBLE_DEVICES": "0",
    }.items():
        assert not zygote._fits(environment({name: value})), name
    assert zygote._fits(environment({"PYTHONPATH": str(tmp_path)}))
    (tmp_path / "sitecustomize.py").touch()
    assert not zygote._fits(environment({"PYTHONPATH": str(tmp_path)}))
    assert zygote._main([*LAUNCH, ONE]) == (LAUNCH[1], [ONE])
    assert zygote._main([*torchrun(), ONE])[0] == zygote.AGENT
    assert zygote._main([sys.executable, "-c", "pass"])[0] is None


@pytest.mark.slow
@pytest.mark.nightly
def test_a_zygote_that_has_ended_is_replaced() -> None:
    assert run("modle=mlp").returncode == 2
    before = zygote.zygote_pid()
    assert before
    os.kill(before, signal.SIGKILL)
    wait_until(
        lambda: bool(zygote._process and zygote._process.poll()), "end of the zygote", seconds=10
    )
    assert run("modle=mlp").returncode == 2
    assert zygote.zygote_pid() not in (None, before)
