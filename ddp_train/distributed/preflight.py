"""Checks before step 0 that all processes have the same versions, source, arguments and run
directory.

They compare through the store; a difference is an error with a table. Only torchrun's workers need
it: those of our launcher share one host, one Python and one frozen config.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import platform
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch.cuda import nccl
from torch.distributed import DistError, Store  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed.agent import hosts_requested, hosts_started
from ddp_train.distributed.environment import gloo_interface
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, PeerError
from ddp_train.linux import wait_until
from ddp_train.text import first_line, named_ranks

HERE = "ddp_train/here"
FACTS = "ddp_train/facts"
CLOCK = "ddp_train/clock"
VERDICT = "ddp_train/verdict"
READ = "ddp_train/read"
CLOCK_TOLERANCE_SECONDS = 5.0
"""torchrun drops a host whose heartbeat is 15 s old by the others' clocks, and trains without
it."""
READ_SECONDS = 5.0
"""The longest wait of rank 0, which may serve the store, until all ranks have read its message."""
SHARED_FILE_SECONDS = 10.0
"""The longest wait until a network file system shows what rank 0 has just written."""

NOTE_SECONDS = 10.0
"""A wait for other processes that lasts so long is told on the terminal."""

Facts = dict[str, str]


def agree(
    store: Store, world: World, argv: list[str], frozen: Path, text: str, timeout_seconds: float
) -> None:
    """Check that all processes agree, with the same error on all ranks if they do not.

    argv: the command line.
    frozen: the config file that rank 0 wrote.
    text: the content of that file.

    Raises ConfigError if the command lines differ; PeerError if anything else differs, if a process
    does not respond within `timeout_seconds`, or if torchrun left a host out.
    """
    store.set_timeout(timedelta(seconds=timeout_seconds))
    try:
        facts = {"argv": argv, **facts_here(world, frozen, text)}
        store.set(f"{FACTS}/{world.rank}", json.dumps(facts))
        if world.is_leader:
            verdict = _verdict(store, world, timeout_seconds)
            store.set(VERDICT, json.dumps(verdict))
        else:
            store.get(CLOCK)
            store.set(f"{CLOCK}/{world.rank}", str(time.time()))
            verdict = json.loads(store.get(VERDICT))
    except DistError as error:
        raise _lost_connection(world, error) from error
    acknowledge(store, world, wait=bool(verdict))
    if not verdict:
        return
    detail, remedy = verdict
    if remedy:
        raise PeerError(detail, remedy)
    raise ConfigError(detail.splitlines())


def meet(store: Store, world: World, timeout_seconds: float) -> None:
    """Wait until all ranks are here.

    Raises PeerError on all of them if one is not within `timeout_seconds`.
    """
    store.set_timeout(timedelta(seconds=timeout_seconds + READ_SECONDS))
    try:
        store.set(f"{HERE}/{world.rank}", "")
        if world.is_leader:
            deadline = time.monotonic() + timeout_seconds
            missing = _missing_ranks(store, HERE, world, deadline)
            store.set(VERDICT, json.dumps(missing))
        else:
            missing = json.loads(store.get(VERDICT))
        acknowledge(store, world, wait=bool(missing), absent=len(missing))
    except DistError as error:
        raise _lost_connection(world, error) from error
    if missing:
        raise PeerError(
            f"{named_ranks(missing)} of {world.size} did not respond within {timeout_seconds:g} s",
            "start these ranks too, or see their output; to wait longer, raise timeout_seconds",
        )


def _lost_connection(world: World, error: DistError) -> PeerError:
    return PeerError(
        f"rank {world.rank} lost the connection to the store before step 0: {first_line(error)}",
        "see the output of rank 0",
    )


def acknowledge(store: Store, world: World, wait: bool, absent: int = 0) -> None:
    """Record that this rank has read rank 0's message.

    wait: whether rank 0 waits until all ranks have, READ_SECONDS at most.
    absent: ranks that never will.
    """
    if not world.is_leader:
        store.add(READ, 1)
    elif wait:
        readers = world.size - 1 - absent
        wait_until(lambda: store.add(READ, 0) >= readers, READ_SECONDS)


def facts_here(world: World, frozen: Path, text: str) -> Facts:
    """The facts that must be the same for all processes, and this host's name."""
    facts = {
        "host": socket.gethostname(),
        "processes of the host": str(world.local_size),
        **versions_here(),
    }
    if world.hosts > 1:
        facts["run_dir"] = seen_here(frozen, text)
        facts["address"] = _address()
    return facts


