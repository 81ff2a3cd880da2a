"""Forks the workers of a run from a process that has imported torch already.

Importing torch, and torch._dynamo for DistributedDataParallel, takes most of the time to the first
step, and workers that start as new interpreters each spend it. The fork server imports both once,
while the launcher still reads the config. It serves only the launcher that started it, over an
unnamed socket pair. The workers that it forks become children of the launcher and no longer depend
on the server. A server that cannot fork safely answers with the reason; the launcher then starts
each worker as a new interpreter. Only the server imports torch, not the launcher.

multiprocessing's forkserver was tried in its place: docs/inside/decisions.md.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ddp_train.distributed.child_environments import (
    environment,
    preload_environment,
    preloading,
    set_environment,
)
from ddp_train.linux import children_of, end_children, end_with_parent, set_title
from ddp_train.resilience.heartbeat import START_SECONDS
from ddp_train.resilience.preemption import SIGNALS

MODULE = ("-P", "-m")
"""How Python runs a module here. -P: the working folder does not come first; a worker puts it
last."""
WORKER = "ddp_train.runs.worker"
SAVE_KEPT = "ddp_train.recovery.kept_checkpoint"
PROGRAMS = ([*MODULE, WORKER], [*MODULE, SAVE_KEPT])
"""Modules that are run without an interpreter of their own."""
POLL_SECONDS = 0.02
MAX_DESCRIPTORS = 253
"""SCM_MAX_FD of the kernel."""
TITLE_BYTES = 1024
"""Space for a worker's command line, which replaces the server's in place."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """Arguments and environment of one worker, whether it is forked or a new interpreter."""

    arguments: list[str]
    environment: dict[str, str]
    descriptors: dict[str, int]
    """Open files that the worker inherits, by the environment variable that holds their number."""
    program: list[str] = field(default_factory=lambda: [*MODULE, WORKER])
    """Arguments of Python: our worker, or the user's own script."""

    def whole_environment(self) -> dict[str, str]:
        """The environment, with the numbers of the descriptors."""
        numbers = {name: str(descriptor) for name, descriptor in self.descriptors.items()}
        return self.environment | numbers

    def command(self) -> list[str]:
        """The command line. A script's has its rank, for readers of `ps`, in an option of Python's
        that has no effect."""
        options: list[str] = []
        if self.program not in PROGRAMS:
            options = ["-X", f"rank={self.environment['RANK']}"]
        return [sys.executable, *options, *self.program, *self.arguments]

    def start_interpreter(self) -> subprocess.Popen[bytes]:
        """Start the worker as a new Python process."""
        return subprocess.Popen(
            self.command(),
            env=self.whole_environment(),
            pass_fds=self.descriptors.values(),
            start_new_session=True,
        )


class ForkedWorker:
    """A child of this process that another process forked.

    It has the part of subprocess.Popen that the launcher needs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | Any = None
        """Negative for a signal; None while the worker runs."""

    def poll(self, options: int = os.WNOHANG) -> int | None:
        """The exit code if the worker has ended. options: of os.waitpid."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_fork(program: list[str]) -> bool:
    """Whether what Python runs is forked: our worker, or a script without options of Python's."""
    return program in PROGRAMS or (len(program) == 1 and program[0].endswith(".py"))


