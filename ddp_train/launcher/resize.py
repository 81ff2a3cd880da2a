"""`ddp-train resize RUN 3`: another number of processes for a running run. Both sides of it.
Torch-free.

The launcher listens on a socket whose name is the random id of its lock, in the abstract namespace
of this host: the kernel removes it with the process, and knows who is at the other end. Nothing is
written to the run directory for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.config.freeze import FILE, load_frozen
from ddp_train.config.key import range_of
from ddp_train.config.program import typed
from ddp_train.config.schema import Config
from ddp_train.errors import ConfigError, PeerError
from ddp_train.launcher.size import shown_counts
from ddp_train.resilience import run_lock
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.text import counted, did_you_mean, word

RESIZE = "resize"
WORD_SECONDS = 1.0
"""For what one side says at once; the answer to a request comes when the change is done."""
LONGEST = 4096
_CREDENTIALS = struct.Struct("3i")


# --- the launcher's side --------------------------------------------------------------------------


@dataclass
class Asked:
    """A request that was accepted and has not been answered yet."""

    count: int
    connection: socket.socket
    at: float
    time: float

    def answer(self, done: bool, text: str) -> None:
        _answer(self.connection, done, text)


class Requests:
    """Takes requests, one at a time."""

    def __init__(self, run_dir: Path, refusal: Callable[[int], str]) -> None:
        """refusal: why the number cannot be that; empty if it can."""
        self.refusal = refusal
        self.asked: Asked | None = None
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(_address(run_lock.owner(run_dir / run_lock.FILE)))
        self.listener.listen()

    def wait(self, seconds: float) -> None:
        """In place of sleeping: takes a request if one comes meanwhile."""
        if not select.select([self.listener], [], [], seconds)[0]:
            return
        connection = self.listener.accept()[0]
        try:
            if _other_end(connection)[1] not in (os.geteuid(), 0):
                raise PermissionError("another user")
            count = int(_received(connection)["processes"])
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # another user, a lost connection, other words
            connection.close()
            return
        why = self.refusal(count)
        if self.asked:
            why = (
                f"it is just changing to {counted(self.asked.count, 'process')}; ask again when"
                " that is done"
            )
        if why:
            _answer(connection, False, why)
        else:
            self.asked = Asked(count, connection, time.monotonic(), time.time())

    def answer(self, done: bool, text: str) -> None:
        """The request that was accepted, if there is one."""
        if self.asked:
            self.asked.answer(done, text)
            self.asked = None

    def close(self) -> None:
        self.answer(False, "the run ended before the change; give its command again to resume it")
        self.listener.close()


def _answer(connection: socket.socket, done: bool, text: str) -> None:
    with connection, contextlib.suppress(OSError):  # it need not be there any more
        connection.settimeout(WORD_SECONDS)
        connection.sendall(json.dumps({"done": done, "text": text}).encode() + b"\n")


def _received(connection: socket.socket, seconds: float | None = WORD_SECONDS) -> dict[str, Any]:
    """A line of JSON. Raises OSError or ValueError."""
    connection.settimeout(seconds)
    with connection.makefile("rb") as stream:
        found = json.loads(stream.readline(LONGEST))
    if not isinstance(found, dict):
        raise ValueError("not a mapping")
    return found


def _address(owner: dict[str, str]) -> str:
    return f"\0ddp-train-{owner.get('id')}"


def _other_end(connection: socket.socket) -> tuple[int, int]:
    """Its process and its user."""
    size = _CREDENTIALS.size
    pid, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, user


# --- the command's side ---------------------------------------------------------------------------


def resize(words: list[str]) -> int:
    """Asks, and waits until the run has done its first step with that number. Returns the exit
    code. Raises ConfigError for what cannot be asked."""
    example = f"{typed()} {RESIZE} RUN 3"
    if len(words) != 2 or words[0].startswith("-"):
        raise ConfigError(
            [f"{RESIZE}: needs the directory of a run and a number of processes; use {example}"]
        )
    run_dir = Path(words[0])
    number = words[1]
    named = f"{RESIZE} {run_dir} {number}"
    if not re.fullmatch(r"[1-9]\d{0,8}", number):
        raise ConfigError([f"{named}: {number} is no number of processes; use {example}"])
    config, owner = _running(run_dir, number)
    if int(number) == config.launch.nproc_per_node:
        print(f"{named}: it has so many already")
        return 0
    if int(number) not in config.process_counts:
        shown = shown_counts(config.process_counts)
        asked_for = f"launch.nproc_per_node={config.process_range}"
        raise ConfigError([f"{named}: the run was started with {asked_for}; use {shown}"])
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_address(owner))
            if _other_end(connection)[0] != int(owner.get("pid", 0)):
                raise ConnectionRefusedError  # another host's process has that number
            connection.sendall(json.dumps({"processes": int(number)}).encode() + b"\n")
            answer = _received(connection, None)
    except ConnectionRefusedError:
        answer = {
            "done": False,
            "text": "the launcher takes no requests at this moment; try again in a second",
        }
    except (OSError, ValueError):
        again = f"{typed()} {shlex.quote(word('run_dir', run_dir))}"
        answer = {
            "done": False,
            "text": f"the launcher ended before the change; `{again}` resumes the run",
        }
    except KeyboardInterrupt:
        print(f"{named}: no longer waited for; the run changes all the same", file=sys.stderr)
        raise
    print(f"{named}: {answer.get('text')}", file=sys.stdout if answer.get("done") else sys.stderr)
    return 0 if answer.get("done") else PeerError.exit_code


def _running(run_dir: Path, number: str) -> tuple[Config, dict[str, str]]:
    """The config and the lock's owner of a run that is running here. Raises ConfigError if there is
    none, or if its number of processes is fixed."""
    named = f"{RESIZE} {run_dir} {number}"
    again = f"{typed()} {shlex.quote(word('run_dir', run_dir))}"
    try:
        if not (run_dir / FILE).is_file():
            beside = [path.parent.name for path in run_dir.parent.glob(f"*/{FILE}")]
            guess = did_you_mean(run_dir.name, beside)
            raise ConfigError(
                [f"{named}: {run_dir} is not the directory of a run{guess or '; name its run_dir'}"]
            )
        config = load_frozen((run_dir / FILE).read_text())
        owner = run_lock.owner(run_dir / run_lock.FILE)
        held = run_lock.is_held(run_dir / run_lock.FILE)
        if owner and owner.get("host") != socket.gethostname():
            raise ConfigError(
                [f"{named}: it was started on {owner.get('host')}; give the command there"]
            )
        if not held:
            if _status(run_dir) == "completed":
                raise ConfigError([f"{named}: the run is completed; nothing is left to train"])
            # With a range a batch need not divide evenly; on the CPU a run starts with its end.
            had = range_of(config.process_range)
            asked = f"{min(had.low, int(number))}:{number}" if had else number
            how = f"`{again} launch.nproc_per_node={asked}`"
            raise ConfigError([f"{named}: the run is not running; start it with {how}"])
        if not config.process_counts:
            fixed = config.launch.nproc_per_node
            value = "a fixed number"
            how = (
                f"stop it, and resume it with a range: `{again}"
                f" launch.nproc_per_node=1:{max(int(fixed), 2)}`"
            )
            raise ConfigError(
                [f"{named}: the run was started with launch.nproc_per_node={fixed}, {value}; {how}"]
            )
    except OSError as error:
        raise ConfigError(
            [f"{named}: cannot be read ({error.strerror}); give the command as its user"]
        ) from None
    return config, owner


def _status(run_dir: Path) -> str:
    try:
        return str(json.loads((run_dir / SUMMARY).read_text()).get("status"))
    except (OSError, ValueError, AttributeError):
        return ""
