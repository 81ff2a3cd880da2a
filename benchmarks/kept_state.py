"""Measures what keeping each step outside the processes costs: launch.py with and without.

    python benchmarks/kept_state.py [--cases mnist resnet50 gpt2] [--rounds 2] [--processes 1]
                                    [--steps 150] [--data data] [--output PAGE.md]

Nothing is kept where the size of files is limited (ulimit -f): this is how the same command runs
without. Both run in turns. The speed of a run is that of its median logging interval, without the
first four; the cost is that of the medians over the rounds.

    digits      the default job (also without GPUs)
    mnist       LeNet, batch 64, captured steps
    resnet50    224 px, bf16, 128 images of a process, AdamW: 292 MiB of weights and moments
    gpt2        GPT-2 124M, 16 x 1,024 tokens of a process: 1.4 GiB
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from page import conditions, publish

FILE_LIMIT = 2**36
"""Bytes; the memory in which a state is kept is a larger file."""
LIMIT_SECONDS = 300
VOCABULARY = 50_304
LENET = ("model._target_=benchmarks.peers.lenet", "trusted_modules=[benchmarks]")


def words_of(case: str, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The overrides of a case."""
    processes = arguments.processes
    steps = f"train.max_steps={arguments.steps}"
    if case == "digits":
        return ["train.epochs=40", "train.evaluate_every_epochs=40"]
    if case == "mnist":
        data = ("data=mnist", f"data.root={arguments.data}")
        return [*LENET, "tuning=max", *data, "train.epochs=6", "train.evaluate_every_epochs=6"]
    if case == "resnet50":
        batch = 128 * processes
        return [
            *("model=resnet50", "data=synthetic", "data.image_size=224", "data.classes=1000"),
            *(f"data.samples={8 * batch}", f"data.test_samples={batch}", "tuning=max"),
            *(f"train.global_batch_size={batch}", f"train.evaluate_batch_size={batch}"),
            *("optimizer=adamw", "train.epochs=1000", "train.evaluate_every_epochs=1000", steps),
        ]
    corpus = folder / "corpus.bin"
    if not corpus.exists():
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, 4_000_000, dtype=np.uint16)
        tokens.tofile(corpus)
    return [
        *("experiment=gpt2_124m", f"data.path={corpus}", f"data.vocabulary={VOCABULARY}"),
        *(f"train.global_batch_size={16 * processes}", "train.epochs=1000", steps),
        *("data.test_part=0.02", "train.evaluate_batch_size=8", "tuning=max"),
    ]


def speed(words: list[str], run_dir: Path, processes: int, is_kept: bool) -> float:
    """Samples per second of one run."""
    command = [
        *(sys.executable, "launch.py", *words, f"run_dir={run_dir}", "train.log_every_steps=10"),
        *(f"launch.nproc_per_node={processes}", "checkpoint.every_steps=1000000000"),
        "launch.page=false",
    ]

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))

    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        preexec_fn=None if is_kept else limit_files,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
    )
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if line["kind"] == "train"][4:]
    return statistics.median(line["samples_per_second"] for line in trained)


def main() -> None:
    parser = argparse.ArgumentParser(description="the cost of keeping each step")
    parser.add_argument("--cases", nargs="+", default=["mnist", "resnet50", "gpt2"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--data", default="data", help="the folder that holds MNIST")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases:
            words = words_of(case, arguments, Path(folder))
            speeds: dict[bool, list[float]] = {False: [], True: []}
            for number in range(arguments.rounds):
                for is_kept in (number % 2 == 0, number % 2 == 1):
                    run_dir = Path(folder, f"{case}_{number}_{is_kept}")
                    found = speed(words, run_dir, arguments.processes, is_kept)
                    speeds[is_kept].append(found)
                    print(f"{case}, kept: {is_kept}: {found:,.1f}/s", file=sys.stderr, flush=True)
            without = statistics.median(speeds[False])
            with_it = statistics.median(speeds[True])
            each = ["; ".join(f"{one:,.1f}" for one in speeds[kept]) for kept in (False, True)]
            rows.append(f"| {case} | {each[0]} | {each[1]} | {without / with_it - 1:+.1%} |")
    words = " ".join(arguments.cases)
    command = f"kept_state.py --cases {words} --processes {arguments.processes}"
    lines = [
        "| case | samples/s, nothing kept | each step kept | cost of a step |",
        "|---|---:|---:|---:|",
        *rows,
        "",
        *conditions(command),
    ]
    publish(lines, arguments.output)


if __name__ == "__main__":
    main()
