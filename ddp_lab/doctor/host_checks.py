"""Checks of one host except its GPUs: cores, shared memory, open files, ports, name, run_dir, data.
Torch-free."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from ddp_lab.doctor.findings import Finding, failure, ok, skipped, warning
from ddp_train.distributed.environment import gloo_interface
from ddp_train.errors import DataError, PeerError, WriteError
from ddp_train.options.schema import Config
from ddp_train.text import counted

KIB = 2**10
MIB = 2**20
GIB = 2**30
FEW_SHARED_BYTES = GIB
"""Recommended for NVIDIA's containers; Docker's own default is 64 MiB (NCCL user guide,
"Docker")."""
FILES_OF_A_PROCESS = 128
"""Allowance for files other than batches and connections: 16 with gloo on the CPU, more with CUDA's
device files."""
CONNECTIONS_OF_A_PEER = 16
"""Sockets to one other rank: NCCL's 2 threads x 8 on AWS (NCCL user guide, NCCL_SOCKET_NTHREADS);
gloo opens one."""
TORCHRUN_PORT = 29500
RESOLVER_SECONDS = 5.0
"""Time limit for the resolver."""
SLOW_RESOLVER_SECONDS = 1.0
PIECE_BYTES = 8 * MIB
WRITE_BYTES = 64 * MIB
WRITE_SECONDS = 2.0
SLOW_BYTES_PER_SECOND = 50e6
SLOW_FSYNC_SECONDS = 0.1
FEW_FREE_BYTES = GIB
OWN_CODE = "the files of a custom data set are known only to its own code"


def shared_memory(config: Config, folder: Path = Path("/dev/shm")) -> Finding:
    """Space in /dev/shm: loader processes pass batches through it, and NCCL data between GPUs
    without peer access."""
    check = "shared memory"
    remedy = "enlarge it: docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8g"
    if not folder.is_dir():
        return warning(check, f"there is no {folder}", "mount a tmpfs there")
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    needed = _batches_in_flight(config) * _batch_bytes(config)
    numbers = {"free": free, "needed": needed}
    detail = f"{folder}: {_bytes(free)} free"
    if needed > free:
        detail += f", the batches of the loader processes need {_bytes(needed)}"
        remedy += f", or lower tuning.num_workers={config.tuning.num_workers}"
        return failure(check, detail, remedy, **numbers)
    if free < FEW_SHARED_BYTES and (config.device == "cuda" or needed):
        return warning(
            check,
            f"{detail}, {_bytes(FEW_SHARED_BYTES)} are recommended for NCCL and loader processes",
            remedy,
            **numbers,
        )
    return ok(check, detail + (f", batches need {_bytes(needed)}" if needed else ""), **numbers)


def _batches_in_flight(config: Config) -> int:
    """Batches that the loader processes of this host hold in shared memory."""
    if config.data.decode == "gpu":
        return 0
    return _ranks(config) * int(config.tuning.num_workers) * config.tuning.prefetch_factor


def _batch_bytes(config: Config) -> int:
    """Bytes of a micro-batch of one rank; 0 for a custom data set, whose size only its own code
    knows."""
    micro_batch = config.train.global_batch_size // (
        config.process_count * config.train.accumulation_steps
    )
    return max(1, micro_batch) * config.data.sample_bytes()


def file_descriptors(config: Config) -> Finding:
    """The limit of open files: a worker needs some for batches of loader processes, connections to
    other ranks and device files."""
    check = "file descriptors"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    of_loaders = 2 * _batches_in_flight(config) // _ranks(config)  # inputs and targets
    needed = FILES_OF_A_PROCESS + of_loaders + CONNECTIONS_OF_A_PEER * (config.process_count - 1)
    detail = f"limit {soft} per process, a worker needs about {needed}"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ok(check, detail, limit=soft, needed=needed)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        beyond = ""
    else:
        beyond = f" (the hard limit is {hard}: ask an admin)"
    remedy = f"ulimit -n {max(65536, needed)}{beyond}; in containers --ulimit nofile=65536:65536"
    return failure(check, detail, remedy, limit=soft, needed=needed)


def ports(config: Config, under_torchrun: bool) -> Finding:
    """Free TCP ports: every rank listens on ports that the kernel picks, torchrun's agents on an
    agreed one."""
    check = "ports"
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    taken = _ports_in_use()
    free = high - low + 1 - sum(low <= port <= high for port in taken)
    needed = _ranks(config) * (
        2 + config.process_count
    )  # a store, a listener, and its ends of the connections
    numbers = {"free": free, "needed": needed}
    remedy = (
        'widen net.ipv4.ip_local_port_range (sysctl -w net.ipv4.ip_local_port_range="32768 60999")'
    )
    with socket.socket() as probe:
        try:
            probe.bind(("", 0))
        except OSError as error:
            detail = f"the kernel has no free port between {low} and {high} ({error.strerror})"
            return failure(check, detail, remedy, PeerError.exit_code, **numbers)
    if free < needed:
        detail = f"{free} of {high - low + 1} ephemeral ports are free, {needed} are needed"
        return failure(check, detail, remedy, PeerError.exit_code, **numbers)
    if TORCHRUN_PORT in taken and not under_torchrun:
        detail = f"port {TORCHRUN_PORT}, torchrun's default, is in use"
        remedy = (
            "runs on one host do not need it; start torchrun with --standalone or another"
            f" --rdzv-endpoint; `ss -ltnp sport = :{TORCHRUN_PORT}` shows which process uses it"
        )
        return warning(check, detail, remedy, **numbers)
    return ok(check, f"{free:,} ephemeral ports are free, {needed:,} are needed", **numbers)


def _ports_in_use() -> set[int]:
    """Local TCP ports, from /proc/net/tcp: the second field of each line is ADDRESS:PORT in
    hexadecimal."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a host without IPv6
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
            found |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    return found


