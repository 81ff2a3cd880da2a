"""Several hosts: one doctor on each. They meet in torchrun's store, through which JSON alone goes; all waits end."""

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

from torch.distributed import DistError, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed.environment import gloo_interface
from ddp_train.distributed.preflight import CLOCK_TOLERANCE_SECONDS, differing_overrides, seen_here
from ddp_train.doctor.findings import Finding, failure, ok, skipped, warning
from ddp_train.doctor.host import OWN_CODE, resolve
from ddp_train.errors import ConfigError, DataError, PeerError
from ddp_train.launcher.multihost import addresses_of_interfaces
from ddp_train.text import counted, first_line

REACH_SECONDS, REACH_AT_ONCE = 3.0, 64
"""For a connection to another host, and how many are tried at a time; a firewall that drops packets gives no answer."""
CLOCK_WARNING_SECONDS = 1.0
ALONE = "one host alone answers"
Facts = dict[str, Any]


class Peers:
    """The doctors of all hosts of a run. Host 0 collects what the others say, and speaks for all."""

    def __init__(self, store: Store, number: int, count: int, attempt: int) -> None:
        """number: of this host among `count`."""
        self.store, self.number, self.count = PrefixStore(f"doctor/{attempt}", store), number, count

    @property
    def is_leader(self) -> bool:
        return self.number == 0

    def gather(self, name: str, mine: Facts, seconds: float) -> dict[int, Facts]:
        """Says `mine`. On host 0: what all hosts say, without those that say nothing in time; elsewhere {}."""
        self.store.set(f"{name}/{self.number}", json.dumps(mine))
        if not self.is_leader:
            return {}
        missing, deadline = set(range(self.count)), time.monotonic() + seconds
        while missing := {number for number in missing if not self.store.check([f"{name}/{number}"])}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        there = sorted(set(range(self.count)) - missing)
        return {number: json.loads(self.store.get(f"{name}/{number}")) for number in there}

    def tell(self, name: str, value: Any) -> None:
        """From host 0 to all."""
        self.store.set(name, json.dumps(value))

    def hear(self, name: str, seconds: float) -> Any:
        """What host 0 tells. Raises PeerError if it tells nothing in time."""
        self.store.set_timeout(timedelta(seconds=seconds))
        try:
            return json.loads(self.store.get(name))
        except DistError as error:
            raise PeerError(
                f"host 0 says nothing for {seconds:.0f} s ({first_line(error)})",
                "look at that host, and at what it printed",
            ) from error

    def offsets(self, others: list[int], seconds: float) -> dict[int, float]:
        """On host 0: how far the clock of each host is ahead of ours, in seconds, those that do not answer left out.

        All are asked at once. What lies within the time that question and answer took is no offset.
        """
        found, missing, deadline = {}, set(others), time.monotonic() + seconds
        asked = time.time()
        for number in others:
            self.store.set(f"clock/ask/{number}", "now")
        while missing and time.monotonic() < deadline:
            for number in [number for number in missing if self.store.check([f"clock/{number}"])]:
                said = float(self.store.get(f"clock/{number}"))
                found[number] = said - min(max(said, asked), time.time())
                missing.remove(number)
            time.sleep(0.005)
        return found

    def answer_clock(self, seconds: float) -> None:
        """Elsewhere than on host 0. Raises PeerError if it is never asked."""
        self.store.set_timeout(timedelta(seconds=seconds))
        try:
            self.store.get(f"clock/ask/{self.number}")
        except DistError as error:
            raise PeerError(f"host 0 does not ask for the time ({first_line(error)})", "look at that host") from error
        self.store.set(f"clock/{self.number}", str(time.time()))


@contextlib.contextmanager
def listening() -> Iterator[Facts]:
    """Inside, this host can be reached as gloo's workers can: at its address, or none, and a port the kernel chose."""
    interface, host = gloo_interface(), socket.gethostname()
    address = ""
    if interface:
        address = addresses_of_interfaces().get(interface.split(",")[0], "")
    else:
        addresses, _ = resolve(host)  # that it resolves to nothing its own check says
        address = addresses[0] if addresses else ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:  # the kernel answers for us: nobody has to accept
        listener.bind(("", 0))
        listener.listen(socket.SOMAXCONN)
        yield {"address": address, "port": listener.getsockname()[1]}


def reach(everybody: dict[int, Facts], number: int) -> Finding:
    """Whether this host can open connections to all others, on ports as gloo and NCCL use them.

    everybody: facts of the hosts, by their number; number: this one.
    """
    check = "connections"
    others = [facts for other, facts in everybody.items() if other != number]
    with ThreadPoolExecutor(REACH_AT_ONCE) as threads:
        failed = [flaw for flaw in threads.map(_no_way_to, others) if flaw]
    if failed:
        return failure(
            check,
            f"no way to {'; '.join(failed)}",
            "open all ports between the hosts (net.ipv4.ip_local_port_range), give each host's name an address that "
            "the others reach, or set GLOO_SOCKET_IFNAME",
            PeerError.exit_code,
        )
    return ok(check, f"{counted(len(others), 'other host')} can be reached")


def _no_way_to(facts: Facts) -> str:
    """Why a host cannot be reached; empty if it can."""
    try:
        if not facts["address"]:
            raise OSError("it has no address")
        socket.create_connection((facts["address"], facts["port"]), REACH_SECONDS).close()
    except OSError as error:
        return f"{facts['host']} ({facts['address']}:{facts['port']}): {error.strerror or error}"
    return ""


