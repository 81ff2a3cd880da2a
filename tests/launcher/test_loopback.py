"""A run listens on the loopback interface alone, and meets no other."""

from __future__ import annotations

import contextlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import netlab
from tests.support.commands import (
    ENDLESS,
    LAUNCH,
    SMALL,
    THREE,
    processes_of,
    read,
    run,
    running,
    weights,
)

pytestmark = pytest.mark.timeout(300)  # the machine may be busy


LISTEN = "0A"  # include/net/tcp_states.h


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as /proc/net/tcp and tcp6 write them on a little-endian
machine."""


def listening_addresses(pid: int) -> list[str]:
    """The local addresses on which a process accepts TCP connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in between
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        if (path := Path(f"/proc/{pid}/net/{table}")).exists()
        for line in path.read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == LISTEN and row[9] in inodes]


@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
def test_without_a_loopback_interface_no_worker_is_started(tmp_path: Path) -> None:
    """Three ranks tried to reach each other for 150 s."""
    done = run(
        *SMALL,
        THREE,
        "launch.fork_server=false",
        f"run_dir={tmp_path}",
        command=["unshare", "--net", *LAUNCH],
    )
    assert done.returncode == 69, done.stderr
    assert "the loopback interface is down: 127.0.0.1: Network is unreachable" in done.stderr
    assert (
        "remedy: ip link set lo up" in done.stderr
        and read(tmp_path, "failure.json")["kind"] == "peer"
    )
    assert not [*tmp_path.glob("logs/*")]


@pytest.mark.slow
def test_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    with running(tmp_path / "run", *ENDLESS, THREE) as job:
        job.wait_for_step()
        addresses = {pid: listening_addresses(pid) for pid in processes_of(job.run_dir)}
        assert len(addresses) == 4, "the launcher and its three workers"
        assert addresses[job.workers()[0]], (
            "rank 0 serves the store: the search finds nothing at all"
        )
        assert {address for found in addresses.values() for address in found} <= set(LOOPBACK)


@pytest.mark.slow
def test_two_jobs_with_the_same_words_do_not_meet(tmp_path: Path) -> None:
    def one(_: int) -> subprocess.CompletedProcess[str]:
        return run(*SMALL, "train.max_steps=6", command=LAUNCH, cwd=tmp_path)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(one, range(2)))
    assert [(done.returncode, done.stderr) for done in both] == [(0, ""), (0, "")]
    run_dirs = list((tmp_path / "runs/default").iterdir())
    assert len(run_dirs) == 2
    assert weights(run_dirs[0]) == weights(run_dirs[1])
