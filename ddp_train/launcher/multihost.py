"""This host's part of a run on several hosts: starts, watches and ends torchrun's agent.

Does not import torch.

The agents of all hosts meet at `launch.rdzv_endpoint`. This module decides what torchrun would
guess: which host serves the store, the address and the interface by which the others reach this
host, and all time limits. An agent that is cut off can hang in a read from the store forever and
ignore SIGTERM; it is killed after its workers have ended.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_train.config.freeze import run_facts
from ddp_train.config.program import Program
from ddp_train.distributed.agent import stopping_file
from ddp_train.distributed.child_environments import agent_environment
from ddp_train.errors import LaunchError, PeerError
from ddp_train.launcher import meeting_point
from ddp_train.launcher.decide import FINAL
from ddp_train.launcher.network_location import NetworkLocation, find_location
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.launcher.worker_exits import WorkerExits, read_exits
from ddp_train.linux import children_of, end_with_parent
from ddp_train.options.schema import Config
from ddp_train.resilience import failure_report, run_lock
from ddp_train.resilience.failure import Failure
from ddp_train.resilience.preemption import SAVED, UNSAVED

AGENT = str(Path(__file__).parents[1] / "distributed" / "torchrun_agent.py")
POLL_SECONDS = 0.2
AGENT_PATIENCE_SECONDS = 5.0
"""Limit from the end of the last worker to the end of the agent, which itself waits 300 s for hosts
that are gone."""
LOOK_SECONDS = 1.0
"""The longest wait for the lock of this host: another one that looks whether it is held has it for
a moment (`run_lock.is_held`)."""
NOTE_SECONDS = 5.0
"""A wait for hosts that lasts so long is told on the terminal."""
NOTE_AGAIN_SECONDS = 60.0
OF_A_RANGE = ("keep_alive_interval=1", "keep_alive_max_attempt=5", "last_call_timeout=3")
"""How fast hosts continue without a lost one. torchrun's defaults, 5 s x 3 and 30 s, would make it
45 s in place of 8. A heartbeat is compared with other hosts' clocks, so that it must not be
believed dead sooner than clocks may differ (distributed/preflight.py)."""
OF_PEERS = {70, 71}
"""Exit codes of workers that end because others have: at once, or after launch.timeout_seconds."""
STOPPED = (SAVED, UNSAVED)
"""Exit codes of workers that were asked to stop; in a range of hosts, perhaps since another host
joins."""


def join_hosts(config: Config, program: Program, argv: list[str]) -> int:
    """Run this host's part. Returns the exit code. Reports a failure of the hosts to connect.

    argv: the command line.
    """
    run_dir = Path(str(config.run_dir))
    stop = StopRequests()
    try:
        with stop.listening(), registered(run_dir), tempfile.TemporaryDirectory() as folder:
            return _run_agents(config, program, argv, stop, Path(folder))
    except LaunchError as error:
        failure = Failure(
            kind=error.kind,
            rank=None,
            host=socket.gethostname(),
            step=None,
            phase="hosts",
            detail=str(error),
            remedy=error.remedy,
            log="",
            exit_code=error.exit_code,
        )
        if not failure_report.report(run_dir, failure, run_facts(config)):
            # Another host reported first, on its own terminal.
            print(failure_report.headline(failure), file=sys.stderr)
        return error.exit_code


def _run_agents(
    config: Config, program: Program, argv: list[str], stop: StopRequests, folder: Path
) -> int:
    """Run an agent, and again wherever the hosts meet once the host of the endpoint is lost.

    folder: for temporary files. Returns the exit code.
    """
    run_dir = Path(str(config.run_dir))
    is_first_host = present_hosts(run_dir) == [socket.gethostname()]
    if is_first_host:
        failure_report.set_aside(run_dir)
    endpoint = meeting_point.chosen(run_dir) if config.host_range else None
    if endpoint:
        config = _meeting_at(config, endpoint)
    while True:
        location = find_location(str(config.launch.rdzv_endpoint))
        exit_code_file = Path(tempfile.mkdtemp(dir=folder), "exit_codes")
        exit_code_file.touch()
        # If this launcher is killed, so is the agent, and with it its workers.
        agent = subprocess.Popen(
            command(config, location, program, argv),
            env=agent_environment(location.interface, exit_code_file),
            preexec_fn=end_with_parent,
            start_new_session=True,
        )
        ended = AgentWatch(config, agent, program.script, exit_code_file, stop).watch()
        next_config = _config_elsewhere(config, location, ended, stop)
        if next_config is None:
            return _exit_code(config, ended, stop)
        config = next_config
        print(f"the hosts meet at {config.launch.rdzv_endpoint} from now on", file=sys.stderr)


def command(
    config: Config, location: NetworkLocation, program: Program, argv: list[str]
) -> list[str]:
    """The command line of the torchrun agent."""
    launch = config.launch
    rendezvous = [
        f"join_timeout={launch.join_timeout_seconds}",
        f"read_timeout={launch.join_timeout_seconds}",
    ]
    if location.is_head is not None:
        rendezvous.append(f"is_host={int(location.is_head)}")
    if config.host_range:
        rendezvous += OF_A_RANGE
    return [
        sys.executable,
        "-P",  # the agent itself imports nothing from the working folder
        AGENT,
        f"--nnodes={config.host_range or launch.nnodes}",
        f"--nproc-per-node={launch.nproc_per_node}",
        f"--max-restarts={launch.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={launch.rdzv_endpoint}",
        f"--rdzv-id={Path(str(config.run_dir)).name}",
        f"--rdzv-conf={','.join(rendezvous)}",
        f"--local-addr={location.address}",
        *program.again([])[1:],
        *[word for word in argv if not word.startswith("launch.max_restarts")],
    ]


@contextlib.contextmanager
def registered(run_dir: Path) -> Iterator[None]:
    """A context in which this host is registered.

    `present_hosts` lists it on every host that sees the same run directory.
    """
    path = run_dir / "hosts" / socket.gethostname()
    try:
        lock = run_lock.acquire(path, LOOK_SECONDS)
    except run_lock.LockHeldError as error:
        raise PeerError(
            "a launcher of this host takes part already, or another host has the same name"
            f" ({path}: {error})",
            "start one launcher on each host, and give each host its own name",
        ) from None
    except OSError as error:
        raise PeerError(
            f"run_dir={run_dir} cannot be written: {error.strerror}",
            "set run_dir to a folder that all hosts share",
        ) from error
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def present_hosts(run_dir: Path) -> list[str]:
    """The hosts whose launchers are running."""
    return sorted(path.name for path in (run_dir / "hosts").iterdir() if run_lock.is_held(path))


@dataclass(frozen=True)
class AgentEnd:
    """The end of an agent."""

    seconds: float
    """Time from its start."""
    hosts_at_start: list[str]
    """The hosts that were there when the workers started; empty if they did not."""
    present: list[str]
    """The hosts that are there at the end."""
    returncode: int
    exits: WorkerExits


class AgentWatch:
    """Watches torchrun's agent, with limits, and kills it."""

    def __init__(
        self,
        config: Config,
        agent: subprocess.Popen[bytes],
        script: Path,
        exit_code_file: Path,
        stop: StopRequests,
    ) -> None:
        """script: what the workers run, by which they are known among the agent's children."""
        self.config = config
        self.run_dir = Path(str(config.run_dir))
        self.agent = agent
        self.script = script
        self.exit_code_file = exit_code_file
        self.stop = stop
        self.hosts_at_start: list[str] = []
        self.began = time.monotonic()
        self.last_seen = self.began
        """When workers were last seen."""
        self.next_note = self.began + NOTE_SECONDS
        """The earliest time of the next line about hosts that are waited for."""
        self.stop_by = math.inf
        """The end of the grace time after a request to stop."""
        self.final_by = math.inf
        """The end of the grace time after a failure that a restart would only repeat."""
        self.restarts_at_failure = 0

    def watch(self) -> AgentEnd:
        """Wait for the agent's end."""
        try:
            while self.agent.poll() is None and not self.stop.repeated:
                now = time.monotonic()
                self._forward_stop(now)
                self._look_for_workers(now)
                if self._is_too_late(now, read_exits(self.exit_code_file)):
                    break
                self._note_missing_hosts(now)
                time.sleep(POLL_SECONDS)
            present = present_hosts(self.run_dir)
        finally:
            self.agent.kill()  # its workers die with it
            self.agent.wait()
        return AgentEnd(
            seconds=time.monotonic() - self.began,
            hosts_at_start=self.hosts_at_start,
            present=present,
            returncode=self.agent.returncode,
            exits=read_exits(self.exit_code_file),
        )

    def _forward_stop(self, now: float) -> None:
        if self.stop.received and self.stop_by == math.inf:
            stopping_file(self.exit_code_file).touch()
            self.agent.send_signal(signal.SIGTERM)  # which forwards it to its workers
            self.stop_by = now + self.config.launch.grace_seconds

    def _look_for_workers(self, now: float) -> None:
        if _has_workers(self.agent.pid, self.script):
            self.hosts_at_start = self.hosts_at_start or present_hosts(self.run_dir)
            self.last_seen = now

    def _note_missing_hosts(self, now: float) -> None:
        """Say for how many hosts this one waits, if its workers wait to be started."""
        if self.stop.received or now < max(self.next_note, self.last_seen + NOTE_SECONDS):
            return
        self.next_note = now + NOTE_SECONDS
        launch = self.config.launch
        present = present_hosts(self.run_dir)
        fewest, _, _ = str(self.config.host_range or launch.nnodes).partition(":")
        missing = int(fewest) - len(present)
        if missing <= 0:
            return
        self.next_note = now + NOTE_AGAIN_SECONDS
        print(
            f"waiting for {missing} of {fewest} hosts at {launch.rdzv_endpoint}"
            f" (launch.join_timeout_seconds={launch.join_timeout_seconds}); present:"
            f" {', '.join(present)}",
            file=sys.stderr,
        )

    def _is_too_late(self, now: float, exits: WorkerExits) -> bool:
        """Whether a limit has passed."""
        launch = self.config.launch
        if self.final_by == math.inf and _is_final(self.run_dir, exits.codes):
            self.final_by = now + launch.grace_seconds
            self.restarts_at_failure = exits.restarts
        if self.final_by < math.inf:
            is_restarting = exits.restarts > self.restarts_at_failure
            if is_restarting or now > min(self.final_by, self.last_seen):
                # The agent would restart the workers, and make those of other hosts do so.
                return True
        patience = AGENT_PATIENCE_SECONDS
        if not self.hosts_at_start or not self._is_last(exits):
            patience += launch.join_timeout_seconds
        if now > min(self.stop_by, self.last_seen + patience):
            return True
        # An agent whose head is cut off can wait for it without an end.
        is_idle = now > self.last_seen + AGENT_PATIENCE_SECONDS
        if not self.config.host_range or not self.hosts_at_start or not is_idle:
            return False
        return not meeting_point.is_reachable(str(launch.rdzv_endpoint))

    def _is_last(self, exits: WorkerExits) -> bool:
        """Whether no workers follow those that have ended."""
        if 0 in exits.codes:
            return True
        are_used_up = exits.restarts >= self.config.launch.max_restarts
        if self.config.host_range and not self.stop.received:
            return are_used_up and not {*exits.codes} & {*STOPPED}
        return are_used_up or SAVED in exits.codes


