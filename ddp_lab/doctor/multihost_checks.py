"""Checks that need several hosts. One doctor process per host takes part; they exchange JSON
through torchrun's store, and every wait has a time limit."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import (
    DistError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from ddp_lab.doctor.findings import Finding, failure, ok, skipped, warning
from ddp_lab.doctor.host_checks import OWN_CODE, resolve
from ddp_train.distributed.environment import gloo_interface
from ddp_train.distributed.preflight import CLOCK_TOLERANCE_SECONDS, differing_overrides, seen_here
from ddp_train.errors import ConfigError, DataError, PeerError
from ddp_train.launcher.network_location import addresses_of_interfaces
from ddp_train.text import counted, first_line

CONNECT_SECONDS = 3.0
"""Time limit for a connection to another host: a firewall that drops packets gives no answer."""
CONNECT_THREADS = 64
CLOCK_WARNING_SECONDS = 1.0
ONE_HOST = "only one host answers"
Facts = dict[str, Any]


class Peers:
    """The doctor processes of all hosts of a job, one per host. Host 0 collects what the others
    send."""

    def __init__(self, store: Store, number: int, count: int, attempt: int) -> None:
        """number: of this host, 0 to count - 1. count: of all hosts. attempt: of torchrun's
        restarts."""
        self.store = PrefixStore(f"doctor/{attempt}", store)
        self.number = number
        self.count = count

    @property
    def is_leader(self) -> bool:
        return self.number == 0

    def gather(self, name: str, mine: Facts, seconds: float) -> dict[int, Facts]:
        """Sends `mine` to host 0. On host 0: the values of all hosts that sent one in time;
        elsewhere {}."""
        self.store.set(f"{name}/{self.number}", json.dumps(mine))
        if not self.is_leader:
            return {}
        missing = set(range(self.count))
        deadline = time.monotonic() + seconds
        while missing := {
            number for number in missing if not self.store.check([f"{name}/{number}"])
        }:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        present = sorted(set(range(self.count)) - missing)
        return {number: json.loads(self.store.get(f"{name}/{number}")) for number in present}

    def publish(self, name: str, value: Any) -> None:
        """On host 0: sends a value to all hosts."""
        self.store.set(name, json.dumps(value))

    def wait_for(self, name: str, seconds: float) -> Any:
        """The value that host 0 published. Raises PeerError if there is none in time."""
        self.store.set_timeout(timedelta(seconds=seconds))
        try:
            return json.loads(self.store.get(name))
        except DistError as error:
            raise PeerError(
                f"no message from host 0 for {seconds:.0f} s ({first_line(error)})",
                "check that host, and what it printed",
            ) from error

    def clock_offsets(self, others: list[int], seconds: float) -> dict[int, float]:
        """On host 0: how far the clock of each host is ahead of this one's, in seconds; hosts
        without answer left out.

        All are asked at once. An answer that lies between the times of question and answer has
        offset 0.
        """
        found: dict[int, float] = {}
        missing = set(others)
        deadline = time.monotonic() + seconds
        asked = time.time()
        for number in others:
            self.store.set(f"clock/ask/{number}", "now")
        while missing and time.monotonic() < deadline:
            for number in [number for number in missing if self.store.check([f"clock/{number}"])]:
                clock = float(self.store.get(f"clock/{number}"))
                found[number] = clock - min(max(clock, asked), time.time())
                missing.remove(number)
            time.sleep(0.005)
        return found

    def answer_clock(self, seconds: float) -> None:
        """On the other hosts: waits for the question and answers it. Raises PeerError if it does
        not come in time."""
        self.store.set_timeout(timedelta(seconds=seconds))
        try:
            self.store.get(f"clock/ask/{self.number}")
        except DistError as error:
            raise PeerError(
                f"host 0 did not ask for this host's clock ({first_line(error)})", "check host 0"
            ) from error
        self.store.set(f"clock/{self.number}", str(time.time()))


@contextlib.contextmanager
def listening() -> Iterator[Facts]:
    """Inside, this host listens as gloo's workers do: on its own address and a port that the kernel
    chose.

    Yields both; the address is empty if there is none.
    """
    interface = gloo_interface()
    host = socket.gethostname()
    address = ""
    if interface:
        address = addresses_of_interfaces().get(interface.split(",")[0], "")
    else:
        addresses, _ = resolve(
            host
        )  # a name that does not resolve is reported by the check of the host name
        address = addresses[0] if addresses else ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(
        family, socket.SOCK_STREAM
    ) as listener:  # the kernel completes connections: no accept needed
        listener.bind(("", 0))
        listener.listen(socket.SOMAXCONN)
        yield {"address": address, "port": listener.getsockname()[1]}


def interface_to_peers(address: str) -> str:
    """The network interface that leads to the other hosts: GLOO_SOCKET_IFNAME, else the one with
    this address."""
    names = {held: name for name, held in addresses_of_interfaces().items()}
    return gloo_interface() or names.get(address, address)


def connections(facts_by_host: dict[int, Facts], number: int) -> Finding:
    """Whether this host can open connections to all others, on ports as gloo and NCCL use them.

    number: of this host.
    """
    check = "connections"
    others = [facts for other, facts in facts_by_host.items() if other != number]
    with ThreadPoolExecutor(CONNECT_THREADS) as threads:
        failed = [problem for problem in threads.map(_connection_error, others) if problem]
    if failed:
        return failure(
            check,
            f"cannot connect to {'; '.join(failed)}",
            "open all ports between the hosts (net.ipv4.ip_local_port_range), give each host's name"
            " an address that the others can reach, or set GLOO_SOCKET_IFNAME",
            PeerError.exit_code,
        )
    return ok(check, f"{counted(len(others), 'other host')} can be reached")


def _connection_error(facts: Facts) -> str:
    """Why a host cannot be reached; empty if it can."""
    try:
        if not facts["address"]:
            raise OSError("it has no address")
        socket.create_connection((facts["address"], facts["port"]), CONNECT_SECONDS).close()
    except OSError as error:
        return f"{facts['host']} ({facts['address']}:{facts['port']}): {error.strerror or error}"
    return ""


def shared_run_dir(token: str, content: str) -> Finding:
    """Whether this host sees a file that host 0 has written into run_dir.

    token: its path, empty if host 0 could not write it.
    """
    check = "shared run_dir"
    if not token:
        return skipped(check, "host 0 could not write there")
    if seen_here(Path(token), content) == "shared":
        return ok(check, "this host sees what host 0 writes")
    detail = f"{token}, written by host 0, is not visible here"
    return failure(
        check, detail, "name a run_dir on a file system that all hosts share", PeerError.exit_code
    )


def all_present(facts_by_host: dict[int, Facts], count: int, seconds: float) -> Finding:
    """Whether all hosts sent their facts and reports. seconds: how long host 0 waited."""
    names = ", ".join(facts["host"] for facts in facts_by_host.values())
    missing = [str(number) for number in range(count) if number not in facts_by_host]
    if missing:
        detail = (
            f"host {' and '.join(missing)} of {count} did not answer within {seconds:.0f} s;"
            f" present: {names}"
        )
        remedy = "check that host: is its process stopped, does it run the same command?"
        return failure("hosts", detail, remedy, PeerError.exit_code)
    return ok("hosts", f"all {count} answer: {names}")


def clocks(offsets: dict[int, float], facts_by_host: dict[int, Facts], count: int) -> Finding:
    """torchrun drops a host whose clock is 15 s behind, and trains without it.

    offsets: of `Peers.clock_offsets`. facts_by_host: of the hosts that answered at all. count: of
    all hosts.
    """
    check = "clocks"
    others = {number: facts["host"] for number, facts in facts_by_host.items() if number}
    if not others:
        return skipped(check, ONE_HOST)
    named = {facts_by_host[number]["host"]: round(offset, 3) for number, offset in offsets.items()}
    off = {host: offset for host, offset in named.items() if abs(offset) > CLOCK_WARNING_SECONDS}
    detail = "compared with host 0: " + ", ".join(
        f"{host} {offset:+.1f} s" for host, offset in off.items()
    )
    if any(abs(offset) > CLOCK_TOLERANCE_SECONDS for offset in off.values()):
        remedy = (
            "synchronise the clocks (chrony, ntpd): torchrun leaves out a host that is 15 s behind"
        )
        return failure(check, detail, remedy, PeerError.exit_code, offsets=named)
    if off:
        return warning(check, detail, "synchronise the clocks (chrony, ntpd)", offsets=named)
    unknown = [host for number, host in others.items() if number not in offsets]
    if unknown:
        detail = f"no answer about the clock from {', '.join(unknown)}"
        return warning(check, detail, "check that host: is its process stopped?", offsets=named)
    return ok(
        check,
        f"{_compared(facts_by_host, count)} within {CLOCK_WARNING_SECONDS:g} s of host 0",
        offsets=named,
    )


def same_overrides(facts_by_host: dict[int, Facts], count: int) -> Finding:
    """Whether all command lines are equal: rank 0 composes the config for all hosts."""
    check = "config"
    argv = [facts["argv"] for facts in facts_by_host.values()]
    if len(argv) < 2:
        return skipped(check, ONE_HOST)
    if any(sorted(other) != sorted(argv[0]) for other in argv):
        differing = "; ".join(
            differing_overrides(argv, [facts["host"] for facts in facts_by_host.values()])
        )
        return failure(check, differing, "run the same command on all hosts", ConfigError.exit_code)
    return ok(check, f"the same overrides on {_compared(facts_by_host, count)}")


def same_versions(facts_by_host: dict[int, Facts], count: int) -> Finding:
    """Python, torch, CUDA, NCCL, this package's source, driver, and the number of processes."""
    check = "versions"
    values = [facts["versions"] for facts in facts_by_host.values()]
    hosts = [facts["host"] for facts in facts_by_host.values()]
    if len(values) < 2:
        return skipped(check, ONE_HOST)
    names = list(dict.fromkeys(name for one in values for name in one))
    differing = [name for name in names if len({one.get(name) for one in values}) > 1]
    if not differing:
        return ok(check, f"the same on {_compared(facts_by_host, count)}", **values[0])
    detail = "; ".join(
        f"{name}: "
        + ", ".join(f"{host} {one.get(name)}" for host, one in zip(hosts, values, strict=True))
        for name in differing
    )
    remedy = "install the same on all hosts, and check out the same version of this code"
    return failure(check, detail, remedy, PeerError.exit_code)


def same_data(facts_by_host: dict[int, Facts], count: int, name: str) -> Finding:
    """Compares `data_digest` of the hosts, None where the files could not be read. name: of the
    data set."""
    check = "same data"
    digests = {
        facts["host"]: facts["data"]
        for facts in facts_by_host.values()
        if facts["data"] is not None
    }
    if len(digests) < 2:
        return skipped(check, ONE_HOST if len(facts_by_host) < 2 else "the files could not be read")
    if not any(digests.values()):
        return skipped(check, OWN_CODE if name == "custom" else f"{name}: no files to compare")
    if len(set(digests.values())) == 1:
        return ok(check, f"the same on {_compared(digests, count)}")
    detail = "files or classes differ, digests: "
    detail += ", ".join(f"{host} {digest or 'none'}" for host, digest in digests.items())
    remedy = "copy the data set again from one host to the others, or name a shared data.root"
    return failure(check, detail, remedy, DataError.exit_code)


def _compared(compared: Sized, count: int) -> str:
    """`all 3 hosts`, or `2 of 3 hosts`: how many hosts a comparison covers."""
    if len(compared) < count:
        return f"{len(compared)} of {counted(count, 'host')}"
    return f"all {count} hosts"
