"""Every environment variable that this package reads or sets: torchrun's, SLURM's, torch's, the
trackers'.

Torch-free: launch.py reads some before it imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.linux import start_time

LISTEN_SOCKET = "DDP_TRAIN_LISTEN_FD"
"""File descriptor of the store's listening socket, which rank 0 inherits from our launcher."""
LAUNCHER_PID = "DDP_TRAIN_LAUNCHER_PID"
"""Process id of our launcher; not set under torchrun."""
EXIT_CODE_FILE = "DDP_TRAIN_EXIT_CODE_FILE"
"""File to which workers append their exit codes; set only if our launcher started the torchrun
agent."""
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
BEGUN = "begun"
"""Line of that file for a worker that has been started; those that its predecessor wrote count no
more."""
REPORTED = "reported"
"""Line of that file for a worker that has reported its failure to the user."""
STATUS_FD = "DDP_TRAIN_STATUS_FD"
"""File descriptor of the status board (see `heartbeat`), inherited from our launcher."""

LOST = "DDP_TRAIN_LOST"
"""JSON: the rank that the attempt before has lost (see `just_in_time.Loss`)."""
RESIZED = "DDP_TRAIN_RESIZED"
"""JSON: the last changes of the number of processes (see `launcher.size.Change`)."""
PROCESSES = "DDP_TRAIN_PROCESSES"
"""How many processes `ddp_train.session` starts where its script does not say it."""


def processes_asked() -> str | None:
    return os.environ.get(PROCESSES)


def threads_asked() -> int | None:
    """OMP_NUM_THREADS, which torch reads when it is imported; None if it is not one number."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) else None


def world_from_environment() -> World | None:
    """The World that torchrun or our launcher started this process in; None for a process that
    neither started."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    numbers = {name: env[name] for name in _NUMBERS if name in env}
    wrong = [name for name in numbers if not re.fullmatch(r"\d{1,9}", numbers[name])]
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    problem = ""
    if wrong:
        problem = f"{wrong[0]}={numbers[wrong[0]]} is no number"
    elif missing:
        problem = f"RANK={env['RANK']} is set and {missing[0]} is not"
    if problem:
        raise ConfigError(
            [
                f"environment: {problem}; start with torchrun, or `unset {' '.join(numbers)}`"
                " before the start"
            ]
        )
    return World(
        rank=int(env["RANK"]),
        size=int(env["WORLD_SIZE"]),
        local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
        local_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
        attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        run_id=env.get("TORCHELASTIC_RUN_ID", ""),
    )


def restart_in_utf8() -> None:
    """Starts this program anew, in the same process, if its locale cannot write every name:
    LC_ALL=C without Python's own remedies. Children inherit what that takes."""
    if sys.getfilesystemencoding().lower() != "utf-8":
        command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})


def worker_environment(
    world: World,
    port: int,
    threads: int,
    import_path: Path | None,
) -> dict[str, str]:
    """The environment of one worker that our launcher starts on this host, without
    `worker_descriptors`.

    port: the store's.
    threads: OMP_NUM_THREADS.
    import_path: see `config.program`.
    """
    env = {
        **_importing_environment(import_path, threads),
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(world.attempt),
        LAUNCHER_PID: str(os.getpid()),
    }
    # One host needs only loopback: nothing listens on other interfaces, and an unresolvable host
    # name does no harm.
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            env.setdefault("GLOO_SOCKET_IFNAME", name)
            env.setdefault("NCCL_SOCKET_IFNAME", name)
    # If a rank dies, its peers must end no collective by themselves: what such a collective leaves
    # is garbage, and they are told first (distributed/connections.py). A rank that hangs is found
    # by the launcher.
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return env


def continuation_environment(
    lost: dict[str, float] | None, changes: Sequence[dict[str, Any]], devices: Sequence[str]
) -> dict[str, str]:
    """The variables by which a worker learns what happened to the run before it was started.

    lost: see `LOST`.
    changes: see `RESIZED`.
    devices: CUDA_VISIBLE_DEVICES; empty: as it is.
    """
    env = {}
    if lost:
        env[LOST] = json.dumps(lost)
    if changes:
        env[RESIZED] = json.dumps(changes)
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return env


def nccl_handles_errors() -> bool:
    """Whether torch's watchdog of NCCL may abort collectives, or the process, when it sees an
    error."""
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"


