"""This host's part of a run on several hosts: starts, watches and ends torchrun's agent. Does not
import torch.

The agents of all hosts meet at `launch.rdzv_endpoint`. This module decides what torchrun would
guess: which host serves the store, the address and the interface by which the others reach this
host, and all time limits. An agent that is cut off can hang in a read from the store forever and
ignore SIGTERM; it is killed after its workers have ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import math
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_train.config.auto import described
from ddp_train.config.program import Program
from ddp_train.distributed.environment import BEGUN, REPORTED, agent_environment, stopping_file
from ddp_train.errors import LaunchError, PeerError
from ddp_train.launcher import meeting_point
from ddp_train.launcher.decide import FINAL
from ddp_train.launcher.stop_requests import StopRequests
from ddp_train.linux import children_of, end_with_parent
from ddp_train.options.schema import Config
from ddp_train.resilience import failure_report, run_lock
from ddp_train.resilience.preemption import SAVED, UNSAVED

AGENT = "torch.distributed.run"
POLL_SECONDS = 0.2
AGENT_PATIENCE_SECONDS = 5.0
"""Limit from the end of the last worker to the end of the agent, which itself waits 300 s for hosts
that are gone."""


OF_A_RANGE = ("keep_alive_interval=1", "keep_alive_max_attempt=5", "last_call_timeout=3")
"""How fast hosts go on without a lost one. torchrun's defaults, 5 s x 3 and 30 s, would make it 45
s in place of 8. A heartbeat is compared with other hosts' clocks, so that it must not be believed
dead sooner than clocks may differ (distributed/preflight.py)."""
OF_PEERS = {70, 71}
"""Exit codes of workers that end because others have: at once, or after launch.timeout_seconds."""
STOPPED = (SAVED, UNSAVED)
"""Exit codes of workers that were asked to stop; in a range of hosts, perhaps since another host
joins."""


@dataclass(frozen=True)
class NetworkLocation:
    """How the other hosts reach this one."""

    address: str
    """This host's address on the route to the endpoint."""
    interface: str | None
    is_head: bool | None
    """Whether the endpoint is on this host; None lets torchrun find out."""


def join_hosts(config: Config, program: Program, argv: list[str]) -> int:
    """Runs this host's part. Returns the exit code. Reports a failure of the hosts to connect.

    argv: the words of the command line.
    """
    run_dir = Path(str(config.run_dir))
    stop = StopRequests()
    try:
        with stop.listening(), registered(run_dir), tempfile.TemporaryDirectory() as folder:
            if present_hosts(run_dir) == [
                socket.gethostname()
            ]:  # the first host: the file is of an earlier run
                (run_dir / failure_report.FILE).unlink(missing_ok=True)
            if config.host_range and (endpoint := meeting_point.chosen(run_dir)):
                config = _meeting_at(config, endpoint)
            while True:
                exit_code_file = Path(tempfile.mkdtemp(dir=folder), "exit_codes")
                exit_code_file.touch()
                location = find_location(str(config.launch.rdzv_endpoint))
                env = agent_environment(location.interface, exit_code_file)
                # if this launcher is killed, so is the agent, and with it its workers
                agent = subprocess.Popen(
                    command(config, location, program, argv),
                    env=env,
                    preexec_fn=end_with_parent,
                    start_new_session=True,
                )
                seen = _watch(config, agent, program.script, exit_code_file, stop)
                if (elsewhere := _elsewhere(config, location, exit_code_file, stop, seen)) is None:
                    return _exit_code(config, seen, exit_code_file, stop)
                print(
                    f"the hosts meet at {elsewhere.launch.rdzv_endpoint} from now on",
                    file=sys.stderr,
                )
                config = elsewhere
    except LaunchError as error:
        failure = failure_report.Failure(
            error.kind,
            None,
            socket.gethostname(),
            None,
            "hosts",
            str(error),
            error.remedy,
            "",
            error.exit_code,
        )
        if not failure_report.report(
            run_dir, failure, described(config)
        ):  # another host reported first, on its own terminal
            print(failure_report.headline(failure), file=sys.stderr)
        return error.exit_code


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
        "-m",
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


def find_location(endpoint: str) -> NetworkLocation:
    """Finds this host's location from the resolver and the routing table, without sending a packet.

    Raises PeerError if the hosts cannot meet at `endpoint` (HOST:PORT).
    """
    name, _, port = endpoint.rpartition(":")
    here = socket.gethostname()
    try:
        family, _, _, _, target = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise PeerError(
            f"launch.rdzv_endpoint={endpoint}: {name} does not resolve on {here}"
            f" ({error.args[-1]})",
            "add the name to /etc/hosts, or use an IP address",
        ) from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise PeerError(
                f"launch.rdzv_endpoint={endpoint}: no route from {here} to {target[0]}"
                f" ({error.strerror})",
                "check the address, and the routes of this host: `ip route`",
            ) from error
        address = str(probe.getsockname()[0])
    if ipaddress.ip_address(address).is_loopback:
        if (
            name == "localhost" or name == target[0]
        ):  # all "hosts" are this one: torchrun finds out which agent serves the store
            return NetworkLocation(address, None, None)
        raise PeerError(
            f"launch.rdzv_endpoint={endpoint}: {name} resolves to {target[0]} on {here}, a loopback"
            " address that no other host can reach",
            f"give {name} its own address in /etc/hosts (Debian writes 127.0.1.1), or use that IP"
            " address",
        )
    is_head = address == target[0]
    if is_head:
        _check_free(endpoint, family, int(port))
    interfaces = {held: name for name, held in addresses_of_interfaces().items()}
    return NetworkLocation(address, interfaces.get(address), is_head)


