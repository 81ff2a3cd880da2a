"""Cases of tests/campaigns/fuzz.py without a fault of the machine: loops of the user's own in a
session, and sweeps.

A loop (tests/campaigns/fuzz_loop.py) is right if it learned in float64 what plain torch learns in
one process; a sweep if each trial has a folder of its own, ran what its row says, and scored what
its row says. Either may be refused, with a cause.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.campaigns import fuzz_loop
from tests.campaigns.fuzz_loop import Alone, Loop
from tests.support import zygote
from tests.support.commands import LAUNCH, ROOT, environment, read

LIMIT_SECONDS = 60.0
CLOSE = 1e-9
"""Between a session and plain torch, relative."""
REFUSED = (2, 65)
STOPPED = 75
MOST_COMMANDS = 3
SHOWN = 200
"""Letters of a value that is wrong."""


class OddError(Exception):
    """A script ended as it must not."""


@dataclass(frozen=True)
class Ended:
    """How a script ended."""

    outcome: str
    """as in one process, resumed, swept, or refused."""
    codes: list[int]


def drawn_loop(draw: random.Random, processes: int) -> Loop:
    samples = draw.randint(2, 40)
    order = draw.choice(["keyed", "keyed", *fuzz_loop.ORDERS])
    global_batch_size = drawn_batch_size(draw, order, samples, processes)
    workers = draw.choice([0, 0, 0, 2])
    changes = "nothing"
    if order in ("keyed", "as it is"):
        changes = draw.choice(["nothing", "nothing", "samples", "length"])
    accumulate = draw.choice([1, 1, 2, 3])
    windows = accumulate > 1 and draw.random() < 0.5
    second = "none"
    models = 1
    if not windows:  # which have one loss, and gradients of one optimizer
        second = draw.choice(["none", "none", "repeats", "shorter"])
        models = draw.choice([1, 1, 2])
    smallest = smallest_batch(order, samples, global_batch_size)
    if changes == "length" or (order in fuzz_loop.STREAMS and workers):
        smallest = 1  # it may be
    fault = draw.choice(["none", "none", "none", "kill", "stop"])
    may_break = fault == "none" and second == "none"
    return Loop(
        samples=samples,
        test_samples=draw.randint(1, 20),
        global_batch_size=global_batch_size,
        test_batch_size=draw.randint(1, 8),
        epochs=draw.randint(2, 3),
        accumulate=accumulate,
        windows=windows,
        optimizer=draw.choice(["sgd", "adam"]),
        norm=smallest > 1 and draw.random() < 0.4,  # torch has none of one sample
        masked=draw.random() < 0.3,
        changes=changes,
        workers=workers,
        order=order,
        second=second,
        batch=draw.choice(list(fuzz_loop.BATCHES)),
        models=models,
        schedule=draw.choice(["none", "none", "by batch", "plateau"]),
        noise=order not in fuzz_loop.STREAMS and draw.random() < 0.3,
        save_every_step=draw.random() < 0.3,
        # a loop that counts its batches itself begins anew where it resumes
        break_at=draw.choice([-1, -1, 0, 1, 2]) if may_break else -1,
        fault=fault,
        fault_rank=0 if fault == "stop" else draw.randrange(processes),
        fault_step=draw.randint(1, 4),
    )


def drawn_batch_size(draw: random.Random, order: str, samples: int, processes: int) -> int:
    """The global batch size of an order; a part of a stream has a sample of each batch."""
    smallest = 1
    largest = 12
    if order == "split":
        smallest = processes
    elif order == "loader":  # which drops the last batch
        largest = min(samples, 12)
    return draw.randint(smallest, largest)


def smallest_batch(order: str, samples: int, global_batch_size: int) -> int:
    """The number of samples of the smallest global batch, as far as it is known."""
    if order == "pairs":
        return 2
    if order == "loader":
        return global_batch_size
    if order == "split":
        return 1
    return min(samples % global_batch_size or global_batch_size, global_batch_size)


def play_loop(draw: random.Random, folder: Path, said: list[str]) -> Ended:
    """said: what was done, for the report of a failure."""
    processes = draw.choice([1, 2, 3, 3, 4])
    loop = drawn_loop(draw, processes)
    said.append(f"{processes} processes: {fuzz_loop.as_argument(loop)}")
    with torch.random.fork_rng():
        plain = Alone(processes)
        expected = fuzz_loop.train(loop, plain, folder)
    script = ROOT / "tests/campaigns/fuzz_loop.py"
    argv = [sys.executable, str(script), fuzz_loop.as_argument(loop), str(folder)]
    env = environment(
        {
            "PYTHONPATH": str(ROOT),
            "DDP_TRAIN_PROCESSES": str(processes),
            "OMP_NUM_THREADS": "1",
        }
    )
    codes: list[int] = []
    while not codes or (codes[-1] == STOPPED and len(codes) < MOST_COMMANDS):
        done = zygote.run(argv, LIMIT_SECONDS, cwd=folder, env=env, text=True)
        codes.append(done.returncode)
        said.append(f"ended with {done.returncode}:\n{done.stderr}")
    if codes[-1] in REFUSED:
        check_refusal(said[-1])
        return Ended("refused", codes)
    if codes[-1] != 0:
        raise OddError(f"ended with {codes}")
    learned = json.loads((folder / "learned.json").read_text())
    wrong = [
        f"{name}: {str(learned.get(name))[:SHOWN]}, not {str(value)[:SHOWN]}"
        for name, value in json.loads(json.dumps(expected)).items()
        if not close(learned.get(name), value)
    ]
    wrong += wrong_lines(folder / "run/metrics.jsonl", plain.logged)
    if wrong:
        raise OddError("; ".join(wrong))
    return Ended("as in one process" if loop.fault == "none" else "resumed", codes)


def wrong_lines(file: Path, logged: dict[int, list[float]]) -> list[str]:
    """What lines of a loop's numbers have that a plain loop has not logged.

    logged: of each step the sum and the number of the values.
    """
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    training = [line for line in lines if line["kind"] == "train"]
    wrong = []
    before = 0
    for line in training:
        steps = range(before + 1, line["step"] + 1)
        values = [logged[step] for step in steps if step in logged]
        mean = sum(total for total, _ in values) / max(1, sum(count for _, count in values))
        if not values or not close(line["own/loss"], mean):
            wrong.append(f"metrics.jsonl: {line} after step {before}, not {mean}")
        before = line["step"]
    if before != len(logged):
        wrong.append(f"metrics.jsonl ends with step {before} of {len(logged)}")
    return wrong


def check_refusal(text: str) -> None:
    """Raise OddError unless it names a cause and a remedy."""
    problems = re.findall(
        r"^FATAL (?:config|data) \(.*|^\d+ problems? in the|^  - .*",
        text,
        re.M,
    )
    named = problems or re.search(r"^\S+: .*\n  remedy: \S", text, re.M)
    if not named or "Traceback" in text:
        raise OddError(f"refused without a cause:\n{text}")


def close(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        same_length = isinstance(found, list) and len(found) == len(expected)
        return same_length and all(map(close, found, expected))
    if isinstance(expected, (int, float)):
        return isinstance(found, (int, float)) and math.isclose(
            found, expected, rel_tol=CLOSE, abs_tol=CLOSE
        )
    return found == expected


# --- sweeps ---------------------------------------------------------------------------------------

VALUES = {
    "optimizer.lr": ["0.1", "0.5", "0.1"],
    "seed": ["0", "1", "1"],
    "model.hidden": ["8", "16"],
    "optimizer.weight_decay": ["0", "0.01"],
}
SUBFOLDERS = (*[""] * 8, "seed_${seed}", "t_${hydra.job.num}")


def play_sweep(draw: random.Random, folder: Path, said: list[str]) -> Ended:
    """said: what was done, for the report of a failure."""
    keys = draw.sample(sorted(VALUES), draw.choice([1, 1, 2]))
    grid = {key: draw.sample(VALUES[key], 2) for key in keys}
    words = [f"{key}={','.join(values)}" for key, values in grid.items()]
    subfolder = draw.choice(SUBFOLDERS)
    if subfolder:
        words.append(f"hydra.sweep.subdir='{subfolder}'")
    places = [f"run_dir={folder}/sweep"] * 8 + [f"run_dir={folder}/one,{folder}/two"]
    place = draw.choice(places)
    fixed = ["model=mlp", "data.limit=40", "train.epochs=1", "launch.nproc_per_node=1"]
    words = ["-m", *words, place, *fixed, "launch.page=false"]
    said.append(" ".join(words))
    env = environment({"OMP_NUM_THREADS": "1"})
    done = zygote.run([*LAUNCH, *words], LIMIT_SECONDS, cwd=ROOT, env=env, text=True)
    said.append(f"ended with {done.returncode}:\n{done.stderr}")
    if done.returncode in REFUSED:
        check_refusal(done.stderr)
        return Ended("refused", [done.returncode])
    if done.returncode != 0:
        raise OddError(f"ended with {done.returncode}")
    check_trials(folder / "sweep", grid)
    return Ended("swept", [done.returncode])


def check_trials(sweep: Path, grid: dict[str, list[str]]) -> None:
    """Raise OddError unless each point of the grid has a folder that is its own and says it."""
    wanted = sorted(itertools.product(*([float(value) for value in grid[key]] for key in grid)))
    found = []
    for file in sorted(sweep.rglob("config.yaml")):
        config = yaml.safe_load(file.read_text())
        point = []
        for key in grid:
            value = config
            for name in key.split("."):
                value = value[name]
            point.append(float(value))
        found.append(tuple(point))
        if read(file.parent, "summary.json")["status"] != "completed":
            raise OddError(f"{file.parent} is not completed")
    if sorted(found) != wanted and sorted(set(found)) != sorted(set(wanted)):
        raise OddError(f"trials of {found}, not of {wanted}")
    rows = [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]
    folders = [row["run_dir"] for row in rows]
    if len(set(folders)) != len(folders) or len(rows) != len(found):
        raise OddError(f"{len(rows)} rows, {len(found)} folders: {folders}")


PLAYS = {"loop": play_loop, "sweep": play_sweep}


def is_of_scripts(number: int) -> bool:
    """Whether the cases of this number are scripts: three of seven numbers."""
    return number % 7 in (0, 2, 3)


def drawn_kind(draw: random.Random) -> str:
    return draw.choices(["loop", "sweep"], [4, 1])[0]
