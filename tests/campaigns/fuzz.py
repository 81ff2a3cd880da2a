"""Random commands under random faults: each ends as if nobody had disturbed it, or says why it does
not.

    python -m tests.campaigns.fuzz [--cases 500] [--seed 0] [--at-once 2] [--out FILE]   (or: make
                                                                                         fuzz)
    python -m tests.campaigns.fuzz --case SEED [--fault NAME]                   one case, again

A case is a command (model, data, strategy, processes, checkpoints, ...: five cases in a row share
one), a fault (tests/campaigns/fuzz_faults.py) and a moment, all drawn from the seed. Where the
fault ends the command, the same command is given again, as a user would. What must be true then:

- The end has the same bytes as that of the run that nobody disturbed: weights, optimizer, every
  rank's buffers; the
  samples of each micro-batch; every line of metrics.jsonl once, with the same numbers but for
  clocks; the scores.
- Each command ends with an exit code that the fault may cause. A failure has one FATAL block with a
  remedy, that names
  the cause, and failure.json says the same; a stop or a success has no FATAL and no traceback.
- Nothing is left: no process five seconds after the command, nothing of it in /dev/shm, no lock, no
  half-written file.

Three cases of seven are scripts instead (tests/campaigns/fuzz_scripts.py): loops of the user's own
with sums, gathers, changing data, samplers, streams, several loaders and models, accumulation,
schedules, keyed noise and stops, held against plain torch in float64; and sweeps.

A command that takes longer than its limit is a failure. Results are a line of JSON each in --out;
cases that are there already are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_train.checkpoints.layout import places
from ddp_train.engine.metrics_hook import RESIZE
from ddp_train.linux import adopting_orphans, children_of, state_of
from ddp_train.resilience import run_lock
from ddp_train.telemetry.metrics_log import last_step
from tests.campaigns import chaos, fuzz_faults, fuzz_scripts
from tests.campaigns.fuzz_faults import FAILED, STOPPED, Command, Fault, Stage
from tests.support import zygote
from tests.support.commands import (
    LAUNCH,
    ROOT,
    Running,
    environment,
    fatal_lines,
    processes_of,
    read,
    torchrun,
)

CASES_PER_COMMAND = 5
COMMAND_SECONDS = 60.0
SLOW_SECONDS = 25.0
"""For one command: until it is ended, and until it has failed all the same. The longest that is
meant to be takes ten, on a busy machine; launch.grace_seconds are 30. Where more processes want to
run than there are cores, it is as many times longer."""
LEAVE_SECONDS = 5.0
TORCHRUN_PART = 0.15
"""Of the cases whose fault is one for torchrun too."""
MOST_COMMANDS = 4
"""Given until a case must have ended well."""
CLOCKS = ("time", "figures")
SUMS_UP = ("train", "test", "validation", "steps", "samples_seen", "stopped_early")


OWN = "own/"
"""Before the names of what the tasks in tests/campaigns/fuzz_code.py log."""
SAMPLES = "own/samples"
"""How many samples a line's numbers are of."""


NO_SPACE = 73
FOLDER_REFUSED = re.compile(r"configuration:\n  - run_dir=.*cannot be written .*; free some space")
"""Before a run begins its folder is a mistake as any other."""
KILLED_AS_IT_ENDED = re.compile(
    r"^Exception ignored in: <function _MultiProcessingDataLoaderIter\.__del__ .*\n"
    r"Traceback.*\n(?: .*\n)+RuntimeError: DataLoader worker .* is killed by signal.*\n",
    re.MULTILINE,
)
"""The lines that torch prints of a loader process that is killed while it is ended."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class WrongError(Exception):
    """A command ended as it must not."""


def expect(condition: object, message: str) -> None:
    if not condition:
        raise WrongError(message)


# --- a run, and what it ended with ----------------------------------------------------------------


@dataclass
class Ended:
    """A command that is over."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass
class Outcome:
    """What a run directory and a ledger hold at the end."""

    state: str
    lines: list[dict[str, Any]]
    summary: dict[str, Any]
    samples: dict[tuple[int, int, int], str]
    """Of each rank, step and micro-batch."""
    seconds: float = 0.0


