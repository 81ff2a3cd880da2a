"""Starts, watches and ends the collective test processes of this host, one per rank. Does not
import torch."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_lab.doctor.collective_stages import (
    NUM_SIZES,
    REPORTS_PER_SIZE,
    CollectiveTestSpec,
    Stage,
)
from ddp_lab.doctor.isolated_check import END_SECONDS
from ddp_train.distributed.child_environments import probe_environment, worker_environment
from ddp_train.distributed.environment import LISTEN_SOCKET
from ddp_train.distributed.world import World
from ddp_train.linux import end_with_parent, state_of
from ddp_train.options.schema import Config

PATIENCE_SECONDS = 20.0
"""Longest silence of test processes while they communicate, unless launch.timeout_seconds is less.
A healthy one takes a second."""
START_SECONDS = 60.0
START_SECONDS_OF_A_PROCESS = 0.5
"""Longest silence while they import torch, meet, start a GPU and compute, and connect: a constant,
and so much for each process. 2,048 took 1,047 s to open their groups before that was improved
(arXiv:2402.15627, section 3.5)."""
PEER_ERROR_GRACE_SECONDS = 3.0
"""Time for the other test processes to report their own errors after one has failed."""


@dataclass
class RankResult:
    """The last stage of the test process of one rank, and its measurements."""

    rank: int
    host: str
    pid: int
    stage: str = Stage.IMPORT
    seconds: float = 0.0
    """Seconds since its last progress line."""
    stopped: bool = False
    """It was stopped by a signal or a debugger."""
    code: int | None = None
    """Exit code; None if it had to be killed."""
    error: str = ""
    """The last line that it wrote to standard error."""
    results: dict[str, Any] = field(default_factory=dict)
    unkillable_state: str = ""
    """The kernel's letter for its state if it survived SIGKILL. D: it waits for a device."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def where(self) -> str:
        return f"{self.name} (process {self.pid}, in stage '{self.stage}')"


def silence_limits(config: Config, size: int, several: bool) -> dict[str, float]:
    """Seconds without a progress line from any rank after which the test counts as hung, by stage.

    size: of the world. several: there are other hosts, where a rank may still compute while ours
    wait in `connect`.
    """
    timeout = config.launch.timeout_seconds
    start = START_SECONDS + START_SECONDS_OF_A_PROCESS * size
    compute = min(start, timeout)
    slow = {
        Stage.IMPORT: start,
        Stage.RENDEZVOUS: start,
        Stage.COMPUTE: compute,
        Stage.CONNECT: compute * (2 if several else 1),
    }
    return dict.fromkeys(map(str, Stage), min(PATIENCE_SECONDS, timeout)) | slow


def longest_seconds(limits: dict[str, float]) -> float:
    """Upper bound on the duration of a test. limits: result of `silence_limits`."""
    # each may take one limit, in addition to the limits of the stages
    reports = NUM_SIZES * REPORTS_PER_SIZE * limits[Stage.EXCHANGE]
    return sum(limits.values()) + reports + PEER_ERROR_GRACE_SECONDS + END_SECONDS


def run_on_this_host(
    config: Config, import_path: Path | None, extra_environment: dict[str, str] | None = None
) -> list[RankResult]:
    """Test the ranks of a run on this host alone, in the environment that the launcher gives its
    workers."""
    size = int(config.launch.nproc_per_node)
    threads = int(config.launch.threads_per_process)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        ranks = []
        for rank in range(size):
            world = World(rank, size, rank, size)
            env = worker_environment(world, port, threads, import_path) | (extra_environment or {})
            if world.is_leader:
                env[LISTEN_SOCKET] = str(listener.fileno())
            ranks.append((world, env))
        return _run_processes(config, ranks, "alone", (listener.fileno(),))


