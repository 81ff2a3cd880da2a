"""Processes of a session are killed or stopped at random moments: no step may be computed twice
after all had done it, and the end must be that of the run that nobody disturbed.

    python -m tests.campaigns.lost_session [--ranks 3] [--kills 30] [--seed 0] [--kinds plain gan]
    python -m tests.campaigns.lost_session --gpu [--ranks 1 2]     the same on GPUs, over NCCL
    python -m tests.campaigns.lost_session --time [--gpu]          what keeping costs, without kills

Each rank notes each step as it begins it. Where it begins the next one, its last is done. The last
step of an epoch counts as done when its epoch has ended: where a process dies in an evaluation, it
is computed again, as what follows the loop is. Of several batches that add up to one update only
the first is noted. On GPUs steps are kept at a pace, and some are computed again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ddp_train.sessions.session_keeper import WORTH_TELLING_SECONDS
from tests.campaigns.lost_ranks import CLOCKS
from tests.support.commands import ROOT, Running, processes_of, running, wait_until, weights

SCRIPT = '''
import copy
import os
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import ddp_train

run_dir = sys.argv[1].removeprefix("run_dir=")
kind = sys.argv[2]
samples, epochs, width, hang_seconds, save_every = map(int, sys.argv[3:])
save_steps = 5 if samples < 1000 else 200


class Best:
    """Plain state of several types, and a tensor that is another one each time."""

    def __init__(self):
        self.seen = []
        self.names = {"last": None, 3: (1, 2)}

    def see(self, value):
        self.seen = [*self.seen[-20:], value]
        self.names["last"] = f"step {run.step}"

    def state_dict(self):
        mean = torch.tensor(self.seen, dtype=torch.float64)
        return {"seen": self.seen, "names": copy.deepcopy(self.names), "mean": mean}

    def load_state_dict(self, state):
        self.seen = state["seen"]
        self.names = state["names"]


class Scale:
    """As GradScaler, which is for GPUs: its state is plain."""

    def __init__(self):
        self.scale = 2.0**10
        self.good = 0

    def update(self):
        self.good += 1
        if self.good % 4 == 0:
            self.scale = 2.0**10 if self.scale > 2.0**12 else 2 * self.scale

    def state_dict(self):
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state):
        self.scale = state["scale"]
        self.good = state["good"]


def note(what):
    with open(f"{run_dir}.ledger_{run.rank}", "a") as file:
        file.write(f"{os.getpid()} {what} {time.monotonic()}\\n")


def rows():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def net(outputs):
    return nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


def evaluate(model, loader):
    note("evaluation")
    time.sleep(0.2)  # long enough to be killed in
    model.eval()
    with torch.no_grad():
        correct = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in loader)
    run.log("test/accuracy", run.sum(correct) / samples)
    model.train()


def plain():
    on_gpu = run.device.type == "cuda"
    model = run.wrap(net(2), sync_batch_norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    best = Best()
    scaler = torch.amp.GradScaler("cuda") if on_gpu else Scale()
    loader = run.loader(rows(), global_batch_size=18)
    test_loader = run.test_loader(rows(), batch_size=18)
    named = {"model": model, "optimizer": optimizer, "average": average}
    run.resume(**named, scheduler=scheduler, best=best, scaler=scaler)
    for epoch in run.epochs(epochs, save_every=save_every):
        for inputs, labels in loader:
            note(run.step)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=on_gpu):
                losses = F.cross_entropy(model(inputs), labels, reduction="none")
                loss = run.mean(losses)
            if on_gpu:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            else:
                (loss * scaler.scale).backward()
                for weight in model.parameters():
                    weight.grad /= scaler.scale
                optimizer.step()
            scaler.update()
            scheduler.step()
            average.update_parameters(model)
            run.log("loss", losses)
            best.see(run.sum(losses.sum().item()))
            if run.step % save_steps == 4 and save_every < 100:
                run.save()
        evaluate(model, test_loader)


def accumulate():
    model = run.wrap(net(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = run.loader(rows(), global_batch_size=9)
    run.resume(model=model, optimizer=optimizer)
    for epoch in run.epochs(epochs, save_every=save_every):
        for inputs, labels in loader:
            if run.step % 3 == 0:
                note(run.step)
            losses = F.cross_entropy(model(inputs), labels, reduction="none")
            run.mean(losses, accumulate=optimizer).backward()
            if run.step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)


def gan():
    generator = run.wrap(net(6))
    critic = run.wrap(net(1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    opt_d = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    loader = run.loader(rows(), global_batch_size=18)
    run.resume(generator=generator, critic=critic, opt_g=opt_g, opt_d=opt_d)
    for epoch in run.epochs(epochs, save_every=save_every):
        for real, _ in loader:
            note(run.step)
            fake = generator(ddp_train.noise_like(real))
            opt_d.zero_grad()
            losses = F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))
            run.mean(losses.squeeze(1)).backward()
            opt_d.step()
            opt_g.zero_grad()
            run.mean(F.softplus(-critic(fake)).squeeze(1)).backward()
            opt_g.step()
            run.log("critic", losses.squeeze(1))


if "LIMITED" in os.environ:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**36, 2**36))
restarts = int(os.environ.get("RESTARTS", 99))
with ddp_train.session(run_dir, max_restarts=restarts, timeout_seconds=hang_seconds) as run:
    torch.use_deterministic_algorithms(True)
    {"plain": plain, "accumulate": accumulate, "gan": gan}[kind]()
'''
KINDS = ("plain", "accumulate", "gan")
HANG_SECONDS = 4
LONGEST_REDONE = WORTH_TELLING_SECONDS
"""Seconds of training that a kill may cost on GPUs."""


@dataclass(frozen=True)
class Size:
    """How much a script trains."""

    samples: int = 162
    epochs: int = 6
    width: int = 16
    hang_seconds: int = 60
    save_every: int = 1000

    def words(self) -> list[str]:
        numbers = (self.samples, self.epochs, self.width, self.hang_seconds, self.save_every)
        return [str(number) for number in numbers]


@dataclass(frozen=True)
class Blow:
    """What happens to the processes, once every rank has noted so many steps of this attempt."""

    steps: int
    ranks: tuple[int, ...]
    number: int = signal.SIGKILL
    moment: str = "step"
    """Or evaluation, or saving: a checkpoint is being written."""
    delay: float = 0.0
    """Seconds after that moment."""


@dataclass
class Outcome:
    """What a run ended with."""

    weights: bytes
    training: dict[str, Any]
    lines: list[dict[str, Any]]
    ledgers: list[Ledger]
    said: str
    dead: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """From each blow to the next step that is begun."""

    @property
    def redone(self) -> int:
        return steps_redone(self.ledgers)


@dataclass(frozen=True)
class Note:
    process: int
    what: str
    time: float


Ledger = list[Note]


def ledgers_of(run_dir: Path, ranks: int) -> list[Ledger]:
    """What each rank has noted."""
    found = []
    for rank in range(ranks):
        file = run_dir.with_name(f"{run_dir.name}.ledger_{rank}")
        text = file.read_text() if file.exists() else ""
        notes = [line.split() for line in text.splitlines() if line.count(" ") == 2]
        found.append([Note(int(pid), what, float(at)) for pid, what, at in notes])
    return found


def attempts_of(ledger: Ledger) -> list[list[int]]:
    """The steps that a rank has begun in each attempt, in which it is another process."""
    attempts: dict[int, list[int]] = {}
    for note in ledger:
        if note.what.isdigit():
            attempts.setdefault(note.process, []).append(int(note.what))
    return list(attempts.values())


def steps_redone(ledgers: list[Ledger]) -> int:
    """How many steps were computed again after all ranks had begun the one behind them."""
    redone = 0
    by_rank = [attempts_of(ledger) for ledger in ledgers]
    steps = sorted({step for attempts in by_rank for attempt in attempts for step in attempt})
    done = -1
    for attempt in range(max(map(len, by_rank))):
        begun = [attempts[attempt] for attempts in by_rank if len(attempts) > attempt]
        first = min(steps[0] for steps in begun)
        redone += len([step for step in steps if first <= step < done])
        if len(begun) == len(by_rank):
            done = min(steps[-1] for steps in begun)
    return redone


def outcome(
    folder: Path,
    kind: str,
    ranks: int,
    size: Size,
    blows: Sequence[Blow] = (),
    gpu: bool = False,
    is_kept: bool = True,
) -> Outcome:
    """Run a script with these blows, one after the other.

    is_kept: False limits the size of files, so that nothing is kept.
    """
    folder.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = {"DDP_TRAIN_PROCESSES": str(ranks), "PYTHONPATH": str(ROOT)}
    if not is_kept:
        env["LIMITED"] = "1"
    if gpu:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(ranks)))
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    run_dir = folder / "run"
    command = [sys.executable, str(script)]
    seconds: list[float] = []
    dead: list[str] = []
    before: set[int] = set()
    with running(run_dir, kind, *size.words(), env=env, command=command) as job:
        for blow in blows:
            said = strike(job, ranks, blow, before)
            if said:
                dead.append(said)
                seconds += next_step(job, ranks, before)
        assert job.end(600) == 0, job.said()[-6000:]
        wait_until(lambda: not processes_of(run_dir), "end of all processes", seconds=20)
        said = job.said()
    newest = max((run_dir / "checkpoints").glob("step_*"))
    training = torch.load(newest / "training.pt", weights_only=True)
    # What is known of a loop after it was resumed, and not of its state.
    del training["session"]["gradients"]
    for loader in training["session"]["loaders"]:
        del loader["place"]["first"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    clocks = (*CLOCKS, "samples_per_second")
    lines = [{name: line[name] for name in line if name not in clocks} for line in lines]
    ledgers = ledgers_of(run_dir, ranks)
    return Outcome(weights(run_dir), training, lines, ledgers, said, dead, seconds)


def strike(job: Running, ranks: int, blow: Blow, before: set[int]) -> str:
    """Do it. Returns what was done; empty if the run was over before.

    before: processes of earlier attempts, to which those of now are added.
    """
    while not _all_are_new(job, ranks, before):
        if job.process.poll() is not None:
            return ""
        time.sleep(0.005)
    begun = [len(ledger) for ledger in ledgers_of(job.run_dir, ranks)]
    saved = _saved_in_part(job.run_dir)
    while not _has_come(job, blow, begun, saved):
        if job.process.poll() is not None:
            return ""
        time.sleep(0.001)
    time.sleep(blow.delay)
    pids = [ledger[-1].process for ledger in ledgers_of(job.run_dir, ranks)]
    before.update(pids)
    for rank in blow.ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[rank], blow.number)
    return f"{signal.Signals(blow.number).name} {blow.ranks} at {blow.moment}"


def _all_are_new(job: Running, ranks: int, before: set[int]) -> bool:
    """Whether all ranks have noted something in this attempt."""
    ledgers = ledgers_of(job.run_dir, ranks)
    return all(ledger and ledger[-1].process not in before for ledger in ledgers)


def _saved_in_part(run_dir: Path) -> set[Path]:
    """Checkpoints that are being written, or of which the writer was killed."""
    return {*(run_dir / "checkpoints").glob("step_*.part-*")}


def _has_come(job: Running, blow: Blow, begun: list[int], saved: set[Path]) -> bool:
    """Whether the moment has come.

    begun: how much each rank has noted in earlier attempts.
    saved: checkpoints that earlier attempts have left unfinished.
    """
    if blow.moment == "saving":
        return bool(_saved_in_part(job.run_dir) - saved)
    ledgers = ledgers_of(job.run_dir, len(begun))
    if blow.moment == "evaluation":
        return any(ledger[-1].what == "evaluation" for ledger in ledgers)
    pairs = zip(ledgers, begun, strict=True)
    return all(len(ledger) >= count + blow.steps for ledger, count in pairs)


def next_step(job: Running, ranks: int, before: set[int]) -> Iterator[float]:
    """The seconds until a new process has begun a step; nothing if the run ends before."""
    began = time.monotonic()
    while job.process.poll() is None:
        for ledger in ledgers_of(job.run_dir, ranks):
            if ledger[-1].process not in before:
                yield ledger[-1].time - began
                return
        time.sleep(0.005)


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """The differences from the run that nobody disturbed."""
    wrong = [] if found.weights == expected.weights else ["weights"]
    for name in expected.training:
        if not _are_equal(found.training[name], expected.training[name]):
            wrong.append(name)
    if found.lines != expected.lines:
        wrong.append("lines of metrics.jsonl")
    return wrong


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, float):
        return abs(one - other) <= 1e-12 * abs(other)  # a sum is rounded once more
    return one == other


def drawn(
    draw: random.Random, kind: str, ranks: int, count: int, longest_delay: float
) -> list[Blow]:
    """Blows at random moments: of one rank or of all, and one stop."""
    blows = []
    for number in range(count):
        moments = ["step", "step", "saving"]
        if kind == "plain":
            moments.append("evaluation")
        ranks_hit = (draw.randrange(ranks),)
        stops = number == 2 and ranks > 1
        if draw.random() < 0.3 and not stops:  # a run that is stopped as a whole is suspended
            ranks_hit = tuple(range(ranks))
        blow = Blow(
            draw.randint(1, 6),
            ranks_hit,
            moment=draw.choice(moments),
            delay=draw.uniform(0, longest_delay),
        )
        if stops:  # behind the second batch, before which more time is allowed
            blow = replace(blow, steps=4, number=signal.SIGSTOP, moment="step")
        blows.append(blow)
    return blows


@dataclass
class Row:
    """A line of the table."""

    kind: str
    ranks: int
    kills: int = 0
    runs: int = 0
    same: int = 0
    redone: int = 0
    redone_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def is_too_much(self, gpu: bool) -> bool:
        """Whether kills cost more than is promised."""
        if gpu:
            return self.redone_seconds > LONGEST_REDONE * self.kills
        return self.redone > 0

    def __str__(self) -> str:
        median = statistics.median(self.seconds) if self.seconds else 0.0
        return (
            f"| {self.kind} | {self.ranks} | {self.kills} | {self.same} of {self.runs} |"
            f" {self.redone} ({self.redone_seconds:.2f} s) | {median:.1f} s |"
        )


def campaign(kind: str, ranks: int, kills: int, seed: int, gpu: bool, folder: Path) -> Row:
    """Runs with five kills each, until there were so many."""
    size = Size(hang_seconds=HANG_SECONDS, save_every=2)
    longest_delay = 0.02
    if gpu:
        size = Size(4500, 4, 512, 15, save_every=2)
        longest_delay = 1.0
    expected = outcome(folder / "reference", kind, ranks, size, [], gpu)
    row = Row(kind, ranks)
    while row.kills < kills and row.runs < kills:
        draw = random.Random(f"{kind} {ranks} {seed} {row.runs}")
        place = folder / str(row.runs)
        blows = drawn(draw, kind, ranks, 5, longest_delay)
        found = outcome(place, kind, ranks, size, blows, gpu)
        wrong = differences(found, expected)
        step_seconds = _step_seconds(expected.ledgers[0])
        row.runs += 1
        row.kills += len(found.dead)
        row.same += not wrong
        row.redone += found.redone
        row.redone_seconds += found.redone * step_seconds
        row.seconds += found.seconds
        print(
            f"{kind}, {ranks} ranks, run {row.runs}: {'; '.join(found.dead)}:"
            f" {', '.join(wrong) or 'the same'}, {found.redone} steps computed twice",
            flush=True,
        )
        if wrong or (found.redone and not gpu):
            print(found.said, flush=True)
    return row


def _step_seconds(ledger: Ledger) -> float:
    """The mean time of a step in the second half: one that is kept takes longer."""
    times = [note.time for note in ledger if note.what.isdigit()]
    middle = len(times) // 2
    return (times[-1] - times[middle]) / (len(times) - 1 - middle)


def cost(ranks: int, gpu: bool, folder: Path, rounds: int = 3) -> str:
    """The time of a step with and without keeping, which a limit on files turns off."""
    times: dict[bool, list[float]] = {True: [], False: []}
    size = Size(4500, 4, 512 if gpu else 64)
    for number in range(rounds):
        for keeps in (True, False):
            place = folder / f"{number}_{keeps}"
            found = outcome(place, "plain", ranks, size, [], gpu, keeps)
            times[keeps].append(_step_seconds(found.ledgers[0]))
    kept, plain = (statistics.median(times[keeps]) for keeps in (True, False))
    return (
        f"{ranks} ranks, a step: {1e3 * kept:.2f} ms with keeping, {1e3 * plain:.2f} ms without"
        f" ({100 * (kept / plain - 1):+.1f} %); of {rounds} runs"
        f" {', '.join(f'{1e3 * one:.2f}' for one in times[True])} and"
        f" {', '.join(f'{1e3 * one:.2f}' for one in times[False])}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Processes of a session are killed while it trains."
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[3])
    parser.add_argument("--kills", type=int, default=30, help="of each kind, at least")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true", help="on GPUs")
    parser.add_argument("--time", action="store_true", help="what keeping costs, no kills")
    arguments = parser.parse_args()
    rows: list[Row] = []
    costs: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lost_session_") as folder:
        for ranks in arguments.ranks:
            if arguments.time:
                costs.append(cost(ranks, arguments.gpu, Path(folder, f"cost_{ranks}")))
                continue
            for kind in arguments.kinds:
                place = Path(folder, f"{kind}_{ranks}")
                rows.append(
                    campaign(kind, ranks, arguments.kills, arguments.seed, arguments.gpu, place)
                )
    print("| loop | ranks | kills | same bytes | steps computed twice | to the next step |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print(row)
    for line in costs:
        print(line)
    is_bad = any(row.same < row.runs or row.is_too_much(arguments.gpu) for row in rows)
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())
