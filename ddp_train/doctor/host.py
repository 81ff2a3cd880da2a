"""What a host must have beside its GPUs: memory to share, files, ports, a name, cores, a disk, the data. Torch-free."""

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

from ddp_train.config.auto import process_count
from ddp_train.config.external_checks import missing_data
from ddp_train.config.schema import Config
from ddp_train.distributed.environment import gloo_interface
from ddp_train.doctor.findings import Finding, failure, ok, skipped, warning
from ddp_train.errors import DataError, PeerError, WriteError
from ddp_train.text import counted

KIB, MIB, GIB = 2**10, 2**20, 2**30
FEW_SHARED_BYTES = GIB
"""What NVIDIA's containers are to be given; Docker's own default is 64 MiB (NCCL user guide, "Docker")."""
FILES_OF_A_PROCESS = 128
"""Room for what a worker has open beside data and peers: 16 with gloo on the CPU, more with CUDA's device files."""
CONNECTIONS_OF_A_PEER = 16
"""Sockets to one other process: NCCL's 2 threads x 8 on AWS (NCCL user guide, NCCL_SOCKET_NTHREADS); gloo opens one."""
TORCHRUN_PORT = 29500
RESOLVER_SECONDS, SLOW_RESOLVER_SECONDS = 5.0, 1.0
PIECE_BYTES, WRITE_BYTES, WRITE_SECONDS = 8 * MIB, 64 * MIB, 2.0
SLOW_BYTES_PER_SECOND, SLOW_FSYNC_SECONDS = 50e6, 0.1
FEW_FREE_BYTES = GIB
OWN_CODE = "what a data set of your own reads is known only once it runs"


def shared_memory(config: Config, folder: Path = Path("/dev/shm")) -> Finding:
    """Loader processes hand batches over in it, NCCL exchanges there between processes without peer access."""
    check, remedy = "shared memory", "enlarge it: docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8g"
    if not folder.is_dir():
        return warning(check, f"there is no {folder}", "mount a tmpfs there")
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    needed = _batches_in_flight(config) * _batch_bytes(config)
    said = f"{folder}: {_bytes(free)} free"
    if needed > free:
        return failure(
            check,
            f"{said}, the batches that loader processes hold ready take {_bytes(needed)}",
            f"{remedy}, or lower tuning.num_workers={config.tuning.num_workers}",
            free=free,
            needed=needed,
        )
    if free < FEW_SHARED_BYTES and (config.device == "cuda" or needed):
        return warning(check, f"{said}: NCCL and loader processes share it", remedy, free=free, needed=needed)
    return ok(check, said + (f", batches take {_bytes(needed)}" if needed else ""), free=free, needed=needed)


def _batches_in_flight(config: Config) -> int:
    """On this host, in the memory that loader processes share with the ranks."""
    if config.data.decode == "gpu":
        return 0
    return _ranks(config) * int(config.tuning.num_workers) * config.tuning.prefetch_factor


def _batch_bytes(config: Config) -> int:
    """Of one process; 0 for data of which only their own code knows the size."""
    share = config.train.global_batch_size // (process_count(config) * config.train.accumulation_steps)
    return max(1, share) * config.data.sample_bytes()


def file_descriptors(config: Config) -> Finding:
    """Batches of loader processes, connections to peers and device files are descriptors of the worker."""
    check = "file descriptors"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    of_loaders = 2 * _batches_in_flight(config) // _ranks(config)  # inputs and targets
    needed = FILES_OF_A_PROCESS + of_loaders + CONNECTIONS_OF_A_PEER * (process_count(config) - 1)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ok(check, f"{soft} for each process, a worker needs some {needed}", limit=soft, needed=needed)
    raised = "" if hard == resource.RLIM_INFINITY or hard >= needed else f" (the hard limit is {hard}: ask an admin)"
    remedy = f"ulimit -n {max(65536, needed)}{raised}; in containers --ulimit nofile=65536:65536"
    return failure(check, f"{soft} for each process, a worker needs some {needed}", remedy, limit=soft, needed=needed)