def _meeting_at(config: Config, endpoint: str, fewer_restarts: int = 0) -> Config:
    """The config of a run whose hosts meet at another endpoint."""
    max_restarts = config.launch.max_restarts - fewer_restarts
    launch = replace(config.launch, rdzv_endpoint=endpoint, max_restarts=max_restarts)
    return replace(config, launch=launch)


def _config_elsewhere(
    config: Config, location: NetworkLocation, ended: AgentEnd, stop: StopRequests
) -> Config | None:
    """The config with which the run continues although the host of the endpoint is lost.

    None if it does not: that host is there, the workers ended in another way, or no restart is
    left. A host that is cut off and not dead cannot train on beside the others: it has the lock of
    the run directory, or they have.
    """
    exits = ended.exits
    run_dir = Path(str(config.run_dir))
    if not config.host_range or not ended.hosts_at_start or stop.received:
        return None
    if exits.restarts >= config.launch.max_restarts or location.is_head:
        return None
    if 0 in exits.codes or _is_final(run_dir, exits.codes):
        return None
    endpoint = str(config.launch.rdzv_endpoint)
    if meeting_point.is_reachable(endpoint):
        return None
    port = endpoint.rpartition(":")[2]
    other = meeting_point.choose(run_dir, endpoint, f"{location.address}:{port}")
    return _meeting_at(config, other, fewer_restarts=exits.restarts + 1)


