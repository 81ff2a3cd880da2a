"""Runs a function on N real processes over gloo and returns what each returned: distributed tests
are plain asserts.

The processes come from a fork server that has imported torch and DDP's machinery once: three ranks
start in about 0.2 s instead of 6 s.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_train.distributed.process_group import session
from ddp_train.distributed.world import World

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "ddp_train.runs.worker",
        "tests.support.ranks",
        "tests.support.warm",
    ]
)


def on_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = 60.0,
    device: str = "cpu",
) -> list[Any]:
    """[function(world, *arguments) on rank 0, 1, ...], inside a session: over gloo, or NCCL on
    device="cuda". Fails with the first rank's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        processes = []
        for rank in range(size):
            ours, theirs = _SERVER.Pipe(duplex=False)
            process = _SERVER.Process(
                target=_enter,
                args=(theirs, World(rank, size, rank, size), device, folder, function, arguments),
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout_seconds)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], timeout_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait(
            [pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout_seconds
        )
        assert ready, (
            f"ranks {sorted(set(range(len(pipes))) - set(results))} gave no answer in"
            f" {timeout_seconds} s"
        )
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                succeeded, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} died without an answer") from None
            assert succeeded, f"rank {rank}:\n{value}"
            results[rank] = torch.load(io.BytesIO(value), weights_only=False)
    return [results[rank] for rank in range(len(pipes))]


def _enter(
    pipe: Connection,
    world: World,
    kind: str,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    multiprocessing.set_start_method(None, force=True)  # a fork server hands its own on
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder, "store")), world.size)
        device = world.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        with session(world, device, "gloo" if kind == "cpu" else "nccl", store, 30.0):
            value = function(world, *arguments)
        content = io.BytesIO()
        torch.save(
            value, content
        )  # pickling tensors would share memory with a process that is about to end
        pipe.send((True, content.getvalue()))
    except BaseException:  # noqa: BLE001  it travels to the test
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)
