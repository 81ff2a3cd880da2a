"""Workers by fork from a process that imports torch while the launcher still reads the config.

A worker that starts by itself imports torch, and torch._dynamo for DistributedDataParallel: that is most of the time to
the first step, and every rank spends it. Here one process does so for all. It serves its launcher alone, over a socket
pair without a name; what it forks becomes the launcher's child and does not need the server any more. A server that
cannot fork safely says so, and the launcher starts each worker by itself. Torch-free until it serves.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ddp_train.distributed.environment import environment, preload_environment, set_environment
from ddp_train.linux import children_of, end_children, end_with_parent, set_title
from ddp_train.resilience.heartbeat import START_SECONDS

MODULE = ("-P", "-m")
"""How Python runs one. -P: nothing is imported from the folder that the user stands in, as launch.py itself imports
nothing from there."""
WORKER = "ddp_train.training.worker"
POLL_SECONDS = 0.02
LENGTH = struct.Struct("!Q")
"""Of a message in bytes; stands before it."""
PAIR = struct.Struct("!II")
"""Rank and process id of a worker."""
MAX_DESCRIPTORS = 8
TITLE_BYTES = 1024
"""Room for the command line that a worker shows in place of the server's."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """What one worker is started with, in either way."""

    arguments: list[str]
    environment: dict[str, str]
    descriptors: dict[str, int]
    """Open files that it inherits, by the variable that tells it their numbers."""
    module: str = WORKER

    def command(self) -> list[str]:
        return [sys.executable, *MODULE, self.module, *self.arguments]


class ForkedWorker:
    """A child of this process that somebody else forked: as much of subprocess.Popen as the launcher needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | Any = None
        """Negative for a signal; None while it runs."""

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        return self._look(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The launcher's side. A server that could not be started, or has ended, is one that forks nothing."""

    def __init__(self, import_path: Path) -> None:
        """Starts it, and returns at once. import_path: the folder from which workers import."""
        self._began_in = _surroundings()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, *MODULE, __name__, str(theirs.fileno()), str(os.getpid()), " " * TITLE_BYTES]
        try:
            if sys.platform == "linux":
                self._process = subprocess.Popen(
                    command, env=preload_environment(import_path), pass_fds=(theirs.fileno(),), start_new_session=True
                )
        except OSError as error:
            log.debug("no fork server: %s", error)
        finally:
            theirs.close()

    def fork(self, specs: list[WorkerSpec], given_up: Callable[[], bool]) -> list[ForkedWorker]:
        """A worker for each, in a session of its own, once torch is imported; none of them if that cannot be.

        Inside `adopting_orphans` only. given_up: asked until then; if it says so there will be none, and no more.
        """
        before = set(children_of(os.getpid()))
        try:
            if self._process is None:
                raise _CannotError("it does not run")
            if _surroundings() != self._began_in:  # a trial's own directory or hydra.job.env_set
                raise _CannotError("it was started in another working directory or environment")
            descriptors = sorted({descriptor for spec in specs for descriptor in spec.descriptors.values()})
            asked = [(spec.arguments, spec.environment, _positions(spec, descriptors)) for spec in specs]
            self._socket.settimeout(START_SECONDS)
            _send(self._socket, asked, descriptors)
            deadline = time.monotonic() + START_SECONDS
            while not select.select([self._socket], [], [], POLL_SECONDS)[0]:
                if given_up() or time.monotonic() > deadline:
                    raise _CannotError("it did not answer in time")
            answer, _ = _receive(self._socket)
            return _adopt(answer, len(specs))
        except (_CannotError, OSError, ValueError) as error:  # ValueError: it ended within its answer
            log.debug("each worker starts by itself: the fork server failed: %s", error)
            self.close()
            end_children(before)  # it may have forked some of which it could not tell
            return []

    def close(self) -> None:
        """Ends it. Its workers go on."""
        self._socket.close()
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


class _CannotError(Exception):
    """Why the server did not fork."""


def _surroundings() -> tuple[str, dict[str, str]]:
    """What libraries may look at when they are imported."""
    return str(Path.cwd()), environment()


def _positions(spec: WorkerSpec, descriptors: list[int]) -> dict[str, int]:
    return {name: descriptors.index(descriptor) for name, descriptor in spec.descriptors.items()}


def _adopt(answer: Any, count: int) -> list[ForkedWorker]:
    """The workers by the process ids in an answer. Raises _CannotError if one is missing, or is nobody's child here."""
    if isinstance(answer, str):
        raise _CannotError(answer)
    workers = [ForkedWorker(pid) for pid in answer]
    try:
        for worker in workers:
            worker.poll()
    except ChildProcessError:
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        raise _CannotError("what it forks does not become the launcher's child") from None
    if len(workers) < count:
        raise _CannotError(f"it forked {len(workers)} of {count} workers")
    return workers