class ForkServer:
    """The launcher's side of the server.

    If the server could not be started, or has ended, `fork` returns no workers.
    """

    def __init__(self, import_path: Path | None, changed: dict[str, str] | None = None) -> None:
        """Start the server without waiting for it.

        import_path: see `config.program`.
        changed: the result of `preload`, in a process that has called it, or was forked from one:
            the server is forked from this process, in milliseconds.
        """
        self._started_in = (Path.cwd(), environment())
        self._process: subprocess.Popen[bytes] | ForkedWorker | None = None
        self._socket, server_socket = socket.socketpair()
        with server_socket:
            if changed is not None:
                self._process = self._fork_server(server_socket, changed)
            elif sys.platform == "linux":
                self._process = self._start_server(server_socket, import_path)

    def _start_server(
        self, server_socket: socket.socket, import_path: Path | None
    ) -> subprocess.Popen[bytes] | None:
        command = [
            sys.executable,
            *MODULE,
            __name__,
            str(server_socket.fileno()),
            str(os.getpid()),
            " " * TITLE_BYTES,
        ]
        try:
            return subprocess.Popen(
                command,
                env=preload_environment(import_path),
                pass_fds=(server_socket.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            log.debug("the fork server could not be started: %s", error)
            return None

    def _fork_server(self, server_socket: socket.socket, changed: dict[str, str]) -> ForkedWorker:
        """Fork a server. To be called after `preload`."""
        parent = os.getpid()
        # Python drops a KeyboardInterrupt that comes while it calls the functions which libraries
        # have registered for a fork: a Ctrl-C in these milliseconds would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            pid = os.fork()
            if not pid:
                self._serve_in_child(server_socket, changed, parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return ForkedWorker(pid)

    def _serve_in_child(
        self, server_socket: socket.socket, changed: dict[str, str], parent: int
    ) -> NoReturn:
        """Be the server, in the process that was forked for it. parent: its process id."""
        try:
            os.setsid()
            end_with_parent()
            self._socket.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # workers inherit the mask
            if os.getppid() == parent:
                _answer(server_socket, changed)
        finally:
            os._exit(0)

    def fork(self, specs: list[WorkerSpec], given_up: Callable[[], bool]) -> list[ForkedWorker]:
        """Fork one worker per spec, each in its own session, as soon as torch is imported.

        Call it inside `adopting_orphans`. Returns all workers, or an empty list if any of them
        could not be forked; the server is closed then.

        given_up: polled while waiting for the server; True ends the wait.
        """
        before = set(children_of(os.getpid()))
        try:
            answer = self._request(specs, given_up)
            return _adopt(answer, len(specs))
        except (_CannotForkError, OSError, ValueError) as error:
            # ValueError: an answer that is cut off
            log.debug(
                "workers start as new interpreters, because the fork server failed: %s", error
            )
            self.close()
            end_children(before)  # the server may have forked workers that it could not report
            return []

    def _request(self, specs: list[WorkerSpec], given_up: Callable[[], bool]) -> Any:
        """The server's answer: process ids, or the reason why it must not fork."""
        if self._process is None:
            raise _CannotForkError("it is not running")
        # Libraries may read both while they are imported. A trial may have its own:
        # hydra.job.chdir, env_set.
        if (Path.cwd(), environment()) != self._started_in:
            raise _CannotForkError("it was started in another working directory or environment")
        descriptors = {number for spec in specs for number in spec.descriptors.values()}
        numbers = sorted(descriptors)
        self._socket.settimeout(START_SECONDS)
        _send(self._socket, [numbers, [vars(spec) for spec in specs]], numbers)
        deadline = time.monotonic() + START_SECONDS
        while not select.select([self._socket], [], [], POLL_SECONDS)[0]:
            if given_up() or time.monotonic() > deadline:
                raise _CannotForkError("no answer in time, or a stop was requested")
        answer, _ = _receive(self._socket)
        return answer

    def close(self) -> None:
        """End the server. Its workers continue."""
        self._socket.close()
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


class _CannotForkError(Exception):
    """Why the server did not fork."""


def _adopt(answer: Any, count: int) -> list[ForkedWorker]:
    """The workers of an answer: their process ids, or a reason.

    Raises _CannotForkError if any is missing or is not a child of this process.
    """
    if isinstance(answer, str):
        raise _CannotForkError(answer)
    workers = [ForkedWorker(pid) for pid in answer]
    try:
        for worker in workers:
            worker.poll()
    except ChildProcessError:
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        raise _CannotForkError(
            "the processes that it forks do not become children of the launcher"
        ) from None
    if len(workers) < count:
        raise _CannotForkError(f"it forked {len(workers)} of {count} workers")
    return workers


def _send(connection: socket.socket, message: Any, descriptors: list[int]) -> None:
    """One byte that carries the descriptors, then the message as a line of JSON."""
    socket.send_fds(connection, [b"\n"], descriptors)
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """A message and the descriptors that came with it.

    Raises OSError or ValueError if the other side ends before.
    """
    mark, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_DESCRIPTORS)
    if not mark:
        raise ConnectionError("the process at the other end has exited")
    with connection.makefile("rb") as stream:
        return json.loads(stream.readline()), descriptors


# --- the server's side ----------------------------------------------------------------------------


def main() -> NoReturn:
    """Import torch, then serve requests.

    Started as `python -m ddp_train.launcher.fork_server SOCKET LAUNCHER_PID SPACE`.
    """
    end_with_parent()
    launcher = int(sys.argv[2])
    if os.getppid() == launcher:  # else it died before end_with_parent took effect
        set_title([sys.executable, *MODULE, "ddp_train.launcher.fork_server"])
        _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # no finalizers of libraries: there is nothing to save


def _serve(connection: socket.socket) -> None:
    connection.set_inheritable(False)
    before = environment()
    if not _import():
        return
    changed = {name: value for name, value in environment().items() if before.get(name) != value}
    _answer(connection, changed)


def preload(import_path: Path | None) -> dict[str, str] | None:
    """Import what workers need, so that this process and its children can fork servers.

    Returns the variables that libraries have set in the environment, for `ForkServer`; None if the
    libraries could not be imported.
    """
    with preloading(import_path) as changed:
        is_imported = _import()
    gc.enable()
    return changed if is_imported else None


def _import() -> bool:
    """Import what workers need. Returns whether it could."""
    gc.disable()  # importing makes half a million objects and no garbage
    try:
        importlib.import_module(WORKER)
        importlib.import_module("torch._dynamo")
    except BaseException:  # noqa: BLE001  new interpreters raise it too, and report it
        return False
    gc.freeze()  # a collection would write to all shared pages, and so copy them
    return True


def _answer(connection: socket.socket, changed: dict[str, str]) -> None:
    """Fork workers on request. changed: the variables that libraries have set."""
    with contextlib.suppress(OSError, ValueError):  # the launcher has closed the socket
        while True:
            (numbers, requests), received = _receive(connection)
            own_numbers = dict(zip(numbers, received, strict=True))
            specs = [WorkerSpec(**request) for request in requests]
            for spec in specs:
                spec.environment.update(changed)
                for name, number in spec.descriptors.items():
                    spec.descriptors[name] = own_numbers[number]
            answer = unfit(received) or _fork(specs, {connection.fileno(), *received})
            _send(connection, answer, [])
            for descriptor in received:
                os.close(descriptor)


def unfit(received: Collection[int] = ()) -> str:
    """Why this process must not fork; empty if it may.

    A child would lack its threads, and CUDA does not survive.

    received: descriptors that it only hands on: memory of a GPU is a file of its driver.
    """
    import torch

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"it has {threads} threads"
    if torch.cuda.is_initialized():
        return "CUDA is initialized in it"
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    for link in links:
        if int(link.name) in received:
            continue
        name = str(link.readlink())
        if name.startswith("/dev/nvidia"):
            return f"it has opened {name}"
    return ""


def _fork(specs: list[WorkerSpec], descriptors: set[int]) -> list[int]:
    """The process ids of the workers, in the order of specs; fewer if a fork failed.

    A process in between forks the workers and exits. They become children of the launcher, which
    adopts orphans. descriptors: open files of the server, of which a worker keeps only its own.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        between = os.getpid()
        pids = []
        try:
            for spec in specs:
                pid = os.fork()
                if not pid:
                    _work(spec, descriptors | {reading}, writing, between)
                pids.append(pid)
        finally:
            os.write(writing, json.dumps(pids).encode())
            os._exit(0)
    os.close(writing)
    # The pipe ends when every worker leads its session and the process in between has exited.
    with os.fdopen(reading, "rb") as pipe:
        pids = json.loads(pipe.read())
    os.waitpid(between, 0)
    return pids


def _work(spec: WorkerSpec, descriptors: set[int], writing: int, between: int) -> NoReturn:
    """Run a worker, which finds what a new interpreter would.

    Python itself reseeds `random` and `tempfile` in a fork.
    """
    try:
        os.setsid()
        os.close(writing)
        for descriptor in descriptors.difference(spec.descriptors.values()):
            os.close(descriptor)
        set_environment(spec.whole_environment())
        import numpy
        from threadpoolctl import threadpool_limits  # it sets KMP_DUPLICATE_LIB_OK

        set_title(spec.command())
        importlib.invalidate_caches()
        numpy.random.seed()
        threads = int(spec.environment["OMP_NUM_THREADS"])
        if threads > 1:  # numpy's BLAS read OMP_NUM_THREADS in the server; the worker tells torch
            threadpool_limits(threads, user_api="blas")
        gc.enable()
        # `main` asks to be ended with its parent, which must be the launcher by then.
        while os.getppid() == between:
            time.sleep(0.001)
        if spec.program not in PROGRAMS:
            os._exit(_run_script(spec))
        module = importlib.import_module(spec.program[-1])
        sys.argv = [str(module.__file__), *spec.arguments]
        sys.modules["__main__"] = module  # loader processes that are spawned import it
        module.main()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # noqa: BLE001  as at the end of any program
        sys.stdout.flush()
        traceback.print_exc()
    finally:
        os._exit(1)


def _run_script(spec: WorkerSpec) -> int:
    """Run a script as a new interpreter would, to its end. Returns the exit code."""
    end_with_parent()
    path = spec.program[0]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(Path(path).absolute()), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv = [path, *spec.arguments]
    sys.orig_argv = spec.command()
    sys.path.insert(0, str(Path(path).resolve().parent))
    code = 0
    try:
        source = Path(path).read_bytes()
        program = compile(source, main.__dict__["__file__"], "exec", dont_inherit=True)
        exec(program, main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            code = 1
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  as at the end of any program
        code = 1
        frames_of_script = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, frames_of_script)
    threading._shutdown()  # type: ignore[attr-defined]  # pyright: ignore  as multiprocessing ends its processes
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


if __name__ == "__main__":
    main()
