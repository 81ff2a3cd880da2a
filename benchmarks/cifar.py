"""How fast does CIFAR-10 reach 94 %? python benchmarks/cifar.py [--runs 20] [--seconds N] [--output
PAGE.md] [WORD ...]

First: python examples/get_cifar10.py. Each seed is a fresh `python launch.py
experiment=cifar10_race seed=N WORD ...`. The table has the accuracy on the test set, with the
standard error of the mean, and seconds as the launcher gives them in summary.json.
docs/guides/examples.md names the method.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from page import conditions, publish

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Trained:
    """One run."""

    seed: int
    accuracy: float
    epochs: list[float]
    """Seconds of each."""
    evaluation: float
    """Seconds between the lines of the last step and of the score, in metrics.jsonl."""
    command: float
    """Seconds of the whole command."""

    @property
    def row(self) -> list[str]:
        first, *others = self.epochs
        eight = statistics.median(others or [first]) * len(self.epochs)
        numbers = (first, sum(others), eight, sum(self.epochs), self.evaluation)
        return [
            str(self.seed),
            f"{self.accuracy:.2%}",
            *(f"{number:.3f}" for number in numbers),
            f"{self.command:.0f}",
        ]


COLUMNS = [
    "seed",
    "accuracy",
    "first epoch",
    "the others",
    "epochs x median",
    "all epochs",
    "evaluation",
    "command",
]


def trained(seed: int, words: list[str], run_dir: Path) -> Trained:
    """Raises RuntimeError with what the command said if it failed."""
    began = time.perf_counter()
    command = [
        sys.executable,
        "launch.py",
        "experiment=cifar10_race",
        f"seed={seed}",
        f"run_dir={run_dir}",
        *words,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last, score = (
        [line for line in lines if line["kind"] == kind][-1] for kind in ("train", "test")
    )
    evaluation = score["time"] - last["time"]
    seconds = time.perf_counter() - began
    return Trained(seed, summary["test"]["accuracy"], summary["epoch_seconds"], evaluation, seconds)


def page(runs: list[Trained], words: list[str]) -> list[str]:
    accuracies = [run.accuracy for run in runs]
    spread = statistics.stdev(accuracies) if len(runs) > 1 else float("nan")
    middle = statistics.median(sum(run.epochs) for run in runs)
    asked = " ".join(["experiment=cifar10_race", *words])
    rows = [COLUMNS, ["---:"] * len(COLUMNS), *(run.row for run in runs)]
    return [
        (
            f"`{asked}`, {len(runs)} runs: accuracy {statistics.mean(accuracies):.3%} on average,"
            f" standard error {spread / len(runs) ** 0.5:.3%}, standard deviation {spread:.3%}; all"
            f" epochs {middle:.3f} s (median)"
        ),
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *conditions(f"cifar.py --runs {len(runs)} {' '.join(words)}".strip()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no run that would end later than this"
    )
    parser.add_argument("--output", type=Path)
    arguments, words = parser.parse_known_args()
    began = time.perf_counter()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.runs):
            longest = max((run.command for run in runs[1:] or runs), default=0.0)
            if time.perf_counter() - began + longest > arguments.seconds:
                print(f"no time for seed {seed} and those after it")
                break
            runs.append(trained(seed, words, Path(folder, str(seed))))
            print(dict(zip(COLUMNS, runs[-1].row, strict=True)), flush=True)
    publish(page(runs, words), arguments.output)


if __name__ == "__main__":
    main()
