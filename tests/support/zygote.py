"""Commands that do not spend seconds in importing torch: a process that has imported it forks them.

A real command imports torch and torch._dynamo in its fork server, and under torchrun in every
process: 3 to 5 s of CPU each. `Command` is subprocess.Popen, except that `python launch.py ...` and
`torchrun ... launch.py ...` are forked by a zygote, one for each test process. What tests look at
stays real: the command is a child of the caller, with the arguments, environment, working
directory, open files, session and signal handlers that it would have; `ps` shows its own command
line (with NULs after it); it has its own exit code. In it, the launcher's fork server, the runs of
a study and the workers of torchrun are forked in the same way. Scripts that call ddp_train.session
are such commands too. So are pytest-xdist's test processes: each of them forks its zygote before it
does anything else (`Beside`), and all together import torch once.

What differs from a real command, and therefore has tests of its own with `LAUNCH` and subprocess:
the time of start-up, what is imported when, Python's flags and PYTHON* variables, the seed of str
hashes (one for each zygote), and /proc/PID/environ (the zygote's). A command that sets what torch
or Python read at import is started for real: `_fits`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import io
import os
import pickle
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from ddp_train.config.overrides import read_overrides
from ddp_train.config.presets import compose_options
from ddp_train.config.program import Program
from ddp_train.linux import PR_SET_CHILD_SUBREAPER, end_with_parent, set_title

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "launch.py")
PROGRAM = Program("python launch.py", ROOT / "launch.py", ROOT)
OWN_PRESETS = ROOT / "conf"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
AGENT = "torch.distributed.run"
AGENT_OF_LAUNCHER = str(ROOT / "ddp_train/distributed/torchrun_agent.py")
SESSION = "ddp_train.session("
"""Scripts that have it are forked too: each of their processes would import torch."""
MODULES = (
    "ddp_train.launcher.fork_server",
    "ddp_train.runs.worker",
    "ddp_lab.doctor.collective_test",
    "ddp_lab.prove.examine",
    AGENT,
)
TEST_PROCESS = "import sys;exec(eval(sys.stdin.readline()))"
"""What execnet starts for pytest-xdist, with `python -u -c`."""
PRELOAD = (
    *(
        "torch",
        "torch._dynamo",
        "hydra",
        "rich.progress",
        "sklearn.datasets",
        "torch.distributed.run",
    ),
    *(
        "ddp_train.runs.worker",
        "ddp_train.config.composition",
        "ddp_train.config.preset_checks",
        "ddp_train.config.prepare",
        "ddp_train.launcher.local",
        "ddp_train.commands.flags",
    ),
    *("ddp_train.launcher.multihost", "ddp_lab.study.main", "ddp_lab.doctor.main"),
    *("ddp_train.sessions.run", "ddp_lab.prove.examine"),
    *(
        "torch.distributed.algorithms.ddp_comm_hooks",
        "hydra._internal.core_plugins",
        "rich._emoji_codes",
    ),
)
ROOM = 8192
"""Bytes for the command lines that forked commands show in place of the zygote's."""
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from tests.support import zygote; zygote.main()"
)
MADV_COLLAPSE = 25
"""linux/mman.h, since Linux 6.1."""
HIGH = 512
"""Number from which a command's open files are kept until the zygote's are closed."""
FIXED = {
    **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    "OMP_WAIT_POLICY": "passive",
}
"""What the zygote is started with. Commands may leave all but CUDA's out: their workers set what
they need. A thread that waits for another one sleeps: where other tests keep the cores busy, two
that spun took three times the CPU."""
READ_AT_IMPORT = (
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH",
    "PYTHON",
    "LD_",
    "CUDA_",
    "NUMBA_",
)
MESSAGE_BYTES = 200_000