def sees_run_dir(token: str, content: str) -> Finding:
    """token: a file that host 0 has written into run_dir; empty if it could not."""
    check = "shared run_dir"
    if not token:
        return skipped(check, "host 0 could not write there")
    if seen_here(Path(token), content) == "shared":
        return ok(check, "what host 0 writes is seen")
    said = f"{token}, which host 0 wrote, is not seen here"
    return failure(check, said, "name a run_dir on a file system that all hosts share", PeerError.exit_code)


def silent(everybody: dict[int, Facts], count: int, seconds: float) -> Finding:
    """Whether the doctors of all hosts are there."""
    there = ", ".join(facts["host"] for facts in everybody.values())
    missing = [str(number) for number in range(count) if number not in everybody]
    if missing:
        said = f"host {' and '.join(missing)} of {count} did not answer within {seconds:.0f} s; there are: {there}"
        remedy = "look at that host: is its process stopped, does it run the same command?"
        return failure("hosts", said, remedy, PeerError.exit_code)
    return ok("hosts", f"all {count} answer: {there}")


def clocks(offsets: dict[int, float], everybody: dict[int, Facts], count: int) -> Finding:
    """torchrun drops a host whose clock is 15 s behind, and trains without it.

    offsets: `Peers.offsets`; everybody: facts of the hosts that answer at all, by their number; count: of all hosts.
    """
    check, others = "clocks", {number: facts["host"] for number, facts in everybody.items() if number}
    if not others:
        return skipped(check, ALONE)
    named = {everybody[number]["host"]: round(offset, 3) for number, offset in offsets.items()}
    off = {host: offset for host, offset in named.items() if abs(offset) > CLOCK_WARNING_SECONDS}
    said = ", ".join(f"{host} {offset:+.1f} s" for host, offset in off.items())
    if any(abs(offset) > CLOCK_TOLERANCE_SECONDS for offset in off.values()):
        remedy = "set the clocks right (chrony, ntpd): torchrun leaves out a host that is 15 s behind"
        return failure(check, f"against host 0: {said}", remedy, PeerError.exit_code, offsets=named)
    if off:
        return warning(check, f"against host 0: {said}", "set the clocks right (chrony, ntpd)", offsets=named)
    unknown = [host for number, host in others.items() if number not in offsets]
    if unknown:
        said = f"{', '.join(unknown)} did not tell the time when asked"
        return warning(check, said, "look at that host: is its process stopped?", offsets=named)
    return ok(check, f"{_compared(everybody, count)} within {CLOCK_WARNING_SECONDS:g} s of host 0", offsets=named)


def same_words(everybody: dict[int, Facts], count: int) -> Finding:
    """The command lines: what rank 0 composes is meant for all, but each host was told something."""
    check, argv = "config", [facts["words"] for facts in everybody.values()]
    if len(argv) < 2:
        return skipped(check, ALONE)
    if any(sorted(other) != sorted(argv[0]) for other in argv):
        differing = "; ".join(differing_overrides(argv, [facts["host"] for facts in everybody.values()]))
        return failure(check, differing, "give the same command on all hosts", ConfigError.exit_code)
    return ok(check, f"the same words on {_compared(everybody, count)}")


def same_versions(everybody: dict[int, Facts], count: int) -> Finding:
    """Python, torch, CUDA, NCCL, this package's source, driver, and the number of processes."""
    check, all_of = "versions", [facts["versions"] for facts in everybody.values()]
    if len(all_of) < 2:
        return skipped(check, ALONE)
    names = list(dict.fromkeys(name for versions in all_of for name in versions))
    differing = [name for name in names if len({versions.get(name) for versions in all_of}) > 1]
    if not differing:
        return ok(check, f"the same on {_compared(everybody, count)}", **all_of[0])
    said = "; ".join(
        f"{name}: " + ", ".join(f"{facts['host']} {facts['versions'].get(name)}" for facts in everybody.values())
        for name in differing
    )
    remedy = "install the same on all hosts, and check out the same version of this code"
    return failure(check, said, remedy, PeerError.exit_code)


def same_data(everybody: dict[int, Facts], count: int, name: str) -> Finding:
    """Names and sizes of files, or classes of an image folder; None where they could not be read.

    name: of the data set.
    """
    check = "same data"
    digests = {facts["host"]: facts["data"] for facts in everybody.values() if facts["data"] is not None}
    if len(digests) < 2:
        return skipped(check, ALONE if len(everybody) < 2 else "what the hosts have could not be read")
    if not any(digests.values()):
        return skipped(check, OWN_CODE if name == "custom" else f"{name}: no files to compare")
    if len(set(digests.values())) == 1:
        return ok(check, f"the same on {_compared(digests, count)}")
    said = ", ".join(f"{host} {digest or 'none'}" for host, digest in digests.items())
    remedy = "copy the data set anew from one host to the others, or name a shared data.root"
    return failure(check, f"files or classes differ, by their digest: {said}", remedy, DataError.exit_code)


def _compared(everybody: Sized, count: int) -> str:
    """Which hosts a comparison speaks for."""
    return f"{len(everybody)} of {counted(count, 'host')}" if len(everybody) < count else f"all {count} hosts"
