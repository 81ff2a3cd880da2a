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
from collections.abc import Callable
from pathlib import Path

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
OWN_CODE = "which files a custom data set reads is known only to its code"


def all_checks(
    config: Config, several: bool, under_torchrun: bool
) -> dict[str, Callable[[], Finding]]:
    """All checks of this module, in the order of the table.

    several: there are other hosts.
    under_torchrun: torchrun has started this process.
    """
    return {
        "cores": lambda: cores(config),
        "shared memory": lambda: shared_memory(config),
        "file descriptors": lambda: file_descriptors(config),
        "ports": lambda: ports(config, under_torchrun),
        "host name": lambda: host_name(several),
        "run_dir": lambda: run_directory(Path(str(config.run_dir))),
        "data set": lambda: data_set(config),
    }


def shared_memory(config: Config, folder: Path = Path("/dev/shm")) -> Finding:
    """Check the space in /dev/shm: loader processes pass batches through it, and NCCL data between
    GPUs without peer access."""
    remedy = (
        f"enlarge {folder}: mount -o remount,size=8g {folder}, or in a container docker run"
        " --shm-size=8g"
    )
    if not folder.is_dir():
        return warning(f"there is no {folder}", f"run mount -t tmpfs tmpfs {folder}")
    free = _free_bytes(folder)
    needed = _batches_in_flight(config) * _batch_bytes(config)
    numbers = {"free": free, "needed": needed}
    detail = f"{folder}: {_bytes(free)} free"
    if needed > free:
        detail += f", the batches of the loader processes need {_bytes(needed)}"
        remedy += f", or lower tuning.num_workers={config.tuning.num_workers}"
        return failure(detail, remedy, **numbers)
    if free < FEW_SHARED_BYTES and (config.device == "cuda" or needed):
        detail += f", {_bytes(FEW_SHARED_BYTES)} are recommended for NCCL and loader processes"
        return warning(detail, remedy, **numbers)
    if needed:
        detail += f", batches need {_bytes(needed)}"
    return ok(detail, **numbers)


