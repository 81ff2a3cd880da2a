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
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.cuda import nccl
from torch.distributed import DistError, Store  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed.environment import gloo_interface, hosts_requested, hosts_started
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError, PeerError
from ddp_train.linux import wait_until
from ddp_train.text import first_line

FACTS, CLOCK, VERDICT, READ = (
    f"ddp_train/{name}" for name in ("facts", "clock", "verdict", "read")
)
CLOCK_TOLERANCE_SECONDS = 5.0
"""torchrun drops a host whose heartbeat is 15 s old by the others' clocks, and trains without
it."""
SHARED_FILE_SECONDS = 10.0
"""The longest wait until a network file system shows what rank 0 has just written."""

Facts = dict[str, str]


def agree(
    store: Store, world: World, argv: list[str], frozen: Path, text: str, timeout_seconds: float
) -> None:
    """Returns if all processes agree, and raises the same error on all ranks if not.

    argv: the command line. frozen: the config file that rank 0 wrote; text: its content. Raises
    ConfigError if the command lines differ; PeerError if anything else differs, if a process does
    not respond within `timeout_seconds`, or if torchrun left a host out.
    """
    store.set_timeout(timedelta(seconds=timeout_seconds))
    try:
        store.set(
            f"{FACTS}/{world.rank}", json.dumps({"argv": argv, **facts_here(world, frozen, text)})
        )
        if world.is_leader:
            verdict = _verdict(store, world, timeout_seconds)
            store.set(VERDICT, json.dumps(verdict))
        else:
            store.get(CLOCK)
            store.set(f"{CLOCK}/{world.rank}", str(time.time()))
            verdict = json.loads(store.get(VERDICT))
    except DistError as error:
        raise PeerError(
            f"rank {world.rank} lost the connection to the store before step 0:"
            f" {first_line(error)}",
            "see the output of rank 0",
        ) from error
    acknowledge(store, world, wait=bool(verdict))
    if verdict:
        detail, remedy = verdict
        raise PeerError(detail, remedy) if remedy else ConfigError(detail.splitlines())


def acknowledge(store: Store, world: World, wait: bool) -> None:
    """Records that this rank has read rank 0's message.

    wait: rank 0, which may serve the store, waits up to 5 s until all ranks have read it.
    """
    if not world.is_leader:
        store.add(READ, 1)
    elif wait:
        wait_until(lambda: store.add(READ, 0) >= world.size - 1, 5.0)


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
    """Whether gloo's address on this host can be reached: that of the host's name, unless an
    interface is set."""
    if gloo_interface():
        return "by interface"
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return "none: this host's name does not resolve"
    local = ipaddress.ip_address(str(found)).is_loopback
    if local:
        return f"{found}: loopback, other hosts cannot reach it"
    return "reachable"


def _verdict(store: Store, world: World, timeout_seconds: float) -> list[str]:
    """On rank 0: [what differs, remedy], the remedy empty for differing command lines. Empty if all
    agree."""
    deadline = time.monotonic() + timeout_seconds
    missing = _missing_ranks(store, FACTS, world, deadline)
    asked_at = time.time()
    store.set(CLOCK, "now")
    store.set(f"{CLOCK}/0", str(asked_at))
    if missing:
        return [
            f"{_ranks(missing)} of {world.size} did not respond within {timeout_seconds:g} s",
            "see their logs; launch.join_timeout_seconds is the limit",
        ]
    facts_by_rank = [json.loads(store.get(f"{FACTS}/{rank}")) for rank in range(world.size)]
    argvs = [facts.pop("argv") for facts in facts_by_rank]
    hosts = [facts.pop("host") for facts in facts_by_rank]
    started = hosts_started(world)
    low, high = hosts_requested() or (started, started)
    if not low <= started <= high:
        return [
            (
                f"torchrun was asked for {low} hosts and started {started}:"
                f" {', '.join(dict.fromkeys(hosts))}"
            ),
            (
                "start it on the others too, and compare their clocks: a host that is 15 s behind"
                " is left out"
            ),
        ]
    if any(sorted(argv) != sorted(argvs[0]) for argv in argvs):
        return ["\n".join(differing_overrides(argvs, hosts)), ""]
    missing = _missing_ranks(store, CLOCK, world, deadline)
    answered_at = time.time()
    clocks = [
        asked_at if rank in missing else float(store.get(f"{CLOCK}/{rank}"))
        for rank in range(world.size)
    ]
    for facts, clock in zip(facts_by_rank, clocks, strict=True):
        offset = clock - min(max(clock, asked_at), answered_at)
        facts["clock"] = f"{offset:+.0f} s" if abs(offset) > CLOCK_TOLERANCE_SECONDS else "right"
    differing = [
        name for name in facts_by_rank[0] if len({facts[name] for facts in facts_by_rank}) > 1
    ]
    unreachable = any(
        ":" in facts.get("address", "") for facts in facts_by_rank
    )  # an error even if all are alike
    if not differing and not unreachable:
        return []
    differing = differing or ["address"]
    rows = [("rank", "host", *differing)]
    rows += [
        (str(rank), hosts[rank], *(facts[name] for name in differing))
        for rank, facts in enumerate(facts_by_rank)
    ]
    remedies = "; ".join(
        REMEDIES.get(name, f"install the same {name} on all hosts") for name in differing
    )
    return [f"the processes differ in {', '.join(differing)}\n{_table(rows)}", remedies]


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

    argvs: the command line of each rank; hosts: the host of each rank.
    """
    problems: dict[str, str] = {}
    overrides = [
        {word.partition("=")[0]: word.partition("=")[2] for word in argv} for argv in argvs
    ]
    first = overrides[0]
    for rank, other in enumerate(overrides):
        for key in {**first, **other}:
            if first.get(key) != other.get(key):
                one, two = (
                    f"{key}={values[key]}" if key in values else f"no {key}"
                    for values in (first, other)
                )
                problems.setdefault(
                    key,
                    f"{one} on rank 0 ({hosts[0]}), {two} on rank {rank} ({hosts[rank]}): "
                    "use the same overrides on all hosts",
                )
    return list(problems.values()) or [
        "an override is repeated on some hosts: use the same overrides on all hosts"
    ]


def _missing_ranks(store: Store, prefix: str, world: World, deadline: float) -> list[int]:
    """The ranks that have not written a key under `prefix` by the deadline."""
    missing = list(range(world.size))

    def complete() -> bool:
        missing[:] = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
        return not missing

    wait_until(complete, deadline - time.monotonic())
    return missing


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join("  " + line for line in lines)
