"""kill -9 of any process of a sweep at any moment: is a device still taken, is a row lost, is a
trial repeated?

    python benchmarks/sweep_kills.py [--kills 50] [--seed 0] [--output FILE]

Each time a sweep of real trainings on two devices (names without hardware, under the locks that
GPUs have) is started, by the grid and by hydra/sweeper=pool_optuna in turn, and after a random time
a random process of it is killed: the sweep itself, a fork server, the launcher of a trial, a
worker. A sweep that was killed is started again by the same command. At the end every trial must
have one row of success with the objective of an undisturbed sweep, every trial of which a process
was killed a row that says so, if its sweep lived on, and no lock may be held and no process left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page import conditions, load_average, publish

from ddp_train.linux import children_of, state_of
from hydra_plugins.ddp_train_pool import Locks

ROOT = Path(__file__).resolve().parent.parent
SWEEPERS = {
    "the grid": ["optimizer.lr=0.2,0.1,0.05,0.02"],
    "Optuna": [
        *(
            "hydra/sweeper=pool_optuna",
            "hydra/sweeper/sampler=random",
            "hydra.sweeper.sampler.seed=1",
        ),
        *("hydra.sweeper.n_trials=4", "optimizer.lr=tag(log,interval(0.01,0.3))"),
    ],
}
TRIALS = 4
SHARED = [
    "model=mlp",
    "data.limit=400",
    "train.epochs=30",
    "launch.nproc_per_node=1",
    "deterministic=true",
]
SHARED += [
    "hydra.launcher.gpus_per_trial=1",
    "hydra.launcher.devices=[a,b]",
    "launch.threads_per_process=1",
]
SHARED += ["device=cpu", "checkpoint.every_steps=20"]


@dataclass
class Outcome:
    sweeper: str
    victim: str
    seconds: float
    starts: int
    faults: list[str]
    """What must not be; none: all is well."""


def start(folder: Path, sweeper: str) -> subprocess.Popen[bytes]:
    words = [
        *SWEEPERS[sweeper],
        *SHARED,
        f"hydra.launcher.lock_folder={folder}/locks",
        f"run_dir={folder}/sweep",
    ]
    with (folder / "said").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), "-m", *words], stdout=out, stderr=out
        )


def family(pid: int) -> dict[int, str]:
    """The kind of a process and of all that it has started, by their ids."""
    found = {pid: "the sweep"}
    for child in (waiting := list(children_of(pid))):
        command = Path(f"/proc/{child}/cmdline")
        try:
            text = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        grandchildren = list(children_of(child))
        waiting += grandchildren
        if "rank=" in text:
            found[child] = "a worker"
        elif child in children_of(pid):
            found[child] = "a trial's launcher"
        else:
            found[child] = "a process of a trial"
    return found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "sweep/results.jsonl"
    if path.exists():
        return [json.loads(line) for line in path.read_text().splitlines()]
    return []


def objectives(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        " ".join(row["overrides"]): row["objective"] for row in rows if row["status"] == "completed"
    }


def once(sweeper: str, expected: dict[str, float], moment: float) -> Outcome:
    """One sweep, one kill, and what came of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        faults = []
        process = start(folder, sweeper)
        starts = 1
        time.sleep(moment)
        own = family(process.pid)
        victim = random.choice(sorted(own))
        ended = process.poll() is not None
        if not ended:
            os.kill(victim, signal.SIGKILL)
        faults += waited(process)
        time.sleep(0.5)
        left = [pid for pid in own if pid != process.pid and state_of(pid) not in ("", "Z")]
        faults += [f"{len(left)} processes left"] if left else []
        faults += held(folder)
        died = [row for row in rows_of(folder) if row["status"] != "completed"]
        if (
            not ended
            and own[victim] != "the sweep"
            and len(objectives(rows_of(folder))) + len(died) < TRIALS
        ):
            faults.append("a trial without a row though the sweep lived on")
        while process.returncode and starts < 4:
            process = start(folder, sweeper)
            starts = starts + 1
            faults += waited(process)
        rows = rows_of(folder)
        completed = Counter(row["trial"] for row in rows if row["status"] == "completed")
        faults += [
            f"trial {trial} was completed {count} times"
            for trial, count in completed.items()
            if count > 1
        ]
        found = objectives(rows)
        if (
            sweeper == "Optuna" and len(died) + len(completed) >= TRIALS
        ):  # one that died counts for Optuna
            missing = [words for words in expected if words not in found]
            faults += (
                [f"{len(missing)} results lost, {len(died)} died"]
                if len(missing) > len(died)
                else []
            )
        elif found.keys() != expected.keys():
            faults.append(f"results of {len(found)} trials instead of {len(expected)}")
        faults += [
            f"another result: {words}" for words in found if found[words] != expected.get(words)
        ]
        faults += held(folder)
        if faults:
            print((folder / "said").read_text()[-3000:], file=sys.stderr)
        return Outcome(sweeper, "" if ended else own[victim], moment, starts, faults)


