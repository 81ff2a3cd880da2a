"""Every variable of the environment that this package reads or sets: torchrun's, SLURM's, torch's, the trackers'.

Torch-free: the entry asks before it imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from pathlib import Path

from ddp_train.distributed.world import World
from ddp_train.linux import started

LISTEN_SOCKET = "DDP_TRAIN_LISTEN_FD"
"""File descriptor of the listening socket of the store, inherited by rank 0 from our own launcher."""


LAUNCHER_PID = "DDP_TRAIN_LAUNCHER_PID"
"""Process id of our own launcher; absent under torchrun."""


LAST_WORDS = "DDP_TRAIN_LAST_WORDS"
"""File into which torchrun's workers write their exit codes; absent under a torchrun that is not ours."""


TOLD = "told"


BOARD = "DDP_TRAIN_BOARD_FD"
"""File descriptor of the board (see `heartbeat`), inherited from our own launcher."""


def world_from_environment() -> World | None:
    """The world that an agent (torchrun, or our launcher) put this process into; None outside of one."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    return World(
        rank=int(env["RANK"]),
        size=int(env["WORLD_SIZE"]),
        local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
        local_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
        attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        run_id=env.get("TORCHELASTIC_RUN_ID", ""),
    )


def worker_environment(world: World, port: int, threads: int, import_path: Path) -> dict[str, str]:
    """The environment of one worker that our own launcher starts on this host, without `worker_descriptors`."""
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
    # One host needs no other interface: nothing listens beyond loopback, and a host name that resolves to nothing
    # cannot stop the run.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        env.setdefault("GLOO_SOCKET_IFNAME", loopback)
        env.setdefault("NCCL_SOCKET_IFNAME", loopback)
    return env


def worker_descriptors(world: World, listen_fd: int, board_fd: int) -> dict[str, int]:
    """The files that a worker inherits from our own launcher, by the variable that tells it their numbers."""
    return {BOARD: board_fd, **({LISTEN_SOCKET: listen_fd} if world.is_leader else {})}


def probe_environment(world: World, threads: int, import_path: Path) -> dict[str, str]:
    """The environment of a process that one of torchrun's starts in the place of a rank, as a client of its store."""
    return {
        **_importing_environment(import_path, threads),
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.local_rank),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # else rank 0 would serve a store of its own on the same port
    }


def preload_environment(import_path: Path) -> dict[str, str]:
    """The environment of the fork server: as a worker's, but with one thread, because numpy's BLAS starts its threads
    when it is imported. Nothing else that libraries read while they are imported differs."""
    return {**_importing_environment(import_path, threads=1), "OPENBLAS_NUM_THREADS": "1"}


def _importing_environment(import_path: Path, threads: int) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(import_path) + (os.pathsep + path if path else ""),
    }


def environment() -> dict[str, str]:
    """A copy of this process's own."""
    return dict(os.environ)


def set_environment(variables: dict[str, str]) -> None:
    """Replaces this process's environment, for getenv in C libraries too."""
    os.environ.clear()
    os.environ.update(variables)


def agent_environment(interface: str | None, last_words: Path) -> dict[str, str]:
    """The environment of a torchrun agent that we start.

    interface: the one that leads to the other hosts, None if unknown. last_words: see `say_last_word`.
    """
    # Without TORCH_DISABLE_SHARE... restarted workers read the addresses of their dead predecessors (pytorch#135712).
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", LAST_WORDS: str(last_words)}
    if interface:  # else gloo takes the address of this host's name, which on Debian is 127.0.1.1
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
        env.setdefault("NCCL_SOCKET_IFNAME", interface)
    return env


def say_last_word(word: object) -> None:
    """Leaves a word for our launcher outside of torchrun, whose agent turns all exit codes into 1.

    word: this worker's exit code, or TOLD once it has told the user what went wrong.
    """
    path = os.environ.get(LAST_WORDS)
    if path:
        with Path(path).open("a") as file:  # one short line is written whole
            file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {word}\n")


def tell_agent(failure: str) -> None:
    """torchrun ends with a page of its own, on which it shows what it finds in a file of each process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        more = {"py_callstack": failure, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # the user has been told already
            Path(path).write_text(json.dumps({"message": {"message": failure, "extraInfo": more}}))


def gloo_interface() -> str | None:
    """The interface that gloo was told to use."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def hosts_started(world: World) -> int:
    """How many agents take part, as torchrun says; it may start other numbers of processes on each."""
    return int(os.environ.get("GROUP_WORLD_SIZE", world.hosts))


def host_number(world: World) -> int:
    """Which of the hosts this is, as torchrun counts them."""
    return int(os.environ.get("GROUP_RANK", world.rank // world.local_size))


def hosts_asked() -> tuple[int, int] | None:
    """The least and the most hosts that torchrun was asked for, from its command line or PET_NNODES; None if unknown.

    It does not tell its workers, and starts with fewer when a host's clock is behind: two hosts then train two models.
    """
    asked = os.environ.get("PET_NNODES", "")
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:  # no /proc, the agent is gone, or outside of this container
        words = [""]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name in ("--nnodes", "--nnode"):
            asked = value or following
    found = re.fullmatch(r"(\d+)(?::(\d+))?", asked)
    return (int(found[1]), int(found[2] or found[1])) if found else None


def srun_tasks() -> int:
    """How many processes SLURM's srun started with this one; 1 outside of it."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) if "SLURM_PROCID" in os.environ else 1


def launcher_pid() -> int | None:
    """The process id of our own launcher, if it started this process."""
    pid = os.environ.get(LAUNCHER_PID)
    return int(pid) if pid else None


def board_descriptor() -> int | None:
    """The file descriptor of the launcher's board, for its direct children alone; None under torchrun."""
    descriptor = os.environ.pop(BOARD, None)
    return int(descriptor) if descriptor else None


def store_address() -> str:
    """The host that serves the key-value store, as torchrun names it."""
    return os.environ["MASTER_ADDR"]


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as the user set it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def keep_trackers_at_home() -> None:
    """Trackers send nothing that nobody asked for, usage statistics and crash reports; MLflow may use folders, which it
    refuses otherwise."""
    for name, value in (
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("WANDB_ERROR_REPORTING", "false"),
        ("MLFLOW_ALLOW_FILE_STORE", "true"),
    ):
        os.environ.setdefault(name, value)


def wandb_mode() -> str:
    """WANDB_MODE: online, offline, disabled. Where the user did not ask, nothing leaves this host."""
    return os.environ.get("WANDB_MODE", "offline")


def mlflow_uri() -> str | None:
    """MLFLOW_TRACKING_URI. In no file of ours: it may hold a password."""
    return os.environ.get("MLFLOW_TRACKING_URI")


def set_cublas_workspace() -> None:
    """Deterministic cuBLAS needs a workspace of fixed size, set before CUDA starts (cuBLAS manual, reproducibility)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def new_run_id(world: World | None) -> str:
    """A name for this run: when its launcher started, and that process's id.

    Under torchrun the launcher is the agent, which outlives its restarts: a restarted rank 0 finds the same name. A
    name that a person gave (`--rdzv-id`) is kept; torchrun's own is a uuid, or `none`.
    """
    if world and world.run_id not in ("", "none") and not _is_uuid(world.run_id):
        return world.run_id
    pid = os.getppid() if world else os.getpid()
    return time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(started(pid))) + f"_{pid}"


def _is_uuid(text: str) -> bool:
    return len(text) == 36 and text.count("-") == 4