def ports(config: Config, under_torchrun: bool) -> Finding:
    """Every process listens on ports that the kernel picks, and torchrun's agents meet on one that is agreed."""
    check = "ports"
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    taken = _ports_in_use()
    free = high - low + 1 - sum(low <= port <= high for port in taken)
    needed = _ranks(config) * (2 + process_count(config))  # a store, a listener, and the own ends of connections
    remedy = 'widen net.ipv4.ip_local_port_range (sysctl -w net.ipv4.ip_local_port_range="32768 60999")'
    with socket.socket() as probe:
        try:
            probe.bind(("", 0))
        except OSError as error:
            said = f"the kernel gives no free port between {low} and {high} ({error.strerror})"
            return failure(check, said, remedy, PeerError.exit_code, free=free, needed=needed)
    if free < needed:
        said = f"{free} of {high - low + 1} ephemeral ports are free, {needed} are needed"
        return failure(check, said, remedy, PeerError.exit_code, free=free, needed=needed)
    if TORCHRUN_PORT in taken and not under_torchrun:
        return warning(
            check,
            f"port {TORCHRUN_PORT}, torchrun's own default, is taken",
            f"python launch.py does not use it; give torchrun --standalone, or another --rdzv-endpoint; "
            f"`ss -ltnp sport = :{TORCHRUN_PORT}` shows who has it",
            free=free,
            needed=needed,
        )
    return ok(check, f"{free:,} ephemeral ports are free, {needed:,} are needed", free=free, needed=needed)


def _ports_in_use() -> set[int]:
    """Local TCP ports, from /proc/net/tcp: the second field of each line is ADDRESS:PORT in hexadecimal."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a host without IPv6
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
            found |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    return found


def host_name(several: bool) -> Finding:
    """gloo listens on the address of this host's name, unless GLOO_SOCKET_IFNAME names an interface."""
    check, name = "host name", socket.gethostname()
    remedy = f"give {name} its own address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
    addresses, seconds = resolve(name)
    if seconds >= RESOLVER_SECONDS:
        said = f"{name} is not resolved within {RESOLVER_SECONDS:g} s"
        return failure(check, said, f"repair DNS (/etc/resolv.conf), or {remedy}", PeerError.exit_code)
    if interface := gloo_interface():
        return ok(check, f"not needed: gloo was told to use {interface}")
    if not addresses:
        said = f"{name} resolves to nothing"
        if several:
            return failure(check, said, remedy, PeerError.exit_code)
        return warning(check, f"{said}: python launch.py does without, torchrun with gloo does not", remedy)
    if several and all(address.startswith("127.") or address == "::1" for address in addresses):
        said = f"{name} is {', '.join(addresses)} here: nobody else can reach it"
        return failure(check, said, remedy, PeerError.exit_code)
    if seconds > SLOW_RESOLVER_SECONDS:
        return warning(check, f"{name} takes {seconds:.1f} s to be resolved", f"repair DNS, or {remedy}")
    return ok(check, f"{name} is {', '.join(addresses)}")


def resolve(name: str) -> tuple[list[str], float]:
    """Addresses, and the seconds they took. The resolver may wait for a dead server for half a minute: we do not."""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError):  # resolves to nothing
            found.extend(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))

    began = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(RESOLVER_SECONDS)
    return list(dict.fromkeys(found)), time.monotonic() - began


