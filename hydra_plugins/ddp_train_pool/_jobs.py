"""One job of a sweep in a process of its own.

The process is forked, so that neither the application nor its config is pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from hydra.core.utils import JobReturn, JobStatus

from hydra_plugins.ddp_train_pool._devices import Grant

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Pruned(float):
    """The last value of the objective of a job that was ended because others were better."""


class SweepEnd(SystemExit):
    """The return value of a job with which the whole sweep is to end."""


class JobFailedError(RuntimeError):
    """A job left no result: it was killed, or has exited by itself."""


@dataclass
class Job:
    """A job that runs, seen from the process that started it."""

    number: int
    overrides: list[str]
    pid: int
    grant: Grant
    """Its devices. Its forked processes hold their locks too, those that it starts by exec do
    not."""
    result: IO[bytes]
    """The file into which it writes what Hydra gets."""
    started: float = field(default_factory=time.monotonic)
    exit_code: int | None = None
    """Negative for a signal; None while it runs."""

    def poll(self) -> bool:
        """Whether the job has ended. What it left in its process group is killed."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
        return self.exit_code is not None

    def send(self, number: int) -> None:
        """Send a signal, if the job still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def returned(self) -> JobReturn:
        """The job's return value for Hydra, once it has ended."""
        self.result.seek(0)
        try:
            return pickle.load(self.result)
        # nothing, or half of it: the process was killed
        except Exception:  # noqa: BLE001
            code = self.exit_code or 0
            if code < 0:
                end = f"was killed by {signal.Signals(-code).name}"
            else:
                end = f"exited with code {code}"
            error = JobFailedError(f"job {self.number} {end}, without a result")
            return failed(error, self.overrides)
        finally:
            self.result.close()


def start(
    number: int,
    overrides: list[str],
    grant: Grant,
    run: Callable[[], JobReturn],
    output: Path | None,
    foreign_locks: list[int],
) -> Job:
    """Fork a process that runs a job, with its devices as CUDA_VISIBLE_DEVICES.

    grant: the devices; without any, CUDA_VISIBLE_DEVICES stays as it is.
    output: the file for all that the job prints; None: the terminal.
    foreign_locks: of the devices of other jobs, which this one must not hold.

    Raises OSError without memory or processes.
    """
    parent = os.getpid()
    result = os.fdopen(os.memfd_create("result"), "w+b")  # in memory: a disk may be full
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # a signal that comes now is for the handlers of this process
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = os.fork()
        if not pid:
            for lock in foreign_locks:
                os.close(lock)
            _run_to_exit(parent, grant.names, run, output, result)
    except OSError:
        result.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return Job(number, overrides, pid, grant, result)


def _run_to_exit(
    parent: int,
    devices: list[str],
    run: Callable[[], JobReturn],
    output: Path | None,
    result: IO[bytes],
) -> NoReturn:
    """Do a job in the new process, which ends here."""
    code = 1
    try:
        _detach(parent)
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if output:
            _redirect(output)
        _reseed()
        returned = run()
        if _came_of_interrupt(returned._return_value):
            raise KeyboardInterrupt
        if returned.status == JobStatus.FAILED:  # a traceback is not pickled with its error
            traceback.print_exception(returned._return_value)
        code = _write_result(returned, result)
    # as at the end of any program
    except BaseException as error:  # noqa: BLE001
        if _came_of_interrupt(error):
            error = KeyboardInterrupt()
            code = -signal.SIGINT
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            traceback.print_exc()
        with contextlib.suppress(Exception):
            _write_result(failed(error), result)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if code == -signal.SIGINT:  # so that its parent knows
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _detach(parent: int) -> None:
    """Make this process the leader of a session that dies with its parent."""
    os.setsid()  # a Ctrl-C reaches the sweep alone, which decides
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of a job stay with it: see `end_adopted`
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if os.getppid() != parent:  # it died before the request above
        os._exit(1)


def _came_of_interrupt(error: Any) -> bool:
    """Whether Ctrl-C caused an error.

    What it leaves half done, in OmegaConf for one, may raise another error.
    """
    while isinstance(error, BaseException) and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return isinstance(error, KeyboardInterrupt)


def failed(error: BaseException, overrides: list[str] | None = None) -> JobReturn:
    """The return value for Hydra of a job that has failed."""
    returned = JobReturn(overrides=overrides, status=JobStatus.FAILED)
    returned.return_value = error
    return returned


def _write_result(returned: JobReturn, result: IO[bytes]) -> int:
    """Write what Hydra gets. Returns the exit code: that of a failure is 1."""
    try:
        content = pickle.dumps(returned)
        pickle.loads(content)  # some exceptions can be written and not be read
    # whatever a job returns, or raises
    except Exception as error:  # noqa: BLE001
        value = returned._return_value
        if returned.status == JobStatus.FAILED:
            problem = "".join(traceback.format_exception_only(value)).strip()
        else:
            returned.status = JobStatus.FAILED
            problem = f"what the job returned cannot be pickled: {error}"
        returned._return_value = JobFailedError(problem)
        content = pickle.dumps(returned)
    result.write(content)
    result.flush()
    return int(returned.status != JobStatus.COMPLETED)


def _redirect(output: Path) -> None:
    """Append standard output and error of this process to a file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def _reseed() -> None:
    """Seed libraries as a new interpreter does: forked jobs would draw the same numbers.

    Python itself reseeds `random`.
    """
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def obstacle_to_fork() -> str:
    """Why jobs cannot be forked from this process; empty if they can."""
    torch: Any = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return (
            "CUDA is initialized in this process, so jobs cannot be forked from it; use the GPU"
            " only inside of the job"
        )
    if sys.platform != "linux":
        return "hydra/launcher=pool needs Linux; use hydra/launcher=basic"
    return ""


def adopt(orphans: bool) -> None:
    """Make orphans of jobs children of this process, or no longer."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(orphans))


def end_adopted(keep: set[int]) -> None:
    """Kill all children of this process but `keep`, and wait for their end.

    Each job adopts its own orphans, so these are of dead jobs; children of theirs come here as they
    end.
    """
    while left := children() - keep:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def children() -> set[int]:
    """Process ids of the children of this process."""
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                pids.add(int(folder.name))
    return pids


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
