"""How long another number of processes takes: asked for, and where a device does not come back.

    python -m tests.campaigns.resizes [--changes 24] [--losses 24] [--seed 0]

The default job between 2 and 4 processes, without a checkpoint before its end. A change: `ddp-train
resize` to a number that is drawn, from the request to the first step that all the new processes
have done. A loss: the last rank is killed while it trains, and a hook kills the process that
replaces it whenever it starts, so that the run continues with one process less; from the first
death to the next step. Then the device is back, and its process is asked for again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ddp_train.commands.resize import resize
from tests.campaigns.lost_ranks import ranks_of
from tests.support.commands import Running, metrics, read, running, wait_until

WORDS = (
    "launch.nproc_per_node=2:4",
    "launch.max_restarts=1",
    "train.epochs=99999",
    "checkpoint.every_steps=99999999",
    "train.evaluate_every_epochs=99999",
    "hooks=[tests.campaigns.resizes.Gone]",
    "trusted_modules=[tests]",
)
GONE = "gone"
"""A file in the run directory: the number of the rank whose device is gone."""


class Gone:
    """A hook of a run: kills one particular rank whenever it starts."""

    def __init__(self, job: Any, run_dir: Path, world: Any) -> None:
        self.file = run_dir / GONE
        self.rank = world.local_rank

    def __enter__(self) -> None:
        if self.file.exists() and self.file.read_text() == str(self.rank):
            os.kill(os.getpid(), signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        pass


def changes_of(job: Running) -> list[dict[str, Any]]:
    return [line for line in metrics(job.run_dir) if line["kind"] == "resize"]


def ask(job: Running, count: int) -> None:
    with contextlib.redirect_stdout(None):
        assert resize([str(job.run_dir), str(count)]) == 0, job.said()


def lose(job: Running, rank: int) -> None:
    """Until the run continues without it."""
    before = len(changes_of(job))
    (job.run_dir / GONE).write_text(str(rank))
    os.kill(ranks_of(job)[rank], signal.SIGKILL)
    wait_until(lambda: len(changes_of(job)) > before, "change")
    (job.run_dir / GONE).unlink()


def told(name: str, seconds: list[float]) -> None:
    found = sorted(seconds)
    print(
        f"{name}: {len(found)}, median {statistics.median(found):.2f} s, worst {found[-1]:.2f} s, "
        f"best {found[0]:.2f} s",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Other numbers of processes during a run.")
    parser.add_argument("--changes", type=int, default=24)
    parser.add_argument("--losses", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    count = 4
    with (
        tempfile.TemporaryDirectory(prefix="resizes_") as folder,
        running(Path(folder, "run"), *WORDS) as job,
    ):
        job.wait_for_step()
        for _ in range(arguments.changes):
            time.sleep(draw.uniform(0, 1))
            count = draw.choice([other for other in (2, 3, 4) if other != count])
            ask(job, count)
        asked = len(changes_of(job))
        for _ in range(arguments.losses):
            if count < 4:
                ask(job, count := 4)
            time.sleep(draw.uniform(0, 1))
            lose(job, count - 1)
            count -= 1
        job.process.send_signal(signal.SIGTERM)
        job.end()
        summary = read(job.run_dir, "summary.json")
    found = summary["resizes"]
    assert all(one["seconds"] for one in found), "each was waited for"
    assert len(found) >= asked + arguments.losses
    for after in (2, 3, 4):
        told(
            f"asked for, to {after}",
            [one["seconds"] for one in found[:asked] if one["to"] == after],
        )
    told("asked for, all", [one["seconds"] for one in found if one["why"] == "asked for"])
    told("a device lost, 4 to 3", [one["seconds"] for one in found if one["why"] != "asked for"])
    print(
        f"{summary['steps_redone']} steps computed twice, {summary['steps']} steps in all, load"
        f" {os.getloadavg()}"
    )
    return 1 if summary["steps_redone"] else 0


if __name__ == "__main__":
    sys.exit(main())