def cores(config: Config, groups: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Cores that this process may use, by affinity and by the quota of its container, against who wants them."""
    check, ranks = "cores", _ranks(config)
    affine = len(os.sched_getaffinity(0))
    quota = _cpu_quota(groups)
    usable = min(affine, quota)
    have = counted(affine, "core") + (f", of which the container's quota allows {quota:.1f}" if quota < affine else "")
    workers, threads = int(config.tuning.num_workers), int(config.launch.threads_per_process)
    numbers = {"cores": usable, "ranks": ranks, "num_workers": workers, "threads": threads}
    wanted = {
        f"{counted(ranks, 'process')}": (ranks, "lower launch.nproc_per_node"),
        f"{ranks} x {workers} loader processes or threads": (ranks * workers, "lower tuning.num_workers"),
        f"{ranks} x {threads} threads of torch": (
            ranks * threads if threads > 1 else 0,
            "lower launch.threads_per_process",
        ),
    }
    over = {what: remedy for what, (number, remedy) in wanted.items() if number > usable}
    if over:
        remedies = " and ".join(dict.fromkeys(over.values()))
        return warning(check, f"{have}, wanted by {' and by '.join(over)}", remedies, **numbers)
    return ok(check, f"{have} for {', '.join(list(wanted)[: 2 if workers else 1])}", **numbers)


def _cpu_quota(groups: Path) -> float:
    """Cores that the control group's bandwidth allows, in version 2 or 1; infinite without a limit."""
    with contextlib.suppress(OSError, ValueError):  # "max 100000", or no such file
        quota, period = (groups / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError):
        quota, period = (int((groups / f"cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else float("inf")
    return float("inf")


def run_directory(run_dir: Path) -> Finding:
    """Writes up to 64 MiB, each 8 with fsync, and some small files as a checkpoint's manifest is; removes them."""
    check, remedy = "run_dir", "name a run_dir on another disk"
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
        said = f"{run_dir} cannot be written ({error.strerror})"
        return failure(check, said, f"{advice}name a folder that can be written", WriteError.exit_code)
    free = state.f_bavail * state.f_frsize
    said = f"{speed / 1e6:,.0f} MB/s, fsync of 4 KiB {1e3 * small:.1f} ms, {_bytes(free)} free"
    numbers = {"bytes_per_second": speed, "fsync_seconds": small, "free": free}
    if free < FEW_FREE_BYTES:
        return warning(check, f"{run_dir}: {said}", f"free some space, or {remedy}", **numbers)
    if speed < SLOW_BYTES_PER_SECOND or small > SLOW_FSYNC_SECONDS:
        slow = f"{run_dir} is slow: {said}; a checkpoint of 1 GB takes {1e9 / speed:,.0f} s"
        return warning(check, slow, f"{remedy}, or raise checkpoint.every_steps", **numbers)
    return ok(check, said, **numbers)


def _write_speed(path: Path) -> float:
    """Bytes per second to the disk, not to the kernel's memory."""
    piece, written, began = os.urandom(PIECE_BYTES), 0, time.perf_counter()
    with path.open("wb") as file:
        while written < WRITE_BYTES and time.perf_counter() - began < WRITE_SECONDS:
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            written += len(piece)
    return written / (time.perf_counter() - began)


def _synced(path: Path, content: bytes) -> float:
    """Seconds to write a small file for good."""
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def data_set(config: Config) -> Finding:
    """Whether this host has it, by the rules of a run."""
    check, data = "data set", config.data
    problems = missing_data(config)
    if problems:
        said, _, remedy = problems[0].partition("; ")
        return failure(check, said, remedy or "name the folder that holds it: data.root=PATH", DataError.exit_code)
    if data.name == "custom":
        return skipped(check, OWN_CODE)
    if data.download:
        return ok(check, f"{data.name}: fetched into {data.root} if it is not there")
    return ok(check, f"{data.name} in {data.root}" if data.root else f"{data.name}: needs no file of its own")


def data_digest(config: Config) -> str:
    """Of names and sizes of the files, or of the classes of an image folder: whether two hosts have the same data.

    Empty where there are none, or their own code alone knows them.
    """
    data = config.data
    root = Path(data.root)
    files = [root / name for name in data.files]
    seen = [f"{path.name} {path.stat().st_size if path.is_file() else 'missing'}" for path in files]
    folders = [path for name in data.class_folders for path in (root / name).glob("*") if path.is_dir()]
    seen += sorted(path.relative_to(root).as_posix() for path in folders)
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:12] if seen else ""


def link_bytes_per_second(interface: str, device_folder: Path = Path("/sys/class")) -> tuple[float, str]:
    """What this host's network carries in one direction, and what it is called; 0 where the kernel does not know.

    interface: the one that leads to the others. NCCL takes InfiniBand where there is any: all its active ports count.
    """
    rates = []
    for port in device_folder.glob("infiniband/*/ports/*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a driver that tells no rate
            if "ACTIVE" in (port / "state").read_text():
                rates.append(float((port / "rate").read_text().split()[0]))  # "400 Gb/sec (4X NDR)"
    if rates:
        return sum(rates) * 1e9 / 8, f"InfiniBand, {len(rates)} x {rates[0]:g} Gbit/s"
    with contextlib.suppress(OSError, ValueError):  # no such interface, or one without a cable: EINVAL
        megabits = int((device_folder / "net" / interface / "speed").read_text())
        if megabits > 0:
            return megabits * 1e6 / 8, f"{interface}, {megabits / 1000:g} Gbit/s"
    return 0.0, interface


def host_findings(config: Config, several: bool, under_torchrun: bool) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """All checks of this module, in the order of the table: name, function, arguments."""
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
    unit, name = next(((size, name) for size, name in ((GIB, "GiB"), (MIB, "MiB")) if number >= size), (KIB, "KiB"))
    return f"{number / unit:,.1f} {name}"