def outcome(run_dir: Path, ledger: Path) -> Outcome:
    lines = []
    file = run_dir / "metrics.jsonl"  # which a fault may have removed after the last line
    for text in file.read_text().splitlines() if file.exists() else ():
        line = {name: value for name, value in json.loads(text).items() if name not in CLOCKS}
        if line["kind"] == RESIZE:
            continue
        lines.append(
            {
                name: value
                for name, value in line.items()
                if not name.endswith(("_per_second", "mfu"))
            }
        )
    summary = read(run_dir, "summary.json")
    kept = {name: summary[name] for name in SUMS_UP} | {
        "epochs done": len(summary["epoch_seconds"])
    }
    if best := summary["best"]:
        kept["best"] = {name: value for name, value in best.items() if name != "checkpoint"}
    samples = {}
    for file in ledger.iterdir():
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, number, numbers = line.split(" ", 2)
                samples[int(file.name.removeprefix("rank_")), int(step), int(number)] = (
                    numbers.strip()
                )
    return Outcome(chaos.state_of(run_dir), lines, kept, samples)


def differences(
    found: Outcome,
    expected: Outcome,
    stopped: bool,
    lines_lost: bool,
    resized: bool = False,
    numbers_lost: bool = False,
) -> list[str]:
    """The differences between two outcomes.

    stopped: a stop adds a line to metrics.jsonl.
    lines_lost: the fault was that lines went, or a digit of one.
    resized: the number of processes has changed: other ranks had the samples of a step, and sums
        were made in another order.
    numbers_lost: a rank was lost, and with it what a task has logged since the last line.
    """
    rounding = (
        1e-8 if resized else 1e-13
    )  # a sum of losses that was saved in between is rounded once more
    if resized:
        found, expected = (
            replace(one, state="", samples=_of_all_ranks(one.samples)) for one in (found, expected)
        )
    wrong = [] if found.state == expected.state else ["weights, optimizer or buffers"]
    for name in found.summary.keys() | expected.summary.keys():
        if not _equal(found.summary.get(name), expected.summary.get(name), rounding):
            wrong.append(
                f"summary.json: {name} {found.summary.get(name)}, not {expected.summary.get(name)}"
            )
    odd = [
        place
        for place, samples in found.samples.items()
        if expected.samples.get(place, "none") != samples
    ]
    odd += [place for place in expected.samples if place not in found.samples]
    wrong += [f"samples of (rank, step, micro-batch) {odd[0]}"] if odd else []
    if lines_lost:
        return wrong
    return wrong + _lines_differ(found.lines, expected.lines, stopped, rounding, numbers_lost)


def _of_all_ranks(samples: dict[tuple[int, int, int], str]) -> dict[tuple[int, int, int], str]:
    """The samples of each step, of all ranks together; one that several ranks had counts once: a
    rank without any computes another's with weight zero."""
    steps: dict[int, set[int]] = {}
    for (_, step, _), numbers in samples.items():
        steps.setdefault(step, set()).update(map(int, numbers.split()))
    return {(0, step, 0): " ".join(map(str, sorted(numbers))) for step, numbers in steps.items()}


def _lines_differ(
    found: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    stopped: bool,
    rounding: float,
    numbers_lost: bool,
) -> list[str]:
    ours, theirs = (
        {(line["kind"], line["step"]): line for line in lines} for lines in (found, expected)
    )
    wrong = [] if len(ours) == len(found) else ["a line of metrics.jsonl is there twice"]
    if [line["step"] for line in found] != sorted(line["step"] for line in found):
        wrong.append("lines of metrics.jsonl are out of order")
    missing = sorted(theirs.keys() - ours.keys())
    extra = sorted(ours.keys() - theirs.keys())
    wrong += [f"metrics.jsonl lacks {missing}"] if missing else []
    wrong += (
        [f"metrics.jsonl has {extra} too"]
        if any(kind != "train" or not stopped for kind, _ in extra)
        else []
    )
    for key in sorted(ours.keys() & theirs.keys()):
        whole = _before(ours, key) == _before(theirs, key)  # else it is the mean of fewer steps
        may_lack = numbers_lost or not whole
        numbers_lack = may_lack and _has_fewer_samples(ours[key], theirs[key])
        for name in sorted(ours[key].keys() | theirs[key].keys()):
            if numbers_lack and name.startswith(OWN):
                continue
            one = ours[key].get(name)
            other = theirs[key].get(name)
            if not _equal(one, other, rounding) and (whole or name != "loss"):
                wrong.append(f"{name} of {key}: {one}, not {other}")
    return wrong