def _exit_code(config: Config, ended: AgentEnd, stop: StopRequests) -> int:
    """This host's exit code, from those of its workers. Raises LaunchError if they do not tell."""
    launch = config.launch
    codes = ended.exits.codes
    if codes == [0] * int(launch.nproc_per_node):
        return 0  # the agent may have failed to end its rendezvous all the same
    if codes and set(codes) <= {0, SAVED}:
        return stop.exit_code(SAVED)
    if stop.received:
        name = signal.Signals(stop.received[0]).name
        print(
            f"stopped by {name} before it could save; the same command resumes the run",
            file=sys.stderr,
        )
        return stop.exit_code(UNSAVED)
    if not ended.hosts_at_start and not codes:
        expected = config.host_range or launch.nnodes
        raise PeerError(
            f"{len(ended.present)} of {expected} hosts joined within {ended.seconds:.0f} s: "
            + ", ".join(ended.present),
            "start the same command on all hosts, within"
            f" launch.join_timeout_seconds={launch.join_timeout_seconds}; each host must reach"
            f" {launch.rdzv_endpoint}",
        )
    if ended.exits.has_reported:
        reported_code = LaunchError.exit_code
    else:
        reported_code = _print_report_of_other_host(Path(str(config.run_dir)))
    if not reported_code:
        raise _unexplained(ended)
    for code in codes:
        if code not in (0, LaunchError.exit_code):
            return code
    return reported_code


