"""launch.py against hand-compiled DDP, Accelerate and Lightning on models that it was not tuned to,
in one go.

    python benchmarks/models.py [--processes 1] [--only NAME ...] [--kept FILE] [--output PAGE.md]

Ten networks of torchvision at 224 x 224 and three GPTs (vocabulary 50,304), in batches from 16 to
1,024, bf16. The peers are compiled, with the loss as one graph; launch.py decides by itself, as for
a long run. Convolutions are trained by SGD with momentum, transformers by AdamW, GPTs are clipped
to 1.0. launch.py keeps uint8 images (or tokens) on the device, and shuffles, normalises (or cuts
windows) for every step; the peers of benchmarks/peers.py read eight ready batches.

All contenders of a model are alive at the same time, and one runs at a time: the others are stopped
(SIGSTOP), and use neither the host nor the GPU. After the warm-up they take TURNS turns of STEPS
steps each. So what changes on a machine in minutes (its neighbours, its heat) changes for all;
measured one after the other, ours was 9 % behind on one machine and 11 % ahead on the next with the
same code. They trace at the same time, but wait for their turn before the first compiled graph
runs: cuDNN chooses its kernels by timing them.

Samples per second over all processes, the median of ten steps at a time; tens in which a process
was stopped do not count, nor do launch.py's ends of epochs. launch.py logs every ten steps, for
which it waits for the device; the peers note a time. `--at-once N`: where memory holds no more
contenders; each sitting has plain DDP, and shares are of its own sitting. Several processes cannot
be stopped at the same step: these contenders run one after the other.

Results are kept in FILE line by line: a command that was stopped (SIGTERM ends its
contenders, too) continues with those that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpt2 import corpus_in
from page import conditions, load_average, publish

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WARM_UP_STEPS = 30
LOG_EVERY = 10
LIMIT_SECONDS = 240
VOCABULARY = 50_304
PEERS = ("plain DDP, compiled", "Accelerate, compiled", "Lightning Trainer, compiled")
SIZES = ("default", "large", "one", "by_flops")
OURS = {
    "launch.py, recommended": (),
    "launch.py, captured": ("tuning.cuda_graph=true",),
    "launch.py, tuning=max": ("tuning=max",),
    **{
        f"launch.py, tuning=max, buckets={size}": ("tuning=max", f"tuning.buckets={size}")
        for size in SIZES
    },
    **{
        f"launch.py, kernel by kernel, buckets={size}": (
            "tuning=max",
            "tuning.cuda_graph=false",
            f"tuning.buckets={size}",
        )
        for size in SIZES
    },
    "launch.py, tuning=max, conv_sums": ("tuning=max", "tuning.conv_sums=true"),
    "launch.py, fp16": ("tuning=max", "tuning.precision=fp16"),
    "launch.py, fp16, conv_sums": ("tuning=max", "tuning.precision=fp16", "tuning.conv_sums=true"),
}


@dataclass
class Model:
    """`words`: of launch.py; `flags`: of benchmarks/peers.py."""

    name: str
    batch: int
    words: list[str]
    flags: list[str]
    at_once: int = 5
    """Contenders that 139 GiB hold."""


def image_model(arch: str, batch: int, optimizer: str = "sgd") -> Model:
    words = [
        "data=synthetic",
        "data.image_size=224",
        "data.classes=1000",
        "model=torchvision",
        f"model.arch={arch}",
        "schedule=constant",
        f"optimizer={optimizer}",
        "optimizer.lr=0.001",
    ]
    flags = ["images", "--arch", arch, "--optimizer", optimizer]
    return Model(arch, batch, words, flags, at_once=3 if batch >= 1024 else 5)


def gpt(layers: int, heads: int, width: int, length: int, batch: int, at_once: int) -> Model:
    sizes = {"layers": layers, "heads": heads, "width": width}
    words = [
        "experiment=gpt2_124m",
        f"data.length={length}",
        f"data.vocabulary={VOCABULARY}",
        "optimizer.lr=0.001",
        "schedule.final_factor=1",
        "schedule.warmup_steps=0",
        *(f"model.{name}={value}" for name, value in sizes.items()),
    ]
    flags = [
        word
        for name, value in (*sizes.items(), ("length", length))
        for word in (f"--{name}", str(value))
    ]
    return Model(
        f"GPT {layers} x {width}, {length} tokens",
        batch,
        words,
        ["tokens", "--optimizer", "adamw", *flags],
        at_once,
    )


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
    gpt(6, 6, 384, 256, 256, at_once=3),
    gpt(12, 12, 768, 1024, 32, at_once=3),
    gpt(24, 16, 1024, 1024, 16, at_once=3),
]


def ours(
    model: Model, processes: int, folder: Path, run: Path, device: str, words: tuple[str, ...]
) -> list[str]:
    batch = model.batch * processes
    data = [f"data.samples={3 * LOG_EVERY * batch}", f"data.test_samples={batch}"]
    if model.flags[0] == "tokens":
        data = [f"data.path={folder / 'corpus.bin'}", "data.test_part=0.02"]
    return [
        *(sys.executable, "launch.py", *model.words, *data, f"run_dir={run}", "strategy=ddp"),
        *(
            f"launch.nproc_per_node={processes}",
            f"device={device}",
            f"train.global_batch_size={batch}",
        ),
        *(
            "train.epochs=100000",
            "train.evaluate_every_epochs=100000",
            f"train.log_every_steps={LOG_EVERY}",
        ),
        *("checkpoint.every_steps=100000000", "launch.timeout_seconds=3600", *words),
    ]


def by_hand(contender: str, model: Model, processes: int, log: Path, device: str) -> list[str]:
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    counted = [
        "--batch",
        str(model.batch),
        "--warm-up",
        "0",
        "--steps",
        "100000000",
        "--tens",
        str(log),
    ]
    return [*start, "benchmarks/peers.py", contender, *model.flags, *counted, "--device", device]


GATE = """
import importlib.abc, importlib.util, os, sys, time

