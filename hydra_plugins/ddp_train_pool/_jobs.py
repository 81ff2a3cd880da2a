"""One job of a sweep in a process of its own: forked, so that neither the application nor its
config is pickled."""

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

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Pruned(float):
    """What a job returns that was ended because others were better by then: the last value of its
    objective."""


class SweepEnd(SystemExit):
    """What a job returns with which the whole sweep is to end."""


class JobFailedError(RuntimeError):
    """A job that left no result: it was killed, or has exited by itself."""


@dataclass
class Job:
    """A job that runs, seen from the process that started it."""

    number: int
    pid: int
    devices: list[str]
    result: IO[bytes]
    """The file into which it writes what Hydra gets."""
    started: float = field(default_factory=time.monotonic)
    exit_code: int | None = None
    """Negative for a signal; None while it runs."""
    locks: list[int] = field(default_factory=list)
    """Of its devices. Its forked processes have them too, but those that it starts by exec do
    not."""

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):  # what it left in its process group
                    os.killpg(self.pid, signal.SIGKILL)
        return self.exit_code is not None

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def free_devices(self) -> None:
        """Once all its processes have ended."""
        while self.locks:
            os.close(self.locks.pop())

    def returned(self, overrides: list[str]) -> JobReturn:
        """What Hydra gets, once it has ended. overrides: of a job that could not tell them."""
        self.result.seek(0)
        try:
            return pickle.load(self.result)
        except Exception:  # noqa: BLE001  nothing, or half of it: the process was killed
            code = self.exit_code or 0
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            else:
                how = f"exited with code {code}"
            return failed(JobFailedError(f"job {self.number} {how}, without a result"), overrides)
        finally:
            self.result.close()


def start(
    number: int,
    devices: list[str],
    run: Callable[[], JobReturn],
    output: Path | None,
    locks_of_others: list[int],
) -> Job:
    """Forks a process that runs a job with CUDA_VISIBLE_DEVICES=devices (none: as it is). output:
    where all that it prints goes. locks_of_others: of the devices of other jobs, which this one
    must not hold."""
    # a disk may be full
    parent = os.getpid()
    result = os.fdopen(os.memfd_create("result"), "w+b")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, SIGNALS
    )  # one that comes now is for this process's handlers
    try:
        pid = os.fork()
        if not pid:
            for lock in locks_of_others:
                os.close(lock)
            _run(parent, devices, run, output, result)
    except OSError:
        result.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Job(number, pid, devices, result)


def _run(
    parent: int,
    devices: list[str],
    run: Callable[[], JobReturn],
    output: Path | None,
    result: IO[bytes],
) -> NoReturn:
    """The new process, to its end."""
    code = 1
    try:
        os.setsid()  # a Ctrl-C reaches the sweep alone, which decides
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # whose parent is alive is nobody's orphan: see `adopted`
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(
                    number,
                    signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
                )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if os.getppid() != parent:  # it died before the request above
            os._exit(1)
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if output:
            _redirect(output)
        _reseed()
        returned = run()
        if _is_of_interrupt(returned._return_value):
            raise KeyboardInterrupt
        code = _tell(returned, result)
    except BaseException as error:  # noqa: BLE001  as at the end of any program
        error = KeyboardInterrupt() if _is_of_interrupt(error) else error
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
        else:
            traceback.print_exc()
        with contextlib.suppress(Exception):
            _tell(failed(error), result)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if code == -signal.SIGINT:  # so that its parent knows
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _is_of_interrupt(error: Any) -> bool:
    """Whether it came of Ctrl-C: what that leaves half done, in OmegaConf for one, may raise
    another error."""
    while isinstance(error, BaseException) and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return isinstance(error, KeyboardInterrupt)


def failed(error: BaseException, overrides: list[str] | None = None) -> JobReturn:
    """What Hydra gets of a job that has failed."""
    returned = JobReturn(overrides=overrides, status=JobStatus.FAILED)
    returned.return_value = error
    return returned


def _tell(returned: JobReturn, result: IO[bytes]) -> int:
    """Writes what Hydra gets. Returns the exit code: a failure's is 1."""
    try:
        text = pickle.dumps(returned)
        pickle.loads(text)  # an exception may be written that cannot be read
    except Exception as error:  # noqa: BLE001  whatever a job returns, or raises
        value = returned._return_value
        if returned.status == JobStatus.FAILED:
            returned._return_value = JobFailedError(
                "".join(traceback.format_exception_only(value)).strip()
            )
        else:
            returned.status = JobStatus.FAILED
            returned._return_value = JobFailedError(
                f"what the job returned cannot be pickled: {error}"
            )
        text = pickle.dumps(returned)
    result.write(text)
    result.flush()
    return int(returned.status != JobStatus.COMPLETED)


def _redirect(output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def _reseed() -> None:
    """As in a new interpreter: forked jobs would draw the same numbers. Python itself reseeds
    `random`."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def cannot_fork() -> str:
    """Why jobs cannot be forked from this process; empty if they can."""
    torch: Any = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return (
            "CUDA is initialized in this process, which no fork survives; use the GPU inside of the"
            " job alone"
        )
    if sys.platform == "linux":
        return ""
    return "hydra/launcher=pool needs Linux"


def adopt(yes: bool) -> None:
    """Whether orphans of jobs become children of this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(yes))


def end_adopted(keep: set[int]) -> None:
    """Kills all children of this process but `keep`, and waits for their end. Each job adopts its
    own orphans, so these are of dead jobs; children of theirs come here as they end."""
    while left := children() - keep:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def children() -> set[int]:
    """Process ids of the children of this process."""
    text = Path(f"/proc/self/task/{os.getpid()}/children")
    if text.exists():
        return {int(pid) for pid in text.read_text().split()}
    found = set()  # a kernel without CONFIG_PROC_CHILDREN
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(folder.name))
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
