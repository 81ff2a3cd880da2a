"""Does GPT-2 learn by launch.py as it does in plain PyTorch? Their losses from the same weights,
windows and seed.

    python benchmarks/gpt2_curves.py [--steps 300] [--batch 64] [--output PAGE.md] [--cpu]
    python benchmarks/gpt2_curves.py --plot PAGE.md PLOT.png

launch.py trains experiment=gpt2_124m on one GPU with tuning=max. Then a plain loop trains: the
network from the same seed, the windows in the order that launch.py's plan has, bf16 by autocast,
torch's cross_entropy and fused AdamW, clipping to 1.0; once eager and once more with another seed
for its weights, which shows how far apart two runs are that differ in nothing that matters. The
corpus is the standard library of Python, a byte a token. --plot draws the table of a page, and
needs matplotlib. --cpu: a small network, to try the script.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from page import conditions, publish
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
EVERY = 10
"""Steps of which the mean is shown."""
OURS = "launch.py tuning=max"
THEIRS = "plain PyTorch"
OTHER = "plain PyTorch, other first weights"


def ours(corpus: Path, steps: int, batch: int, run_dir: Path, words: list[str]) -> list[float]:
    command = [
        *(
            sys.executable,
            "launch.py",
            "experiment=gpt2_124m",
            f"data.path={corpus}",
            f"run_dir={run_dir}",
            *words,
        ),
        *(
            f"train.global_batch_size={batch}",
            f"train.max_steps={steps}",
            f"train.log_every_steps={EVERY}",
        ),
        *(
            "launch.nproc_per_node=1",
            "data.test_part=0.02",
            "train.evaluate_batch_size=8",
            "train.epochs=1000",
        ),
        *("schedule.final_factor=1", "schedule.warmup_steps=0", "checkpoint.every_steps=1000000"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def plain(run_dir: Path, device: str, seed_more: int) -> list[float]:
    """The same job without the launcher's loop, loss, optimizer and precision; its data and its
    order are the run's."""
    from ddp_train.assembly.data_sets import open_datasets
    from ddp_train.assembly.plan import build_plan
    from ddp_train.config.freeze import FILE, load_frozen
    from ddp_train.data.rng import hash_key
    from ddp_train.distributed.world import World
    from ddp_train.models.gpt.network import Gpt

    config = load_frozen((run_dir / FILE).read_text())
    source = open_datasets(config)[0]
    model = config.model
    torch.manual_seed(hash_key(config.seed + seed_more, "model"))
    network = Gpt(
        source.outputs,
        config.data.length,
        model.layers,
        model.heads,
        model.width,
        vocabulary_multiple=model.vocabulary_multiple,
    ).to(device)
    torch.set_float32_matmul_precision("high")
    decayed = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.optimizer.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.optimizer.lr,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        fused=device == "cuda",
    )
    losses = []
    for micro_batch in build_plan(config, World(), len(source)).micro_batches():
        inputs, targets = (
            part.to(device) for part in source.get_batch(micro_batch.indices, micro_batch.epoch)
        )
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = functional.cross_entropy(network(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), config.train.max_grad_norm or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    means = torch.stack(losses).float().view(-1, EVERY).mean(1)
    return means.tolist()


def plot(page: Path, into: Path) -> None:
    """The losses of a page over the steps that they are means of, but for the first mean, which is
    twice the others."""
    from matplotlib import pyplot

    found = re.finditer(r"^\| (\d+) to (\d+) \| (.+) \|$", page.read_text(), re.MULTILINE)
    rows = [[(int(row[1]) + int(row[2])) / 2, *map(float, row[3].split(" | "))] for row in found][
        1:
    ]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for i, (name, style) in enumerate(((OURS, "-o"), (THEIRS, "--s"), (OTHER, ":^"))):
        axes.plot(
            [row[0] for row in rows], [row[i + 1] for row in rows], style, label=name, markersize=4
        )
    axes.set(
        xlabel="step",
        ylabel="loss, nats a token",
        title="GPT-2 124M: the same windows in the same order",
    )
    axes.legend()
    figure.savefig(into, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("PAGE.md", "PLOT.png"))
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    if arguments.plot:
        return plot(*arguments.plot)
    from ddp_train.data.corpus.documents import standard_library

    words = ["tuning=max"]
    device = "cuda"
    if arguments.cpu:
        words = [
            "device=cpu",
            "model.layers=1",
            "model.width=32",
            "model.heads=2",
            "data.length=32",
            "data.vocabulary=256",
        ]
        device = "cpu"
    with tempfile.TemporaryDirectory(prefix="gpt2_curves_") as folder:
        corpus = Path(folder, "corpus.bin")
        run_dir = Path(folder, "run")
        content = b"\n".join(path.read_bytes() for path in standard_library())
        np.frombuffer(content, dtype=np.uint8).astype(np.uint16).tofile(corpus)
        curves = {OURS: ours(corpus, arguments.steps, arguments.batch, run_dir, words)}
        curves[THEIRS] = plain(run_dir, device, 0)
        curves[OTHER] = plain(run_dir, device, 1)
    gaps = {name: np.abs(np.subtract(curves[name], curves[THEIRS])) for name in (OURS, OTHER)}
    publish(
        [
            "# The losses of GPT-2 124M by launch.py and by plain PyTorch",
            "",
            (
                f"Means of {EVERY} steps. What is compared stands in the head of"
                " `benchmarks/gpt2_curves.py`."
            ),
            "",
            f"| steps | {' | '.join(curves)} |",
            "|---:|---:|---:|---:|",
            *(
                f"| {EVERY * i + 1} to {EVERY * i + EVERY} |"
                f" {' | '.join(f'{one[i]:.4f}' for one in curves.values())} |"
                for i in range(len(curves[OURS]))
            ),
            "",
            *(
                f"- {name}: {gap.mean():.4f} from plain PyTorch on average, {gap.max():.4f} at most"
                for name, gap in gaps.items()
            ),
            "",
            *conditions(f"gpt2_curves.py --steps {arguments.steps} --batch {arguments.batch}"),
        ],
        arguments.output,
    )
    return None


if __name__ == "__main__":
    main()