class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch._inductor.output_code":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def load_and_wrap(module):
            load(module)
            run = module.CompiledFxGraph.__call__
            def wait_and_run(graph, inputs):
                open(os.environ["MODELS_GATE"] + ".reached", "w").close()
                while not os.path.exists(os.environ["MODELS_GATE"]):
                    time.sleep(0.05)
                module.CompiledFxGraph.__call__ = run
                return run(graph, inputs)
            module.CompiledFxGraph.__call__ = wait_and_run
        spec.loader.exec_module = load_and_wrap
        return spec

if "MODELS_GATE" in os.environ:
    sys.meta_path.insert(0, Gate())
"""
"""Of sitecustomize.py: the first compiled graph of a process runs when the file MODELS_GATE is
there."""


class Contender:
    """A training job that is alive until `end`, and does steps only in `warm_up` and `turn`."""

    def __init__(self, name: str, model: Model, processes: int, parent: Path, device: str) -> None:
        """parent: of a folder that it makes; has the corpus."""
        folder = Path(tempfile.mkdtemp(dir=parent))
        self.name = name
        self.folder = folder
        self.gate = folder / "gate"
        if name in OURS:
            self.log = folder / "run" / "metrics.jsonl"
            command = ours(model, processes, parent, folder / "run", device, OURS[name])
        else:
            self.log = folder / "log.jsonl"
            command = by_hand(name, model, processes, self.log, device)
        self.tens: list[list[float]] = []
        self.failure = ""
        self.ended = False
        with (folder / "out").open("w") as output:
            environment = {**os.environ, "MODELS_GATE": str(self.gate)}
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[dict[str, Any]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def last_step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def waits(self) -> bool:
        """At its gate; or it has none, as it compiles nothing; or it has failed."""
        reached = self.folder.joinpath("gate.reached").exists() or self.last_step() > 0
        return reached or self.process.poll() is not None

    def warm_up(self) -> None:
        self.gate.touch()
        self.run_until(WARM_UP_STEPS)

    def turn(self, steps: int) -> None:
        """One ten more: the one in which it was stopped does not count."""
        began = time.time()
        self._signal(signal.SIGCONT)
        self.run_until(self.last_step() + LOG_EVERY + steps)
        self.tens.append(
            [
                line["samples_per_second"]
                for before, line in pairwise(self.lines())
                if before["time"] > began and line["step"] == before["step"] + LOG_EVERY
            ]
        )

    def run_until(self, step: int) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while (
            self.last_step() < step and self.process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        self._signal(signal.SIGSTOP)
        if self.last_step() < step:
            if self.process.poll() is not None:
                self.failure = self._said()
            else:
                self.failure = f"not at step {step} in time"
        time.sleep(0.3)  # the GPU does what it was given

    def _said(self) -> str:
        said = (self.folder / "out").read_text().splitlines()
        reasons = [
            line
            for line in said
            if "FATAL" in line
            or line.startswith("  - ")
            or ("Error" in line and "ChildFailedError" not in line)
        ]
        return f"exit code {self.process.poll()}: {(reasons or said or [''])[-1][-200:]}"

    def _signal(self, number: int) -> None:
        """Signal the launcher first: it watches the others."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def result(self) -> dict[str, Any]:
        if self.failure:
            return {"failure": self.failure}
        logs = self.folder / "run" / "logs" / "rank_0.log"
        said = (self.folder / "out").read_text() + (logs.read_text() if logs.exists() else "")
        return {
            "tens": [[round(speed, 1) for speed in turn] for turn in self.tens],
            "loss": self.lines()[-1]["loss"],
            "why": re.findall(
                "^tuning.*|steps are not captured.*|tuning.buckets=by_flops: .*", said, re.MULTILINE
            ),
        }

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        pids = descendants(self.process.pid)
        self._signal(signal.SIGKILL)
        self.process.wait()
        while any(lives(pid) for pid in pids):  # their memory is for the next
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    try:
        children = [
            int(child)
            for file in Path(f"/proc/{pid}/task").glob("*/children")
            for child in file.read_text().split()
        ]
    except OSError:  # it has ended
        return []
    return [found for child in children for found in (child, *descendants(child))]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def sittings(contenders: list[str], at_once: int) -> list[list[str]]:
    """Plain DDP is in each, unless they are measured one after the other."""
    plain = [name for name in contenders if name == PEERS[0]]
    others = [n for n in contenders if n != PEERS[0]]
    if at_once == 1:
        return [[name] for name in contenders]
    size = at_once - len(plain)
    return [plain + others[i : i + size] for i in range(0, len(others), size)] or [plain]


