"""The store, the process group of a run, and the collectives that this package uses."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from ddp_train.distributed.agent import check_agent_lives, serves_store
from ddp_train.distributed.environment import LISTEN_SOCKET
from ddp_train.distributed.preflight import acknowledge, wait_for_leader
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from ddp_train.text import first_line

CONFIG_KEY = "ddp_train/config"
JOINED = "ddp_train/joined"
_session: dict[str, Any] = {}
"""The timeout and the `side_group`s of the session that is open."""


def open_store(world: World, timeout_seconds: float) -> Store:
    """Open the key-value store of this run. It does not wait until all ranks have opened it.

    Under our launcher rank 0 serves it on a socket that the launcher has bound to loopback: no
    other process can take the port, and nothing listens on other interfaces. Under torchrun it is
    the agent's store, which listens before any worker starts: where nobody listens, the agent has
    died. Where ranks were started by hand or by another program, rank 0 serves it. Raises
    PeerError, then at once, or if the store cannot be reached within `timeout_seconds`.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    check_agent_lives(world)
    try:
        store = _connected_store(world, address, port, timeout_seconds)
    except (dist.DistError, OSError) as error:
        raise PeerError(
            f"rank {world.rank} cannot reach the store at {address}:{port}: {first_line(error)}",
            "check that rank 0 is running and that its host name and port can be reached from here",
        ) from error
    # torchrun keeps one store over restarts: without a prefix of its own an attempt reads the
    # addresses of its dead predecessors (pytorch#135712). Hosts count attempts differently, so the
    # prefix is used on a single host only.
    if world.hosts > 1:
        return store
    store = PrefixStore(f"attempt_{world.attempt}", store)
    if store.add(f"{JOINED}/{world.rank}", 1) > 1:
        raise PeerError(
            f"another process has joined as rank {world.rank} at {address}:{port} already: two"
            " processes have the same RANK",
            "give each process its own RANK; if a rank starts another command, start that with"
            " `env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE`",
        )
    return store


def _connected_store(world: World, address: str, port: int, timeout_seconds: float) -> Store:
    """The store, of whoever serves it, see `open_store`. Raises DistError or OSError."""
    timeout = timedelta(seconds=timeout_seconds)
    listen_fd = os.environ.pop(LISTEN_SOCKET, None)
    if listen_fd is not None:
        return TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=int(listen_fd),
        )
    if serves_store():
        store, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=timeout)))
        return store
    if not world.is_leader:
        wait_for_leader(world, address, port, timeout_seconds)
    return TCPStore(
        address, port, is_master=world.is_leader, timeout=timeout, wait_for_workers=False
    )


