"""launch.py against hand-compiled DDP, Accelerate and Lightning on models that it was not tuned to, in one go.

    python benchmarks/models.py [--processes 1] [--only NAME ...] [--kept FILE] [--output PAGE.md]

Ten networks of torchvision at 224 x 224 and three GPTs (vocabulary 50,304), in batches from 16 to 1,024, bf16. The
peers are compiled, with the loss as one graph; launch.py decides by itself, as for a long run. Convolutions are trained
by SGD with momentum, transformers by AdamW, GPTs are clipped to 1.0. launch.py keeps uint8 images (or tokens) on the
device, and shuffles, normalises (or cuts windows) for every step; the peers of benchmarks/peers.py read eight ready
batches.

Samples per second over all processes, the median of ten steps at a time, of STEPS steps after 30, one run each;
launch.py is stopped when it has done them. It logs every ten steps, for which it waits for the device; the peers log
nothing. The ends of its epochs, which have sixteen steps here, are in none of the tens. The mean of 60 steps will not
do: ours was 9 % behind on one machine, and 11 % ahead on the next with the same code (wide_resnet50_2). Such a step is
hardly longer than its launches take the host, which has neighbours.

`--prepare N` runs a few steps before, N commands at a time: what is compiled then lies in torch's cache, so that
the commands that count begin at once. Results are kept in FILE line by line: a command that was cut off goes on with
those that it has not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from page import conditions, load_average, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WARM_UP_STEPS, LOG_EVERY, LIMIT_SECONDS = 30, 10, 240
VOCABULARY, CORPUS = 50_304, "corpus.bin"
PEERS = ("plain DDP, compiled", "Accelerate, compiled", "Lightning Trainer, compiled")
OURS = {
    "launch.py, recommended": (),
    "launch.py, captured": ("tuning.cuda_graph=true",),
    "launch.py, tuning=max": ("tuning=max",),
}


@dataclass
class Model:
    """`words`: of launch.py; `flags`: of benchmarks/peers.py."""

    name: str
    batch: int
    words: list[str]
    flags: list[str]


def image_model(arch: str, batch: int, optimizer: str = "sgd") -> Model:
    words = ["data=synthetic", "data.image_size=224", "data.classes=1000", "model=torchvision", f"model.arch={arch}",
             "schedule=constant", f"optimizer={optimizer}", "optimizer.lr=0.001"]  # fmt: skip
    return Model(arch, batch, words, ["images", "--arch", arch, "--optimizer", optimizer])


def gpt(layers: int, heads: int, width: int, length: int, batch: int) -> Model:
    sizes = {"layers": layers, "heads": heads, "width": width}
    words = ["experiment=gpt2_124m", f"data.length={length}", f"data.vocabulary={VOCABULARY}", "optimizer.lr=0.001",
             "schedule.final_factor=1", "schedule.warmup_steps=0",
             *(f"model.{name}={value}" for name, value in sizes.items())]  # fmt: skip
    flags = [word for name, value in (*sizes.items(), ("length", length)) for word in (f"--{name}", str(value))]
    return Model(f"GPT {layers} x {width}, {length} tokens", batch, words, ["tokens", "--optimizer", "adamw", *flags])


MODELS = [
    image_model("resnet18", 1024),
    image_model("resnet50", 256),
    image_model("wide_resnet50_2", 128),
    image_model("vgg16", 64),
    image_model("densenet121", 128),
    image_model("mobilenet_v3_large", 512),
    image_model("efficientnet_b0", 256),
    image_model("convnext_tiny", 128, "adamw"),
    image_model("vit_b_16", 256, "adamw"),
    image_model("swin_t", 128, "adamw"),
    gpt(6, 6, 384, 256, 256),
    gpt(12, 12, 768, 1024, 32),
    gpt(24, 16, 1024, 1024, 16),
]


def ours(model: Model, processes: int, folder: Path, device: str, words: tuple[str, ...]) -> list[str]:
    batch = model.batch * processes
    data = [f"data.samples={16 * batch}", f"data.test_samples={batch}"]
    if model.flags[0] == "tokens":
        data = [f"data.path={folder.parent / CORPUS}", "data.test_part=0.02"]
    return [
        *(sys.executable, "launch.py", *model.words, *data, f"run_dir={folder}", "strategy=ddp"),
        *(f"launch.nproc_per_node={processes}", f"device={device}", f"train.global_batch_size={batch}"),
        *("train.epochs=100000", "train.evaluate_every_epochs=100000", f"train.log_every_steps={LOG_EVERY}"),
        *("checkpoint.every_steps=100000000", *words),
    ]


def follow(command: list[str], folder: Path, steps: int) -> dict[str, Any]:
    """Runs launch.py until it has done `steps` steps more than the warm-up, and stops it."""
    log, lines, last = folder / "metrics.jsonl", [], WARM_UP_STEPS + steps if steps else 1
    with folder.with_suffix(".out").open("w+") as output:
        with subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as process:
            deadline = time.monotonic() + LIMIT_SECONDS
            while not (done := lines and lines[-1]["step"] >= last) and process.poll() is None:
                time.sleep(0.1)
                text = log.read_text() if log.exists() else ""
                lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
                if time.monotonic() > deadline:
                    break
            process.terminate()
        output.seek(0)
        said = output.read()
    if not done:
        reasons = [line for line in said.splitlines() if "FATAL" in line or line.startswith("  - ")]
        raise RuntimeError(f"exit code {process.returncode}: {(reasons or [said])[-1][-200:]}")
    counted = [
        line["samples_per_second"]
        for before, line in pairwise(lines)
        if before["step"] >= WARM_UP_STEPS and line["step"] == before["step"] + LOG_EVERY
    ]
    return {
        "speed": statistics.median(counted) if counted else 0.0,
        "loss": lines[-1]["loss"],
        "why": [" ".join(line.split()) for line in said.splitlines() if line.startswith("tuning")],
    }


def by_hand(contender: str, model: Model, processes: int, steps: int, device: str) -> dict[str, Any]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    counted = ["--batch", str(model.batch), "--warm-up", str(WARM_UP_STEPS if steps else 1), "--steps", str(steps or 1)]
    command = [*start, "benchmarks/peers.py", contender, *model.flags, *counted, "--device", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        reasons = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
        raise RuntimeError(f"exit code {done.returncode}: {(reasons or lines)[-1][-200:]}")
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
    return {"speed": result["median"], "loss": result["loss"]}


def run(contender: str, model: Model, processes: int, steps: int, folder: Path, device: str) -> dict[str, Any]:
    """Samples per second and the last loss, or the reason why there are none."""
    began = time.perf_counter()
    found: dict[str, Any] = {"model": model.name, "batch": model.batch, "contender": contender}
    try:
        if contender in OURS:
            found |= follow(ours(model, processes, folder, device, OURS[contender]), folder, steps)
        else:
            found |= by_hand(contender, model, processes, steps, device)
    except (RuntimeError, subprocess.TimeoutExpired, StopIteration) as error:
        found["failure"] = str(error)
    found["seconds"] = round(time.perf_counter() - began, 1)
    print(found, file=sys.stderr, flush=True)
    return found


def row(model: Model, results: list[dict[str, Any]], contenders: list[str]) -> str:
    by_name = {found["contender"]: found for found in results if found["model"] == model.name}
    plain = by_name.get(PEERS[0], {}).get("speed")
    cells = []
    for name in contenders:
        speed = by_name.get(name, {}).get("speed")
        share = f", {speed / plain:.1%}" if speed and plain and name != PEERS[0] else ""
        cells.append(f"{speed:,.0f}{share}" if speed else "failed" if name in by_name else "-")
    losses = [by_name[name]["loss"] for name in contenders if "loss" in by_name.get(name, {})]
    return f"| {model.name} | {model.batch} | {' | '.join(cells)} | {' '.join(f'{loss:.2f}' for loss in losses)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--prepare", type=int, default=0, help="commands at a time that compile before")
    parser.add_argument("--only", nargs="+", help="models whose names begin so, in this order")
    parser.add_argument("--contenders", nargs="+", default=[*PEERS, *OURS])
    parser.add_argument("--kept", type=Path, help="a file for results, one line each; those in it are not repeated")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    load = f"{load_average()} at the start"
    models = [m for begin in arguments.only or [""] for m in MODELS if m.name.startswith(begin)]
    with tempfile.TemporaryDirectory(prefix="models_") as made:
        folder, kept = Path(made), arguments.kept or Path(made, "kept.jsonl")
        from ddp_train.data.corpus import standard_library

        content = b"\n".join(path.read_bytes() for path in standard_library())
        np.frombuffer(content, dtype=np.uint8).astype(np.uint16).tofile(folder / CORPUS)
        results = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
        there = {(found["model"], found["contender"]) for found in results}
        todo = [(name, model) for model in models for name in arguments.contenders if (model.name, name) not in there]
        if arguments.prepare:
            threads = ThreadPoolExecutor(arguments.prepare)
            try:
                for number, (name, model) in enumerate(todo):
                    if name in (PEERS[0], "launch.py, recommended"):  # the others compile the same again
                        threads.submit(run, name, model, 1, 0, folder / f"p{number}", arguments.device)
                threads.shutdown()
            except KeyboardInterrupt:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        for number, (name, model) in enumerate(todo):
            results.append(
                run(name, model, arguments.processes, arguments.steps, folder / str(number), arguments.device)
            )
            with kept.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    short = [name.removesuffix(", compiled") for name in arguments.contenders]
    publish(
        [
            f"# Models nobody tuned to, {arguments.processes} x {arguments.device}",
            "",
            f"Samples per second, and of {PEERS[0]}. What is measured stands in the head of `benchmarks/models.py`.",
            "",
            f"| | batch a process | {' | '.join(short)} | last losses |",
            f"|---|{'---:|' * (len(short) + 2)}",
            *(row(model, results, arguments.contenders) for model in models),
            "",
            *(
                f"- {found['model']}, {found['contender']}: {found['failure']}"
                for found in results
                if "failure" in found
            ),
            *conditions(
                f"models.py --processes {arguments.processes} --steps {arguments.steps}",
                f"{load}, {load_average()} at the end",
                ("torchvision", "accelerate", "lightning"),
            ),
        ],
        arguments.output,
    )


if __name__ == "__main__":
    main()
