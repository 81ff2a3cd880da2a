"""Ranks are killed in every phase of a run that saves no checkpoint before its end: no step may be
computed twice.

    python -m tests.campaigns.lost_ranks [--ranks 2 3 4] [--runs 8] [--kills 5] [--seed 0]    (make
                                                                                              chaos)
    python -m tests.campaigns.lost_ranks --time [--ranks 2 3] [--runs 3]    the default job, idle
                                                                            machine

The workload is that of tests/campaigns/chaos.py. The status board, which is read from outside, says
when the victim enters the phase in which it is to die. In a second round each kill is followed by
another one, of any process that is there then, up to 150 ms later. Compared with the run that
nobody disturbed: weights, optimizer, every rank's buffers, the samples of each step, the lines of
metrics.jsonl but for what depends on clocks, and the scores. Seeds are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_train.resilience.heartbeat import StatusBoard
from tests.campaigns import chaos
from tests.support.commands import Running, processes_of, read, running, wait_until

ALWAYS = ("checkpoint.every_steps=1000000", "train.evaluate_batch_size=8")
"""No checkpoint before the end; every rank has a part of the test set."""
PHASES = (
    "data",
    "forward",
    "backward",
    "optimizer step",
    "record",
    "evaluation forward",
    "evaluation end",
)
SECOND_KILL_SECONDS = 0.15
CLOCKS = ("time", "figures")


@dataclass(frozen=True)
class Kill:
    """The end of a rank, as soon as it has done so many steps and is in that phase.

    second: another kill follows.
    """

    rank: int
    step: int
    phase: str
    second: random.Random | None = None


@dataclass
class Outcome:
    """What a run ended with."""

    state: str
    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    killed: list[str] = field(default_factory=list)


def board_of(job: Running, ranks: int) -> StatusBoard:
    """The status board that the launcher shares with its workers at present."""
    board = board_if_running(job, ranks)
    assert board, f"the run is over: {job.said()}"
    return board


def board_if_running(job: Running, ranks: int) -> StatusBoard | None:
    """The same; None once the run is over."""
    found: list[StatusBoard] = []

    def there() -> bool:
        with contextlib.suppress(OSError, ValueError):  # closed in between, or not of its size yet
            files = Path(f"/proc/{job.process.pid}/fd").iterdir()
            boards = [file for file in files if "rank_status" in os.readlink(file)]  # noqa: PTH115  no real path
            found.extend(StatusBoard(os.open(file, os.O_RDWR), ranks) for file in boards[-1:])
        return bool(found) or job.process.poll() is not None

    wait_until(there, "status board")
    return found[0] if found else None


def kill(job: Running, ranks: int, what: Kill) -> str:
    """Does it. Returns what was killed; empty if the run was over before."""
    while job.process.poll() is None:
        # looking takes 20 ms: not when the moment has come
        board = board_if_running(job, ranks)
        if board is None:
            break
        workers = ranks_of(job)
        try:
            if what.rank in workers and _reached(job, board, what, workers[what.rank]):
                return _strike(job, what, board, workers)
        finally:
            board.close()
        time.sleep(0.01)
    return ""


def _reached(job: Running, board: StatusBoard, what: Kill, pid: int) -> bool:
    """Tell whether the moment has come; False too if the attempt of this board has ended."""
    status = board.ranks[what.rank]
    worker = Path("/proc", str(pid))
    while not (status.step >= what.step and status.phase == what.phase):
        if job.process.poll() is not None or not worker.exists():
            time.sleep(0.01)
            return False
        time.sleep(0.0005)  # phases last 10 ms, and whoever looks all the time slows the ranks down
    return True


def ranks_of(job: Running) -> dict[int, int]:
    """The process id of each rank, which leads a session; its loader processes have its command
    line too."""
    found = {}
    for pid, rank in processes_of(job.run_dir).items():
        with contextlib.suppress(ProcessLookupError):
            found |= {rank: pid} if rank is not None and os.getsid(pid) == pid else {}
    return found


def _strike(job: Running, what: Kill, board: StatusBoard, workers: dict[int, int]) -> str:
    try:
        os.kill(workers[what.rank], signal.SIGKILL)
    except ProcessLookupError:
        return ""
    said = f"rank {what.rank} in {board.ranks[what.rank].snapshot().where}"
    if what.second:
        time.sleep(what.second.uniform(0, SECOND_KILL_SECONDS))
        there: dict[int, int] = {}
        while not there and job.process.poll() is None:  # between two attempts there may be none
            there = {
                pid: rank for pid, rank in processes_of(job.run_dir).items() if rank is not None
            }
        if there:
            pid = what.second.choice(sorted(there))
            ranks = ranks_of(job)
            if pid not in ranks.values():
                kind = "loader of "
            else:
                kind = "old " if pid in workers.values() else "new "
            said += f" + {kind}rank {there[pid]}"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return said


def outcome(folder: Path, ranks: int, kills: list[Kill], *more: str) -> Outcome:
    """The outcome of a run of the workload with these kills, one after the other."""
    given = dict(word.split("=", 1) for word in more)
    always = [word for word in ALWAYS if word.partition("=")[0] not in given]
    command, env = chaos.words(folder, ranks, "launch.max_restarts=9", *always, *more)
    with running(
        folder / "run", *command, env=env | {"DELAY": "0.01"}
    ) as job:  # so that no phase is too short to hit
        killed = [kill(job, ranks, one) for one in kills]
        assert job.end() == 0, job.said()
        wait_until(lambda: not processes_of(folder / "run"), "end of all processes", seconds=5)
    if "strategy=ordered" not in more:  # where the statistics of batch norm do not count the passes
        chaos.check_ledger(folder, ranks, int(given.get("train.epochs", chaos.EPOCHS)))
    texts = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    lines = [
        {name: value for name, value in json.loads(text).items() if name not in CLOCKS}
        for text in texts
    ]
    for line in lines:
        for name in [name for name in line if name.endswith(("_per_second", "mfu"))]:
            del line[name]
    summary = read(folder / "run", "summary.json")
    return Outcome(chaos.state_of(folder / "run"), lines, summary, [one for one in killed if one])


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """The differences from the run that nobody disturbed."""
    wrong = [] if found.state == expected.state else ["weights, optimizer or buffers"]
    wrong += [
        f"{key} of summary.json"
        for key in ("train", "test", "steps", "samples_seen")
        if found.summary[key] != expected.summary[key]
    ]
    if len(found.lines) != len(expected.lines):
        return [*wrong, f"{len(found.lines)} lines in metrics.jsonl, not {len(expected.lines)}"]
    for ours, theirs in zip(found.lines, expected.lines, strict=True):
        for name in sorted(ours.keys() | theirs.keys()):
            one = ours.get(name)
            other = theirs.get(name)
            if one != other and not _rounding(one, other):
                wrong.append(f"{name} of step {ours['step']}: {one}, not {other}")
    return wrong


def _rounding(ours: Any, theirs: Any) -> bool:
    """A sum of losses that was saved in between is rounded once more."""
    return (
        isinstance(ours, float)
        and isinstance(theirs, float)
        and abs(ours - theirs) <= 1e-14 * abs(theirs)
    )


def drawn(seed: int, ranks: int, count: int, second: bool) -> list[Kill]:
    """Kills at rising steps, of any rank, in any phase."""
    draw = random.Random(seed)
    last = chaos.EPOCHS * -(-chaos.SAMPLES // chaos.BATCH) - 2
    steps = sorted(draw.sample(range(1, last), count))
    return [
        Kill(draw.randrange(ranks), step, draw.choice(PHASES), draw if second else None)
        for step in steps
    ]


def seconds_of_default_job(folder: Path, ranks: int) -> list[float]:
    """From a death to the next step that is done, of three ranks one after the other. Nothing else
    runs meanwhile."""
    words = (
        "train.epochs=1000",
        ALWAYS[0],
        "launch.max_restarts=9",
        f"launch.nproc_per_node={ranks}",
    )
    with running(folder / "run", *words) as job:
        job.wait_for_step()
        for victim in (1, 0, ranks - 1):
            time.sleep(2)
            os.kill(ranks_of(job)[victim], signal.SIGKILL)
        time.sleep(2)
        job.process.send_signal(signal.SIGTERM)
        job.end()
    return [one["seconds"] for one in read(folder / "run", "summary.json")["recoveries"]]


def time_default_job(ranks: list[int], runs: int) -> None:
    for count in ranks:
        found: list[float] = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory(prefix="lost_") as folder:
                found += seconds_of_default_job(Path(folder), count)
        times = ", ".join(f"{one:.2f}" for one in sorted(found))
        print(f"{count} ranks: median {statistics.median(found):.2f} s of {times}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Ranks are killed in every phase of runs without checkpoints."
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument(
        "--runs", type=int, default=8, help="for each number of ranks; from 3 on as many again"
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--time", action="store_true", help="how long it takes, with the default job"
    )
    arguments = parser.parse_args()
    if arguments.time:
        time_default_job(arguments.ranks, arguments.runs)
        return 0
    bad = 0
    seconds = list[float]()
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix="lost_") as folder:
            expected = outcome(Path(folder, "reference"), ranks, [])
            for second in (False, True) if ranks > 2 else (False,):  # nobody would be left
                kills = same = redone = 0
                for seed in range(arguments.seed, arguments.seed + arguments.runs):
                    place = Path(folder, f"seed_{seed}_{second}")
                    found = outcome(place, ranks, drawn(seed, ranks, arguments.kills, second))
                    wrong = differences(found, expected)
                    kills = kills + len(found.killed)
                    same = same + (not wrong)
                    redone += found.summary["steps_redone"]
                    seconds += [
                        one["seconds"] for one in found.summary["recoveries"] if one["seconds"]
                    ]
                    print(
                        f"{ranks} ranks, seed {seed}: {'; '.join(found.killed)}:"
                        f" {'; '.join(wrong) or 'the same'}, {found.summary['steps_redone']} steps"
                        " computed twice",
                        flush=True,
                    )
                bad += arguments.runs - same + redone
                times = "two kills at a time" if second else "one kill at a time"
                print(
                    f"{ranks} ranks, {times}: {kills} kills, {same} of {arguments.runs} runs the"
                    f" same, {redone} steps computed twice",
                    flush=True,
                )
    low, median, high = statistics.quantiles(seconds, n=4)
    print(
        f"from a death to the next step that is done: median {median:.2f} s, quartiles {low:.2f}"
        f" and {high:.2f}, longest {max(seconds):.2f}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
