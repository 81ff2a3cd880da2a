"""GPT-2 124M with launch.py against plain compiled DDP: the same network, batch, precision,
optimizer and clipping.

    python benchmarks/gpt2.py [--processes 1] [--batches 32 64] [--steps 100] [--rounds 1] [--only
    NAME ...]
        [--output PAGE.md]

Windows of 1,024 tokens, bf16, AdamW (fused), clipping to 1.0, tokens on the device. The corpus is
the standard library of Python, a byte a token, in a vocabulary of 50,304 as GPT-2's: speed does not
depend on which tokens they are, and the loss can be seen to fall. Tokens per second over all
processes: for launch.py the median logging interval of 10 steps after the first three, for the peer
STEPS steps after 30. Loss: of the last 10 steps, of the last round. With several rounds, whose
order alternates, the median round and the slowest and fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from page import conditions, load_average, publish
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LENGTH = 1024
VOCABULARY = 50_304
WARM_UP_STEPS = 30
LAST = 10
MUON = (
    "tuning=max",
    "optimizer=muon",
    "optimizer.lr=0.02",
    "optimizer.adamw_lr=6e-4",
    "optimizer.weight_decay=0.1",
)


class WithLoss(nn.Module):
    """The network and its loss, compiled as one, as nanoGPT does: the logits are the largest
    tensors of a step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(ids).flatten(0, 1), targets.flatten())