def _has_fewer_samples(line: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether a task has logged some of the samples of a line, and not all."""
    return line.get(SAMPLES, 0) < expected.get(SAMPLES, 0)


def _before(lines: dict[tuple[str, int], Any], key: tuple[str, int]) -> int:
    return max((step for kind, step in lines if kind == key[0] and step < key[1]), default=0)


def _equal(ours: Any, theirs: Any, rounding: float) -> bool:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(
            _equal(ours[name], theirs[name], rounding) for name in ours
        )
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= rounding * abs(theirs)
    return ours == theirs


# --- commands -------------------------------------------------------------------------------------


KINDS = ("mlp", "cnn", "own", "own", "linear", "gpt", "folder", "drawn", "drawn", "words", "words")
HAVE_LOADERS = ("own", "folder", "words")
LABELLED = ("mlp", "cnn", "own", "folder")
EVALUATIONS = (
    "train.evaluate_every_epochs=2",
    "train.evaluate_every_epochs=99",
    "train.evaluate_every_steps=1",
    "train.evaluate_every_steps=2",
    "train.evaluate_every_steps=5",
)
SCHEDULES = (
    "schedule=constant",
    "schedule=one_cycle",
    "schedule=polynomial",
    "schedule=step",
    "schedule=wsd schedule.decay=sqrt",
    "schedule=ExponentialLR schedule.gamma=0.9",
    "schedule=CosineAnnealingLR schedule.interval=epoch",
    "schedule=OneCycleLR schedule.max_lr=0.1",
    "schedule=ReduceLROnPlateau schedule.patience=0 schedule.threshold=0.05",
    "schedule=ReduceLROnPlateau schedule.patience=0 schedule.factor=0.5 schedule.warmup_steps=2",
    "schedule._target_=tests.campaigns.fuzz_code.falling",
    "schedule._target_=tests.campaigns.fuzz_code.falling schedule.interval=epoch",
)
"""Words of one choice, with spaces between them, here and below."""


def drawn_command(number: int, data: Path) -> Command:
    """data: holds the images and the text that some of them read."""
    draw = random.Random(f"command {number}")
    ranks = draw.choices([1, 2, 3, 4], [2, 3, 4, 2])[0]
    if ranks > 1:
        strategy = draw.choices(["ddp", "ordered"], [4, 1])[0]
    else:
        strategy = draw.choice(["ddp", "single", "ordered"])
    if strategy == "ordered" and ranks == 3:
        ranks = 4
    kind = draw.choice(KINDS)
    samples = draw.randint(48, 96)
    loaders = draw.choice([0, 0, 1, 2])
    words = {
        "mlp": ["model=mlp", f"data.limit={samples}"],
        "cnn": ["model=cnn", f"data.limit={samples}"],
        "own": [
            "model._target_=tests.campaigns.fuzz_code.Net",
            "data._target_=tests.campaigns.fuzz_code.Rows",
            f"+data.samples={samples}",
        ],
        "linear": [
            "model=linear_regression",
            "data=linear_regression",
            f"data.samples={samples}",
            "data.test_samples=40",
        ],
        "gpt": [
            "model=gpt",
            "model.layers=1",
            "model.width=16",
            "model.heads=2",
            "data=text",
            "data.length=16",
            f"data.path={data}/text.txt",
            "data.test_part=0.2",
        ],
        "folder": [
            "model=mlp",
            "data=image_folder",
            f"data.root={data}/images",
            "data.image_size=8",
        ],
        "drawn": [
            "model=mlp",
            f"data.limit={samples}",
            "task._target_=tests.campaigns.fuzz_code.Drawn",
        ],
        "words": [
            "model._target_=tests.campaigns.fuzz_code.Reader",
            "task._target_=tests.campaigns.fuzz_code.NextWord",
            "data._target_=tests.campaigns.fuzz_code.Sentences",
            f"+data.samples={samples}",
            f"+data.batch='{draw.choice(['encoding', 'attributes', 'in place', 'dict'])}'",
        ],
    }[kind]
    words += [
        "trusted_modules=[tests]",
        "hooks=[tests.campaigns.fuzz_code.Hook]",
        f"strategy={strategy}",
    ]
    words += [
        f"launch.nproc_per_node={ranks}",
        "launch.threads_per_process=1",
        "train.global_batch_size=24",
    ]
    words += drawn_length(draw)
    words.append(f"train.log_every_steps={draw.choice([1, 1, 2, 3, 50])}")
    restarts = draw.choice([0, 0, 1, 3])
    words += [f"launch.max_restarts={restarts}"] if restarts else []
    if kind in HAVE_LOADERS:
        words.append(f"tuning.num_workers={loaders}")
    optional = [
        *further_sets(kind, data),
        (0.3, f"train.accumulation_steps={draw.choice([2, 3])}"),
        (0.7, f"optimizer={draw.choice(['adamw', 'adam', 'rmsprop', 'lamb', 'lars', 'adadelta'])}"),
        (0.3, "train.max_grad_norm=1"),
        (0.8, f"checkpoint.every_steps={draw.choice([1, 2, 3, 4, 5, 1000])}"),
        (0.5, f"checkpoint.keep={draw.choice([1, 3])}"),
        (0.5, draw.choice(EVALUATIONS)),
        (0.5, "train.evaluate_batch_size=8"),
        (0.7, draw.choice(SCHEDULES)),
        (0.2, "train.ema_decay=0.9"),
        (0.1, "tuning.precision=fp64"),
        (0.2, "data.validation=0.2") if kind != "gpt" else (0.0, ""),
        (0.2, "data.weights=balanced") if kind in LABELLED else (0.0, ""),
        (0.2, "data.mixup=0.2") if kind in LABELLED else (0.0, ""),
        (0.3, "checkpoint.best=true"),
        (0.1, "train.early_stopping.patience=1"),
        (0.15, "strategy.sync_bn=true") if strategy == "ddp" and ranks > 1 else (0.0, ""),
        (
            (0.15, "strategy.gradient_as_bucket_view=false")
            if strategy == "ddp" and ranks > 1
            else (0.0, "")
        ),
        (
            (0.15, "strategy.broadcast_buffers=false")
            if strategy == "ddp" and ranks > 1
            else (0.0, "")
        ),
    ]
    for probability, text in optional:
        if draw.random() < probability:
            words += text.split()
    if kind not in HAVE_LOADERS:
        loaders = 0
    return Command(number, kind, ranks, words, restarts, loaders)


def drawn_length(draw: random.Random) -> list[str]:
    """By epochs, by steps, or by what comes first."""
    epochs = f"train.epochs={draw.randint(2, 3)}"
    steps = f"train.max_steps={draw.randint(3, 9)}"
    return draw.choices([[epochs], [steps], [epochs, steps]], [60, 25, 15])[0]


def further_sets(kind: str, data: Path) -> list[tuple[float, str]]:
    """Validation and test sets by name, with their probabilities."""
    if kind == "own":
        return [(0.3, "+data.validation_sets.far.shift=1"), (0.3, "+data.test_sets.near.shift=0.1")]
    if kind == "folder":
        folder = f"{data}/images/val"
        return [(0.3, f"+data.validation_sets.more={folder}"), (0.3, f"+data.test_sets.a={folder}")]
    return []


def reference_of(number: int, base: Path) -> tuple[Command, Outcome]:
    """The command, with the outcome of the run that nobody disturbed. What the config refuses is
    drawn anew."""
    data = base / "data"
    if not data.is_dir():
        fuzz_faults.write_data(data)
    said = ""
    for attempt in range(20):
        command = drawn_command(number + 1_000_000 * attempt, data)
        ended, found = undisturbed(command, base)
        if found:
            return command, found
        expect(
            ended.code == 2,
            f"undisturbed, it ended with {ended.code}:\n{shell(command)}\n{ended.err}",
        )
        said = ended.err
    raise WrongError(f"command {number}: none of 20 draws is a valid config:\n{said}")


def undisturbed(command: Command, base: Path) -> tuple[Ended, Outcome | None]:
    """None if it does not end well."""
    place = base / f"reference_{command.number}"
    stage = Stage(command, place, random.Random(), place / "run")
    ended = finished(*start(stage, {}))
    if ended.code != 0:
        return ended, None
    found = outcome(stage.run_dir, stage.ledger)
    found.seconds = ended.seconds
    shutil.rmtree(place)
    return ended, found


def shell(command: Command) -> str:
    return " ".join(["python launch.py", *command.words])


def start(
    stage: Stage, fuzz: dict[str, Any], *more: str, limit: int = 0, again: bool = False
) -> tuple[Running, float]:
    """Gives the command. fuzz: for tests/campaigns/fuzz_code.py. limit: on the size of files.
    again: undisturbed."""
    stage.ledger.mkdir(parents=True, exist_ok=True)
    words = [*stage.command.words, f"run_dir={stage.run_dir}", *more]
    argv = [*LAUNCH, *words]
    if stage.torchrun:
        own = [
            word
            for word in words
            if not word.startswith(("launch.nproc_per_node", "launch.max_restarts"))
        ]
        argv = [
            *torchrun()[:1],
            "--standalone",  # a free port: several cases run at once
            f"--nproc_per_node={stage.command.ranks}",
            str(ROOT / "launch.py"),
            *own,
        ]
    output = stage.folder / f"command_{stage.given}.out"
    stage.given += 1
    with output.open("w") as out, output.with_suffix(".err").open("w") as err:
        process = zygote.Command(
            argv,
            cwd=ROOT,
            env=environment(
                {"FUZZ": json.dumps({"ledger": str(stage.ledger), "kind": "", **fuzz})}
            ),
            stdout=out,
            stderr=err,
            preexec_fn=functools.partial(fuzz_faults.prepare, limit),
        )
    return Running(process, stage.run_dir, output), time.monotonic()


def stacks_of(job: Running) -> str:
    """What each rank, and each loader process, is doing: all write into the stack file of their
    rank."""
    there = {pid: rank for pid, rank in processes_of(job.run_dir).items() if rank is not None}
    for pid in there:
        if caught(pid) >> (signal.SIGUSR2 - 1) & 1:
            fuzz_faults.send(pid, signal.SIGUSR2)
            time.sleep(0.2)  # one after the other
    files = sorted((job.run_dir / "logs").glob("*.stack"))
    return "\n".join(
        [
            f"processes and their ranks: {there}",
            *(f"{file.name}:\n{file.read_text()}" for file in files),
        ]
    )


def caught(pid: int) -> int:
    """The signals for which a process has a handler, as bits."""
    with contextlib.suppress(OSError):
        found = re.search(
            r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
        return int(found[1], 16) if found else 0
    return 0


def finished(job: Running, began: float) -> Ended:
    try:
        code = job.process.wait(max(1.0, COMMAND_SECONDS - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        stacks = stacks_of(job)
        job.process.kill()  # with it all that it has started: the next case would find them left
        job.process.wait()
        raise WrongError(
            f"no end within {COMMAND_SECONDS:.0f} s:\n{job.said()}\n{stacks}"
        ) from None
    ended = Ended(code, job.output.read_text(), job.said(), time.monotonic() - began)
    waiting = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
    slow = ended.seconds > SLOW_SECONDS * waiting
    expect(not slow, f"it took {ended.seconds:.1f} s:\n{ended.out}{ended.err}")
    return ended


# --- what must be true after each command ---------------------------------------------------------


def check_said(stage: Stage, ended: Ended, codes: frozenset[int], named: str) -> None:
    """The exit code, and what it says of a failure. named: the FATAL block must match it."""
    said = ended.err + ended.out
    code = ended.code
    if -code in STOP_SIGNALS and (stage.torchrun or not said):
        return  # it had not begun: the default of that signal
    expect(code in codes, f"exit code {code}, not one of {sorted(codes)}:\n{ended.err}")
    if stage.torchrun or code < 0:
        return  # the agent says things of its own; a killed launcher says nothing
    *before, last = ended.err.split("\nrestarting (")
    for attempt in before:
        expect(
            "FATAL" not in attempt or "is saved: a rank that" not in attempt,
            f"nothing was lost:\n{ended.err}",
        )
    fatal = fatal_lines(last)
    if code not in FAILED:
        expect(not fatal, f"FATAL in a command that ended with {code}:\n{ended.err}")
        expect(
            "Traceback" not in KILLED_AS_IT_ENDED.sub("", last),
            f"a traceback in a command that ended with {code}:\n{ended.err}",
        )
    if code in (0, 2, *STOPPED) or (code == NO_SPACE and FOLDER_REFUSED.search(last)):
        return
    expect(len(fatal) == 1, f"{len(fatal)} FATAL lines with exit code {code}:\n{ended.err}")
    block = last[last.index(fatal[0]) :]
    expect("\n  remedy: " in block and "\n  remedy: \n" not in block, f"no remedy:\n{ended.err}")
    expect(fuzz_faults.matches(named, block), f"the cause is not named ({named}):\n{ended.err}")
    if (stage.run_dir / "failure.json").exists():
        failure = read(stage.run_dir, "failure.json")
        expect(
            fatal[0].startswith(f"FATAL {failure['kind']} ("),
            f"failure.json has another kind: {failure}",
        )
    else:
        expect(stage.unwritable, f"no failure.json:\n{ended.err}")


def check_left(stage: Stage, before: set[str], killed: bool = False) -> None:
    """before: what was in /dev/shm. killed: whether the launcher was, which removes what killed
    loaders leave there."""
    deadline = time.monotonic() + LEAVE_SECONDS
    check_no_process_left()
    while run_lock.is_held(stage.run_dir / run_lock.FILE):
        expect(time.monotonic() < deadline + LEAVE_SECONDS, "the lock is still held")
        time.sleep(0.02)
    shared = [name for name in set(os.listdir("/dev/shm")) - before if _of_nobody(name)]  # noqa: PTH208
    expect(not shared or killed, f"left in /dev/shm: {shared}")


def check_no_process_left() -> None:
    """Wait for the processes of a command. Raises WrongError if some stay, which are ended."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while (left := _own_children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        fuzz_faults.send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    expect(not left, f"processes are left: {list(left.values())}")


def _own_children() -> dict[int, str]:
    """Processes that a command has left, which this process has adopted; those that have ended are
    buried."""
    found = {}
    for pid in children_of(os.getpid()):
        if pid == zygote.zygote_pid() or pid in KEPT:
            continue
        if state_of(pid) == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        else:
            with contextlib.suppress(OSError):
                found[pid] = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .rstrip(b"\0")
                    .replace(b"\0", b" ")
                    .decode()
                )
    return found