def versions_here() -> Facts:
    """Versions of Python, torch, CUDA and NCCL, and a digest of this package's source."""
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        version = nccl.version()
    else:
        version = ()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(str(part) for part in version) or "none",
        "ddp_train": source_digest(),
    }


def source_digest() -> str:
    """The first 12 hex digits of the sha256 over this package's Python files: hosts may have
    different checkouts."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def seen_here(frozen: Path, text: str) -> str:
    """`shared` if this host sees the file that rank 0 wrote, else a text that says it does not."""
    visible = wait_until(
        lambda: frozen.is_file() and frozen.read_text() == text, SHARED_FILE_SECONDS
    )
    if visible:
        return "shared"
    return f"{frozen} is not the file that rank 0 wrote"


def _address() -> str:
    """`reachable`, or why other hosts cannot reach gloo's address on this host: that of the host's
    name, unless an interface is set."""
    if gloo_interface():
        return "by interface"
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "none: this host's name does not resolve"
    _, _, _, _, target = found[0]
    address = str(target[0])
    if ipaddress.ip_address(address).is_loopback:
        return f"{address}: loopback, other hosts cannot reach it"
    return "reachable"


def _verdict(store: Store, world: World, timeout_seconds: float) -> list[str]:
    """The finding of rank 0: [difference, remedy], the remedy empty for differing command lines.

    Empty if all agree.
    """
    deadline = time.monotonic() + timeout_seconds
    missing = _missing_ranks(store, FACTS, world, deadline)
    requested_at = time.time()
    store.set(CLOCK, "now")
    store.set(f"{CLOCK}/0", str(requested_at))
    if missing:
        return [
            f"{named_ranks(missing)} of {world.size} did not respond within {timeout_seconds:g} s",
            "start these ranks too, or see their logs; to wait longer, raise"
            " launch.join_timeout_seconds",
        ]
    facts_by_rank = [json.loads(store.get(f"{FACTS}/{rank}")) for rank in range(world.size)]
    argvs = [facts.pop("argv") for facts in facts_by_rank]
    hosts = [facts.pop("host") for facts in facts_by_rank]
    verdict = _missing_hosts(world, hosts)
    if verdict:
        return verdict
    if any(sorted(argv) != sorted(argvs[0]) for argv in argvs):
        return ["\n".join(differing_overrides(argvs, hosts)), ""]
    clocks = _clocks(store, world, deadline, requested_at)
    for facts, clock in zip(facts_by_rank, clocks, strict=True):
        facts["clock"] = clock
    return _differing_facts(facts_by_rank, hosts)


def _missing_hosts(world: World, hosts: list[str]) -> list[str]:
    """The verdict if torchrun has started other than the requested number of hosts, else empty."""
    started = hosts_started(world)
    low, high = hosts_requested() or (started, started)
    if low <= started <= high:
        return []
    names = ", ".join(dict.fromkeys(hosts))
    return [
        f"torchrun was asked for {low} hosts, but started {started}: {names}",
        "start torchrun on the other hosts too, and compare the clocks: torchrun leaves out a"
        " host that is 15 s behind",
    ]


def _clocks(store: Store, world: World, deadline: float, requested_at: float) -> list[str]:
    """The difference of each rank's clock to that of rank 0: `+12 s`, or `right`.

    requested_at: when rank 0 asked for the time.
    """
    missing = _missing_ranks(store, CLOCK, world, deadline)
    answered_at = time.time()
    clocks = []
    for rank in range(world.size):
        clock = requested_at
        if rank not in missing:
            clock = float(store.get(f"{CLOCK}/{rank}"))
        nearest = min(max(clock, requested_at), answered_at)
        offset = clock - nearest
        is_right = abs(offset) <= CLOCK_TOLERANCE_SECONDS
        clocks.append("right" if is_right else f"{offset:+.0f} s")
    return clocks


def _differing_facts(facts_by_rank: list[Facts], hosts: list[str]) -> list[str]:
    """The verdict with a table of the facts that differ, or if an address cannot be reached, else
    empty."""
    names = [name for name in facts_by_rank[0] if len({facts[name] for facts in facts_by_rank}) > 1]
    # An address that cannot be reached is an error even if all are alike.
    is_unreachable = any(":" in facts.get("address", "") for facts in facts_by_rank)
    if not names and is_unreachable:
        names = ["address"]
    if not names:
        return []
    rows = [("rank", "host", *names)]
    for rank, facts in enumerate(facts_by_rank):
        rows.append((str(rank), hosts[rank], *(facts[name] for name in names)))
    remedies = [REMEDIES.get(name, f"install the same {name} on all hosts") for name in names]
    detail = f"the processes differ in {', '.join(names)}\n{_table(rows)}"
    return [detail, "; ".join(remedies)]


REMEDIES = {
    "processes of the host": "start the same number of processes on each host",
    "ddp_train": "check out the same version of this code on all hosts",
    "run_dir": "set run_dir to a path on a file system that all hosts share",
    "address": "give each host's name its own address in /etc/hosts, or set GLOO_SOCKET_IFNAME",
    "clock": "synchronise the clocks (chrony, ntpd)",
}


def differing_overrides(argvs: list[list[str]], hosts: list[str]) -> list[str]:
    """One message for each key whose override differs between ranks: its value on rank 0 and on the
    first other rank.

    argvs: the command line of each rank.
    hosts: the host of each rank.
    """
    problems: dict[str, str] = {}
    overrides = [_overrides(argv) for argv in argvs]
    first = overrides[0]
    for rank, other in enumerate(overrides):
        for key in {**first, **other}:
            if first.get(key) == other.get(key):
                continue
            here = _shown_override(first, key)
            there = _shown_override(other, key)
            problem = (
                f"{here} on rank 0 ({hosts[0]}), {there} on rank {rank} ({hosts[rank]}): use the"
                " same overrides on all hosts"
            )
            problems.setdefault(key, problem)
    if not problems:
        return ["an override is repeated on some hosts: use the same overrides on all hosts"]
    return list(problems.values())


def _overrides(argv: list[str]) -> dict[str, str]:
    """The values of a command line's overrides, by key."""
    overrides = {}
    for word in argv:
        key, _, value = word.partition("=")
        overrides[key] = value
    return overrides


