"""`ddp-train resize RUN 3`: asks a running run for another number of processes. Torch-free."""

from __future__ import annotations

import json
import re
import shlex
import socket
import sys
from pathlib import Path

from ddp_train.config.freeze import FILE, load_frozen
from ddp_train.config.program import typed
from ddp_train.errors import ConfigError, PeerError
from ddp_train.launcher.resize import address, other_end, received
from ddp_train.launcher.size import shown_counts
from ddp_train.options.key import range_of
from ddp_train.options.schema import Config
from ddp_train.resilience import run_lock
from ddp_train.resilience.failure_report import SUMMARY
from ddp_train.text import did_you_mean, word

RESIZE = "resize"


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
            connection.connect(address(owner))
            if other_end(connection)[0] != int(owner.get("pid", 0)):
                raise ConnectionRefusedError  # another host's process has that number
            connection.sendall(json.dumps({"processes": int(number)}).encode() + b"\n")
            answer = received(connection, None)
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