def measure(alive: list[Contender], turns: int, steps: int) -> list[dict[str, Any]]:
    """The results of each contender of one sitting, or the reason why it failed."""
    for contender in alive:
        contender.warm_up()
    for number in range(turns):
        for contender in alive[:: -1 if number % 2 else 1]:
            if not contender.failure:
                contender.turn(steps)
    return [{"contender": contender.name, **contender.result()} for contender in alive]


def measure_some(
    some: list[tuple[Model, int, list[str]]],
    arguments: argparse.Namespace,
    folder: Path,
    kept: Path,
) -> list[dict[str, Any]]:
    """Start the contenders of all these sittings (models, numbers, names); measure one sitting
    after the other."""
    alive: list[list[Contender]] = []
    results = []
    try:
        for model, _, names in some:
            alive.append(
                [
                    Contender(name, model, arguments.processes, folder, arguments.device)
                    for name in names
                ]
            )
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline and not all(
            contender.waits() for contender in itertools.chain(*alive)
        ):
            time.sleep(0.1)
        for (model, number, _), sitting in zip(some, alive, strict=True):
            for found in measure(sitting, arguments.turns, arguments.steps):
                results.append(
                    {"model": model.name, "batch": model.batch, "sitting": number, **found}
                )
                print(results[-1], file=sys.stderr, flush=True)
                with kept.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
            for contender in sitting:
                contender.end()
    finally:
        for contender in itertools.chain(*alive):
            contender.end()
    return results


def median(found: dict[str, Any]) -> float | None:
    tens = [speed for turn in found.get("tens", []) for speed in turn]
    return statistics.median(tens) if tens else None


def spread(found: dict[str, Any]) -> str:
    """The medians of the slowest and the fastest turn, as text."""
    middles = [statistics.median(turn) for turn in found["tens"] if turn]
    return f"{min(middles):,.0f} to {max(middles):,.0f}"


