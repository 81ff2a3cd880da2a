"""This host's part of a run on several hosts: torchrun's agent, started, watched and ended. Does not import torch.

The agents of all hosts meet at `launch.rdzv_endpoint`. What they leave to chance is decided here: who serves the store,
the address and the interface by which the others reach this host, and how long anything may take. An agent that is cut
off can hang for ever, deaf to SIGTERM, in a read from the store; it is killed once its workers are gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import json
import math
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_train.config.auto import described
from ddp_train.config.schema import Config
from ddp_train.distributed.environment import TOLD, agent_environment
from ddp_train.errors import LaunchError, PeerError
from ddp_train.launcher.local import FINAL, StopRequests
from ddp_train.linux import children_of, end_with_parent
from ddp_train.resilience import failure_report, run_lock
from ddp_train.resilience.preemption import SAVED, UNSAVED

AGENT = "torch.distributed.run"
POLL_SECONDS = 0.2
AGENT_PATIENCE_SECONDS = 5.0
"""From the end of the last worker to the end of its agent. The agent waits for others, 300 s if they are gone."""


@dataclass(frozen=True)
class NetworkLocation:
    """Where this host stands among the others."""

    address: str
    """Its own, on the way to the endpoint."""
    interface: str | None
    is_head: bool | None
    """Whether the endpoint is here; None leaves it to torchrun."""


def join_hosts(config: Config, script: Path, argv: list[str]) -> int:
    """Runs this host's part. Returns the exit code; what kept the hosts apart is told and in failure.json."""
    run_dir, stop = Path(str(config.run_dir)), StopRequests()
    try:
        with stop.listening(), registered(run_dir), tempfile.TemporaryDirectory() as folder:
            if present_hosts(run_dir) == [socket.gethostname()]:  # the first: what it finds is of an earlier run
                (run_dir / failure_report.FILE).unlink(missing_ok=True)
            last_words = Path(folder, "last_words")
            last_words.touch()
            place = find_location(str(config.launch.rdzv_endpoint))
            env = agent_environment(place.interface, last_words)
            agent = subprocess.Popen(  # if this launcher is killed, so is the agent, and with it its workers
                command(config, place, script, argv), env=env, preexec_fn=end_with_parent, start_new_session=True
            )
            return _watch(config, agent, script, last_words, stop)
    except LaunchError as error:
        failure = failure_report.Failure(
            error.kind, None, socket.gethostname(), None, "hosts", str(error), error.remedy, "", error.exit_code
        )
        if not failure_report.report(run_dir, failure, described(config)):  # another host did, on its own terminal
            print(failure_report.headline(failure), file=sys.stderr)
        return error.exit_code


def command(config: Config, place: NetworkLocation, script: Path, argv: list[str]) -> list[str]:
    """torchrun's command line."""
    launch = config.launch
    rendezvous = [f"join_timeout={launch.join_timeout_seconds}", f"read_timeout={launch.join_timeout_seconds}"]
    if place.is_head is not None:
        rendezvous.append(f"is_host={int(place.is_head)}")
    return [
        sys.executable,
        "-P",  # nothing is imported from the folder that the user stands in
        "-m",
        AGENT,
        f"--nnodes={launch.nnodes}",
        f"--nproc-per-node={launch.nproc_per_node}",
        f"--max-restarts={launch.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={launch.rdzv_endpoint}",
        f"--rdzv-id={Path(str(config.run_dir)).name}",
        f"--rdzv-conf={','.join(rendezvous)}",
        f"--local-addr={place.address}",
        str(script),
        *[word for word in argv if not word.startswith("launch.max_restarts")],
    ]


def find_location(endpoint: str) -> NetworkLocation:
    """Asks the resolver and the routing table; sends nothing. Raises PeerError if hosts could not meet there."""
    name, _, port = endpoint.rpartition(":")
    here = socket.gethostname()
    try:
        family, _, _, _, target = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise PeerError(
            f"launch.rdzv_endpoint={endpoint}: {name} resolves to nothing on {here} ({error.args[-1]})",
            "add it to /etc/hosts, or use an address",
        ) from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise PeerError(
                f"launch.rdzv_endpoint={endpoint}: there is no way from {here} to {target[0]} ({error.strerror})",
                "check the address, and this host's network",
            ) from error
        address = str(probe.getsockname()[0])
    if ipaddress.ip_address(address).is_loopback:
        if name == "localhost" or name == target[0]:  # all "hosts" are this one: torchrun finds out who serves
            return NetworkLocation(address, None, None)
        raise PeerError(
            f"launch.rdzv_endpoint={endpoint}: {name} resolves to {target[0]} on {here}, where no other host finds it",
            f"give {name} its own address in /etc/hosts (Debian writes 127.0.1.1), or use the address",
        )
    is_head = address == target[0]
    if is_head:
        _check_free(endpoint, family, int(port))
    interfaces = {held: name for name, held in addresses_of_interfaces().items()}
    return NetworkLocation(address, interfaces.get(address), is_head)


