"""torchrun's agent, as its workers see it: the variables that it sets, and what they write for it
and for the launcher behind it. Torch-free: workers ask before they import torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

from ddp_train.distributed.environment import launcher_pid
from ddp_train.distributed.world import World
from ddp_train.errors import PeerError
from ddp_train.linux import end_with_parent

EXIT_CODE_FILE = "DDP_TRAIN_EXIT_CODE_FILE"
"""File to which workers append their exit codes; set only if our launcher started the torchrun
agent."""
BEGUN = "begun"
"""Line of that file for a worker that has been started; those that its predecessor wrote count no
more."""
REPORTED = "reported"
"""Line of that file for a worker that has reported its failure to the user."""


# --- whether it lives -----------------------------------------------------------------------------


def end_with_agent(world: World) -> None:
    """End this worker with the agent that started it, whenever that dies; at once if it has died
    already."""
    end_with_parent()
    # No traceback per rank when torchrun passes Ctrl-C on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        check_agent_lives(world)
    except PeerError as error:
        print(f"FATAL peer (rank {world.rank}): {error}\n  remedy: {error.remedy}", file=sys.stderr)
        sys.exit(error.exit_code)


def check_agent_lives(world: World) -> None:
    """Raise PeerError if torchrun's agent has died.

    The agent listens before it starts workers: if its host answers that nobody does, it has died
    before they could ask to be ended with it, and torch would try to connect for as long as its
    store's timeout.
    """
    if launcher_pid() is not None or not serves_store():
        return
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    for pause_seconds in (0, 0.3, 0.3):
        time.sleep(pause_seconds)
        if not _is_refused(address, port):
            return
    raise PeerError(
        f"rank {world.rank} cannot reach the store at {address}:{port}: nothing listens on that"
        " port, so torchrun's agent, which serves the store, has ended",
        "see the output of torchrun, and start the same command again",
    )


def serves_store() -> bool:
    """Whether an agent started this process and serves the store; else rank 0 serves it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_refused(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


# --- what it says ---------------------------------------------------------------------------------


def hosts_started(world: World) -> int:
    """The number of torchrun agents in this run. The number of processes may differ between
    agents."""
    return int(os.environ.get("GROUP_WORLD_SIZE", world.hosts))


def host_number(world: World) -> int:
    """The index of this host in torchrun's numbering."""
    return int(os.environ.get("GROUP_RANK", world.rank // world.local_size))


def hosts_requested() -> tuple[int, int] | None:
    """The minimum and maximum of torchrun's --nnodes, from its command line or PET_NNODES; None if
    unknown.

    torchrun does not pass it to its workers, and leaves out a host whose clock is behind: two hosts
    then train two models.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", _nnodes())
    return (int(match[1]), int(match[2] or match[1])) if match else None


def range_of_hosts() -> str | None:
    """torchrun's --nnodes if it is a range, LOW:HIGH, else None."""
    nnodes = _nnodes()
    return nnodes if re.fullmatch(r"\d+:\d+", nnodes) else None


def _nnodes() -> str:
    """torchrun's --nnodes, from the agent's command line or PET_NNODES; empty if unknown."""
    nnodes = os.environ.get("PET_NNODES", "")
    # OSError: no /proc, or the agent has ended or is outside of this container.
    with contextlib.suppress(OSError):
        argv = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
        for argument, following in zip(argv, [*argv[1:], ""], strict=True):
            name, _, value = argument.partition("=")
            if name in ("--nnodes", "--nnode"):
                nnodes = value or following
    return nnodes


def is_of_launcher() -> bool:
    """Whether our launcher of this host started the agent."""
    return EXIT_CODE_FILE in os.environ


def restarts_left() -> bool:
    """Whether the agent starts the workers of this host again if this one fails."""
    used = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    return used < allowed


def hosts_follow() -> bool:
    """Whether the agent stops the workers of this host only to start them again with other
    hosts."""
    path = os.environ.get(EXIT_CODE_FILE)
    return path is not None and not stopping_file(Path(path)).exists()


def stopping_file(exit_code_file: Path) -> Path:
    """The file that our launcher of this host creates when it is asked to stop, before it stops
    the agent."""
    return exit_code_file.with_name("stopping")


# --- what workers write ---------------------------------------------------------------------------


def write_begun() -> None:
    """Append to the exit-code file that this worker has been started."""
    _append_to_exit_code_file(BEGUN)


def write_exit_code(code: int) -> None:
    """Append this worker's exit code to the exit-code file, if our launcher set one: the agent
    exits with 1 whatever its workers' codes are."""
    _append_to_exit_code_file(str(code))


def write_reported(code: int) -> None:
    """Append to the exit-code file that this worker has reported a failure to the user, and that
    failure's exit code: the agent may end the worker before it ends by itself."""
    _append_to_exit_code_file(REPORTED)
    write_exit_code(code)


def _append_to_exit_code_file(entry: str) -> None:
    path = os.environ.get(EXIT_CODE_FILE)
    if not path:
        return
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    local_rank = os.environ["LOCAL_RANK"]
    with Path(path).open("a") as file:  # one short line is one write
        file.write(f"{attempt} {local_rank} {entry}\n")


def write_torchrun_error_file(failure: str) -> None:
    """Write the file whose message the agent shows for this worker in its final summary."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": failure, "timestamp": str(int(time.time()))}
    content = {"message": {"message": failure, "extraInfo": extra}}
    with contextlib.suppress(OSError):  # the failure is on standard error already
        Path(path).write_text(json.dumps(content))