def _shown_override(overrides: dict[str, str], key: str) -> str:
    return f"{key}={overrides[key]}" if key in overrides else f"no {key}"


def _missing_ranks(store: Store, prefix: str, world: World, deadline: float) -> list[int]:
    """The ranks that have not written a key under `prefix` by the deadline."""
    missing = list(range(world.size))

    def complete() -> bool:
        missing[:] = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
        return not missing

    _wait_noting(
        complete,
        deadline - time.monotonic(),
        lambda: f"rank 0 waits for {named_ranks(missing)} of {world.size}",
    )
    return missing


def wait_for_leader(world: World, address: str, port: int, timeout_seconds: float) -> None:
    """Wait until the port of rank 0's store accepts a connection.

    Whether the store answers there is not tested. torch would wait too, but print stacks meanwhile.

    world: names this rank in the note that is printed if the wait is long.
    address, port: where rank 0 listens.

    Raises OSError, that of the last attempt, after `timeout_seconds`.
    """
    reasons: list[OSError] = []

    def serves() -> bool:
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError as error:
            reasons[:] = [error]
            return False
        return True

    waiting = f"rank {world.rank} of {world.size} waits for rank 0 at {address}:{port}"
    if not _wait_noting(serves, timeout_seconds, lambda: waiting):
        raise reasons[0]


def _wait_noting(
    condition: Callable[[], object], seconds: float, waiting: Callable[[], str]
) -> bool:
    """Wait until a condition holds, `seconds` at most. Returns whether it does.

    waiting: what is told on the terminal if it lasts longer than NOTE_SECONDS.
    """
    deadline = time.monotonic() + seconds
    if wait_until(condition, min(seconds, NOTE_SECONDS)):
        return True
    if seconds <= NOTE_SECONDS:
        return False
    print(f"note: {waiting()}, for {seconds:.0f} s at most", file=sys.stderr, flush=True)
    return wait_until(condition, deadline - time.monotonic())


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join("  " + line for line in lines)
