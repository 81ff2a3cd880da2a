"""Random SIGKILLs against a whole run: the end must be byte for byte that of the run that nobody
disturbed.

    python -m tests.campaigns.chaos [--ranks 2 3 4] [--schedules 20] [--seed 0]         (or: make
                                                                                        chaos)

The workload has all that makes an exact resume hard: convolution, batch norm, dropout, AdamW,
clipping, accumulation, a cosine schedule, augmentation drawn by torch's generator, a data set that
does not divide. A schedule kills one to three times: a worker, rank 0 included, or the launcher, at
a random moment. A killed worker is the launcher's business (launch.max_restarts); after a killed
launcher the same command is given again. Every rank writes down the samples of each forward pass
before its collective. Compared at the end: model.safetensors, the optimizer's state, every rank's
buffers, and that every sample was seen once per epoch. The seed of each schedule is printed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ddp_train.checkpoints.training_state import STEPPER, TrainingState
from tests.support.commands import Running, checkpoints, processes_of, running, wait_until, weights

SAMPLES = 210
BATCH = 48
EPOCHS = 8
ACCUMULATION = 2
WORKLOAD = '''
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    """Writes down which samples it was given, before anything is exchanged."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 36, 10)
        )
        self.ledger = Path(os.environ["LEDGER"], f"ledger_{os.environ['RANK']}")
        # Passes of strategy.warm_up_ddp_buckets, which put back what a model itself counts.
        os.environ["THROW_AWAY"] = str(2 * (int(os.environ["WORLD_SIZE"]) > 2))
        self.was_frozen = False

    def train(self, mode=True):
        trains = self.layers[0].weight.requires_grad
        if trains and self.was_frozen:  # long enough to be killed in
            time.sleep(30 * float(os.environ.get("DELAY", 0)))
        self.was_frozen = not trains
        return super().train(mode)

    def forward(self, inputs):
        time.sleep(float(os.environ.get("DELAY", 0)))
        if self.training:
            passes = int(self.layers[1].num_batches_tracked)  # a buffer: a resumed run goes on with it
            throw_away = int(os.environ["THROW_AWAY"])
            if throw_away == 0:
                with self.ledger.open("a") as file:
                    file.write(f"{passes} {' '.join(map(str, inputs['number'].tolist()))}\\n")
            os.environ["THROW_AWAY"] = str(max(0, throw_away - 1))
        return self.layers(inputs["image"])


class Images(Dataset):
    """Stripes with noise that torch's generator draws anew for each epoch."""

    classes = tuple("0123456789")

    def __init__(self, train, samples=60):
        self.train, self.samples = train, samples if train else 50

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        image = torch.zeros(1, 8, 8)
        image[0, :, number % 8] = 1 + number % 10
        return {"image": image + torch.randn(1, 8, 8) * self.train, "number": number}, number % 10
