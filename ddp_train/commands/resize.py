"""`ddp-train resize RUN 3`: asks a running run for another number of processes. Torch-free."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

from ddp_train.config.freeze import FILE, load_frozen
from ddp_train.config.program import command_name
from ddp_train.errors import ConfigError, PeerError
from ddp_train.launcher.resize import address_of, peer_of, receive
from ddp_train.launcher.size import shown_counts
from ddp_train.options.key import range_of
from ddp_train.options.schema import Config
from ddp_train.resilience import run_lock
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.text import counted, did_you_mean, words_to_resume

RESIZE = "resize"


def resize(argv: list[str]) -> int:
    """Ask for another number of processes, and wait for the first step with it.

    argv: the run directory and the number.

    Returns the exit code. Raises ConfigError for what cannot be asked.
    """
    example = f"{command_name()} {RESIZE} RUN 3"
    if len(argv) != 2 or argv[0].startswith("-"):
        raise ConfigError(
            [f"{RESIZE}: needs the folder of a run and a number of processes; use {example}"]
        )
    run_dir = Path(argv[0])
    command = f"{RESIZE} {run_dir} {argv[1]}"
    if not re.fullmatch(r"[1-9]\d{0,8}", argv[1]):
        raise ConfigError([f"{command}: {argv[1]} is not a number of processes; use {example}"])
    count = int(argv[1])
    config, owner = _running_run(run_dir, count, command)
    if count == config.launch.nproc_per_node:
        print(f"{command}: the run has {counted(count, 'process')} already")
        return 0
    if count not in config.process_counts:
        allowed = shown_counts(config.process_counts)
        started_with = f"launch.nproc_per_node={config.process_range}"
        raise ConfigError([f"{command}: the run was started with {started_with}; use {allowed}"])
    try:
        done, text = _ask(run_dir, config, owner, count)
    except KeyboardInterrupt:
        print(
            f"{command}: stopped waiting; the run still changes its number of processes",
            file=sys.stderr,
        )
        raise
    print(f"{command}: {text}", file=sys.stdout if done else sys.stderr)
    return 0 if done else PeerError.exit_code


def _ask(run_dir: Path, config: Config, owner: dict[str, str], count: int) -> tuple[bool, str]:
    """Send the request and wait for the answer: whether the change is done, and a text."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address_of(owner))
            pid, _ = peer_of(connection)
            if pid != int(owner.get("pid", 0)):
                raise ConnectionRefusedError  # another host's process has that number
            connection.sendall(json.dumps({"processes": count}).encode() + b"\n")
            answer = receive(connection, None)
    except ConnectionRefusedError:
        return False, (
            "the run is busy and takes no requests at this moment; try again in a second"
        )
    except (OSError, ValueError):
        resuming = _resuming_command(run_dir, config)
        return False, f"the run ended before the change; `{resuming}` resumes the run"
    return bool(answer.get("done")), str(answer.get("text"))


def _running_run(run_dir: Path, count: int, command: str) -> tuple[Config, dict[str, str]]:
    """The config and the lock's owner of a run that is running here.

    command: as the user gave it, for messages. Raises ConfigError if there is no such run, or if
    its number of processes is fixed.
    """
    lock = run_dir / run_lock.FILE
    try:
        if not (run_dir / FILE).is_file():
            neighbours = [path.parent.name for path in run_dir.parent.glob(f"*/{FILE}")]
            hint = did_you_mean(run_dir.name, neighbours) or "; give the run_dir of a run"
            raise ConfigError([f"{command}: {run_dir} is not the folder of a run{hint}"])
        config = load_frozen((run_dir / FILE).read_text())
        owner = run_lock.owner(lock)
        is_held = run_lock.is_held(lock)
        status = _status(run_dir)
    except OSError as error:
        raise ConfigError(
            [
                f"{command}: {error.filename or run_dir} cannot be read ({error.strerror}); run"
                " this command as the user who started the run"
            ]
        ) from None
    if owner and owner.get("host") != socket.gethostname():
        host = owner.get("host")
        raise ConfigError([f"{command}: the run was started on {host}; use this command there"])
    if not is_held and status == "completed":
        raise ConfigError([f"{command}: the run is completed; nothing is left to train"])
    if not is_held:
        start = _starting_command(run_dir, config, count)
        raise ConfigError([f"{command}: the run is not running; start it with `{start}`"])
    if not config.process_counts:
        fixed = int(config.launch.nproc_per_node)
        with_range = f"{_resuming_command(run_dir, config)} launch.nproc_per_node=1:{max(fixed, 2)}"
        raise ConfigError(
            [
                f"{command}: the run was started with a fixed number of processes,"
                f" launch.nproc_per_node={fixed}; stop the run, then resume it with a range:"
                f" `{with_range}`"
            ]
        )
    return config, owner


def _resuming_command(run_dir: Path, config: Config) -> str:
    """The command that resumes a run as it was."""
    return f"{command_name()} {words_to_resume(run_dir, config.trusted_modules)}"


def _starting_command(run_dir: Path, config: Config, count: int) -> str:
    """The command that resumes a run with a number of processes.

    With a range a batch need not divide evenly; on the CPU a run starts with the end of its range.
    """
    processes = str(count)
    earlier_range = range_of(config.process_range)
    if earlier_range:
        processes = f"{min(earlier_range.low, count)}:{count}"
    return f"{_resuming_command(run_dir, config)} launch.nproc_per_node={processes}"


def _status(run_dir: Path) -> str:
    """The status in summary.json; empty if there is none."""
    try:
        return str(json.loads((run_dir / SUMMARY).read_text()).get("status"))
    except (OSError, ValueError, AttributeError):
        return ""