def peer(corpus: Path, batch: int, steps: int) -> None:
    """Train as a careful person writes it by hand. Rank 0 prints RESULT {...}."""
    import torch.distributed as dist

    from ddp_train.models.gpt.network import Gpt

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.set_float32_matmul_precision("high")
    tokens = torch.from_numpy(np.fromfile(corpus, dtype=np.uint16).astype(np.int16)).cuda()
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, LENGTH, layers=12, heads=12, width=768).cuda()
    wrapped = DistributedDataParallel(
        torch.compile(WithLoss(model)), device_ids=[rank], gradient_as_bucket_view=True
    )
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    draw = torch.Generator("cuda").manual_seed(rank)
    losses = []
    began = 0.0
    reach = torch.arange(LENGTH + 1, device="cuda")
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            torch.cuda.synchronize()
            began = time.perf_counter()
        starts = torch.randint(len(tokens) - LENGTH, (batch, 1), generator=draw, device="cuda")
        windows = tokens[starts + reach].long()
        with torch.autocast("cuda", torch.bfloat16):
            loss = wrapped(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    speed = steps * batch * ranks * LENGTH / (time.perf_counter() - began)
    if rank == 0:
        loss = torch.stack(losses[-LAST:]).mean().item()
        print("RESULT " + json.dumps({"tokens_per_second": speed, "loss": loss}), flush=True)
    dist.destroy_process_group()


def ours(
    corpus: Path,
    batch: int,
    steps: int,
    processes: int,
    run_dir: Path,
    *overrides: str,
    gpus: str | None = None,
) -> dict[str, float]:
    """gpus: CUDA_VISIBLE_DEVICES, where it shall be another than this process's."""
    command = [
        *(
            sys.executable,
            "launch.py",
            "experiment=gpt2_124m",
            f"data.path={corpus}",
            f"run_dir={run_dir}",
        ),
        *(f"train.global_batch_size={batch * processes}", f"launch.nproc_per_node={processes}"),
        *(
            f"train.max_steps={WARM_UP_STEPS + steps}",
            "train.log_every_steps=10",
            "data.test_part=0.02",
        ),
        *(
            "train.evaluate_batch_size=8",
            "train.epochs=1000",
            "schedule.final_factor=1",
            "schedule.warmup_steps=0",
        ),
        *("tuning.compile=true", "checkpoint.every_steps=1000000"),
        f"data.vocabulary={VOCABULARY}",
        *overrides,
    ]
    environment = {**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    speed = statistics.median(line["tokens_per_second"] for line in train[3:])
    found = {"tokens_per_second": speed, "loss": train[-1]["loss"]}
    if "mfu" in train[-1]:
        found["mfu"] = statistics.median(line["mfu"] for line in train[3:])
    return found


def corpus_in(folder: Path, processes: int) -> Path:
    """A file of tokens that is the longer the more processes read it."""
    from ddp_train.data.corpus.documents import standard_library

    content = b"\n".join(path.read_bytes() for path in standard_library()) * processes
    np.frombuffer(content, dtype=np.uint8).astype(np.uint16).tofile(folder / "corpus.bin")
    return folder / "corpus.bin"


def by_hand(corpus: Path, batch: int, steps: int, processes: int) -> dict[str, float]:
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    command = [
        *start,
        __file__,
        "--peer",
        str(corpus),
        "--batches",
        str(batch),
        "--steps",
        str(steps),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    return json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:]
    )


def row(name: str, batch: int, results: list[dict[str, float]], rounds: int) -> str:
    """A line of the table. A round that failed is counted; its reason is on the standard error."""
    if not results:
        return f"| {name} | {batch} | failed, {rounds} of {rounds} | | | |"
    speeds = sorted(result["tokens_per_second"] for result in results)
    utilisation = [result["mfu"] for result in results if "mfu" in result]
    mfu = f"{statistics.median(utilisation):.1%}" if utilisation else "-"
    failed = f", {rounds - len(results)} failed" if len(results) < rounds else ""
    return (
        f"| {name} | {batch} | {statistics.median(speeds):,.0f} | {speeds[0]:,.0f} to"
        f" {speeds[-1]:,.0f}{failed} | {mfu} | {results[-1]['loss']:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[32, 64], help="windows on each process"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="contenders with these names")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        return peer(arguments.peer, arguments.batches[0], arguments.steps)
    if torch.cuda.device_count() < arguments.processes:
        sys.exit(
            f"--processes {arguments.processes}: torch.cuda.device_count() is"
            f" {torch.cuda.device_count()}"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contenders are ended on the way out
    load = f"{load_average()} at the start"
    rows = []
    n = arguments.processes
    steps = arguments.steps
    with tempfile.TemporaryDirectory(prefix="gpt2_") as folder:
        corpus = corpus_in(Path(folder), n)
        contenders = {
            "plain DDP, compiled": lambda batch, _: by_hand(corpus, batch, steps, n),
            "launch.py, recommended": lambda batch, run_dir: ours(corpus, batch, steps, n, run_dir),
            "launch.py, tuning=max": lambda batch, run_dir: ours(
                corpus, batch, steps, n, run_dir, "tuning=max"
            ),
            "launch.py, tuning=max, torch's own kernels": lambda batch, run_dir: ours(
                corpus, batch, steps, n, run_dir, "tuning=max", "tuning.triton_kernels=false"
            ),
            "launch.py, tuning=max, buckets=default": lambda batch, run_dir: ours(
                corpus, batch, steps, n, run_dir, "tuning=max", "tuning.buckets=default"
            ),
            "launch.py, tuning=max, muon": lambda batch, run_dir: ours(
                corpus, batch, steps, n, run_dir, *MUON
            ),
        }
        if unknown := set(arguments.only or ()) - contenders.keys():
            sys.exit(
                f"--only {' '.join(sorted(unknown))}: no such contender; there are"
                f" {', '.join(contenders)}"
            )
        if arguments.only:
            contenders = {name: run for name, run in contenders.items() if name in arguments.only}
        for batch in arguments.batches:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
            for number in range(arguments.rounds):
                for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
                    run_dir = Path(folder, f"{batch}_{number}_{len(name)}")
                    try:
                        found[name].append(contenders[name](batch, run_dir))
                        print(name, batch, found[name][-1], file=sys.stderr, flush=True)
                    except (RuntimeError, subprocess.TimeoutExpired, StopIteration) as error:
                        said = (getattr(error, "stdout", None) or b"") + (
                            getattr(error, "stderr", None) or b""
                        )
                        print(
                            name,
                            batch,
                            error,
                            said.decode(errors="replace")[-2000:],
                            file=sys.stderr,
                            flush=True,
                        )
            rows += [row(name, batch, results, arguments.rounds) for name, results in found.items()]
    publish(
        [
            f"# GPT-2 124M, {n} x GPU",
            "",
            (
                "What is measured stands in the head of `benchmarks/gpt2.py`. Rounds:"
                f" {arguments.rounds}."
            ),
            "",
            (
                "| | windows a process | tokens/s | slowest to fastest round | model-FLOP"
                f" utilisation | loss of the last {LAST} steps |"
            ),
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            "",
            *conditions(
                f"gpt2.py --processes {n} --batches {' '.join(map(str, arguments.batches))} --steps"
                f" {steps} --rounds {arguments.rounds}"
                + "".join(f' --only "{name}"' for name in arguments.only or ()),
                f"{load}, {load_average()} at the end",
            ),
        ],
        arguments.output,
    )
    return None


if __name__ == "__main__":
    main()