def host_name(several: bool) -> Finding:
    """Whether the name resolves: gloo listens on its address, unless GLOO_SOCKET_IFNAME names an
    interface."""
    check = "host name"
    name = socket.gethostname()
    remedy = f"give {name} its own address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
    addresses, seconds = resolve(name)
    if seconds >= RESOLVER_SECONDS:
        detail = f"{name} is not resolved within {RESOLVER_SECONDS:g} s"
        return failure(
            check, detail, f"repair DNS (/etc/resolv.conf), or {remedy}", PeerError.exit_code
        )
    if interface := gloo_interface():
        return ok(check, f"not needed: GLOO_SOCKET_IFNAME={interface}")
    if not addresses:
        detail = f"{name} does not resolve to an address"
        if several:
            return failure(check, detail, remedy, PeerError.exit_code)
        return warning(
            check, f"{detail}: runs on one host do not need one, torchrun with gloo does", remedy
        )
    if several and all(address.startswith("127.") or address == "::1" for address in addresses):
        detail = f"{name} resolves to {', '.join(addresses)} here, which no other host can reach"
        return failure(check, detail, remedy, PeerError.exit_code)
    if seconds > SLOW_RESOLVER_SECONDS:
        return warning(check, f"resolving {name} takes {seconds:.1f} s", f"repair DNS, or {remedy}")
    return ok(check, f"{name} resolves to {', '.join(addresses)}")


def resolve(name: str) -> tuple[list[str], float]:
    """The addresses of a name, and the seconds that it took. None after RESOLVER_SECONDS: the
    resolver itself may wait half a minute for a dead server."""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError):  # no address
            found.extend(
                str(entry[4][0])
                for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            )

    began = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(RESOLVER_SECONDS)
    return list(dict.fromkeys(found)), time.monotonic() - began


