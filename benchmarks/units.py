"""What it costs to exchange the number of tokens in each step, so that the mean over them is exact.

    python benchmarks/units.py [--device cuda] [--rounds 100] [--steps 10] [--output FILE]

Two processes, over gloo on the CPU with one thread each, or over NCCL on two GPUs kernel by kernel;
DDP, a GPT on bytes. One job trains on and on; from block to block of STEPS steps the exchange is
there or is patched out: `UpdateRules.mean_of_units` then gives the number of this process, which
costs the same arithmetic and no message. All windows have equally many tokens here: the weights
become the same.

A round has three blocks in an order drawn for it: with the exchange, without it, and without it
once more. The cost is the median over the rounds of the difference within a round; its spread are
the quartiles. The difference of the two blocks without shows how far to trust that. Wall time is
the slower process's of each block, CPU time that of both processes with all their threads, which
waiting for a core does not count into.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PROCESSES = 2
ARMS = ("with", "without", "without again")
SETTINGS: dict[str, dict[str, Any]] = {
    "`experiment=gpt_tiny`: 2 layers, 96 wide, 8 windows of 128 tokens": {
        "model": {"name": "gpt", "layers": 2, "heads": 3, "width": 96},
        "data": {"name": "text", "length": 128},
    },
    "as small as can be: 1 layer, 16 wide, 2 windows of 16 tokens": {
        "model": {"name": "gpt", "layers": 1, "heads": 1, "width": 16},
        "data": {"name": "text", "length": 16},
        "train": {"global_batch_size": 2},
    },
}
ON_GPUS: dict[str, dict[str, Any]] = {
    "12 layers, 768 wide, bf16, 32 windows of 1,024 tokens": {
        "model": {"name": "gpt", "layers": 12, "heads": 12, "width": 768},
        "data": {"name": "text", "length": 1024},
        "train": {"global_batch_size": 32},
        "tuning": {"precision": "bf16", "cuda_graph": False, "compile": False},
    },
    "2 layers, 96 wide, 8 windows of 128 tokens": {
        **next(iter(SETTINGS.values())),
        "tuning": {"cuda_graph": False, "compile": False},
    },
}
"""A captured step has its exchange in the graph, from which it cannot be taken out."""
Block = tuple[float, float]
"""Milliseconds of a step: wall, and CPU of all threads of the process."""


def measure(
    rank: int,
    store: str,
    device: str,
    settings: dict[str, Any],
    rounds: int,
    steps: int,
    answer: Any,
) -> None:
    """Runs on each process; sends its blocks of each arm."""
    import torch
    import torch.distributed as dist

    from ddp_train.assembly.data_sets import open_datasets
    from ddp_train.assembly.job import JobBuilder
    from ddp_train.assembly.model import build_module
    from ddp_train.assembly.strategy import build_strategy
    from ddp_train.config.auto import resolve
    from ddp_train.config.bind import bind
    from ddp_train.distributed.process_group import session
    from ddp_train.distributed.world import World
    from ddp_train.engine.loop import train
    from ddp_train.hardware import Hardware
    from ddp_train.resilience.heartbeat import RankStatus

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    world = World(rank, PROCESSES, rank, PROCESSES)
    gpus = PROCESSES if device == "cuda" else 0
    common = {
        "task": {"name": "language_model"},
        "optimizer": {"name": "adamw"},
        "schedule": {"name": "constant"},
    }
    batch = {"global_batch_size": 8, **settings.get("train", {}), "epochs": 1000}
    config, problems = bind({**common, **settings, "train": batch, "device": device})
    assert not problems, problems
    capability = torch.cuda.get_device_capability() if gpus else (0, 0)
    config = resolve(
        config, Hardware(cpus=PROCESSES, gpus=gpus, compute_capability=capability), world
    )
    wait = torch.cuda.synchronize if gpus else lambda: None
    device = world.device(device)
    if gpus:
        torch.cuda.set_device(device)
    blocks: dict[str, list[Block]] = {arm: [] for arm in ARMS}
    with session(
        world, device, str(config.launch.backend), dist.FileStore(store, PROCESSES), 120.0
    ):
        splits = open_datasets(config)
        strategy = build_strategy(config, world, device)
        module = build_module(config, splits.train, strategy, device)
        builder = JobBuilder(config, world, device, module, strategy, RankStatus())
        job = builder.build_job(splits)
        with_exchange = job.stepper.rules
        own_units = replace(with_exchange, mean_of_units=lambda scaled: scaled.sum)
        rules = {"with": with_exchange, "without": own_units, "without again": own_units}
        batches = iter(job.batches)
        order = random.Random(0)
        train(job, batches, until=30)
        for _ in range(rounds):
            for arm in order.sample(ARMS, len(ARMS)):  # the same order on both
                job.stepper.rules = rules[arm]
                dist.barrier()
                wait()
                wall = time.perf_counter()
                cpu = time.process_time()
                train(job, batches, until=job.step + steps)
                wait()
                times = time.perf_counter() - wall, time.process_time() - cpu
                blocks[arm].append((times[0] / steps * 1e3, times[1] / steps * 1e3))
        answer.send(blocks)
        del job, module, strategy, batches, rules, with_exchange, own_units


def of_both(
    device: str, settings: dict[str, Any], rounds: int, steps: int
) -> dict[str, list[Block]]:
    """The blocks of each arm: the wall time of the slower process, the CPU time of both."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        processes = []
        for rank in range(PROCESSES):
            ours, theirs = context.Pipe(duplex=False)
            given = (rank, f"{folder}/store", device, settings, rounds, steps, theirs)
            processes.append(context.Process(target=measure, args=given))
            pipes.append(ours)
            processes[-1].start()
            theirs.close()
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return {
        arm: [
            (max(a[0], b[0]), a[1] + b[1])
            for a, b in zip(found[0][arm], found[1][arm], strict=True)
        ]
        for arm in ARMS
    }


def difference(one: list[Block], other: list[Block], which: int) -> str:
    """Median and quartiles of one - other within a round, in microseconds a step."""
    low, middle, high = statistics.quantiles(
        [1e3 * (a[which] - b[which]) for a, b in zip(one, other, strict=True)], n=4
    )
    return f"**{middle:+.0f}** ({low:+.0f} to {high:+.0f})"


def row(name: str, blocks: dict[str, list[Block]]) -> str:
    without = blocks["without"]
    cells = [f"{statistics.median(block[0] for block in without):.2f}"]
    for which in (0, 1):
        cells += [difference(blocks[arm], without, which) for arm in ("with", "without again")]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    from page import conditions, load_average, publish

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    before = load_average()
    settings = ON_GPUS if arguments.device == "cuda" else SETTINGS
    rows = [
        row(name, of_both(arguments.device, each, arguments.rounds, arguments.steps))
        for name, each in settings.items()
    ]
    words = " ".join(sys.argv[1:])
    lines = [
        "# What the exchange of the number of tokens costs",
        "",
        (
            f"Microseconds a step, median (quartiles) of {arguments.rounds} rounds with"
            f" {arguments.steps} steps a block; two processes over"
            f" {'NCCL' if arguments.device == 'cuda' else 'gloo'}."
        ),
        "",
        (
            "| job | ms a step without | with - without, wall | without - without, wall | with -"
            " without, CPU | without - without, CPU |"
        ),
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        "",
        *conditions(
            f"units.py {words}".strip(), f"{before} at the start, {load_average()} at the end"
        ),
    ]
    publish(lines, arguments.output)


if __name__ == "__main__":
    main()