def run_with_other_hosts(
    config: Config, leader: World, import_path: Path | None
) -> list[RankResult]:
    """Test this host's ranks together with those of other hosts, under torchrun.

    leader: first rank of this host.
    """
    threads = int(config.launch.threads_per_process)
    ranks = []
    for local in range(leader.local_size):
        world = replace(leader, rank=leader.rank + local, local_rank=local)
        ranks.append((world, probe_environment(world, threads, import_path)))
    return _run_processes(config, ranks, f"attempt_{leader.attempt}", ())


def _run_processes(
    config: Config,
    ranks: list[tuple[World, dict[str, str]]],
    run_id: str,
    descriptors: tuple[int, ...],
) -> list[RankResult]:
    """Run one test process for each (world, environment) until all have ended, one failed or the
    test hangs.

    descriptors: open files that the processes inherit.
    """
    size = ranks[0][0].size
    limits = silence_limits(config, size, several=size > len(ranks))
    # Longer than our limits: a test process cannot tell which rank is to blame, we can.
    timeout = longest_seconds(limits)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running: list[RankProcess] = []
        stack.callback(kill_all, running)
        for world, env in ranks:
            device = world.device(config.device)
            spec = CollectiveTestSpec(device, config.launch.backend, timeout, run_id)
            errors = Path(folder, f"{world.rank}")
            process = subprocess.Popen(
                spec.argv(),
                env=env,
                pass_fds=descriptors,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(errors.open("wb")),
                preexec_fn=end_with_parent,
                start_new_session=True,
            )
            result = RankResult(world.rank, socket.gethostname(), process.pid)
            running.append(RankProcess(process, result, errors))
        watch(running, limits)
        return [process.result for process in running]


class RankProcess:
    """One running test process: a thread reads its progress lines into `result`."""

    def __init__(self, process: subprocess.Popen[bytes], result: RankResult, errors: Path) -> None:
        self.process = process
        self.result = result
        self.errors = errors
        self.last_progress = time.monotonic()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # something else that a library printed
                values = json.loads(line)
                stage = values.pop("stage")
                self.result.results |= values
                self.result.stage = stage
                self.last_progress = time.monotonic()

    def poll(self) -> None:
        """Update `result` with the state of the process now."""
        self.result.code = self.process.poll()
        if self.result.code is not None:
            self.reader.join(1.0)  # its last lines
        if self.result.code:
            lines = self.errors.read_text(errors="replace").strip().splitlines()
            self.result.error = lines[-1].strip() if lines else ""
        self.result.stopped = state_of(self.process.pid) in ("T", "t")
        self.result.seconds = time.monotonic() - self.last_progress

    def reap(self, deadline: float) -> None:
        """Wait for the end after SIGKILL, until the deadline (time.monotonic()). Records a process
        that survives."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.result.unkillable_state = state_of(self.process.pid)
            return  # the reader thread cannot be stopped either, and holds the lock of stdout
        self.reader.join(1.0)
        if self.process.stdout:
            self.process.stdout.close()


def kill_all(running: list[RankProcess]) -> None:
    """End all processes by SIGKILL, which ends stopped ones too."""
    for process in running:
        process.process.kill()
    deadline = time.monotonic() + END_SECONDS
    for process in running:
        process.reap(deadline)


def watch(running: list[RankProcess], limits: dict[str, float]) -> None:
    """Return when all have ended, one has failed, or none has made progress for too long.

    limits: result of `silence_limits`.
    """
    failed_at: float | None = None
    while True:
        for process in running:
            process.poll()
        results = [process.result for process in running]
        alive = [result for result in results if result.code is None]
        if not alive:
            return
        now = time.monotonic()
        if any(result.code for result in results):
            failed_at = failed_at or now
            if now - failed_at > PEER_ERROR_GRACE_SECONDS:
                return
        if any(result.stopped and result.seconds > limits[Stage.EXCHANGE] for result in results):
            return
        silent_seconds = min(result.seconds for result in results)
        if silent_seconds > max(limits[result.stage] for result in alive):
            return
        time.sleep(0.05)