KEPT: set[int] = set()
"""Children that are no command's."""


def _of_nobody(name: str) -> bool:
    """Shared memory of torch, named after a process that is gone."""
    words = name.split("_")
    return (
        words[0] == "torch"
        and len(words) > 1
        and words[1].isdigit()
        and state_of(int(words[1])) in ("", "Z")
    )


def check_end(stage: Stage, expected: Outcome, stopped: bool) -> None:
    """Check a case whose last command ended with 0."""
    for name in fuzz_faults.STRAYS:
        shutil.rmtree(stage.run_dir / "checkpoints" / name, ignore_errors=True)
    found = outcome(stage.run_dir, stage.ledger)
    wrong = differences(found, expected, stopped, stage.lines_lost, stage.resized, stage.rank_lost)
    parts = [
        str(path.relative_to(stage.run_dir))
        for path in stage.run_dir.rglob("*")
        if ".part" in path.name and "_before_" not in str(path)
    ]  # what checkpoint.resume=never has set aside
    wrong += [f"left in the run directory: {parts}"] if parts else []
    wrong += (
        ["failure.json of a run that is completed"]
        if (stage.run_dir / "failure.json").exists()
        else []
    )
    expect(not wrong, "; ".join(wrong))


# --- cases ----------------------------------------------------------------------------------------