def worker_descriptors(world: World, listen_fd: int, status_fd: int) -> dict[str, int]:
    """The file descriptors that a worker inherits from our launcher: environment variable ->
    descriptor."""
    descriptors = {STATUS_FD: status_fd}
    if world.is_leader:
        descriptors[LISTEN_SOCKET] = listen_fd
    return descriptors


def probe_environment(world: World, threads: int, import_path: Path | None) -> dict[str, str]:
    """The environment of a probe that a torchrun worker starts in place of its rank: a client of
    the agent's store."""
    return {
        **_importing_environment(import_path, threads),
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.local_rank),
        # otherwise rank 0 would serve a second store on the same port
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def preload_environment(import_path: Path | None) -> dict[str, str]:
    """The environment of the fork server, which imports what workers need and must have one thread.

    OPENBLAS_NUM_THREADS=1, since numpy's BLAS starts its threads on import. All else that libraries
    read while they are imported is as in a worker.
    """
    return {**_importing_environment(import_path, threads=1), "OPENBLAS_NUM_THREADS": "1"}


@contextlib.contextmanager
def preloading(import_path: Path | None) -> Iterator[dict[str, str]]:
    """This process has `preload_environment` inside, and its own again after it. Yields, filled in
    at the end, the variables that libraries have set meanwhile."""
    before = environment()
    changed = {}
    set_environment(preload_environment(import_path))
    inside = environment()
    try:
        yield changed
    finally:
        for name, value in environment().items():
            if inside.get(name) != value:
                changed[name] = value
        set_environment(before)


def _importing_environment(import_path: Path | None, threads: int) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if import_path:
        earlier = env.get("PYTHONPATH")
        paths = [str(import_path), earlier] if earlier else [str(import_path)]
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def set_environment(variables: dict[str, str]) -> None:
    """Replaces the whole environment of this process, for C libraries too."""
    os.environ.clear()
    os.environ.update(variables)


def agent_environment(interface: str | None, exit_code_file: Path) -> dict[str, str]:
    """The environment of a torchrun agent that our launcher starts.

    interface: the one that leads to the other hosts; None if unknown.
    exit_code_file: see `write_exit_code`.
    """
    # Without TORCH_DISABLE_SHARE... restarted workers read the addresses of their dead predecessors
    # (pytorch#135712).
    env = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        EXIT_CODE_FILE: str(exit_code_file),
    }
    # Otherwise gloo takes the address of this host's name, which on Debian is 127.0.1.1.
    if interface:
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
    return env


def restarts_left() -> bool:
    """Whether torchrun's agent starts the workers of this host again if this one fails."""
    used = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    return used < allowed


def stopping_file(exit_code_file: Path) -> Path:
    """The file that our launcher of this host creates when it is asked to stop, before it stops
    torchrun's agent."""
    return exit_code_file.with_name("stopping")


def hosts_follow() -> bool:
    """Whether torchrun's agent stops the workers of this host only to start them again with other
    hosts."""
    path = os.environ.get(EXIT_CODE_FILE)
    return path is not None and not stopping_file(Path(path)).exists()


def write_begun() -> None:
    """Appends to the exit-code file that this worker has been started."""
    _append_to_exit_code_file(BEGUN)


def write_exit_code(code: int) -> None:
    """Appends this worker's exit code to the exit-code file, if our launcher set one: torchrun's
    agent exits with 1 whatever its workers' codes are."""
    _append_to_exit_code_file(str(code))


def write_reported(code: int) -> None:
    """Appends to the exit-code file that this worker has reported a failure to the user, and that
    failure's exit code: torchrun's agent may end the worker before it ends by itself."""
    _append_to_exit_code_file(REPORTED)
    write_exit_code(code)


def _append_to_exit_code_file(entry: str) -> None:
    path = os.environ.get(EXIT_CODE_FILE)
    if not path:
        return
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    local_rank = os.environ["LOCAL_RANK"]
    with Path(path).open("a") as file:  # one short line is one write
        file.write(f"{attempt} {local_rank} {entry}\n")