'''


def words(folder: Path, ranks: int, *more: str) -> tuple[list[str], dict[str, str]]:
    """The command line of the workload, and its environment. Its ledger and its code lie in
    `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workload.py").write_text(WORKLOAD)
    return [
        "model._target_=workload.Net",
        "data._target_=workload.Images",
        f"+data.samples={SAMPLES}",
        "trusted_modules=[workload]",
        "optimizer=adamw",
        "schedule=cosine",
        f"train.global_batch_size={BATCH}",
        f"train.accumulation_steps={ACCUMULATION}",
        f"train.epochs={EPOCHS}",
        "train.max_grad_norm=1",
        "train.log_every_steps=3",
        "checkpoint.every_steps=4",
        f"launch.nproc_per_node={ranks}",
        *more,
    ], {"PYTHONPATH": str(folder), "LEDGER": str(folder)}


def state_of(run_dir: Path) -> str:
    """One hash of the newest checkpoint: weights, optimizer, scaler, every rank's buffers."""
    digest = hashlib.sha256(weights(run_dir))
    training = TrainingState.load(run_dir / "checkpoints" / checkpoints(run_dir)[-1])
    stepper = training.objects[STEPPER]
    _digest(
        {**{name: stepper[name] for name in ("optimizer", "scaler")}, "buffers": training.buffers},
        digest,
    )
    return digest.hexdigest()


def _digest(value: Any, digest: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _digest(value[key], digest)
    elif isinstance(value, list | tuple):
        for item in value:
            _digest(item, digest)
    else:
        digest.update(repr(value).encode())


def check_ledger(folder: Path, ranks: int, epochs: int = EPOCHS) -> None:
    """Every sample once per epoch, over all ranks, in the history that led to the final weights."""
    passes_per_epoch = -(-SAMPLES // (BATCH // ACCUMULATION))
    seen: dict[int, list[int]] = collections.defaultdict(list)
    for rank in range(ranks):
        history: dict[int, list[int]] = {}
        for line in (folder / f"ledger_{rank}").read_text().splitlines(keepends=True):
            if line.endswith(
                "\n"
            ):  # a pass that is computed again overwrites what was lost with its process
                number, *samples = map(int, line.split())
                history[number] = samples
        for number, samples in history.items():
            seen[number // passes_per_epoch] += samples
    assert sorted(seen) == list(range(epochs)), sorted(seen)
    for epoch, samples in seen.items():
        assert sorted(samples) == list(range(SAMPLES)), f"epoch {epoch}: {len(samples)} samples"


def undisturbed(folder: Path, ranks: int, *more: str) -> tuple[str, float]:
    """The hash of the end, and the seconds it took."""
    command, env = words(folder, ranks, *more)
    began = time.monotonic()
    with running(folder / "run", *command, env=env) as job:
        assert job.end() == 0, job.said()
    check_ledger(folder, ranks)
    return state_of(folder / "run"), time.monotonic() - began


def disturbed(
    folder: Path, ranks: int, seed: int, seconds: float, *more: str
) -> tuple[str, list[str]]:
    """Train through a schedule of kills drawn from `seed`. Returns the hash of the end, and what
    was killed."""
    draw = random.Random(seed)
    killed = list[str]()
    command, env = words(folder, ranks, "launch.max_restarts=9", *more)
    kills = draw.randint(1, 3)
    while True:
        with running(folder / "run", *command, env=env) as job:
            while len(killed) < kills and job.process.poll() is None:
                time.sleep(draw.uniform(0.1, 0.8) * seconds / kills)
                victim = _victim(job, draw)
                if victim:
                    name, pid = victim
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed.append(name)
            code = job.end()
            wait_until(lambda: not processes_of(folder / "run"), "end of all processes", seconds=5)
            if code == 0:
                return state_of(folder / "run"), killed
            # The launcher itself, or three times the same rank before its first step: the user
            # starts the run again.
            assert code == -signal.SIGKILL or "not restarted" in job.said(), f"{code}: {job.said()}"


def _victim(job: Running, draw: random.Random) -> tuple[str, int] | None:
    candidates = {f"rank {rank}": pid for rank, pid in job.workers().items()} | {
        "launcher": job.process.pid
    }
    name = draw.choice(sorted(candidates))
    if job.process.poll() is not None:
        return None
    return (name, candidates[name])


def main() -> int:
    parser = argparse.ArgumentParser(description="Random SIGKILLs against whole runs.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--schedules", type=int, default=20, help="for each number of ranks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    bad = 0
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix="chaos_") as folder:
            expected, _ = undisturbed(
                Path(folder, "first"), ranks
            )  # slow: nothing of it is in the page cache yet
            again, seconds = undisturbed(Path(folder, "reference"), ranks)
            assert again == expected
            print(f"{ranks} ranks, undisturbed: {expected[:16]} in {seconds:.1f} s", flush=True)
            same = 0
            kills = []
            for number in range(arguments.schedules):
                seed = arguments.seed + number
                place = Path(folder, f"seed_{seed}")
                found, killed = disturbed(place, ranks, seed, seconds)
                check_ledger(place, ranks)
                same += found == expected
                kills.append(len(killed))
                print(
                    f"{ranks} ranks, seed {seed}: killed {', '.join(killed) or 'nothing'}:"
                    f" {found[:16]}",
                    flush=True,
                )
            print(
                f"{ranks} ranks: {same} of {arguments.schedules} the same,"
                f" {statistics.mean(kills):.1f} kills each"
            )
            bad += arguments.schedules - same
            if sum(kills) < arguments.schedules:
                print(
                    "too few kills to show anything: most moments lay behind the end of their run"
                )
                bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