@dataclass
class Result:
    seed: int
    fault: str
    outcome: str
    """went on, restarted, given again, refused and repaired, or WRONG; of a script: see
    fuzz_scripts.Ended."""
    codes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    why: str = ""
    command: str = ""

    def line(self) -> str:
        codes = ", ".join(map(str, self.codes))
        return (
            f"case {self.seed}: {self.fault}: {self.outcome} (exit codes {codes};"
            f" {self.seconds:.1f} s)"
        )


class Fuzzer:
    """Runs cases one after the other, and keeps the reference of the last command."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.number = -1
        self.reference: tuple[Command, Outcome] | None = None

    def case(self, seed: int, fault_name: str = "", torchrun: bool = False) -> Result:
        """Never raises for what the run does. torchrun: under it, whether that was drawn or not."""
        if fuzz_scripts.is_of_scripts(seed // CASES_PER_COMMAND):
            return self.script_case(seed)
        if self.number != seed // CASES_PER_COMMAND or self.reference is None:
            self.number = seed // CASES_PER_COMMAND
            self.reference = None
            try:
                self.reference = reference_of(self.number, self.base)
            except WrongError as error:
                return Result(seed, "none", "WRONG", why=str(error))
        command, expected = self.reference
        draw = random.Random(f"case {seed}")
        fault = fuzz_faults.drawn_fault(command, draw, fault_name)
        if fault.resizes:
            command = fuzz_faults.with_range(command)
            ended, expected = undisturbed(command, self.base)
            if expected is None:
                return Result(
                    seed, fault.name, "WRONG", why=f"with a range, undisturbed:\n{ended.err}"
                )
        folder = Path(tempfile.mkdtemp(prefix=f"case_{seed}_", dir=self.base))
        stage = Stage(command, folder, draw, folder / "run", seconds=expected.seconds)
        stage.resized = fault.resizes
        stage.torchrun = fault.suits_torchrun and (draw.random() < TORCHRUN_PART or torchrun)
        under = "torchrun: " * stage.torchrun
        result = Result(seed, under + fault.name, "WRONG", command=shell(command))
        began = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                if fault.disk:
                    stack.enter_context(fuzz_faults.small_disk(stage))
                result.outcome = self.play(stage, fault, expected, result.codes)
            shutil.rmtree(folder)
        except Exception as error:  # noqa: BLE001  what cannot be read is not as it should be
            result.why = str(error) if isinstance(error, WrongError) else traceback.format_exc()
            fuzz_faults.make_writable(stage)
            result.why += f"\n  fault: {stage.said}\n  left in {folder}"
        result.seconds = time.monotonic() - began
        return result

    def script_case(self, seed: int) -> Result:
        """A loop of the user's own, or a sweep: tests/campaigns/fuzz_scripts.py."""
        draw = random.Random(f"script {seed}")
        kind = fuzz_scripts.drawn_kind(draw)
        result = Result(seed, kind, "WRONG")
        folder = Path(tempfile.mkdtemp(prefix=f"case_{seed}_", dir=self.base))
        said: list[str] = []
        began = time.monotonic()
        try:
            ended = fuzz_scripts.PLAYS[kind](draw, folder, said)
            result.codes = ended.codes
            check_no_process_left()
            result.outcome = ended.outcome
            shutil.rmtree(folder)
        except Exception as error:  # noqa: BLE001  what cannot be read is not as it should be
            is_told = isinstance(error, (WrongError, fuzz_scripts.OddError))
            result.why = str(error) if is_told else traceback.format_exc()
            result.why += "\n  ".join(["", *said, f"left in {folder}"])
        result.seconds = time.monotonic() - began
        return result

    def play(self, stage: Stage, fault: Fault, expected: Outcome, codes: list[int]) -> str:
        shared = set(os.listdir("/dev/shm"))  # noqa: PTH208
        job, began = start(stage, stage.own_code(fault), *fault.words, limit=fault.file_bytes)
        try:
            fault.during(stage, job)
            ended = finished(job, began)
        finally:
            job.process.kill()
            job.process.wait()
        codes.append(ended.code)
        stage.say(f"ended with {ended.code} after {ended.seconds:.1f} s")
        check_said(
            stage, ended, fault.codes | ({1} if stage.torchrun else frozenset()), fault.named
        )
        check_left(stage, shared, killed=ended.code < 0)
        shared = set(os.listdir("/dev/shm"))  # noqa: PTH208
        fault.after(stage)
        word = "restarted" if "\nrestarting (" in ended.err else "went on"
        stage.rank_lost = word == "restarted" or ended.code in (1, *FAILED)
        stopped = (
            ended.code in (*STOPPED, 1)
            or re.search("SIG(TERM|INT|HUP|USR1)", fault.name) is not None
        )
        more: tuple[str, ...] = ()
        while codes[-1] != 0 or (fault.damages and len(codes) == 1):
            expect(len(codes) < MOST_COMMANDS, f"not completed in {codes}:\n{ended.err}")
            lost = not more and not places(stage.run_dir) and last_step(stage.run_dir)
            job, began = start(stage, {}, *fault.words, *more)
            ended = finished(job, began)
            codes.append(ended.code)
            may_be_refused = fault.damages and len(codes) == 2
            refused = 1 if stage.torchrun else 65
            check_said(
                stage,
                ended,
                frozenset({0, refused} if may_be_refused else {0}),
                "no valid checkpoint",
            )
            check_left(stage, shared)
            expect(
                not lost or "holds no checkpoint" in ended.err,
                f"it began anew without a word:\n{ended.err}",
            )
            word = "refused, then begun anew" if more else "given again"
            more = ()
            if ended.code == refused:
                expect(
                    "holds no valid checkpoint" in ended.err,
                    f"refused for something else:\n{ended.err}",
                )
                expect(
                    not fuzz_faults.valid_checkpoints(stage.run_dir),
                    f"a valid one is there:\n{ended.err}",
                )
                more = ("checkpoint.resume=never",)
        check_end(stage, expected, stopped)
        if fault.name == "resize":
            expect(
                read(stage.run_dir, "summary.json")["steps_redone"] == 0,
                "steps were computed twice",
            )
        return word