@dataclass
class Request:
    """What subprocess.Popen was asked for."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    numbers: list[int]
    """Of the open files that the command inherits: 0, 1, 2 and those in pass_fds."""
    start_new_session: bool = False
    preexec: Any = None
    host: int = 0
    """A process whose namespaces the command enters, as nsenter does; 0: none."""


class Command(subprocess.Popen[Any]):
    """subprocess.Popen, with a zygote for the commands of this project.

    host: a process whose namespaces (mount, uts, ipc, net, pid) the command enters.
    """

    def __init__(self, *arguments: Any, host: int = 0, **options: Any) -> None:
        self.host = host
        super().__init__(*arguments, **options)

    def _execute_child(self, *arguments: Any) -> None:
        if not _execute(self, arguments, start):
            if self.host:
                inside = ["nsenter", f"--target={self.host}", "-m", "-u", "-i", "-n", "-p", "--"]
                arguments = (
                    [*inside, "env", "-C", str(arguments[5] or Path.cwd()), *arguments[0]],
                    *arguments[1:],
                )
            super()._execute_child(*arguments)  # type: ignore[misc]  # pyright: ignore


def run(argv: list[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[Any]:
    """subprocess.run with captured output, by way of a zygote."""
    with Command(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


# --- the caller's side ----------------------------------------------------------------------------

_lock = threading.Lock()
_connection: socket.socket | None = None
_process: subprocess.Popen[bytes] | None = None
_execute_for_real: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # pyright: ignore


def start() -> socket.socket:
    """The connection to this process's own, which is started on the first call.

    Call it before `adopting_orphans`, which ends what was started inside.
    """
    global _connection, _process
    if _process and _process.poll() is not None:
        stop()
    if _connection is None:
        _connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [
            sys.executable,
            "-P",
            "-c",
            START,
            str(ROOT),
            str(theirs.fileno()),
            str(os.getpid()),
            " " * ROOM,
        ]
        _process = subprocess.Popen(
            command, env=env | FIXED, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        atexit.register(stop)
    return _connection


def stop() -> None:
    """Ends the zygote of this process; the next command starts another one."""
    global _connection, _process
    if _connection and _process:
        _connection.shutdown(socket.SHUT_RDWR)  # the server of ranks may have it too
        _connection.close()
        _process.wait()
        _connection = _process = None


def zygote_pid() -> int | None:
    return _process.pid if _process else None


def _execute(process: Any, arguments: tuple[Any, ...], connect: Any) -> bool:
    """In place of Popen._execute_child, whose arguments these are. False if the command must be
    started for real."""
    argv, executable, preexec, _close, pass_fds, cwd, env, _info, _flags, shell = arguments[:10]
    (
        p2cread,
        p2cwrite,
        c2pread,
        c2pwrite,
        errread,
        errwrite,
        _restore,
        gid,
        gids,
        uid,
        umask,
        session,
    ) = arguments[10:22]
    group = arguments[22] if len(arguments) > 22 else -1
    plain = not (executable or shell or issubclass(type(argv), str | bytes))
    plain = plain and (gid, gids, uid, umask, group) == (None, None, None, -1, -1)
    target = _main([os.fspath(word) for word in argv])[0] if plain else None
    streams = [
        given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))
    ]
    request = Request(
        [],
        os.fspath(cwd or Path.cwd()),
        dict(os.environ if env is None else env),
        [],
        bool(session),
    )
    request.host = getattr(process, "host", 0)
    read_later = {"CUDA_VISIBLE_DEVICES": ""} if target == TEST_PROCESS else {}
    if target is None or not _fits(request.env | read_later):
        return False
    request.argv = [os.fspath(word) for word in argv]
    request.numbers = [0, 1, 2, *pass_fds]
    request.preexec = preexec
    descriptors = [*streams, *pass_fds]
    if connect is None and _threads() == 1:
        pid = _fork_here(request, descriptors)
    else:
        connection = connect() if connect else _nursery
        if connection is None:
            return False
        try:
            message = pickle.dumps(request)
        except (pickle.PicklingError, AttributeError):  # a preexec_fn that is a closure
            return False
        if len(message) > MESSAGE_BYTES or not (pid := _ask(connection, message, descriptors)):
            return False
    process.pid = pid
    process._child_created = True
    process._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
    return True


def _ask(connection: socket.socket, message: bytes, descriptors: list[int]) -> int:
    """The process id of a new child of this process: it adopts what the zygote's child leaves. 0:
    the zygote cannot."""
    try:
        with _lock, _adopting():
            socket.send_fds(connection, [message], descriptors)
            return int(connection.recv(64) or 0)
    except OSError:  # it has ended
        if connection is _connection and _process and _process.wait(5) == 1:
            raise RuntimeError(
                "the zygote failed; its traceback is above: tests would be right, and twice as slow"
            ) from None
        return 0


@contextlib.contextmanager
def _adopting() -> Any:
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(37, ctypes.byref(before))  # PR_GET_CHILD_SUBREAPER, linux/prctl.h
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value)


def _main(argv: list[str]) -> tuple[str | None, list[str]]:
    """What a command line runs, a script or a module, and its arguments. None: nothing that is
    forked here."""
    words = argv[1:]
    if argv and argv[0] == TORCHRUN:
        return AGENT, words
    if not argv or argv[0] != sys.executable or len("\0".join(argv).encode()) >= ROOM:
        return None, []
    while words and words[0] in ("-P", "-u"):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1 and words[1] in MODULES:
        return words[1], words[2:]
    if words == ["-c", TEST_PROCESS]:
        return TEST_PROCESS, []
    if words and Path(words[0]).name == "launch.py" and Path(words[0]).resolve() == Path(SCRIPT):
        return words[0], words[1:]
    if words and words[0] == AGENT_OF_LAUNCHER:
        return words[0], words[1:]
    if words and words[0].endswith(".py") and SESSION in Path(words[0]).read_text():
        return words[0], words[1:]
    return None, []


def _fits(env: dict[str, str]) -> bool:
    """Whether a command of this environment would find the same after it imported torch."""
    for name, value in env.items():
        if not name.startswith(READ_AT_IMPORT) or name in ("PYTHONPATH", "TORCHELASTIC_RUN_ID"):
            continue
        if name.startswith(("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DISABLE_SHARE_", "CUBLAS_")):
            continue  # read later
        if FIXED.get(name, os.environ.get(name)) != value:
            return False
    if env.get("CUDA_VISIBLE_DEVICES") != "":
        return False
    path = [Path(entry) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return not any(
        (entry / f"{name}.py").exists()
        for entry in path
        for name in ("sitecustomize", "usercustomize")
    )


# --- the zygote's side ----------------------------------------------------------------------------

_nursery: socket.socket | None = None
"""In torchrun's agent and the doctor, which have threads when they start processes: a process
without, forked before."""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  called before every fork


def _serve(connection: socket.socket) -> NoReturn:
    """Forks commands until the caller has ended."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 64)
        if not message:
            os._exit(0)
        if _threads() == 1:
            request = pickle.loads(message)
            if TEST_PROCESS in request.argv:
                _use_large_pages()
            _compose_ahead(request.argv)
            pid = _fork_orphan(connection, request, descriptors)
        else:
            pid = 0
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


