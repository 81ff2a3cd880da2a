"""Before step 0: do all processes run the same thing? They compare through the store, and refuse with a table.

Only torchrun's workers ask: those of our own launcher share a machine, a Python and a frozen config.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import platform
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch.cuda import nccl
from torch.distributed import DistError, Store  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed.environment import gloo_interface, hosts_asked, hosts_started
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, PeerError
from ddp_train.text import first_line

FACTS, CLOCK, VERDICT, READ = (f"ddp_train/{name}" for name in ("facts", "clock", "verdict", "read"))
CLOCK_TOLERANCE_SECONDS = 5.0
"""torchrun drops a host whose heartbeat looks 15 s old by its own clock, and then trains without it."""
SHARED_PATIENCE_SECONDS = 10.0
"""For a network file system to show what rank 0 has just written."""

Facts = dict[str, str]


def agree(store: Store, world: World, argv: list[str], frozen: Path, text: str, timeout_seconds: float) -> None:
    """Returns if all processes of all hosts fit together.

    words: the command line; frozen: the file that rank 0 wrote; text: what it holds. Raises on all ranks alike:
    ConfigError if the command lines differ, PeerError if anything else does, if a process does not answer in time, or
    if torchrun left a host out.
    """
    store.set_timeout(timedelta(seconds=timeout_seconds))
    try:
        store.set(f"{FACTS}/{world.rank}", json.dumps({"words": argv, **facts_here(world, frozen, text)}))
        if world.is_leader:
            verdict = _verdict(store, world, timeout_seconds)
            store.set(VERDICT, json.dumps(verdict))
        else:
            store.get(CLOCK)
            store.set(f"{CLOCK}/{world.rank}", str(time.time()))
            verdict = json.loads(store.get(VERDICT))
    except DistError as error:
        raise PeerError(
            f"rank {world.rank} lost touch with the others before step 0: {first_line(error)}",
            "see what rank 0 printed",
        ) from error
    acknowledge(store, world, wait=bool(verdict))
    if verdict:
        detail, remedy = verdict
        raise PeerError(detail, remedy) if remedy else ConfigError(detail.splitlines())


def acknowledge(store: Store, world: World, wait: bool) -> None:
    """Says that this rank has read what rank 0 wrote. Rank 0, which may serve the store, can wait until all have."""
    if not world.is_leader:
        store.add(READ, 1)
    elif wait:
        _wait_until(lambda: store.add(READ, 0) >= world.size - 1, 5.0)


def facts_here(world: World, frozen: Path, text: str) -> Facts:
    """What must be the same everywhere, and where this process is."""
    facts = {"host": socket.gethostname(), "processes of the host": str(world.local_size), **versions_here()}
    if world.hosts > 1:
        facts["run_dir"] = seen_here(frozen, text)
        facts["address"] = _address()
    return facts


def versions_here() -> Facts:
    """Of all that computes, and of this package's source."""
    version = nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else ()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(str(part) for part in version) or "none",
        "ddp_train": source_digest(),
    }


def source_digest() -> str:
    """Of this package's own code: two hosts with two checkouts do not train one model."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def seen_here(frozen: Path, text: str) -> str:
    """Whether this host sees the file that rank 0 wrote."""
    there = _wait_until(lambda: frozen.is_file() and frozen.read_text() == text, SHARED_PATIENCE_SECONDS)
    return "shared" if there else f"{frozen} is not rank 0's"


def _address() -> str:
    """The address on which gloo will wait for the others: that of this host's name, unless an interface is named."""
    if gloo_interface():
        return "by interface"
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return "none: this host's name resolves to nothing"
    local = ipaddress.ip_address(str(found)).is_loopback
    return f"{found}: nobody else can reach it" if local else "reachable"


def _verdict(store: Store, world: World, timeout_seconds: float) -> list[str]:
    """On rank 0: what is wrong, and the remedy (empty for differing command lines). Empty if nothing is."""
    deadline = time.monotonic() + timeout_seconds
    silent = _silent(store, FACTS, world, deadline)
    asked = time.time()
    store.set(CLOCK, "now")
    store.set(f"{CLOCK}/0", str(asked))
    if silent:
        return [
            f"{_ranks(silent)} of {world.size} did not answer within {timeout_seconds:g} s",
            "see their logs; launch.join_timeout_seconds is the time they have",
        ]
    everybody = [json.loads(store.get(f"{FACTS}/{rank}")) for rank in range(world.size)]
    argv = [facts.pop("words") for facts in everybody]
    hosts = [facts.pop("host") for facts in everybody]
    started = hosts_started(world)
    low, high = hosts_asked() or (started, started)
    if not low <= started <= high:
        return [
            f"torchrun was asked for {low} hosts and started {started}: {', '.join(dict.fromkeys(hosts))}",
            "start it on the others too, and compare their clocks: one that is 15 s behind is left out",
        ]
    if any(sorted(others) != sorted(argv[0]) for others in argv):
        return ["\n".join(differing_words(argv, hosts)), ""]
    silent = _silent(store, CLOCK, world, deadline)
    answered = time.time()
    clocks = [asked if rank in silent else float(store.get(f"{CLOCK}/{rank}")) for rank in range(world.size)]
    for facts, clock in zip(everybody, clocks, strict=True):
        off = clock - min(max(clock, asked), answered)
        facts["clock"] = f"{off:+.0f} s" if abs(off) > CLOCK_TOLERANCE_SECONDS else "right"
    differing = [name for name in everybody[0] if len({facts[name] for facts in everybody}) > 1]
    unreachable = any(":" in facts.get("address", "") for facts in everybody)  # on all of them it is still wrong
    if not differing and not unreachable:
        return []
    differing = differing or ["address"]
    rows = [("rank", "host", *differing)]
    rows += [(str(rank), hosts[rank], *(everybody[rank][name] for name in differing)) for rank in range(world.size)]
    remedies = "; ".join(REMEDIES.get(name, f"install the same {name} on all hosts") for name in differing)
    return [f"the processes differ in {', '.join(differing)}\n{_table(rows)}", remedies]


REMEDIES = {
    "processes of the host": "start the same number of processes on each host",
    "ddp_train": "check out the same version of this code on all hosts",
    "run_dir": "name a run_dir on a file system that all hosts share",
    "address": "give each host's name its own address in /etc/hosts, or set GLOO_SOCKET_IFNAME",
    "clock": "set the clocks right (chrony, ntpd)",
}


def differing_words(argv: list[list[str]], hosts: list[str]) -> list[str]:
    """One line per key that not all have alike, by the first rank that differs. No value of a key is shown twice."""
    problems: dict[str, str] = {}
    given = [{word.partition("=")[0]: word.partition("=")[2] for word in others} for others in argv]
    ours = given[0]
    for rank, theirs in enumerate(given):
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                one, other = (f"{key}={found[key]}" if key in found else f"no {key}" for found in (ours, theirs))
                problems.setdefault(
                    key, f"{one} on rank 0 ({hosts[0]}), {other} on rank {rank} ({hosts[rank]}): use the same words"
                )
    return list(problems.values()) or ["a word is repeated on some hosts: use the same words"]


def _silent(store: Store, prefix: str, world: World, deadline: float) -> list[int]:
    """The ranks that have not written under a prefix by the deadline."""
    missing = list(range(world.size))

    def complete() -> bool:
        missing[:] = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
        return not missing

    _wait_until(complete, deadline - time.monotonic())
    return missing


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join("  " + line for line in lines)
