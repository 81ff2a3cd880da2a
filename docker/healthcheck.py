"""Is the run in this container alive? Exit code 0, or 1 and one line that says what is not.

A run that fails or hangs ends by itself, and its container with it, with an exit code that says
why: docs/operate/failures.md. What remains to be seen from outside is a launcher or a worker that
somebody stopped, and a container where none runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_train.linux import children_of, state_of

STOPPED = {"T": "stopped", "t": "held by a debugger"}
TRAINS = ("launch.py", "ddp_train.runs.worker", "torch.distributed.run", "torchrun")
"""What stands on the command line of a launcher, a worker or an agent. Forked workers bear the
words of a worker."""


def main(init: int) -> int:
    """Looks at a process and all that descend from it."""
    found = {pid: command for pid in family(init) if trains(command := command_of(pid))}
    if not found:
        print("no training process")
        return 1
    states = {pid: STOPPED.get(state_of(pid)) for pid in found}
    stopped = [f"process {pid} is {state}: {found[pid]}" for pid, state in states.items() if state]
    print("; ".join(stopped) or f"{len(found)} processes at work")
    return 1 if stopped else 0


def trains(command: str) -> bool:
    """tini has the launcher's words on its command line too."""
    return any(word in command for word in TRAINS) and not command.startswith("tini ")


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    return [pid, *(one for child in children_of(pid) for one in family(child))]


def command_of(pid: int) -> str:
    """Empty for the dead."""
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:  # it ended in between
        return ""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
