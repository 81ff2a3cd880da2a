"""Ranks are killed at random while they train over NCCL: on GPUs too not a byte may be another.

    python -m tests.campaigns.lost_gpus [--ranks 2] [--runs 2] [--kills 2] [--seed 0] [--cases NAME
    ...]

Every second kill is one of all ranks at once. Runs save no checkpoint before their end: what was
kept outside the processes is all that is left. Compared with the run that nobody disturbed:
weights, optimizer, the score of the test set, and the losses that are logged. Steps that are not
kept at the pace of a GPU (recovery/pace.py) are computed again: LONGEST_REDONE at most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.campaigns import chaos
from tests.campaigns.lost_ranks import ALWAYS, board_of, ranks_of
from tests.support.commands import Running, processes_of, read, running, wait_until

GPT = (
    *("experiment=gpt_tiny", "task.sample_tokens=0", "task.sample_prompt="),
    *("train.max_steps=4000", "data.test_part=0.001"),
)
MLP = ("model=mlp", "train.epochs=500", "train.evaluate_every_epochs=100")
CASES: dict[str, tuple[str, ...]] = {
    "captured steps": (*MLP, "optimizer=adamw", "tuning.cuda_graph=true"),
    "kernel by kernel, clipped": (*GPT, "tuning.cuda_graph=false", "train.max_steps=800"),
    "captured, tokens, bf16": (*GPT, "tuning.cuda_graph=true", "tuning.precision=bf16"),
    "checked on the host": (
        *MLP,
        "optimizer=rmsprop",
        "optimizer.lr=0.001",
        "tuning.cuda_graph=false",
        "train.epochs=200",
    ),
    "accumulation": (
        *MLP,
        "train.accumulation_steps=2",
        "tuning.cuda_graph=false",
        "train.epochs=300",
    ),
}
BATCH_NORM = ("model=cnn", "model.norm=batch", "data=digits", "train.epochs=300")
CASES |= {
    "batch norm": BATCH_NORM,
    "batch norm, fp16, average": (
        *BATCH_NORM,
        "tuning.precision=fp16",
        "train.ema_decay=0.99",
        "train.max_grad_norm=1",
    ),
    "SyncBatchNorm, accumulation": (
        *BATCH_NORM,
        "strategy.sync_bn=true",
        "train.accumulation_steps=2",
        "tuning.cuda_graph=false",
    ),
    "compiled": (*BATCH_NORM, "tuning.compile=true"),
}
LIMIT_SECONDS = 300
"""Of a run, and of the time until it trains: it may be compiled first."""
LONGEST_REDONE = 0.25
"""Seconds of training that a kill may cost."""


def killed(job: Running, ranks: int, draw: random.Random, number: int, before: set[int]) -> str:
    """Kill one rank, or each second time all of them, at some time after all have begun to train.

    number: kills before this one.
    before: processes of earlier attempts, to which those of now are added.

    Returns who was killed, and where the first one was.
    """

    def training() -> bool:
        if len(ranks_of(job)) < ranks or before & set(ranks_of(job).values()):
            return False
        board = board_of(job, ranks)
        try:
            return all(status.step and status.beats for status in board.ranks)
        finally:
            board.close()

    wait_until(training, "all ranks in training", seconds=LIMIT_SECONDS)
    time.sleep(draw.uniform(0.2, 1.5))
    board = board_of(job, ranks)
    pids = ranks_of(job)
    victims = [draw.randrange(ranks)] if number % 2 == 0 else [*range(ranks)]
    where = board.ranks[victims[0]].snapshot().where
    board.close()
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    before |= set(pids.values())
    return f"rank {' and '.join(map(str, victims))} in {where}"


def ended(
    folder: Path, ranks: int, words: tuple[str, ...], kills: int, draw: random.Random
) -> dict[str, Any]:
    """Train with so many kills. Returns what the run left."""
    given = {word.partition("=")[0] for word in words}
    folder.mkdir()
    always = [word for word in ALWAYS[:1] if word.partition("=")[0] not in given]
    command = (
        *words,
        *always,
        "deterministic=true",
        f"launch.nproc_per_node={ranks}",
        "launch.max_restarts=9",
    )
    with running(
        folder / "run", *command, env={"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks)))}
    ) as job:
        before = set[int]()
        dead = [killed(job, ranks, draw, number, before) for number in range(kills)]
        assert job.end(LIMIT_SECONDS) == 0, job.said()
        wait_until(lambda: not processes_of(folder / "run"), "end of all processes", seconds=10)
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    summary = read(folder / "run", "summary.json")
    trained = [line for line in lines if line["kind"] == "train"]
    losses = {line["step"]: line["loss"] for line in trained}
    speed = statistics.median(line["samples_per_second"] for line in trained)
    step_seconds = summary["samples_seen"] / summary["steps"] / speed
    return {
        "redone_seconds": summary["steps_redone"] * step_seconds,
        "dead": dead,
        "state": chaos.state_of(folder / "run"),
        "losses": losses,
        "summary": summary,
        "said": job.said(),
    }


def compared(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The differences, and whether too much was computed again."""
    wrong = [] if found["state"] == expected["state"] else ["weights or optimizer"]
    wrong += [
        key
        for key in ("test", "steps", "samples_seen")
        if found["summary"][key] != expected["summary"][key]
    ]
    if found["losses"] != expected["losses"]:
        wrong.append("losses")
    if found["redone_seconds"] > LONGEST_REDONE * len(found["dead"]):
        wrong.append(f"{found['redone_seconds']:.2f} s computed again")
    return ", ".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description="Ranks are killed while they train over NCCL.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2, help="of each case")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", default=[*CASES])
    arguments = parser.parse_args()
    bad = 0
    seconds = list[float]()
    kills = 0
    for name in arguments.cases:
        words = CASES[name]
        with tempfile.TemporaryDirectory(prefix="lost_") as folder:
            expected = ended(Path(folder, "reference"), arguments.ranks, words, 0, random.Random(0))
            for seed in range(arguments.seed, arguments.seed + arguments.runs):
                draw = random.Random(f"{name} {seed}")
                found = ended(
                    Path(folder, str(seed)), arguments.ranks, words, arguments.kills, draw
                )
                summary = found["summary"]
                wrong = compared(found, expected)
                redone = summary["steps_redone"]
                recoveries = summary["recoveries"]
                kills += len(found["dead"])
                # None: killed again before a step was done.
                times = [one["seconds"] for one in recoveries if one["seconds"] is not None]
                seconds += times
                if wrong or len(recoveries) != len(found["dead"]):
                    bad += 1
                    print(found["said"], flush=True)
                took = ", ".join(f"{one:.1f} s" for one in times)
                dead = "; ".join(found["dead"])
                print(
                    f"{name}, seed {seed}: {dead}: {wrong or 'the same'}, {redone} steps redone"
                    f" ({found['redone_seconds']:.3f} s), {took}",
                    flush=True,
                )
    if seconds:
        print(
            f"{kills} kills without a checkpoint: from a death to the next step that is done"
            f" {min(seconds):.1f} to {max(seconds):.1f} s, median {statistics.median(seconds):.1f}"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