@functools.cache
def _use_large_pages() -> None:
    """Move the memory of this process into pages of 2 MiB, which takes 1 s; older kernels refuse.

    Each fork copies the table of 120,000 pages otherwise, 16 ms: a command of three processes takes
    0.77 CPU-s, and 0.66 with large ones.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0":  # no file's
            begin, end = (int(address, 16) for address in span.split("-"))
            madvise(begin, end - begin, MADV_COLLAPSE)


_composed_ahead: dict[str, Any] = {}
"""What Hydra composes of the options that a command chooses, which takes it 0.2 s: done here, once
for all commands that choose the same. A command takes it out of its own copy."""


def _compose_ahead(argv: list[str]) -> None:
    """Compose the options of a command with the presets of this repository.

    What is wrong with them is left to the command, which says it.
    """
    if SCRIPT not in argv:
        return
    program = replace(PROGRAM, own=OWN_PRESETS)
    try:
        with warnings.catch_warnings(action="error"):
            arguments = read_overrides(program, argv[argv.index(SCRIPT) + 1 :]).choice_arguments
            name = shlex.join(arguments)
            if name not in _composed_ahead:
                _composed_ahead[name] = compose_options(program, arguments)
    except Exception:  # noqa: BLE001  bad input: it may raise anything
        return


def _take_composed(program: Program, arguments: list[str]) -> Any:
    """In place of `compose_options` in a command. Presets that a test writes are not composed
    ahead."""
    composed = None
    if program.own and program.own.resolve() == OWN_PRESETS:
        composed = _composed_ahead.pop(shlex.join(arguments), None)
    return composed or compose_options(program, arguments)


def _fork_orphan(connection: socket.socket, request: Request, descriptors: list[int]) -> int:
    """A process in between forks the command and ends: the command becomes a child of the
    caller."""
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        itself = os.pidfd_open(os.getpid())
        try:
            if request.host:
                _enter_namespaces(request.host)
            pid = os.fork()
            if not pid:
                os.close(reading)
                connection.detach()
                _become(request, descriptors, writing, itself)
            os.write(
                writing, str(pid).encode()
            )  # in the namespace of the caller: the child may see another number
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        pid = int(pipe.read() or 0)
    os.waitpid(between, 0)
    return pid


def _enter_namespaces(process: int) -> None:
    """Of this process, but that of process ids: of its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    for namespace in [
        os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY)
        for kind in ("uts", "ipc", "net", "pid", "mnt")
    ]:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        os.close(namespace)