def have_own_shared_memory() -> None:
    """As root this process, and what it starts, has a /dev/shm to itself: what other work leaves
    there is not seen."""
    libc = ctypes.CDLL(None)
    if libc.unshare(CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)


CLONE_NEWNS = 0x00020000  # linux/sched.h


@contextlib.contextmanager
def prepared(base: Path | None = None) -> Iterator[Fuzzer]:
    """Inside, orphans of commands become children of this process: none of them is overlooked."""
    zygote.start()
    KEPT.update(children_of(os.getpid()))
    with contextlib.ExitStack() as stack:
        folder = base or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz_")))
        with adopting_orphans():
            yield Fuzzer(folder)


def tell(result: Result, out: Path | None) -> None:
    print(result.line(), flush=True)
    if result.outcome == "WRONG":
        print(
            f"  {result.why}\n  {result.command}\n  again: python -m tests.campaigns.fuzz --case"
            f" {result.seed}",
            flush=True,
        )
    if out:
        with out.open("a") as file:
            file.write(json.dumps(vars(result)) + "\n")


def table(results: list[dict[str, Any]]) -> str:
    outcomes = ["went on", "restarted", "given again", "refused, then begun anew"]
    outcomes += ["as in one process", "resumed", "swept", "refused", "WRONG"]
    count = Counter((one["fault"], one["outcome"]) for one in results)
    rows = ["| fault | " + " | ".join(outcomes) + " |", "|---|" + "---:|" * len(outcomes)]
    for fault in [*sorted({one["fault"] for one in results}), "all"]:
        cells = [
            sum(n for (name, kind), n in count.items() if kind == one and fault in (name, "all"))
            for one in outcomes
        ]
        rows.append(f"| {fault} | " + " | ".join(str(cell or "") for cell in cells) + " |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random commands under random faults.")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "build/fuzz/results.jsonl")
    parser.add_argument("--case", type=int, help="this case alone")
    parser.add_argument(
        "--fault", default="", help="with --case: this fault, not the one that is drawn"
    )
    parser.add_argument("--torchrun", action="store_true", help="with --case: under torchrun")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # I/N: of this process
    arguments = parser.parse_args()
    if arguments.case is not None or arguments.share:
        have_own_shared_memory()
    if arguments.case is not None:
        with prepared() as fuzzer:
            result = fuzzer.case(arguments.case, arguments.fault, arguments.torchrun)
            tell(result, None)
            if result.outcome == "WRONG":
                os._exit(1)  # the folder is left to be looked into
        return 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    done = {one["seed"] for one in _results(arguments.out)}
    seeds = [
        seed for seed in range(arguments.seed, arguments.seed + arguments.cases) if seed not in done
    ]
    if arguments.share:
        share, shares = map(int, arguments.share.split("/"))
        with prepared() as fuzzer:
            for seed in seeds:
                if seed // CASES_PER_COMMAND % shares == share:
                    tell(fuzzer.case(seed), arguments.out)
            if any(fuzzer.base.glob("case_*")):
                os._exit(0)  # as above
        return 0
    again = [sys.executable, "-m", "tests.campaigns.fuzz", *sys.argv[1:]]
    workers = [
        subprocess.Popen([*again, "--share", f"{share}/{arguments.at_once}"], cwd=ROOT)
        for share in range(arguments.at_once)
    ]
    for worker in workers:
        worker.wait()
    chosen = range(arguments.seed, arguments.seed + arguments.cases)
    results = [one for one in _results(arguments.out) if one["seed"] in chosen]
    wrong = [one["seed"] for one in results if one["outcome"] == "WRONG"]
    print(table(results))
    print(f"{len(results)} cases, {len(wrong)} wrong: {wrong}")
    return 1 if wrong or len(results) < arguments.cases else 0


def _results(out: Path) -> list[dict[str, Any]]:
    if out.exists():
        return [json.loads(line) for line in out.read_text().splitlines()]
    return []


if __name__ == "__main__":
    sys.exit(main())
