"""The process group: opened once, closed once, and the few collectives that the launcher needs."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed.environment import LISTEN_SOCKET
from ddp_train.distributed.preflight import acknowledge
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from ddp_train.text import first_line

CONFIG_KEY = "ddp_train/config"


def open_store(world: World, timeout_seconds: float) -> Store:
    """The key-value store through which the processes of this run find each other.

    Under our own launcher rank 0 serves it on a socket that is bound to loopback already, so that no port can be taken
    in between and nothing listens beyond this host. Under torchrun it is the agent's.
    """
    timeout = timedelta(seconds=timeout_seconds)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listen_fd = os.environ.pop(LISTEN_SOCKET, None)
    try:
        if listen_fd is not None:
            store = TCPStore(
                address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=int(listen_fd)
            )
        else:
            store, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=timeout)))
    except (dist.DistError, OSError) as error:
        raise PeerError(
            f"rank {world.rank} cannot reach the store at {address}:{port}: {first_line(error)}",
            "check that rank 0 runs, and that host name and port can be reached from here",
        ) from error
    # torchrun restarts workers over one store: without a name of its own an attempt reads the addresses of its dead
    # predecessors (pytorch#135712). Hosts count attempts differently, so only one host may use the count.
    return PrefixStore(f"attempt_{world.attempt}", store) if world.hosts == 1 else store


def share_config(store: Store, world: World, text: str | None) -> str:
    """Rank 0 hands the frozen config to all others. An empty text says: there is none, leave.

    Raises PeerError if rank 0 never sends it.
    """
    if world.is_leader:
        store.set(CONFIG_KEY, text or "")
        acknowledge(store, world, wait=not text)
        return text or ""
    try:
        text = store.get(CONFIG_KEY).decode()
        if not text:
            acknowledge(store, world, wait=False)
        return text
    except dist.DistError as error:
        raise PeerError(
            f"rank {world.rank} got no config from rank 0: {first_line(error)}", "see what rank 0 printed"
        ) from error


@contextlib.contextmanager
def session(world: World, device: str, backend: str, store: Store, timeout_seconds: float) -> Iterator[None]:
    """The process group of a run. Nothing built inside may outlive it: DDP objects in particular.

    It is closed on success only. A gloo process whose DDP object was alive at the time aborted or hung at exit in 5 to
    28 % of runs (torch 2.13), and closing it after a failure can wait forever for peers (torchtitan#1342).
    """
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=torch.device(device) if backend == "nccl" else None,
    )
    yield
    gc.collect()  # DDP objects sit in reference cycles: `del` alone does not free them
    dist.barrier()  # rank 0 serves the store: nobody leaves while others may still read from it
    dist.destroy_process_group()


def total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def from_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, stacked along a new first dimension."""
    if not dist.is_initialized():
        return tensor[None]
    gathered = tensor.new_empty(dist.get_world_size() * tensor.numel())  # flat: gloo wants no more dimensions
    dist.all_gather_into_tensor(gathered, tensor.flatten())
    return gathered.view(-1, *tensor.shape)


def send_from_leader(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrites them with those of rank 0."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)


def same_everywhere(number: int, device: str, what: str) -> None:
    """Raises PeerError with every rank's number if they differ."""
    numbers = from_all_ranks(torch.tensor(number, device=device)).tolist()
    if len(set(numbers)) > 1:
        table = ", ".join(f"rank {rank}: {number}" for rank, number in enumerate(numbers))
        raise PeerError(f"{what} is not the same for all processes ({table})", "run_dir must be shared by all hosts")


@contextlib.contextmanager
def averaged_buffers(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Inside, every rank has the average of all ranks' floating-point buffers; outside it keeps its own.

    Each rank's batch-norm statistics saw its own samples only. Whatever is evaluated or saved should know all of them,
    and the training that goes on should not know that it was looked at. Yields every rank's own: [ranks, n], float64.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if not buffers:
        yield torch.empty(dist.get_world_size() if dist.is_initialized() else 1, 0)
        return
    own = torch.cat([buffer.detach().double().flatten() for buffer in buffers])
    of_all = from_all_ranks(own)
    set_buffers(module, of_all.mean(0))
    try:
        yield of_all
    finally:
        set_buffers(module, own)


def set_buffers(module: torch.nn.Module, values: torch.Tensor) -> None:
    """Sets all floating-point buffers of a module, one after the other, from `values` [n]."""
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    with torch.no_grad():
        for buffer, part in zip(buffers, values.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


@contextlib.contextmanager
def local_leader_first(world: World, device: str) -> Iterator[None]:
    """One process per host goes first; the others follow when it is done: a download happens once per host."""
    if not world.is_local_leader:
        barrier(device)
    yield
    if world.is_local_leader:
        barrier(device)


def barrier(device: str) -> None:
    """Waits for all processes."""
    total(torch.zeros(1, device=device)).item()