def share_config(store: Store, world: World, text: str | None) -> str:
    """Send the frozen config from rank 0 to all ranks.

    Returns it; empty if rank 0 has none. Raises PeerError if rank 0 does not send it within the
    store's timeout.
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
            f"rank {world.rank} got no config from rank 0: {first_line(error)}",
            "see the output of rank 0",
        ) from error


@contextlib.contextmanager
def session(
    world: World, device: str, backend: str, store: Store, timeout_seconds: float
) -> Iterator[None]:
    """The process group of a run. Objects that use it, DDP's above all, must not outlive the
    context.

    It is closed on success only: after a failure closing can wait forever for peers
    (torchtitan#1342). A gloo process whose DDP object was still alive at that time aborted or hung
    at exit in 5 to 28 % of runs (torch 2.13).
    """
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=torch.device(device) if backend == "nccl" else None,
    )
    _session["timeout"] = timedelta(seconds=timeout_seconds)
    yield
    gc.collect()  # DDP objects are in reference cycles: `del` alone does not free them
    _session.clear()
    # rank 0 serves the store: it must not leave while other ranks still read from it
    dist.barrier()
    dist.destroy_process_group()


def ranks() -> int:
    """The number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def place_among_ranks() -> tuple[int, int]:
    """This process's rank, and the number of processes; 0 and 1 without a process group."""
    return (dist.get_rank() if dist.is_initialized() else 0), ranks()


def backend() -> str:
    """nccl or gloo; empty without a process group."""
    return dist.get_backend() if ranks() > 1 else ""


def side_group(name: str = "side_group") -> Any:
    """A further process group of all ranks, for collectives whose place among those of DDP may
    differ between ranks.

    It is made when it is first asked for, by all ranks alike.
    """
    if name not in _session:
        _session[name] = dist.new_group(timeout=_session.get("timeout"))
    return _session[name]


def total(tensor: torch.Tensor) -> torch.Tensor:
    """Sum `tensor` over all ranks, in place (all-reduce), and return it.

    Without a process group it is unchanged.
    """
    if ranks() > 1:
        with _in_order(tensor) as elements:
            dist.all_reduce(elements)
    return tensor


@contextlib.contextmanager
def _in_order(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, or a contiguous copy that is copied back at the end.

    A collective takes elements in the order of memory, in which those of other strides lie at
    other places.
    """
    elements = tensor
    if tensor.layout == torch.strided:
        elements = tensor.contiguous()
    yield elements
    if elements is not tensor:
        tensor.copy_(elements)


def from_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """All-gather: [...] -> [ranks, ...]. Without a process group [1, ...]."""
    count = ranks()
    if count == 1:
        return tensor[None]
    gathered = tensor.new_empty(count * tensor.numel())  # flat: gloo supports one dimension only
    dist.all_gather_into_tensor(gathered, tensor.flatten())
    return gathered.view(-1, *tensor.shape)


def send_from_leader(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors of all ranks with those of rank 0 (broadcast)."""
    if ranks() > 1:
        for tensor in tensors:
            with _in_order(tensor.detach()) as elements:
                dist.broadcast(elements, 0)


def from_leader(value: Any, device: str) -> Any:
    """The value of rank 0, on all ranks (two broadcasts). It travels as JSON: tuples arrive as
    lists."""
    if ranks() == 1:
        return value
    content = json.dumps(value).encode()
    text = torch.tensor(list(content), dtype=torch.uint8, device=device)
    size = torch.tensor(len(text), device=device)
    dist.broadcast(size, 0)
    if dist.get_rank():
        text = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(text, 0)
    return json.loads(bytes(text.tolist()))


def mean_later(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start to take the mean of `tensor` over all ranks, in place (all-reduce), while other work
    continues.

    Returns a function that waits for it (on a GPU its stream does) and returns it.
    """
    if ranks() == 1:
        return lambda: tensor
    work = dist.all_reduce(tensor, async_op=True)

    def finish() -> torch.Tensor:
        assert work is not None
        work.wait()
        return tensor.div_(dist.get_world_size())

    return finish


def gather_later(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start an all-gather of [n] in a group of its own, while other work continues.

    Returns a function that waits for it and returns [ranks, n].
    """
    gathered = tensor.new_empty(ranks() * tensor.numel())
    work = dist.all_gather_into_tensor(
        gathered, tensor, group=side_group("gather_later"), async_op=True
    )

    def finish() -> torch.Tensor:
        assert work is not None
        work.wait()
        return gathered.view(-1, tensor.numel())

    return finish


SHARED_RUN_DIR = "set run_dir to a path on a file system that all hosts share"


def same_everywhere(number: int, device: str, what: str, remedy: str = SHARED_RUN_DIR) -> None:
    """Raise PeerError if a number is not the same on all ranks. A collective.

    what: the name of the number, for the message.
    """
    numbers = from_all_ranks(torch.tensor(number, device=device)).tolist()
    if len(set(numbers)) == 1:
        return
    table = ", ".join(f"rank {rank}: {_shown(number)}" for rank, number in enumerate(numbers))
    raise PeerError(f"{what} is not the same for all processes ({table})", remedy)


def _shown(number: int) -> str:
    """A number; "none" for -1; of a checksum the first digits."""
    if number == -1:
        return "none"
    is_checksum = bool(number >> 32)
    return f"{number:x}"[:8] if is_checksum else str(number)


@contextlib.contextmanager
def averaged_buffers(
    module: torch.nn.Module, keep_if_alike: bool = False
) -> Iterator[torch.Tensor]:
    """Replace the floating-point buffers by their average over all ranks inside the context.

    Batch-norm statistics differ between ranks, since each rank sees its own samples. Evaluations
    and checkpoints use the average, and training continues with each rank's own. Yields the buffers
    of all ranks: [ranks, n], float64.

    keep_if_alike: buffers that are the same on all ranks keep their very bits, which a mean over
        three would round. Waits for the device.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if not buffers:
        yield torch.empty(ranks(), 0)
        return
    own = torch.cat([buffer.detach().double().flatten() for buffer in buffers])
    gathered = from_all_ranks(own)
    if keep_if_alike and bool(((gathered == gathered[0]) | gathered.isnan()).all()):
        yield gathered
        return
    set_buffers(module, gathered.mean(0))
    try:
        yield gathered
    finally:
        set_buffers(module, own)


def buffer_places(module: torch.nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str]]:
    """The dict that holds each buffer, and its name there, in the order of `module.buffers()`."""
    names = [name.rpartition(".") for name, _ in module.named_buffers()]
    return [(module.get_submodule(parent)._buffers, name) for parent, _, name in names]


def set_buffers(module: torch.nn.Module, values: torch.Tensor) -> None:
    """Set all floating-point buffers of a module.

    values: [n], in the order of `module.buffers()`.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    parts = values.split([buffer.numel() for buffer in buffers])
    with torch.no_grad():
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


@contextlib.contextmanager
def local_leader_first(world: World, device: str) -> Iterator[None]:
    """A context that local rank 0 runs first, the other ranks of the host after it: a download
    happens once per host."""
    if not world.is_local_leader:
        barrier(device)
    yield
    if world.is_local_leader:
        barrier(device)


def barrier(device: str) -> None:
    """Wait for all ranks, by an all-reduce on `device`."""
    total(torch.zeros(1, device=device)).item()
