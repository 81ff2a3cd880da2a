"""The environments of the processes that this package starts. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_train.distributed.agent import EXIT_CODE_FILE
from ddp_train.distributed.environment import (
    KEEPER_FD,
    KEPT_FD,
    LAUNCHER_PID,
    LISTEN_SOCKET,
    LOST,
    PROCESSES,
    PROOF,
    PROOF_DRAWS,
    RESIZED,
    STATUS_FD,
)
from ddp_train.distributed.world import World


def _importing_environment(import_path: Path | None, threads: int) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if import_path:
        earlier = env.get("PYTHONPATH")
        paths = [str(import_path), earlier] if earlier else [str(import_path)]
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def _with_interface(env: dict[str, str], interface: str) -> dict[str, str]:
    """The environment with the network interface of gloo and NCCL, unless the user has set them."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **env}


def proof_environment(run_dir: Path, processes: int, first_draws: int = 0) -> dict[str, str]:
    """The environment of a script whose session is to be proved, on CPUs.

    first_draws: the rank of whom rank 0 has the random draws of a step.
    """
    return {
        **os.environ,
        PROOF: str(run_dir),
        PROOF_DRAWS: str(first_draws),
        PROCESSES: str(processes),
        "CUDA_VISIBLE_DEVICES": "",
    }


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
        # If a rank dies, or hangs, the launcher ends the others. What a collective that ends by
        # itself leaves is garbage, and no step may be kept with it.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
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
            env = _with_interface(env, name)
    return env


def continuation_environment(
    lost: dict[str, Any] | None, changes: Sequence[dict[str, Any]], devices: Sequence[str]
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


def worker_descriptors(
    world: World, listen_fd: int, status_fd: int, kept_fd: int | None, keeper_fd: int | None
) -> dict[str, int]:
    """The file descriptors that a worker inherits from our launcher: environment variable ->
    descriptor."""
    descriptors = {STATUS_FD: status_fd}
    if kept_fd is not None:
        descriptors[KEPT_FD] = kept_fd
    if keeper_fd is not None:
        descriptors[KEEPER_FD] = keeper_fd
    if world.is_leader:
        descriptors[LISTEN_SOCKET] = listen_fd
    return descriptors


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
    return _with_interface(env, interface) if interface else env


def probe_environment(world: World, threads: int, import_path: Path | None) -> dict[str, str]:
    """The environment of a probe that a torchrun worker starts in place of its rank: a client of
    the agent's store."""
    return {
        **_importing_environment(import_path, threads),
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.local_rank),
        # Otherwise rank 0 would serve a second store on the same port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def saving_environment(import_path: Path | None, devices: Sequence[str]) -> dict[str, str]:
    """The environment of a process that makes a checkpoint of what others have kept.

    devices: see `continuation_environment`.
    """
    env = {**_importing_environment(import_path, threads=1), LAUNCHER_PID: str(os.getpid())}
    return env | continuation_environment(None, (), devices)


def preload_environment(import_path: Path | None) -> dict[str, str]:
    """The environment of the fork server, which imports what workers need and must have one thread.

    OPENBLAS_NUM_THREADS=1, since numpy's BLAS starts its threads on import. All else that libraries
    read while they are imported is as in a worker.
    """
    return {**_importing_environment(import_path, threads=1), "OPENBLAS_NUM_THREADS": "1"}


@contextlib.contextmanager
def preloading(import_path: Path | None) -> Iterator[dict[str, str]]:
    """A context in which this process has `preload_environment`.

    Yields, filled in at the end, the variables that libraries have set meanwhile.
    """
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


def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def set_environment(variables: dict[str, str]) -> None:
    """Replace the whole environment of this process, for C libraries too."""
    os.environ.clear()
    os.environ.update(variables)