def _send(connection: socket.socket, message: Any, descriptors: list[int]) -> None:
    content = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(content))], descriptors)
    connection.sendall(content)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """A message and the descriptors that came with it. Raises _CannotError if the other side is gone."""
    header, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, MAX_DESCRIPTORS)
    if not header:
        raise _CannotError("it has ended")
    (length,) = LENGTH.unpack(header)
    with connection.makefile("rb") as stream:
        return json.loads(stream.read(length)), descriptors


# --- the server's side ------------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """`python -m ddp_train.launcher.fork_server SOCKET LAUNCHER ROOM`: imports, then forks as often as it is asked."""
    end_with_parent()
    if os.getppid() == int(sys.argv[2]):  # else it died before we could ask
        set_title([sys.executable, *MODULE, "ddp_train.launcher.fork_server"])
        _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # no finalizers of libraries: there is nothing to save


def _serve(connection: socket.socket) -> None:
    connection.set_inheritable(False)
    given = environment()
    gc.disable()  # importing makes half a million objects and no garbage
    try:
        worker = importlib.import_module(WORKER)
        importlib.import_module("torch._dynamo")
    except BaseException:  # noqa: BLE001  workers that start by themselves meet it too, and say so
        return
    found = {name: value for name, value in environment().items() if given.get(name) != value}  # libraries leave some
    gc.freeze()  # a collection would write to all pages that are shared, and so copy them
    with contextlib.suppress(_CannotError, OSError, ValueError):  # the launcher is gone
        while True:
            specs, descriptors = _receive(connection)
            for _, variables, _ in specs:
                variables.update(found)
            _send(connection, unfit() or _fork(specs, descriptors, connection, worker.main), [])
            for descriptor in descriptors:
                os.close(descriptor)


def unfit() -> str:
    """Why this process must not fork: threads would be missing in the child, and CUDA does not survive. Else empty."""
    import torch

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"it has {threads} threads"
    if torch.cuda.is_initialized():
        return "CUDA is initialized in it"
    opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    devices = [name for name in opened if name.startswith("/dev/nvidia")]
    return f"it has opened {devices[0]}" if devices else ""


def _fork(
    specs: list[Any], descriptors: list[int], connection: socket.socket, main: Callable[[], NoReturn]
) -> list[int]:
    """The process ids of the workers, by rank; fewer of them if it failed.

    A process in between forks them and leaves, which makes them children of the launcher: it adopts orphans.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        between = os.getpid()
        try:
            for rank, spec in enumerate(specs):
                if not os.fork():
                    connection.close()
                    os.close(reading)
                    _work(rank, spec, descriptors, writing, between, main)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:  # its end: every worker leads its session, and the one in between is gone
        pids = dict(PAIR.iter_unpack(pipe.read()))
    os.waitpid(between, 0)
    return [pid for _, pid in sorted(pids.items())]


def _work(
    rank: int, spec: Any, descriptors: list[int], writing: int, between: int, main: Callable[[], NoReturn]
) -> NoReturn:
    """The life of a worker, in which all is as if Python had just been started for it."""
    try:
        os.setsid()
        os.write(writing, PAIR.pack(rank, os.getpid()))
        os.close(writing)
        arguments, variables, positions = spec
        for position in set(range(len(descriptors))) - set(positions.values()):
            os.close(descriptors[position])
        set_environment(variables | {name: str(descriptors[position]) for name, position in positions.items()})
        _start_anew(arguments, int(variables["OMP_NUM_THREADS"]))
        while os.getppid() == between:  # `main` asks to be ended with its parent
            time.sleep(0.001)
        main()
    except BaseException:  # noqa: BLE001  as at the end of any program
        sys.stdout.flush()
        traceback.print_exc()
    finally:
        os._exit(1)


def _start_anew(arguments: list[str], threads: int) -> None:
    """What a new interpreter has of its own and forked ones share. Python sees to `random` and `tempfile` itself."""
    import numpy
    from threadpoolctl import threadpool_limits

    sys.argv = [str(sys.modules[WORKER].__file__), *arguments]
    sys.modules["__main__"] = sys.modules[WORKER]  # which loader processes that are spawned import
    set_title(WorkerSpec(arguments, {}, {}).command())
    importlib.invalidate_caches()
    numpy.random.seed()
    if threads > 1:  # numpy's BLAS read OMP_NUM_THREADS in the server; torch is told by the worker
        threadpool_limits(threads, user_api="blas")
    gc.enable()


if __name__ == "__main__":
    main()
