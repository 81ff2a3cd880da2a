"""Runs a function on N real processes over gloo and returns what each returned: distributed tests
are plain asserts.

The processes are forked by a server, which is forked from this process when all tests are collected
(tests/conftest.py): torch and the test modules are imported once for both.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddp_train.distributed.process_group import session
from ddp_train.distributed.world import World
from ddp_train.linux import end_with_parent

PRELOAD = ("torch._dynamo", "ddp_train.runs.worker", "sklearn.metrics", "tests.support.jobs")
"""What most ranks need, and not every test module imports."""
MESSAGE_BYTES = 64
LEAVE_SECONDS = 5.0
"""For a rank that has answered to end by itself."""


def on_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = 60.0,
    device: str = "cpu",
) -> list[Any]:
    """[function(world, *arguments) on rank 0, 1, ...], inside a session: over gloo, or NCCL on
    device="cuda". Fails with the first rank's traceback."""
    pipes = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ranks:
        for rank in range(size):
            ours, theirs = multiprocessing.Pipe(duplex=False)
            world = World(rank, size, rank, size)
            work = (world, device, folder, function, arguments)
            if device == "cpu":
                ranks.enter_context(forked_rank(theirs, work, Path(folder, f"work_{rank}")))
            else:
                ranks.enter_context(spawned_rank(theirs, work))
            theirs.close()
            pipes.append(ours)
        return _collect(pipes, timeout_seconds)


@contextlib.contextmanager
def forked_rank(pipe: Connection, work: tuple[Any, ...], place: Path) -> Iterator[int]:
    """A process that is forked by the server: its descriptor. It ends at the latest here.

    pipe: where it answers.
    work: the arguments of `_enter` after the pipe.
    place: a file that passes them on.
    """
    place.write_bytes(pickle.dumps((list(sys.path), work)))
    process = server.fork(pipe, place)
    try:
        yield process
    finally:
        ended, _, _ = select.select([process], [], [], LEAVE_SECONDS)
        if not ended:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [])
        os.close(process)


@contextlib.contextmanager
def spawned_rank(pipe: Connection, work: tuple[Any, ...]) -> Iterator[None]:
    """A new interpreter: what is forked from a process that has asked for GPUs cannot use them."""
    process = multiprocessing.get_context("spawn").Process(target=_enter, args=(pipe, *work))
    process.start()
    try:
        yield
    finally:
        process.join(LEAVE_SECONDS)
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


# --- the server -----------------------------------------------------------------------------------


class RankServer:
    """A process with one thread that is forked from this one, and forks ranks."""

    def __init__(self) -> None:
        self.pid: int | None = None

    def start(self) -> None:
        """Call it before any test: what a test changes in this process, no rank shall see."""
        if self.pid is not None:
            return
        resource_tracker.ensure_running()  # one for all ranks
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            try:
                self.connection.close()
                _serve(theirs)
            except BaseException:  # noqa: BLE001  no test may run in this process too
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        atexit.register(self.stop)

    def stop(self) -> None:
        if self.pid:
            self.connection.close()
            os.waitpid(self.pid, 0)
            self.pid = None

    def fork(self, pipe: Connection, place: Path) -> int:
        """A descriptor of the new process, which does the work that lies in a file.

        pipe: where it answers. What it prints goes where this process prints now.
        """
        self.start()
        socket.send_fds(self.connection, [str(place).encode()], [pipe.fileno(), 1, 2])
        _, processes, _, _ = socket.recv_fds(self.connection, MESSAGE_BYTES, 1)
        assert processes, "the server of ranks has ended; its traceback is above"
        return processes[0]


server = RankServer()


def _serve(connection: socket.socket) -> NoReturn:
    """Forks ranks until the caller has ended."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the caller ends this one
    sys.unraisablehook = sys.__unraisablehook__  # pytest's keeps what a rank should print
    threading.excepthook = threading.__excepthook__
    first = True
    while True:
        place, descriptors, _, _ = socket.recv_fds(connection, 4096, 3)
        if not place:
            os._exit(0)
        if first:
            _prepare()
            first = False
        _reap()
        pid = os.fork()
        if not pid:
            connection.close()
            _work(Path(place.decode()), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        process = os.pidfd_open(pid)
        socket.send_fds(connection, [b"forked"], [process])
        os.close(process)


def _prepare() -> None:
    """What ranks would do, each for itself: imports, the types of options, a look for garbage."""
    for name in PRELOAD:
        importlib.import_module(name)
    bind = importlib.import_module("ddp_train.config.bind").bind
    options_of_groups = importlib.import_module("ddp_train.options.registry").OPTIONS
    for group, options in options_of_groups.items():
        for option in options:
            bind({group: {"name": option}})
    gc.collect()
    gc.freeze()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _work(place: Path, pipe: int, output: int, errors: int) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        sys.path[:], work = pickle.loads(place.read_bytes())
        _enter(Connection(pipe, readable=False), *work)
    except BaseException:  # noqa: BLE001  it ends here
        traceback.print_exc()
    finally:
        os._exit(1)