def _check_free(endpoint: str, family: int, port: int) -> None:
    """torchrun itself takes whoever listens there for the store, and waits for its answers."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise PeerError(
                f"launch.rdzv_endpoint={endpoint}: port {port} of {socket.gethostname()} "
                + ("is taken by another process" if taken else f"cannot be used ({error.strerror})"),
                f"use another port; `ss -ltnp sport = :{port}` shows who has it",
            ) from error


def addresses_of_interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one. For IPv6 gloo and NCCL must find it themselves."""
    SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface is at byte 20 of struct ifreq
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return found


@contextlib.contextmanager
def registered(run_dir: Path) -> Iterator[None]:
    """Inside, `present_hosts` counts this host, wherever it sees the same run directory."""
    path = run_dir / "hosts" / socket.gethostname()
    try:
        mine = run_lock.acquire(path)
    except run_lock.LockHeldError as error:
        raise PeerError(
            f"{path} is held by {error}: this host takes part already, or another one has its name",
            "start one launcher per host, and give each host a name of its own",
        ) from None
    except OSError as error:
        raise PeerError(
            f"run_dir={run_dir} cannot be written: {error.strerror}", "name a folder that all hosts share"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        mine.release()


def present_hosts(run_dir: Path) -> list[str]:
    """The hosts whose launchers are at work."""
    return sorted(path.name for path in (run_dir / "hosts").iterdir() if run_lock.is_held(path))


def _watch(config: Config, agent: subprocess.Popen[bytes], script: Path, last_words: Path, stop: StopRequests) -> int:
    """Waits for the agent, and not for ever. Returns the exit code of this host's workers, whatever became of it."""
    launch, run_dir = config.launch, Path(str(config.run_dir))
    began = last_seen = time.monotonic()
    met: list[str] = []  # the hosts that were there when the workers started
    stop_by = math.inf
    attempt, codes, told = 0, [], False
    try:
        while agent.poll() is None and not stop.insists:
            now = time.monotonic()
            if stop.received and stop_by == math.inf:
                agent.send_signal(signal.SIGTERM)  # it hands it on to its workers
                stop_by = now + launch.grace_seconds
            if _has_workers(agent.pid, script):
                met = met or present_hosts(run_dir)
                last_seen = now
            attempt, codes, told = _read(last_words)
            over = met and (attempt >= launch.max_restarts or any(code in (0, SAVED, *FINAL) for code in codes))
            patience = AGENT_PATIENCE_SECONDS + (0 if over else launch.join_timeout_seconds)
            if now > min(stop_by, last_seen + patience):
                break
            time.sleep(POLL_SECONDS)
        present = present_hosts(run_dir)
    finally:
        agent.kill()  # its workers die with it
        agent.wait()
    attempt, codes, told = _read(last_words)
    if codes == [0] * int(launch.nproc_per_node):  # the agent may still have failed to say goodbye to the others
        return 0
    if codes and set(codes) <= {0, SAVED}:
        return stop.exit_code(SAVED)
    if stop.received:
        print(f"stopped by {signal.Signals(stop.received[0]).name}; the same command goes on", file=sys.stderr)
        return stop.exit_code(UNSAVED)
    if not met and not codes:
        raise PeerError(
            f"{len(present)} of {launch.nnodes} hosts came within {time.monotonic() - began:.0f} s: "
            + ", ".join(present),
            f"start the same command on all of them; each must reach {launch.rdzv_endpoint}, and have the time of "
            f"launch.join_timeout_seconds={launch.join_timeout_seconds}",
        )
    if not told and not _tell(run_dir):
        left = f"torchrun's agent left with {agent.returncode}, its workers without a word"
        gone = ", ".join(sorted(set(met) - set(present)))
        raise PeerError(f"{gone} is gone; {left}", "look at that host") if gone else LaunchError(left, "see above")
    return next((code for code in codes if code not in (0, LaunchError.exit_code)), LaunchError.exit_code)


def _tell(run_dir: Path) -> bool:
    """Shows here what a worker on another host has told there. Returns whether any did."""
    if not failure_report.wait_for_report(run_dir, AGENT_PATIENCE_SECONDS):
        return False
    print(
        failure_report.headline(failure_report.Failure(**json.loads((run_dir / failure_report.FILE).read_text()))),
        file=sys.stderr,
    )
    return True


def _has_workers(agent: int, script: Path) -> bool:
    """Whether workers of an agent are alive. It has other children too, while torch is imported."""
    for pid in children_of(agent):
        with contextlib.suppress(OSError):  # it ended in between
            command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for the dead
            if str(script).encode() in command and AGENT.encode() not in command:  # between fork and exec it has both
                return True
    return False


def _read(last_words: Path) -> tuple[int, list[int], bool]:
    """The latest attempt of which workers on this host left a word, their exit codes, and whether one told the user."""
    lines = [line.split() for line in last_words.read_text().splitlines()]
    latest = max((int(attempt) for attempt, _ in lines), default=0)
    argv = [word for attempt, word in lines if int(attempt) == latest]
    return latest, [int(word) for word in argv if word != TOLD], TOLD in argv
