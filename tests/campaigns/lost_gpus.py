"""Ranks are killed at random while they train over NCCL: on GPUs too no step may be lost, nor a
byte be another.

    python -m tests.campaigns.lost_gpus [--ranks 2] [--runs 2] [--kills 2] [--seed 0] [--cases NAME
    ...]

It needs two GPUs.

Runs save no checkpoint before their end. The host is many steps ahead of the device when a rank
dies, so the survivor must find out which step is the last one that was completed. Compared with the
run that nobody disturbed: weights, optimizer, the score of the test set, and the losses that are
logged, but for the interval in which a rank died.
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

from ddp_train.resilience.heartbeat import TRAINING
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
    "kernel by kernel, clipped": (*GPT, "tuning.cuda_graph=false"),
    "captured, tokens, bf16": (*GPT, "tuning.cuda_graph=true", "tuning.precision=bf16"),
    "checked on the host": (
        *MLP,
        "optimizer=rmsprop",
        "optimizer.lr=0.001",
        "tuning.cuda_graph=false",
    ),
    "accumulation": (
        *MLP,
        "train.accumulation_steps=2",
        "tuning.cuda_graph=false",
        "train.epochs=300",
    ),
}
RESTARTED = {
    "batch norm": (
        "model=cnn",
        "model.norm=batch",
        "data=digits",
        "train.epochs=300",
        "checkpoint.every_steps=200",
    )
}
"""What a survivor cannot save: it restarts from its last checkpoint, to the same bytes."""


def killed(
    job: Running, ranks: int, draw: random.Random, before: set[int], is_restarted: bool
) -> str:
    """Kill one rank at some time after all have begun to train, in other processes than `before`,
    to which those of now are added.

    is_restarted: the survivors have nothing to offer, and never say so.

    Returns the rank, and where it was.
    """

    def training() -> bool:
        if len(ranks_of(job)) < ranks or before & set(ranks_of(job).values()):
            return False
        board = board_of(job, ranks)
        try:
            return all(
                status.recovery.state == TRAINING or (is_restarted and status.step)
                for status in board.ranks
            )
        finally:
            board.close()

    wait_until(training, "all ranks in training", seconds=60)
    time.sleep(draw.uniform(0.2, 1.5))
    board = board_of(job, ranks)
    pids = ranks_of(job)
    rank = draw.randrange(ranks)
    where = board.ranks[rank].snapshot().where
    board.close()
    os.kill(pids[rank], signal.SIGKILL)
    before |= set(pids.values())
    return f"rank {rank} in {where}"


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
        is_restarted = words in RESTARTED.values()
        dead = [killed(job, ranks, draw, before, is_restarted) for _ in range(kills)]
        assert job.end() == 0, job.said()
        wait_until(lambda: not processes_of(folder / "run"), "end of all processes", seconds=10)
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    summary = read(folder / "run", "summary.json")
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    return {
        "dead": dead,
        "state": chaos.state_of(folder / "run"),
        "losses": losses,
        "summary": summary,
        "said": job.said(),
    }


def compared(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The differences; for losses their number."""
    wrong = [] if found["state"] == expected["state"] else ["weights or optimizer"]
    wrong += [
        key
        for key in ("test", "steps", "samples_seen")
        if found["summary"][key] != expected["summary"][key]
    ]
    if found["losses"].keys() != expected["losses"].keys():
        wrong.append("steps of metrics.jsonl")
    other = [step for step, loss in expected["losses"].items() if found["losses"].get(step) != loss]
    if len(other) > len(found["dead"]):
        wrong.append(f"losses of {len(other)} intervals")
    return ", ".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description="Ranks are killed while they train over NCCL.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=2, help="of each case")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", default=[*CASES, *RESTARTED])
    arguments = parser.parse_args()
    bad = 0
    seconds = list[float]()
    kills = 0
    for name in arguments.cases:
        words = {**CASES, **RESTARTED}[name]
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
                if name in CASES:
                    kills += len(found["dead"])
                    seconds += [one["seconds"] for one in recoveries]
                if (
                    wrong
                    or (redone > 0) != (name in RESTARTED)
                    or len(recoveries) != len(found["dead"])
                ):
                    bad += 1
                    print(found["said"], flush=True)
                took = ", ".join(f"{one['seconds']:.1f} s" for one in recoveries)
                dead = "; ".join(found["dead"])
                print(
                    f"{name}, seed {seed}: {dead}: {wrong or 'the same'}, {redone} steps redone,"
                    f" {took}",
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