def cores(config: Config, groups: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Cores that this process may use, by affinity and container quota, compared with the processes
    and threads of a run."""
    check = "cores"
    ranks = _ranks(config)
    affinity = len(os.sched_getaffinity(0))
    quota = _cpu_quota(groups)
    usable = min(affinity, quota)
    have = counted(affinity, "core")
    if quota < affinity:
        have += f", of which the container's quota allows {quota:.1f}"
    workers = int(config.tuning.num_workers)
    threads = int(config.launch.threads_per_process)
    numbers = {"cores": usable, "ranks": ranks, "num_workers": workers, "threads": threads}
    torch_threads = ranks * threads if threads > 1 else 0
    wanted = {
        f"{counted(ranks, 'process')}": (ranks, "lower launch.nproc_per_node"),
        f"{ranks} x {workers} loader processes or threads": (
            ranks * workers,
            "lower tuning.num_workers",
        ),
        f"{ranks} x {threads} threads of torch": (
            torch_threads,
            "lower launch.threads_per_process",
        ),
    }
    over = {what: remedy for what, (number, remedy) in wanted.items() if number > usable}
    if over:
        remedies = " and ".join(dict.fromkeys(over.values()))
        return warning(check, f"{have} for {' and for '.join(over)}", remedies, **numbers)
    return ok(check, f"{have} for {', '.join(list(wanted)[: 2 if workers else 1])}", **numbers)


def _cpu_quota(groups: Path) -> float:
    """Cores that the CPU quota of the control group allows (cgroup version 2 or 1); infinite
    without a limit."""
    with contextlib.suppress(OSError, ValueError):  # "max 100000", or no such file
        quota, period = (groups / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError):
        quota, period = (
            int((groups / f"cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
        )
        return quota / period if quota > 0 else float("inf")
    return float("inf")


def run_directory(run_dir: Path) -> Finding:
    """Write speed: up to 64 MiB in pieces of 8, each with fsync, and five small files like a
    checkpoint's manifest. Removes them."""
    check = "run_dir"
    remedy = "name a run_dir on another disk"
    mine = run_dir / f".doctor_{socket.gethostname()}_{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            speed = _write_speed(mine)
            small = statistics.median(_synced(mine, os.urandom(4 * KIB)) for _ in range(5))
        finally:
            mine.unlink(missing_ok=True)
        state = os.statvfs(run_dir)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space there, or " if full else ""
        detail = f"run_dir={run_dir} cannot be written ({error.strerror})"
        return failure(
            check, detail, f"{advice}name a folder that can be written", WriteError.exit_code
        )
    free = state.f_bavail * state.f_frsize
    detail = f"{speed / 1e6:,.0f} MB/s, fsync of 4 KiB {1e3 * small:.1f} ms, {_bytes(free)} free"
    numbers = {"bytes_per_second": speed, "fsync_seconds": small, "free": free}
    if free < FEW_FREE_BYTES:
        return warning(
            check, f"run_dir={run_dir}: {detail}", f"free some space, or {remedy}", **numbers
        )
    if speed < SLOW_BYTES_PER_SECOND or small > SLOW_FSYNC_SECONDS:
        slow = (
            f"run_dir={run_dir} is slow: {detail}; a checkpoint of 1 GB takes {1e9 / speed:,.0f} s"
        )
        return warning(check, slow, f"{remedy}, or raise checkpoint.every_steps", **numbers)
    return ok(check, detail, **numbers)


def _write_speed(path: Path) -> float:
    """Bytes per second written to the disk, not only to the kernel's page cache."""
    piece = os.urandom(PIECE_BYTES)
    written = 0
    began = time.perf_counter()
    with path.open("wb") as file:
        while written < WRITE_BYTES and time.perf_counter() - began < WRITE_SECONDS:
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            written += len(piece)
    return written / (time.perf_counter() - began)


def _synced(path: Path, content: bytes) -> float:
    """Seconds to write a small file with fsync."""
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def data_set(config: Config) -> Finding:
    """Whether the files are there, by the rules of a run."""
    check = "data set"
    data = config.data
    problems = [str(problem) for problem in config.data.missing(config)]
    if problems:
        detail, _, remedy = problems[0].partition("; ")
        return failure(
            check,
            detail,
            remedy or "name the folder that holds it: data.root=PATH",
            DataError.exit_code,
        )
    if data.name == "custom":
        return skipped(check, OWN_CODE)
    if data.download:
        return ok(check, f"{data.name}: downloaded into {data.root} if it is not there")
    return ok(check, f"{data.name} in {data.root}" if data.root else f"{data.name}: needs no files")


def data_digest(config: Config) -> str:
    """A digest to compare hosts by: of the names and sizes of the files, or of the classes of an
    image folder.

    Empty if the data set has no files, or only its own code knows them.
    """
    data = config.data
    root = Path(data.root)
    files = [root / name for name in data.files]
    seen = [f"{path.name} {path.stat().st_size if path.is_file() else 'missing'}" for path in files]
    folders = [
        path for name in data.class_folders for path in (root / name).glob("*") if path.is_dir()
    ]
    seen += sorted(path.relative_to(root).as_posix() for path in folders)
    if seen:
        return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:12]
    return ""


def link_bytes_per_second(
    interface: str, device_folder: Path = Path("/sys/class")
) -> tuple[float, str]:
    """Bandwidth of this host's network in one direction, 0 if the kernel does not know it, and the
    network's name.

    interface: the one that leads to other hosts. NCCL prefers InfiniBand: the sum of all active
    ports.
    """
    rates = []
    for port in device_folder.glob("infiniband/*/ports/*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a driver without a rate
            if "ACTIVE" in (port / "state").read_text():
                rates.append(float((port / "rate").read_text().split()[0]))  # "400 Gb/sec (4X NDR)"
    if rates:
        return sum(rates) * 1e9 / 8, f"InfiniBand, {len(rates)} x {rates[0]:g} Gbit/s"
    with contextlib.suppress(
        OSError, ValueError
    ):  # no such interface, or one without a cable: EINVAL
        megabits = int((device_folder / "net" / interface / "speed").read_text())
        if megabits > 0:
            return megabits * 1e6 / 8, f"{interface}, {megabits / 1000:g} Gbit/s"
    return 0.0, interface


def all_checks(
    config: Config, several: bool, under_torchrun: bool
) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """All checks of this module in the order of the table: name, function, arguments."""
    return [
        ("cores", cores, (config,)),
        ("shared memory", shared_memory, (config,)),
        ("file descriptors", file_descriptors, (config,)),
        ("ports", ports, (config, under_torchrun)),
        ("host name", host_name, (several,)),
        ("run_dir", run_directory, (Path(str(config.run_dir)),)),
        ("data set", data_set, (config,)),
    ]


def _ranks(config: Config) -> int:
    return int(config.launch.nproc_per_node)


def _bytes(number: float) -> str:
    unit, name = next(
        ((size, name) for size, name in ((GIB, "GiB"), (MIB, "MiB")) if number >= size),
        (KIB, "KiB"),
    )
    return f"{number / unit:,.1f} {name}"