def _check_free(endpoint: str, family: int, port: int) -> None:
    """Raises PeerError if the port is in use: torchrun would take any listener for the store and
    wait for it."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise PeerError(
                f"launch.rdzv_endpoint={endpoint}: port {port} of {socket.gethostname()} "
                + (
                    "is in use by another process"
                    if taken
                    else f"cannot be used ({error.strerror})"
                ),
                f"use another port; `ss -ltnp sport = :{port}` shows which process has it",
            ) from error


def addresses_of_interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one. With IPv6, gloo and NCCL choose an
    interface."""
    SIOCGIFADDR = (
        0x8915  # linux/sockios.h: the address of an interface is at byte 20 of struct ifreq
    )
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return found


@contextlib.contextmanager
def registered(run_dir: Path) -> Iterator[None]:
    """Registers this host inside: `present_hosts` lists it on every host that sees the same run
    directory."""
    path = run_dir / "hosts" / socket.gethostname()
    try:
        lock = run_lock.acquire(path)
    except run_lock.LockHeldError as error:
        raise PeerError(
            f"{path} is held by {error}: this host takes part already, or another host has the same"
            " name",
            "start one launcher per host, and give each host a name of its own",
        ) from None
    except OSError as error:
        raise PeerError(
            f"run_dir={run_dir} cannot be written: {error.strerror}",
            "set run_dir to a folder that all hosts share",
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def present_hosts(run_dir: Path) -> list[str]:
    """The hosts whose launchers are running."""
    return sorted(path.name for path in (run_dir / "hosts").iterdir() if run_lock.is_held(path))


@dataclass(frozen=True)
class _Seen:
    """Of an agent, from its start to its end."""

    seconds: float
    hosts_at_start: list[str]
    """When the workers started; none if they did not."""
    present: list[str]
    """At the end."""
    returncode: int


def _meeting_at(config: Config, endpoint: str, fewer_restarts: int = 0) -> Config:
    left = config.launch.max_restarts - fewer_restarts
    return replace(config, launch=replace(config.launch, rdzv_endpoint=endpoint, max_restarts=left))


def _elsewhere(
    config: Config, location: NetworkLocation, exit_code_file: Path, stop: StopRequests, seen: _Seen
) -> Config | None:
    """The config with which the run goes on although the host of the endpoint is lost; None if it
    does not: that host is there, the workers ended in another way, or no restart is left. A host
    that is cut off and not dead cannot train on beside the others: it has the lock of the run
    directory, or they have."""
    launch, (attempt, codes, _) = config.launch, _read_exit_codes(exit_code_file)
    may = (
        config.host_range
        and seen.hosts_at_start
        and not stop.received
        and attempt < launch.max_restarts
    )
    if not may or location.is_head or 0 in codes or _is_final(config, codes):
        return None
    endpoint = str(launch.rdzv_endpoint)
    if meeting_point.is_reachable(endpoint):
        return None
    here = f"{location.address}:{endpoint.rpartition(':')[2]}"
    return _meeting_at(
        config, meeting_point.choose(Path(str(config.run_dir)), endpoint, here), attempt + 1
    )


def _watch(
    config: Config,
    agent: subprocess.Popen[bytes],
    script: Path,
    exit_code_file: Path,
    stop: StopRequests,
) -> _Seen:
    """Waits for the agent, with limits, and kills it."""
    launch = config.launch
    run_dir = Path(str(config.run_dir))
    began = last_seen = time.monotonic()
    hosts_at_start: list[str] = []  # when the workers started
    stop_by = final_by = math.inf
    attempt_that_failed = 0
    try:
        while agent.poll() is None and not stop.repeated:
            now = time.monotonic()
            if stop.received and stop_by == math.inf:
                stopping_file(exit_code_file).touch()
                agent.send_signal(signal.SIGTERM)  # which forwards it to its workers
                stop_by = now + launch.grace_seconds
            if _has_workers(agent.pid, script):
                hosts_at_start = hosts_at_start or present_hosts(run_dir)
                last_seen = now
            attempt, codes, _ = _read_exit_codes(exit_code_file)
            if final_by == math.inf and _is_final(config, codes):
                final_by = now + launch.grace_seconds
                attempt_that_failed = attempt
            if final_by < math.inf and (
                now > min(final_by, last_seen) or attempt > attempt_that_failed
            ):
                # at once: the agent would restart the workers, and make those of other hosts do so
                break
            is_last = _is_last(config, attempt, codes, stop)
            patience = AGENT_PATIENCE_SECONDS + (
                0 if hosts_at_start and is_last else launch.join_timeout_seconds
            )
            if now > min(stop_by, last_seen + patience):
                break
            # An agent whose head is cut off can wait for it without an end.
            is_alone = (
                bool(config.host_range and hosts_at_start)
                and now > last_seen + AGENT_PATIENCE_SECONDS
            )
            if is_alone and not meeting_point.is_reachable(str(launch.rdzv_endpoint)):
                break
            time.sleep(POLL_SECONDS)
        present = present_hosts(run_dir)
    finally:
        agent.kill()  # its workers die with it
        agent.wait()
    return _Seen(time.monotonic() - began, hosts_at_start, present, agent.returncode)


def _exit_code(config: Config, seen: _Seen, exit_code_file: Path, stop: StopRequests) -> int:
    """This host's exit code, from those of its workers. Raises LaunchError if they tell nothing."""
    launch = config.launch
    run_dir = Path(str(config.run_dir))
    present = seen.present
    _, codes, reported = _read_exit_codes(exit_code_file)
    if codes == [0] * int(
        launch.nproc_per_node
    ):  # the agent may have failed to end its rendezvous all the same
        return 0
    if codes and set(codes) <= {0, SAVED}:
        return stop.exit_code(SAVED)
    if stop.received:
        name = signal.Signals(stop.received[0]).name
        print(
            f"stopped by {name} before it could save; the same command resumes the run",
            file=sys.stderr,
        )
        return stop.exit_code(UNSAVED)
    if not seen.hosts_at_start and not codes:
        asked = config.host_range or launch.nnodes
        raise PeerError(
            f"{len(present)} of {asked} hosts joined within {seen.seconds:.0f} s: "
            + ", ".join(present),
            "start the same command on all of them, within"
            f" launch.join_timeout_seconds={launch.join_timeout_seconds}; each must reach"
            f" {launch.rdzv_endpoint}",
        )
    other_code = LaunchError.exit_code if reported else _print_report_of_other_host(run_dir)
    if not other_code:
        ended = f"torchrun's agent exited with {seen.returncode}, and no worker reported a failure"
        gone = ", ".join(sorted(set(seen.hosts_at_start) - set(present)))
        raise (
            PeerError(f"{gone} is gone; {ended}", "look at that host")
            if gone
            else LaunchError(ended, "see its output")
        )
    return next((code for code in codes if code not in (0, LaunchError.exit_code)), other_code)


def _is_final(config: Config, codes: list[int]) -> bool:
    """Whether a restart would only repeat the failure after which workers of this host have ended
    with these codes. That of another host makes them end with one of `OF_PEERS`."""
    if any(code in FINAL for code in codes):
        return True
    with contextlib.suppress(OSError, ValueError, TypeError):  # none is reported
        return (
            bool(OF_PEERS & {*codes})
            and failure_report.reported(Path(str(config.run_dir))).exit_code in FINAL
        )
    return False


def _is_last(config: Config, attempt: int, codes: list[int], stop: StopRequests) -> bool:
    """Whether no workers follow those that have ended with these exit codes."""
    if 0 in codes:
        return True
    if config.host_range and not stop.received:
        return attempt >= config.launch.max_restarts and not {*codes} & {*STOPPED}
    return attempt >= config.launch.max_restarts or SAVED in codes


def _print_report_of_other_host(run_dir: Path) -> int:
    """Prints the failure that a worker on another host reported there. Returns its exit code, 0 if
    there is none."""
    if not failure_report.wait_for_report(run_dir, AGENT_PATIENCE_SECONDS):
        return 0
    failure = failure_report.reported(run_dir)
    print(failure_report.headline(failure), file=sys.stderr)
    return failure.exit_code


def _has_workers(agent: int, script: Path) -> bool:
    """Whether an agent has living workers. While it imports torch it has other children too."""
    for pid in children_of(agent):
        with contextlib.suppress(OSError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
            if (
                str(script).encode() in command and AGENT.encode() not in command
            ):  # between fork and exec it has both
                return True
    return False


def _read_exit_codes(exit_code_file: Path) -> tuple[int, list[int], bool]:
    """The restarts of torchrun's agent here, the exit codes of the workers that it started last,
    and whether one of them has reported a failure. It starts workers anew without counting when
    hosts join."""
    attempts = [0]
    entries = dict[str, list[str]]()
    for line in exit_code_file.read_text().splitlines():
        attempt, local_rank, entry = line.split()
        attempts.append(int(attempt))
        if entry == BEGUN:
            entries[local_rank] = []
        else:
            entries.setdefault(local_rank, []).append(entry)
    last = [entry for of_one in entries.values() for entry in of_one]
    return max(attempts), [int(entry) for entry in last if entry != REPORTED], REPORTED in last