def cells(results: list[dict[str, Any]], name: str) -> str:
    """The cells of one model: the speed, its spread, and the share of plain DDP in the same
    sitting."""
    mine = [found for found in results if found["contender"] == name]
    if not mine:
        return "-"
    found = mine[-1]
    speed = median(found)
    if not speed:
        return "failed"
    others = [r for r in results if r["contender"] == PEERS[0]]
    plain = [median(r) for r in others if r["sitting"] == found["sitting"]] or [
        median(r) for r in others
    ]
    if plain and plain[-1] and name != PEERS[0]:
        share = f"**{speed / plain[-1]:.1%}**, "
    else:
        share = ""
    return f"{share}{speed:,.0f} ({spread(found)})"


def row(model: Model, results: list[dict[str, Any]], contenders: list[str]) -> str:
    results = [found for found in results if found["model"] == model.name]
    losses = " ".join(f"{found['loss']:.2f}" for found in results if "loss" in found)
    columns = " | ".join(cells(results, name) for name in contenders)
    return f"| {model.name} | {model.batch} | {columns} | {losses} |"


def write_gate(folder: Path) -> None:
    (folder / "gate").mkdir()
    (folder / "gate" / "sitecustomize.py").write_text(GATE)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(folder / "gate"), os.environ.get("PYTHONPATH")])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="that count in a turn")
    parser.add_argument(
        "--at-once", type=int, default=5, help="contenders that are alive at the same time"
    )
    parser.add_argument(
        "--ahead", type=int, default=1, help="sittings whose contenders trace at the same time"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--batch", type=int, help="samples of a process, in place of the model's own"
    )
    parser.add_argument("--only", nargs="+", help="models whose names begin so, in this order")
    parser.add_argument("--contenders", nargs="+", default=[*PEERS, *OURS])
    parser.add_argument(
        "--kept", type=Path, help="a file for results, one line each; those in it are not repeated"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contenders are ended on the way out
    names = [model.name for model in MODELS]
    if unknown := [
        name for name in arguments.only or () if not any(one.startswith(name) for one in names)
    ]:
        parser.error(f"--only {' '.join(unknown)}: no such model; there are {', '.join(names)}")
    if unknown := [name for name in arguments.contenders if name not in (*PEERS, *OURS)]:
        parser.error(
            f"--contenders {', '.join(unknown)}: no such contender; there are"
            f" {', '.join((*PEERS, *OURS))}"
        )
    if arguments.processes > 1:
        arguments.at_once = 1
    load = f"{load_average()} at the start"
    models = [m for begin in arguments.only or [""] for m in MODELS if m.name.startswith(begin)]
    if arguments.batch:
        models = [replace(model, batch=arguments.batch) for model in models]
    with tempfile.TemporaryDirectory(prefix="models_") as made:
        folder = Path(made)
        kept = arguments.kept or Path(made, "kept.jsonl")
        corpus_in(folder, processes=1)
        write_gate(folder)
        if kept.exists():
            results = [json.loads(line) for line in kept.read_text().splitlines()]
        else:
            results = []
        done = {(found["model"], found["contender"]) for found in results}
        todo = [
            (model, number, names)
            for model in models
            for number, names in enumerate(
                sittings(arguments.contenders, min(arguments.at_once, model.at_once))
            )
            if any((model.name, name) not in done for name in names)
        ]
        for first in range(0, len(todo), arguments.ahead):
            results += measure_some(todo[first : first + arguments.ahead], arguments, folder, kept)
    short = [name.removesuffix(", compiled") for name in arguments.contenders]
    publish(
        [
            f"# Models nobody tuned to, {arguments.processes} x {arguments.device}",
            "",
            (
                f"In bold the share of {PEERS[0]} in the same sitting; samples per second, and in"
                " brackets from the"
            ),
            (
                "slowest turn to the fastest. What is measured stands in the head of"
                " `benchmarks/models.py`."
            ),
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
                f"models.py {shlex.join(sys.argv[1:])}",
                f"{load}, {load_average()} at the end",
                ("torchvision", "accelerate", "lightning"),
            ),
        ],
        arguments.output,
    )


if __name__ == "__main__":
    main()