def write_torchrun_error_file(failure: str) -> None:
    """Writes the file whose message torchrun's agent shows for this worker in its final summary."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": failure, "timestamp": str(int(time.time()))}
    content = {"message": {"message": failure, "extraInfo": extra}}
    with contextlib.suppress(OSError):  # the failure is on standard error already
        Path(path).write_text(json.dumps(content))


def gloo_interface() -> str | None:
    """GLOO_SOCKET_IFNAME: the network interface that gloo uses; None if not set."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def hosts_started(world: World) -> int:
    """The number of torchrun agents in this run. The number of processes may differ between
    agents."""
    return int(os.environ.get("GROUP_WORLD_SIZE", world.hosts))


def host_number(world: World) -> int:
    """The index of this host in torchrun's numbering."""
    return int(os.environ.get("GROUP_RANK", world.rank // world.local_size))


def hosts_requested() -> tuple[int, int] | None:
    """The minimum and maximum of torchrun's --nnodes, from its command line or PET_NNODES; None if
    unknown.

    torchrun does not pass it to its workers, and leaves out a host whose clock is behind: two hosts
    then train two models.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", _nnodes())
    if match:
        return (int(match[1]), int(match[2] or match[1]))
    return None


def range_of_hosts() -> str | None:
    """torchrun's --nnodes if it is a range, LOW:HIGH, else None."""
    requested = _nnodes()
    if re.fullmatch(r"\d+:\d+", requested):
        return requested
    return None


def _nnodes() -> str:
    """torchrun's --nnodes, from the agent's command line or PET_NNODES; empty if unknown."""
    requested = os.environ.get("PET_NNODES", "")
    try:
        argv = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:  # no /proc, or the agent has ended or is outside of this container
        argv = [""]
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        if name in ("--nnodes", "--nnode"):
            requested = value or following
    return requested


def srun_tasks() -> int:
    """The number of tasks of this srun step; 1 outside of srun."""
    if "SLURM_PROCID" in os.environ:
        return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    return 1


def launcher_pid() -> int | None:
    """The process id of our launcher; None if it did not start this process."""
    pid = os.environ.get(LAUNCHER_PID)
    return int(pid) if pid else None


def has_agent_store() -> bool:
    """Whether the store at MASTER_ADDR was there before this process: that of torchrun's agent."""
    return launcher_pid() is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def status_descriptor() -> int | None:
    """The file descriptor of the status board; None under torchrun. Removes the variable, so that
    children of this process do not see it."""
    descriptor = os.environ.pop(STATUS_FD, None)
    return int(descriptor) if descriptor else None


def lost_rank() -> dict[str, float] | None:
    """The rank that the attempt before has lost; None if this is the first attempt, or it ended in
    another way."""
    text = os.environ.get(LOST)
    return json.loads(text) if text else None


def changes_of_number() -> list[dict[str, Any]]:
    """The last changes of the number of processes; none if they are as many as at the start."""
    return json.loads(os.environ.get(RESIZED, "[]"))


def store_address() -> str:
    """MASTER_ADDR: the host that serves the key-value store."""
    return os.environ["MASTER_ADDR"]


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as the user set it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def c_compiler() -> str | None:
    """The path of a C compiler, found as Triton finds one; None if there is none."""
    if "CC" in os.environ:
        return shutil.which(os.environ["CC"])
    return shutil.which("gcc") or shutil.which("clang")


def set_triton_cache() -> None:
    """Moves Triton's kernels to the folder for temporary files if the home folder cannot be
    written, as in a container with another user. torch's compiler keeps its own there too."""
    home = Path("~/.triton").expanduser()
    written_to = home if home.exists() else home.parent
    if not os.access(written_to, os.W_OK):
        folder = Path(tempfile.gettempdir(), f"triton_{os.getuid()}")
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder))


def set_default_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_cublas_workspace() -> None:
    """Sets the fixed workspace that deterministic cuBLAS needs, before CUDA starts (cuBLAS manual,
    reproducibility)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def new_run_id(world: World | None) -> str:
    """The name of a run: start time and process id of its launcher.

    Under torchrun the launcher is the agent, which lives on through restarts, so a restarted rank 0
    gets the same name. A `--rdzv-id` that the user chose is the name; torchrun's default id is a
    uuid or `none`.
    """
    if world and world.run_id not in ("", "none") and not _is_uuid(world.run_id):
        return world.run_id
    pid = os.getppid() if world else os.getpid()
    started_at = time.localtime(start_time(pid))
    return time.strftime("%Y-%m-%d_%H-%M-%S", started_at) + f"_{pid}"


def _is_uuid(text: str) -> bool:
    return len(text) == 36 and text.count("-") == 4
