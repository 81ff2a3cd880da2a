"""Checks that need several hosts, by the facts that each host sends."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ddp_lab.doctor.findings import Finding, failure, ok, run_check, skipped, warning
from ddp_lab.doctor.host_checks import OWN_CODE, resolve
from ddp_lab.doctor.peers import Facts
from ddp_train.distributed.environment import gloo_interface
from ddp_train.distributed.preflight import CLOCK_TOLERANCE_SECONDS, differing_overrides, seen_here
from ddp_train.errors import ConfigError, DataError, PeerError
from ddp_train.launcher.network_location import addresses_of_interfaces
from ddp_train.text import counted

CONNECT_SECONDS = 3.0
"""Time limit for a connection to another host: a firewall that drops packets gives no answer."""
CONNECT_THREADS = 64
CLOCK_WARNING_SECONDS = 1.0
ONE_HOST = "only one host answered"


@contextlib.contextmanager
def listening() -> Iterator[Facts]:
    """Inside, this host listens as gloo's workers do: on its own address and a port that the kernel
    chose.

    Yields both; the address is empty if there is none.
    """
    interface = gloo_interface()
    if interface:
        address = addresses_of_interfaces().get(interface.split(",")[0], "")
    else:
        # the check of the host name reports one that does not resolve
        addresses, _ = resolve(socket.gethostname())
        address = addresses[0] if addresses else ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        listener.listen(socket.SOMAXCONN)  # the kernel completes connections: no accept needed
        yield {"address": address, "port": listener.getsockname()[1]}


def interface_to_peers(address: str) -> str:
    """The network interface that leads to the other hosts: GLOO_SOCKET_IFNAME, else the one with
    this address."""
    names = {held: name for name, held in addresses_of_interfaces().items()}
    return gloo_interface() or names.get(address, address)


def connections(facts_by_host: dict[int, Facts], number: int) -> Finding:
    """Open connections to all other hosts, on ports as gloo and NCCL use them.

    number: of this host.
    """
    others = [facts for other, facts in facts_by_host.items() if other != number]
    with ThreadPoolExecutor(CONNECT_THREADS) as threads:
        failed = [problem for problem in threads.map(_connection_error, others) if problem]
    if failed:
        return failure(
            f"cannot connect to {'; '.join(failed)}",
            "open all ports between the hosts (net.ipv4.ip_local_port_range), give each host's name"
            " an address that the others can reach, or set GLOO_SOCKET_IFNAME",
            PeerError.exit_code,
        )
    return ok(f"{counted(len(others), 'other host')} can be reached")


def _connection_error(facts: Facts) -> str:
    """Why a host cannot be reached; empty if it can."""
    try:
        if not facts["address"]:
            raise OSError("the host has no address")
        socket.create_connection((facts["address"], facts["port"]), CONNECT_SECONDS).close()
    except OSError as error:
        return f"{facts['host']} ({facts['address']}:{facts['port']}): {error.strerror or error}"
    return ""


def shared_run_dir(token: str, content: str) -> Finding:
    """Look for a file that host 0 has written into run_dir.

    token: path of the file, empty if host 0 could not write it.
    """
    if not token:
        return skipped("host 0 could not write there")
    if seen_here(Path(token), content) == "shared":
        return ok("this host sees what host 0 writes")
    detail = f"{token}, written by host 0, is not visible here"
    return failure(
        detail, "use a run_dir on a file system that all hosts share", PeerError.exit_code
    )


def all_present(facts_by_host: dict[int, Facts], count: int, seconds: float) -> Finding:
    """Name the hosts that did not send their facts and reports.

    seconds: how long host 0 waited.
    """
    names = ", ".join(facts["host"] for facts in facts_by_host.values())
    missing = [str(number) for number in range(count) if number not in facts_by_host]
    if missing:
        detail = (
            f"host {' and '.join(missing)} of {count} did not answer within {seconds:.0f} s;"
            f" present: {names}"
        )
        remedy = (
            "check on that host whether the same command runs, and whether its process is stopped"
        )
        return failure(detail, remedy, PeerError.exit_code)
    return ok(f"all {count} answer: {names}")


@dataclass(frozen=True)
class HostComparison:
    """Compares the facts of the hosts that answer."""

    facts_by_host: dict[int, Facts]
    """The hosts that answered, by number; host 0 always does."""
    count: int
    """Number of all hosts."""

    def findings(self, offsets: dict[int, float], data_name: str) -> list[Finding]:
        """The findings of all comparisons.

        offsets: result of `Peers.clock_offsets`.
        data_name: name of the data set.
        """
        checks: dict[str, Callable[[], Finding]] = {
            "clocks": lambda: self.clocks(offsets),
            "config": self.overrides,
            "versions": self.versions,
            "same data": lambda: self.data(data_name),
        }
        if len(self.facts_by_host) < 2:
            return [skipped(ONE_HOST).named(name) for name in checks]
        return [run_check(name, check) for name, check in checks.items()]

    @property
    def _facts(self) -> list[Facts]:
        return list(self.facts_by_host.values())

    @property
    def _hosts(self) -> list[str]:
        return [facts["host"] for facts in self._facts]

    def _compared(self, compared: Sized) -> str:
        """The hosts that a comparison covers: `all 3 hosts`, or `2 of 3 hosts`."""
        if len(compared) < self.count:
            return f"{len(compared)} of {counted(self.count, 'host')}"
        return f"all {self.count} hosts"

    def clocks(self, offsets: dict[int, float]) -> Finding:
        """Compare the clocks: torchrun drops a host whose clock is 15 s behind, and trains without
        it.

        offsets: result of `Peers.clock_offsets`.
        """
        names = dict(zip(self.facts_by_host, self._hosts, strict=True))
        named = {names[number]: round(offset, 3) for number, offset in offsets.items()}
        wrong = {
            host: offset for host, offset in named.items() if abs(offset) > CLOCK_WARNING_SECONDS
        }
        listed = ", ".join(f"{host} {offset:+.1f} s" for host, offset in wrong.items())
        detail = f"compared with host 0: {listed}"
        remedy = "synchronise the clocks (chrony, ntpd)"
        if any(abs(offset) > CLOCK_TOLERANCE_SECONDS for offset in wrong.values()):
            remedy += ": torchrun leaves out a host that is 15 s behind"
            return failure(detail, remedy, PeerError.exit_code, offsets=named)
        if wrong:
            return warning(detail, remedy, offsets=named)
        unknown = [host for number, host in names.items() if number and number not in offsets]
        if unknown:
            detail = f"no answer about the clock from {', '.join(unknown)}"
            return warning(
                detail, "check on that host whether the process is stopped", offsets=named
            )
        compared = self._compared(names)
        detail = f"{compared} within {CLOCK_WARNING_SECONDS:g} s of host 0"
        return ok(detail, offsets=named)

    def overrides(self) -> Finding:
        """Compare the command lines: rank 0 composes the config for all hosts."""
        argv = [facts["argv"] for facts in self._facts]
        if any(sorted(other) != sorted(argv[0]) for other in argv):
            differing = "; ".join(differing_overrides(argv, self._hosts))
            return failure(differing, "run the same command on all hosts", ConfigError.exit_code)
        return ok(f"the same overrides on {self._compared(argv)}")

    def versions(self) -> Finding:
        """Compare Python, torch, CUDA, NCCL, this package's source, driver, and the number of
        processes."""
        versions = [facts["versions"] for facts in self._facts]
        differing = []
        for name in dict.fromkeys(name for known in versions for name in known):
            values = [known.get(name) for known in versions]
            if len(set(values)) > 1:
                pairs = zip(self._hosts, values, strict=True)
                listed = ", ".join(f"{host} {value}" for host, value in pairs)
                differing.append(f"{name}: {listed}")
        if not differing:
            return ok(f"the same on {self._compared(versions)}", **versions[0])
        remedy = "install the same on all hosts, and check out the same version of this code"
        return failure("; ".join(differing), remedy, PeerError.exit_code)

    def data(self, name: str) -> Finding:
        """Compare the digests of the data set, which are None where the files could not be read.

        name: of the data set.
        """
        digests = {
            facts["host"]: facts["data"] for facts in self._facts if facts["data"] is not None
        }
        if len(digests) < 2:
            return skipped("the files could not be read")
        if not any(digests.values()):
            return skipped(OWN_CODE if name == "custom" else f"{name}: no files to compare")
        if len(set(digests.values())) == 1:
            return ok(f"the same on {self._compared(digests)}")
        listed = ", ".join(f"{host} {digest or 'none'}" for host, digest in digests.items())
        detail = f"files or classes differ, digests: {listed}"
        remedy = "copy the data set again from one host to the others, or name a shared data.root"
        return failure(detail, remedy, DataError.exit_code)
