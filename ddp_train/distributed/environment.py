"""The environment variables of this process, but for those of torchrun's agent (agent.py).

Torch-free: launch.py reads some before it imports torch. No other package reads or sets any.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.linux import start_time

LISTEN_SOCKET = "DDP_TRAIN_LISTEN_FD"
"""File descriptor of the store's listening socket, which rank 0 inherits from our launcher."""
LAUNCHER_PID = "DDP_TRAIN_LAUNCHER_PID"
"""Process id of our launcher; not set under torchrun."""
STATUS_FD = "DDP_TRAIN_STATUS_FD"
"""File descriptor of the status board (see `heartbeat`), inherited from our launcher."""
KEPT_FD = "DDP_TRAIN_KEPT_FD"
"""File descriptor of the memory in which a run's state is kept (see `kept_memory`), inherited from
our launcher."""
KEEPER_FD = "DDP_TRAIN_KEEPER_FD"
"""File descriptor of a socket: our launcher takes memory of GPUs over (see `held_devices`)."""
SAVING_TASK = "DDP_TRAIN_SAVING_TASK"
"""JSON: what the processes of the attempt before have kept (see `launcher.kept_attempt`), of which
a checkpoint is to be made first."""
LOST = "DDP_TRAIN_LOST"
"""JSON: the rank that the attempt before has lost (see `lost_ranks.Loss`)."""
RESIZED = "DDP_TRAIN_RESIZED"
"""JSON: the last changes of the number of processes (see `launcher.size.Change`)."""
PROCESSES = "DDP_TRAIN_PROCESSES"
"""Number of processes that `ddp_train.session` starts where its script does not say it."""
PROOF = "DDP_TRAIN_PROOF"
"""Folder of a run of `ddp-train prove train.py`: `ddp_train.session` writes there alone."""
PROOF_DRAWS = "DDP_TRAIN_PROOF_DRAWS"
"""The rank of whom such a run's rank 0 has the random draws of a step; 0 where it is not set."""
GRADIENTS = "gradients.safetensors"
BY_OPTIMIZER = "weights after update"
"""Before its number and the parameter's name: the change that an optimizer has made, in float64."""
BY_LOOP = "weights after step"
"""Likewise what the loop has changed beside optimizers."""
"""File in a proof's folder: the gradients of the first updates."""
DRAWS = "draws_by_process"
"""Entry of that file's metadata, 0 or 1."""
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
_TASK_VARIABLES = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),  # MVAPICH2
    ("mpirun", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK"),  # MVAPICH 3
    ("flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("mpiexec", "PMI_SIZE", "PALS_RANKID"),  # Cray's PALS
    ("mpirun", "PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("prterun", "", "PMIX_RANK"),
    ("aprun", "", "ALPS_APP_PE"),
)
"""Commands that start another one several times, with the variables by which each of those knows
how many they are (empty: it does not) and which of them it is."""


@dataclass(frozen=True)
class Tasks:
    """The processes that one command of a batch system or an MPI has started."""

    count: int = 1
    command: str = ""
    """srun, mpirun ..."""
    variables: tuple[str, ...] = ()
    """The variables that say so."""


# --- who this process is --------------------------------------------------------------------------


def world_from_environment() -> World | None:
    """The World that torchrun or our launcher started this process in; None for a process that
    neither started. Raises ConfigError if the variables do not make sense."""
    env = os.environ
    numbers = {name: env[name] for name in _NUMBERS if name in env}
    problem = _problem_of(numbers)
    if problem:
        names = " ".join(numbers)
        raise ConfigError(
            [f"environment: {problem}; start with torchrun, or `unset {names}` before the start"]
        )
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    launcher = launcher_pid()
    if launcher is not None and os.getppid() != launcher:
        names = " ".join(f"-u {name}" for name in (*numbers, LAUNCHER_PID))
        raise ConfigError(
            [
                f"environment: a process of another run (launcher {launcher}) has started this"
                f" command, which has inherited RANK={env['RANK']} from there; start the command"
                f" as `env {names} COMMAND`"
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


def _problem_of(numbers: dict[str, str]) -> str:
    """Why the variables do not make sense; empty if they do.

    numbers: variables that must be numbers.
    """
    for name, value in numbers.items():
        if not re.fullmatch(r"\d{1,9}", value):
            return f"{name}={value} is not a number"
    rank_of = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
    for rank, size in rank_of.items():
        if rank in numbers and size in numbers and int(numbers[rank]) >= int(numbers[size]):
            return f"{rank}={numbers[rank]} is not below {size}={numbers[size]}"
    if "RANK" not in numbers or "WORLD_SIZE" not in numbers:
        return _problem_of_part(numbers)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            return f"RANK={numbers['RANK']} is set and {name} is not"
    port = os.environ["MASTER_PORT"]
    if not re.fullmatch(r"\d{1,5}", port):
        return f"MASTER_PORT={port} is not a port"
    return ""


def _problem_of_part(numbers: dict[str, str]) -> str:
    """Why variables that do not name a rank and a world say all the same that this process is one
    of several, each of which would train alone; empty if they do not say so."""
    if "RANK" in numbers:
        return f"RANK={numbers['RANK']} is set and WORLD_SIZE is not"
    least_of_several = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": 1}
    for name, least in least_of_several.items():
        if int(numbers.get(name, 0)) >= least:
            return f"{name}={numbers[name]} is set and RANK is not"
    return ""


def new_run_id(world: World | None) -> str:
    """The name of a run: start time and process id of its launcher.

    Under torchrun the launcher is the agent, which lives on through restarts, so a restarted rank 0
    gets the same name. A `--rdzv-id` that the user chose is the name; torchrun's default id is a
    uuid or `none`.
    """
    pid = os.getpid()
    if world:
        pid = os.getppid()
        is_uuid = len(world.run_id) == 36 and world.run_id.count("-") == 4
        if world.run_id not in ("", "none") and not is_uuid:
            return world.run_id
    started_at = time.localtime(start_time(pid))
    return time.strftime("%Y-%m-%d_%H-%M-%S", started_at) + f"_{pid}"


def store_address() -> str:
    """MASTER_ADDR: the host that serves the key-value store."""
    return os.environ["MASTER_ADDR"]


# --- what our launcher says -----------------------------------------------------------------------


def launcher_pid() -> int | None:
    """The process id of our launcher; None if it did not start this process."""
    pid = os.environ.get(LAUNCHER_PID)
    return int(pid) if pid else None


def status_descriptor() -> int | None:
    """The file descriptor of the status board; None under torchrun.

    Removes the variable, so that children of this process do not see it.
    """
    descriptor = os.environ.pop(STATUS_FD, None)
    return int(descriptor) if descriptor else None


def kept_descriptor() -> int | None:
    """The file descriptor of the memory in which the state is kept; None if there is none.

    Removes the variable, as `status_descriptor` does.
    """
    descriptor = os.environ.pop(KEPT_FD, None)
    return int(descriptor) if descriptor else None


def keeper_descriptor() -> int | None:
    """The file descriptor of the socket on which our launcher takes memory of GPUs over.

    Removes the variable, as `status_descriptor` does.
    """
    descriptor = os.environ.pop(KEEPER_FD, None)
    return int(descriptor) if descriptor else None


def saving_task() -> dict[str, Any] | None:
    """The task of saving the step that an earlier attempt has kept; None if there is none."""
    return json.loads(os.environ.pop(SAVING_TASK, "null"))


def descriptor_named(name: str) -> int:
    """A file descriptor that was handed on under the name of a variable."""
    return int(os.environ.pop(name))


def lost_rank() -> dict[str, Any] | None:
    """The rank that the attempt before has lost; None if this is the first attempt, or it ended in
    another way."""
    return json.loads(os.environ.get(LOST, "null"))


def changes_of_number() -> list[dict[str, Any]]:
    """The last changes of the number of processes; none if they are as many as at the start."""
    return json.loads(os.environ.get(RESIZED, "[]"))


# --- what the user, the system and libraries say --------------------------------------------------


def processes_asked() -> str | None:
    return os.environ.get(PROCESSES)


def proof_folder() -> Path | None:
    folder = os.environ.get(PROOF)
    return Path(folder) if folder else None


def draws_of_proof() -> int:
    return int(os.environ.get(PROOF_DRAWS, "0"))


def threads_asked() -> int | None:
    """OMP_NUM_THREADS, which torch reads when it is imported; None if it is not one number."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) or None if threads.isdigit() else None


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as the user set it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def gloo_interface() -> str | None:
    """GLOO_SOCKET_IFNAME: the network interface that gloo uses; None if not set."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def tasks_started() -> Tasks:
    """The tasks among which a batch system or an MPI has started this process: one if none has.

    The first of some whose number is not known takes itself for the only one.
    """
    env = os.environ
    for command, size_variable, rank_variable in _TASK_VARIABLES:
        rank = env.get(rank_variable, "")
        if not rank.isdigit():
            continue
        size = env.get(size_variable, "")
        count = int(rank) + 1
        if size.isdigit():
            count = max(count, int(size))
        if count > 1:
            names = [name for name in (size_variable, rank_variable) if name in env]
            return Tasks(count, command, tuple(names))
    return Tasks()


def c_compiler() -> str | None:
    """The path of a C compiler, found as Triton finds one; None if there is none."""
    if "CC" in os.environ:
        return shutil.which(os.environ["CC"])
    return shutil.which("gcc") or shutil.which("clang")


# --- what is set for libraries --------------------------------------------------------------------


def restart_in_utf8() -> None:
    """Start this program anew, in the same process, if its locale cannot write every name.

    That is LC_ALL=C without Python's own remedies. Children inherit what that takes.
    """
    if sys.getfilesystemencoding().lower() != "utf-8":
        command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})


def set_default_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_triton_cache() -> None:
    """Move Triton's kernels to the folder for temporary files if the home folder cannot be written,
    as in a container with another user. torch's compiler keeps its own there too."""
    home = Path("~/.triton").expanduser()
    written_to = home if home.exists() else home.parent
    if not os.access(written_to, os.W_OK):
        folder = Path(tempfile.gettempdir(), f"triton_{os.getuid()}")
        set_default_variables({"TRITON_CACHE_DIR": str(folder)})