def waited(process: subprocess.Popen[bytes]) -> list[str]:
    """Waits for the end of a sweep, which has a minute."""
    try:
        process.wait(60)
        return []
    except subprocess.TimeoutExpired:
        tree = [f"{pid} {what} {state_of(pid)}" for pid, what in family(process.pid).items()]
        process.kill()
        process.wait()
        return [f"it did not end: {'; '.join(tree)}"]


def held(folder: Path) -> list[str]:
    locks = Locks(folder / "locks")
    found = {name: locks.take(name) for name in "ab"}
    locks.close()
    for descriptor in found.values():
        if descriptor is not None:
            os.close(descriptor)
    return [f"device {name} is taken" for name, descriptor in found.items() if descriptor is None]


def undisturbed(sweeper: str) -> tuple[dict[str, float], float]:
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        if start(Path(name), sweeper).wait(300):
            raise SystemExit((Path(name) / "said").read_text())
        return objectives(rows_of(Path(name))), time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    random.seed(asked.seed)
    before = load_average()
    outcomes = []
    expected = {sweeper: undisturbed(sweeper) for sweeper in SWEEPERS}
    while len(outcomes) < asked.kills:
        sweeper = list(SWEEPERS)[len(outcomes) % len(SWEEPERS)]
        results, seconds = expected[sweeper]
        outcome = once(sweeper, results, random.uniform(0.3, 0.95 * seconds))
        outcomes += [outcome] if outcome.victim or outcome.faults else []  # or it had ended before
        print(len(outcomes), outcome, flush=True)
    well = [one for one in outcomes if not one.faults]
    kinds = Counter((one.sweeper, one.victim) for one in outcomes)
    page = [
        "# A sweep of which a process is killed",
        "",
        (
            f"{TRIALS} trainings on two devices that are names, under locks as GPUs have. After a"
            " random time SIGKILL to a"
        ),
        (
            "random process of the sweep; a sweep that ended so is started again by the same"
            " command. Well: no device is"
        ),
        (
            "taken and no process left half a second after the end, every trial has its row, none"
            " is completed twice, and"
        ),
        "the objectives are those of a sweep that nobody disturbed, to the last bit.",
        "",
        f"**{len(well)} of {len(outcomes)} ended well.**",
        "",
        "| trials drawn by | killed | times | ended well |",
        "|---|---|---:|---:|",
        *(
            f"| {sweeper} | {victim} | {count} | "
            f"{sum((one.sweeper, one.victim) == (sweeper, victim) for one in well)} |"
            for (sweeper, victim), count in sorted(kinds.items())
        ),
        "",
        *(
            f"- {one.sweeper}, {one.victim}, after {one.seconds:.1f} s: {', '.join(one.faults)}"
            for one in outcomes
            if one.faults
        ),
        (
            "An undisturbed sweep takes"
            f" {' and '.join(f'{seconds:.1f} s' for _, seconds in expected.values())}."
        ),
        "",
        *conditions(
            " ".join(["sweep_kills.py", *sys.argv[1:]]),
            f"{before} before, {load_average()} after",
            ("hydra-core", "optuna"),
        ),
    ]
    publish(page, asked.output)


if __name__ == "__main__":
    main()