def _free_bytes(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def _batches_in_flight(config: Config) -> int:
    """Number of batches that the loader processes of this host hold in shared memory."""
    if config.data.decode == "gpu":
        return 0
    return _ranks(config) * int(config.tuning.num_workers) * config.tuning.prefetch_factor


def _batch_bytes(config: Config) -> int:
    """Bytes of a micro-batch of one rank; 0 for a custom data set, whose size only its own code
    knows."""
    micro_batches = config.process_count * config.train.accumulation_steps
    samples = config.train.global_batch_size // micro_batches
    return max(1, samples) * config.data.sample_bytes()


def file_descriptors(config: Config) -> Finding:
    """Check the limit of open files: a worker needs some for batches of loader processes,
    connections to other ranks and device files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    of_loaders = 2 * _batches_in_flight(config) // _ranks(config)  # inputs and targets
    needed = FILES_OF_A_PROCESS + of_loaders + CONNECTIONS_OF_A_PEER * (config.process_count - 1)
    detail = f"a process may open {soft} files, and a worker needs about {needed}"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ok(detail, limit=soft, needed=needed)
    remedy = f"run ulimit -n {max(65536, needed)}"
    if hard != resource.RLIM_INFINITY and hard < needed:
        remedy += f" (the hard limit is {hard}: ask an admin)"
    remedy += "; in containers --ulimit nofile=65536:65536"
    return failure(detail, remedy, limit=soft, needed=needed)


def ports(config: Config, under_torchrun: bool) -> Finding:
    """Check for free TCP ports: every rank listens on ports that the kernel picks, torchrun's
    agents on an agreed one."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    used = _ports_in_use()
    free = high - low + 1 - sum(low <= port <= high for port in used)
    # each rank has a store, a listener, and its ends of the connections
    needed = _ranks(config) * (2 + config.process_count)
    numbers = {"free": free, "needed": needed}
    remedy = (
        'widen net.ipv4.ip_local_port_range (sysctl -w net.ipv4.ip_local_port_range="15000 60999")'
    )
    with socket.socket() as probe:
        try:
            probe.bind(("", 0))
        except OSError as error:
            detail = f"the kernel has no free port between {low} and {high} ({error.strerror})"
            return failure(detail, remedy, PeerError.exit_code, **numbers)
    if free < needed:
        detail = f"{free} of {high - low + 1} ephemeral ports are free, {needed} are needed"
        return failure(detail, remedy, PeerError.exit_code, **numbers)
    if TORCHRUN_PORT in used and not under_torchrun:
        detail = f"port {TORCHRUN_PORT}, torchrun's default, is in use"
        remedy = (
            "only torchrun needs this port: start torchrun with --standalone or another"
            f" --rdzv-endpoint. `ss -ltnp sport = :{TORCHRUN_PORT}` shows which process uses the"
            " port"
        )
        return warning(detail, remedy, **numbers)
    return ok(f"{free:,} ephemeral ports are free, {needed:,} are needed", **numbers)


def _ports_in_use() -> set[int]:
    """Local TCP ports, from /proc/net/tcp: the second field of each line is ADDRESS:PORT in
    hexadecimal."""
    numbers = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a host without IPv6
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                address = line.split()[1]
                numbers.add(int(address.rpartition(":")[2], 16))
    return numbers


def host_name(several: bool) -> Finding:
    """Resolve the host's name: gloo listens on its address, unless GLOO_SOCKET_IFNAME names an
    interface."""
    name = socket.gethostname()
    remedy = f"give {name} its own address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
    addresses, seconds = resolve(name)
    if seconds >= RESOLVER_SECONDS:
        detail = f"{name} is not resolved within {RESOLVER_SECONDS:g} s"
        return failure(detail, f"repair DNS (/etc/resolv.conf), or {remedy}", PeerError.exit_code)
    if interface := gloo_interface():
        return ok(f"not needed: GLOO_SOCKET_IFNAME={interface}")
    if not addresses:
        detail = f"{name} does not resolve to an address"
        if several:
            return failure(detail, remedy, PeerError.exit_code)
        detail += ": only torchrun with gloo needs one for a run on one host"
        return warning(detail, remedy)
    if several and all(address.startswith("127.") or address == "::1" for address in addresses):
        detail = f"{name} resolves to {', '.join(addresses)} here, which no other host can reach"
        return failure(detail, remedy, PeerError.exit_code)
    if seconds > SLOW_RESOLVER_SECONDS:
        return warning(f"resolving {name} takes {seconds:.1f} s", f"repair DNS, or {remedy}")
    return ok(f"{name} resolves to {', '.join(addresses)}")


def resolve(name: str) -> tuple[list[str], float]:
    """The addresses of a name, and the seconds that it took. None after RESOLVER_SECONDS: the
    resolver itself may wait half a minute for a dead server."""
    addresses: dict[str, None] = {}

    def ask() -> None:
        with contextlib.suppress(OSError):  # no address
            for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
                addresses[str(entry[4][0])] = None

    began = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(RESOLVER_SECONDS)
    return list(addresses), time.monotonic() - began


def cores(config: Config, groups: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Compare the cores that this process may use, by affinity and container quota, with the
    processes and threads of a run."""
    ranks = _ranks(config)
    workers = int(config.tuning.num_workers)
    threads = int(config.launch.threads_per_process)
    affinity = len(os.sched_getaffinity(0))
    quota = _cpu_quota(groups)
    usable = min(affinity, quota)
    available = counted(affinity, "core")
    if quota < affinity:
        available += f", of which the container's quota allows {quota:.1f}"
    processes = counted(ranks, "process")
    loaders = f"{ranks} x {workers} loader processes or threads"
    numbers = {"cores": usable, "ranks": ranks, "num_workers": workers, "threads": threads}
    excess = {}
    if ranks > usable:
        excess[processes] = "lower launch.nproc_per_node"
    if ranks * workers > usable:
        excess[loaders] = "lower tuning.num_workers"
    if threads > 1 and ranks * threads > usable:
        excess[f"{ranks} x {threads} threads of torch"] = "lower launch.threads_per_process"
    if excess:
        detail = f"{available} for {' and for '.join(excess)}"
        return warning(detail, " and ".join(excess.values()), **numbers)
    purpose = f"{processes}, {loaders}" if workers else processes
    return ok(f"{available} for {purpose}", **numbers)


def _cpu_quota(groups: Path) -> float:
    """Cores that the CPU quota of the control group allows (cgroup version 2 or 1); infinite
    without a limit."""
    with contextlib.suppress(OSError, ValueError):  # "max 100000", or no such file
        quota, period = (groups / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError):
        quota = int((groups / "cpu/cpu.cfs_quota_us").read_text())
        period = int((groups / "cpu/cpu.cfs_period_us").read_text())
        if quota > 0:
            return quota / period
    return float("inf")


def run_directory(run_dir: Path) -> Finding:
    """Measure the write speed: up to 64 MiB in pieces of 8, each with fsync, and five small files
    like a checkpoint's manifest. Removes them."""
    remedy = "use a run_dir on another disk"
    path = run_dir / f".doctor_{socket.gethostname()}_{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            speed = _write_speed(path)
            small = statistics.median(_write_seconds(path, os.urandom(4 * KIB)) for _ in range(5))
        finally:
            path.unlink(missing_ok=True)
        free = _free_bytes(run_dir)
    except OSError as error:
        detail = f"run_dir={run_dir} cannot be written ({error.strerror})"
        remedy = "use a run_dir that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"free some space there, or {remedy}"
        return failure(detail, remedy, WriteError.exit_code)
    speeds = f"writes {speed / 1e6:,.0f} MB/s, fsync of 4 KiB {1e3 * small:.1f} ms"
    numbers = {"bytes_per_second": speed, "fsync_seconds": small, "free": free}
    if free < FEW_FREE_BYTES:
        full = f"run_dir={run_dir}: only {_bytes(free)} free ({speeds})"
        return warning(full, f"free some space, or {remedy}", **numbers)
    if speed < SLOW_BYTES_PER_SECOND or small > SLOW_FSYNC_SECONDS:
        slow = (
            f"run_dir={run_dir} is slow: a checkpoint of 1 GB takes {1e9 / speed:,.0f} s"
            f" ({speeds}, {_bytes(free)} free)"
        )
        return warning(slow, f"{remedy}, or raise checkpoint.every_steps", **numbers)
    return ok(f"{speeds}, {_bytes(free)} free", **numbers)


def _write_speed(path: Path) -> float:
    """Bytes per second written to the disk, not only to the kernel's page cache."""
    piece = os.urandom(PIECE_BYTES)
    written = 0
    seconds = 0.0
    while written < WRITE_BYTES and seconds < WRITE_SECONDS:
        seconds += _write_seconds(path, piece, "ab")
        written += len(piece)
    return written / seconds


def _write_seconds(path: Path, content: bytes, mode: str = "wb") -> float:
    """Seconds to write to a file, with fsync."""
    began = time.perf_counter()
    with path.open(mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def data_set(config: Config) -> Finding:
    """Look for the files of the data set, by the rules of a run."""
    data = config.data
    problem = next(iter(data.missing(config)), None)
    if problem:
        detail, _, remedy = str(problem).partition("; ")
        remedy = remedy or "give the folder of the data set: data.root=PATH"
        return failure(detail, remedy, DataError.exit_code)
    if data.name == "custom":
        return skipped(OWN_CODE)
    if data.download:
        return ok(f"{data.name}: downloaded into {data.root} if it is not there")
    return ok(f"{data.name} in {data.root}" if data.root else f"{data.name}: needs no files")


def data_digest(config: Config) -> str:
    """A digest to compare hosts by: of the names and sizes of the files, or of the classes of an
    image folder.

    Empty if the data set has no files, or only its own code knows them.
    """
    data = config.data
    root = Path(data.root)
    entries = []
    for name in data.files:
        path = root / name
        size = path.stat().st_size if path.is_file() else "missing"
        entries.append(f"{path.name} {size}")
    folders: list[str] = []
    for name in data.class_folders:
        folders += [f"{name}/{path.name}" for path in (root / name).glob("*") if path.is_dir()]
    entries += sorted(folders)
    if entries:
        return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:12]
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
    # no such interface, or one without a cable: EINVAL
    with contextlib.suppress(OSError, ValueError):
        megabits = int((device_folder / "net" / interface / "speed").read_text())
        if megabits > 0:
            return megabits * 1e6 / 8, f"{interface}, {megabits / 1000:g} Gbit/s"
    return 0.0, interface


def _ranks(config: Config) -> int:
    """Number of processes on this host."""
    return int(config.launch.nproc_per_node)


def _bytes(number: float) -> str:
    """A number of bytes as text."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number / KIB:,.1f} KiB"