def _unexplained(ended: AgentEnd) -> LaunchError:
    """The error of an agent that has ended, when no worker reported a failure."""
    detail = f"torchrun's agent exited with {ended.returncode}, and no worker reported a failure"
    gone = sorted({*ended.hosts_at_start} - {*ended.present})
    if gone:
        return PeerError(f"{', '.join(gone)} is gone; {detail}", "check that host")
    return LaunchError(detail, "see the output of torchrun's agent, above")


def _is_final(run_dir: Path, codes: list[int]) -> bool:
    """Whether a restart would only repeat a failure of this run.

    codes: exit codes of this host's workers. The failure of another host makes them end with one of
        `OF_PEERS`.
    """
    if any(code in FINAL for code in codes):
        return True
    if not OF_PEERS & {*codes}:
        return False
    with contextlib.suppress(OSError, ValueError, TypeError):  # none is reported
        return failure_report.recorded_failure(run_dir).exit_code in FINAL
    return False


def _print_report_of_other_host(run_dir: Path) -> int:
    """Print the failure that a worker on another host reported there.

    Returns its exit code, 0 if there is none.
    """
    if not failure_report.wait_for_report(run_dir, AGENT_PATIENCE_SECONDS):
        return 0
    failure = failure_report.recorded_failure(run_dir)
    print(failure_report.headline(failure), file=sys.stderr)
    return failure.exit_code


def _has_workers(agent: int, script: Path) -> bool:
    """Whether an agent has living workers. While it imports torch it has other children too."""
    for pid in children_of(agent):
        with contextlib.suppress(OSError):  # it has just ended
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
            is_agent = AGENT.encode() in command_line  # between fork and exec it is both
            if str(script).encode() in command_line and not is_agent:
                return True
    return False