def _fork_here(request: Request, descriptors: list[int]) -> int:
    """Of a process with one thread. Returns once the child is what it says on its command line."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _become(request, descriptors, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        pipe.read()
    return pid


def _become(request: Request, descriptors: list[int], writing: int, between: int = -1) -> NoReturn:
    """Makes this process that of the command, runs it and ends. between: a descriptor of the
    process that forked it, and ends."""
    code = 1
    try:
        target, words = _main(request.argv)
        assert target
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if request.start_new_session:
            os.setsid()
        script = [sys.executable] * (
            request.argv[0] != sys.executable
        ) + request.argv  # as the kernel reads `#!`
        set_title(script)
        os.chdir(request.cwd)
        os.close(writing)
        if between >= 0:  # commands that end with their parent must not take that process for it
            select.select(
                [between], [], []
            )  # getppid() is 0 where the parent is of another PID namespace
        _renew_files(request.numbers, descriptors)
        if target == TEST_PROCESS:
            _start_beside()
        _renew_python(request, target, words)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request.preexec:
            request.preexec()
        if target in (AGENT, AGENT_OF_LAUNCHER) or "mode=doctor" in words:
            _start_nursery()
        code = _run_as_main(target)
    except BaseException:  # noqa: BLE001  as at the end of any program
        sys.excepthook(*sys.exc_info())  # pyright: ignore
    finally:
        os._exit(code)


def _renew_files(numbers: list[int], descriptors: list[int]) -> None:
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
    os.closerange(3, HIGH)
    for number, descriptor in zip(numbers, kept, strict=True):
        os.dup2(descriptor, number, inheritable=True)
    os.closerange(HIGH, max(kept) + 1)


def _renew_python(request: Request, target: str, words: list[str]) -> None:
    """What a new interpreter sets up from its command line and environment."""
    os.environ.clear()
    os.environ.update(request.env)
    unbuffered = "-u" in request.argv[1:3] or bool(request.env.get("PYTHONUNBUFFERED"))
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        buffering = 0 if unbuffered and mode == "w" else -1
        binary = io.open(number, mode + "b", closefd=False, buffering=buffering)  # noqa: SIM115, UP020
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = io.TextIOWrapper(
            binary,
            "utf-8",
            errors,
            line_buffering=name == "stderr" or os.isatty(number),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    path = [entry for entry in request.env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [
        *([str(Path(target).parent.resolve())] if target.endswith(".py") else []),
        *path,
        *_base_path,
    ]
    sys.path_importer_cache.clear()
    sys.argv = [target, *words]
    sys.orig_argv = request.argv
    for finalizer in set(weakref.finalize._registry) - _finalizers:  # type: ignore[attr-defined]  # pyright: ignore
        finalizer.detach()  # the parent's: a folder that it will remove
    sys.modules["numpy"].random.seed()
    if target != TEST_PROCESS:
        subprocess.Popen._execute_child = _execute_within  # type: ignore[attr-defined]  # pyright: ignore
        for module in ("composition", "preset_checks"):
            sys.modules[f"ddp_train.config.{module}"].compose_options = _take_composed  # type: ignore[attr-defined]
    gc.enable()


def _execute_within(process: Any, *arguments: Any) -> None:
    """Popen._execute_child in a command that the zygote forked."""
    if not _execute(process, arguments, None):
        _execute_for_real(process, *arguments)


def _start_nursery() -> None:
    global _nursery
    _nursery, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if not os.fork():
        _nursery.close()
        end_with_parent()
        set_title(["zygote"])
        if os.getppid() == parent:
            _serve(theirs)
        os._exit(0)
    theirs.close()


class Beside(subprocess.Popen[Any]):
    """The zygote of a test process, which forks it: both share what is imported."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        super().__init__(["zygote"])

    def _execute_child(self, *_arguments: Any) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            end_with_parent()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal
            set_title(["zygote"])
            if os.getppid() == parent:
                _serve(self.connection)
            os._exit(0)
        self._child_created = True


def _start_beside() -> None:
    global _connection, _process
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _process = Beside(theirs)
    _connection = ours
    theirs.close()
    atexit.register(stop)


def _run_as_main(target: str) -> int:
    """Runs a script, a module or the line of a test process as __main__, to the end of the
    interpreter. Returns its exit code."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if target == TEST_PROCESS:
        sys.argv[0] = "-c"
        source = compile(target, "<string>", "exec", dont_inherit=True)
    else:
        spec = None if target.endswith(".py") else importlib.util.find_spec(target)
        main.__file__ = sys.argv[0] = str(spec.origin) if spec else target
        main.__spec__ = spec
        main.__package__ = target.rpartition(".")[0] if spec else None
        source = compile(Path(main.__file__).read_bytes(), main.__file__, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    try:
        exec(source, main.__dict__)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT
    except BaseException as error:  # noqa: BLE001  as at the end of any program
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # pyright: ignore
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # as Python does
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def main() -> NoReturn:
    """`python -P -c START ROOT SOCKET CALLER ROOM`"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the caller ends this one
    end_with_parent()
    if os.getppid() != int(sys.argv[3]):
        os._exit(1)
    connection = socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)
    set_title(["zygote"])
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    sys.modules["ddp_train.config.bind"].bind(
        {"train": {}}
    )  # the types of the keys outside of sections are made once
    gc.collect()
    gc.freeze()
    _finalizers.update(weakref.finalize._registry)  # type: ignore[attr-defined]  # pyright: ignore
    _serve(connection)


_finalizers: set[Any] = set()
"""Of the modules that the zygote imported."""
_base_path = [entry for entry in sys.path if entry != str(ROOT)]
