"""The faults of tests/campaigns/fuzz.py: what happens to a command, when, and how the command may
end for it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from ddp_train.checkpoints.layout import MANIFEST, digest_of, places, read_manifest
from ddp_train.checkpoints.reader import defect_of, sha256_of
from ddp_train.commands.resize import resize
from ddp_train.errors import ConfigError
from tests.campaigns import fuzz_code
from tests.campaigns.lost_ranks import board_of, ranks_of
from tests.support.commands import Running, hear_signals, processes_of, server_of

FAILED = (65, 69, 70, 71, 73)
STOPPED = (75, 130, 143)
PHASES = (
    "data",
    "forward",
    "backward",
    "optimizer step",
    "record",
    "evaluation forward",
    "evaluation end",
    "checkpoint",
)
DELAY_SECONDS = 0.006
"""Of each micro-batch of a disturbed run, so that training is no shorter than the start."""
RESIZE_DELAY_SECONDS = 0.2
"""The same where processes are replaced several times meanwhile."""
HANG_SECONDS = 2.0
"""launch.timeout_seconds where a rank is to hang."""


@dataclass(frozen=True)
class Command:
    """A command that may be given again: what was drawn, and the words."""

    number: int
    kind: str
    ranks: int
    words: list[str]
    restarts: int
    loaders: int

    def value(self, key: str, default: str) -> str:
        return next(
            (word.partition("=")[2] for word in self.words if word.startswith(f"{key}=")), default
        )


@dataclass
class Stage:
    """A case on its way."""

    command: Command
    folder: Path
    draw: random.Random
    run_dir: Path
    seconds: float = 1.0
    """That the undisturbed run took."""
    said: list[str] = field(default_factory=list)
    """What was done, for the report of a failure."""
    torchrun: bool = False
    lines_lost: bool = False
    unwritable: bool = False
    """Whether failure.json may be impossible."""
    resized: bool = False
    rank_lost: bool = False
    given: int = 0
    """How many commands have been."""

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    def say(self, what: str) -> None:
        self.said.append(what)

    def own_code(self, fault: Fault) -> dict[str, Any]:
        """FUZZ of tests/campaigns/fuzz_code.py."""
        asked: dict[str, Any] = {"delay": RESIZE_DELAY_SECONDS if fault.resizes else DELAY_SECONDS}
        if fault.code:
            asked |= {
                "kind": fault.code,
                "rank": self.draw.randrange(self.command.ranks),
                "step": self.draw.randrange(1, 5),
            }
            asked |= {"of_train": self.draw.random() < 0.7, "sample": self.draw.randrange(30)}
            # Again in the first step of the next attempt it would last the 120 s that a first step
            # may take.
            if self.draw.random() < 0.5 or (fault.code == "hang" and self.command.restarts):
                asked["once"] = str(self.folder / "happened")
            self.say(str(asked))
        return asked


During = Callable[[Stage, Running], None]
After = Callable[[Stage], None]


def nothing(*_: Any) -> None:
    """No fault here."""


@dataclass(frozen=True)
class Fault:
    """One fault: what is done, and what may come of it."""

    name: str
    codes: frozenset[int]
    """With which the disturbed command may end."""
    during: During = nothing
    after: After = nothing
    """Once it has ended: what is damaged, or repaired."""
    words: tuple[str, ...] = ()
    code: str = ""
    """A fault in own code, of tests/campaigns/fuzz_code.py."""
    named: str = ""
    """What the FATAL block says, a regular expression."""
    fits: Callable[[Command], bool] = lambda _: True
    damages: bool = False
    """`after` damages files: the next command may find no checkpoint."""
    disk: bool = False
    """The run directory is on a small disk of its own."""
    file_bytes: int = 0
    """The limit on the size of files (ulimit -f); 0: none."""
    weight: float = 1.0
    resizes: bool = False
    """The number of processes changes: the command has a range, and float64 where the order of sums
    does."""
    suits_torchrun: bool = False
    """Whether it may come under torchrun, whose agent ends with 1 for all failures, and restarts
    nothing here."""

    @property
    def needs_root(self) -> bool:
        """Tell whether a fault mounts something, or makes a folder immutable."""
        return self.disk or self.after is make_writable


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def prepare(limit: int) -> None:
    """Prepare the process of a command.

    limit: bytes of a file, 0: any.
    """
    hear_signals()
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def write_data(folder: Path) -> None:
    """Images in folders of two classes, and a text."""
    numbers = np.random.default_rng(0)
    for split, count in (("train", 30), ("val", 10)):
        for label in ("cat", "dog"):
            place = folder / "images" / split / label
            place.mkdir(parents=True)
            for number in range(count):
                pixels = numbers.integers(0, 255, (10, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number:02}.png")
    (folder / "text.txt").write_text(
        "".join(chr(97 + number) for number in numbers.integers(0, 26, 1200))
    )


# --- the moment -----------------------------------------------------------------------------------


def wait(stage: Stage, job: Running, training: bool = False) -> bool:
    """Wait for a moment that is drawn: a time, or a phase of a step of a rank. Returns False if the
    run is over.

    training: not before every rank has begun its second batch.
    """
    draw = stage.draw
    ranks = stage.command.ranks
    by_time = stage.torchrun or (draw.random() < 0.4 and not training)
    seconds = draw.uniform(0, 1.3 * stage.seconds)
    rank = draw.randrange(ranks)
    step = draw.randrange(8)
    phase = draw.choice(PHASES)
    if by_time:
        stage.say(f"after {seconds:.2f} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(seconds)
        return job.process.poll() is None
    stage.say(f"rank {rank} at step {step}, {phase}")
    while job.process.poll() is None:
        try:
            board = board_of(job, ranks)
        except (AssertionError, OSError):
            return False
        try:
            there = [Path("/proc", str(pid)) for pid in ranks_of(job).values()]
            while job.process.poll() is None and all(worker.exists() for worker in there):
                one = board.ranks[rank]
                begun = not training or all(
                    each.batches > 1 for each in board.ranks
                )  # until then the limit is 120 s
                if begun and one.step >= step and (one.phase == phase or one.step > step + 1):
                    return True
                if one.phase == "end" and not training:
                    return True
                time.sleep(0.0005)
        finally:
            board.close()
        time.sleep(0.01)
    return False


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def ranks(job: Running) -> list[int]:
    return [pid for _, pid in sorted(ranks_of(job).items())]


def loaders(job: Running) -> list[int]:
    own = set(ranks(job))
    return [
        pid
        for pid, rank in processes_of(job.run_dir).items()
        if rank is not None and pid not in own
    ]


def a_rank(stage: Stage, job: Running) -> list[int]:
    there = ranks(job)
    return [stage.draw.choice(there)] if there else []


def launcher(_: Stage, job: Running) -> list[int]:
    return [job.process.pid]


def a_loader(stage: Stage, job: Running) -> list[int]:
    there = loaders(job)
    return [stage.draw.choice(there)] if there else []


def all_ranks(_: Stage, job: Running) -> list[int]:
    return ranks(job)


def server(_: Stage, job: Running) -> list[int]:
    with contextlib.suppress(AssertionError):
        if job.process.poll() is None:
            return [server_of(job.process.pid)]
        return []
    return []


def everybody(_: Stage, job: Running) -> list[int]:
    return [job.process.pid, *processes_of(job.run_dir)]


Victims = Callable[[Stage, Running], list[int]]


def strike(number: int, victims: Victims, training: bool = False) -> During:
    def act(stage: Stage, job: Running) -> None:
        if wait(stage, job, training):
            chosen = victims(stage, job)
            stage.say(f"signal {number} to {chosen}")
            for pid in chosen:
                send(pid, number)

    return act


def then(first: During, second: During, most_seconds: float, least_seconds: float = 0.0) -> During:
    """Two in a row."""

    def act(stage: Stage, job: Running) -> None:
        first(stage, job)
        time.sleep(stage.draw.uniform(least_seconds, most_seconds))
        second(stage, job)

    return act


def now(number: int, victims: Victims) -> During:
    def act(stage: Stage, job: Running) -> None:
        chosen = victims(stage, job)
        stage.say(f"signal {number} to {chosen}")
        for pid in chosen:
            send(pid, number)

    return act


def resize_to(stage: Stage, job: Running) -> None:
    """Ask for a number of processes, which is refused if the run ends before; does not wait for the
    answer."""
    count = stage.draw.choice([1, 2] if stage.command.ranks == 2 else [1, 2, stage.command.ranks])
    stage.say(f"resize to {count}")

    def ask() -> None:
        with contextlib.suppress(ConfigError):  # it is over
            resize([str(job.run_dir), str(count)])

    threading.Thread(target=ask, daemon=True).start()


def resizes(stage: Stage, job: Running) -> None:
    """At a moment that is drawn, and some times more at random."""
    if wait(stage, job):
        resize_to(stage, job)
        for _ in range(stage.draw.randrange(3)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(stage.draw.uniform(0, 1.5))
            resize_to(stage, job)


def with_range(command: Command) -> Command:
    """Whose number of processes may change, and end as it would have: to rounding, in float64."""
    words = [
        f"launch.nproc_per_node=1:{command.ranks}"
        if word.startswith("launch.nproc_per_node=")
        else word
        for word in command.words
        if not word.startswith("tuning.precision=")
    ]
    return replace(command, words=[*words, "tuning.precision=fp64"])


def pause(victims: Victims, seconds: float) -> During:
    def act(stage: Stage, job: Running) -> None:
        if wait(stage, job):
            chosen = victims(stage, job)
            stage.say(f"stopped for {seconds} s: {chosen}")
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in chosen:
                    send(pid, number)
                time.sleep(seconds)

    return act


# --- files ----------------------------------------------------------------------------------------


def in_run_dir(do: Callable[[Stage], None]) -> During:
    """While the command runs."""

    def act(stage: Stage, job: Running) -> None:
        if wait(stage, job):
            do(stage)

    return act


def remove_checkpoints(stage: Stage) -> None:
    for _ in range(20):  # a writer may put one there meanwhile
        with contextlib.suppress(OSError):
            shutil.rmtree(stage.run_dir / "checkpoints")
    stage.say("checkpoints/ removed")


def remove(*names: str) -> After:
    def act(stage: Stage) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (stage.run_dir / name).unlink()
        stage.lines_lost = stage.lines_lost or "metrics.jsonl" in names

    return act


def damage(name: str) -> After:
    """A file of the run directory, if it is there."""

    def act(stage: Stage) -> None:
        path = stage.run_dir / name
        if path.is_file():
            stage.lines_lost = stage.lines_lost or name == "metrics.jsonl"
            _damage(stage, path)

    return act


def _damage(stage: Stage, path: Path) -> None:
    content = bytearray(path.read_bytes())
    draw = stage.draw
    how = draw.choice(["cut", "flipped", "emptied", "garbage", "appended"])
    stage.say(f"{path.name} {how}")
    if how == "cut":
        del content[draw.randrange(len(content) or 1) :]
    elif how == "flipped" and content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == "emptied":
        content.clear()
    elif how == "garbage":
        content[:] = draw.randbytes(draw.randint(1, 300))
    elif how == "appended":
        content += draw.choice(
            [b"xx}\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"step": 1', b"null\n"]
        )
    path.write_bytes(content)


def damage_newest(stage: Stage) -> None:
    """One file of the newest checkpoint."""
    for newest in places(stage.run_dir)[:1]:
        path = stage.draw.choice(sorted(path for path in newest.iterdir() if path.is_file()))
        if stage.draw.random() < 0.2:
            path.unlink()
            stage.say(f"{path.name} removed")
        else:
            _damage(stage, path)


def damage_all(stage: Stage) -> None:
    """A file of each checkpoint."""
    for place in places(stage.run_dir):
        _damage(
            stage, stage.draw.choice(sorted(path for path in place.iterdir() if path.is_file()))
        )


def spoil_newest(stage: Stage) -> None:
    """Give the newest checkpoint weights that are NaN, and a manifest that says that they are as
    they should be."""
    for newest in places(stage.run_dir)[:1]:
        model = newest / "model.safetensors"
        weights = load_file(model)
        manifest = read_manifest(newest)
        weights[stage.draw.choice(sorted(manifest["trained"]))].view(-1)[0] = float("nan")
        save_file(weights, model)
        manifest["files"]["model.safetensors"] = {
            "bytes": model.stat().st_size,
            "sha256": sha256_of(model),
        }
        (newest / MANIFEST).write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))
        stage.say(f"NaN in {newest.name}")


STRAYS = ("step_8_backup", "step_99", "notes")
"""Folders that are no checkpoints."""


def leave_strays(stage: Stage) -> None:
    """Leave what somebody, or a process that was killed, might have left."""
    folder = stage.run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)  # it may have been killed before it made one
    for name in (*STRAYS, "step_00000099.part-1"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "best.part-77").symlink_to("step_99")
    (stage.run_dir / "failure.json.part-1").write_text("{")
    (stage.run_dir / "metrics.jsonl.part").write_text("{")
    (stage.run_dir / "failure.json").write_text("garbage")


def valid_checkpoints(run_dir: Path) -> list[Path]:
    return [place for place in places(run_dir) if defect_of(place) is None and _is_finite(place)]


def _is_finite(place: Path) -> bool:
    return all(
        bool(torch.isfinite(one).all()) for one in load_file(place / "model.safetensors").values()
    )


@contextlib.contextmanager
def small_disk(stage: Stage) -> Iterator[None]:
    """The run directory of a case on a file system of its own."""
    disk = stage.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", disk], check=True)
    stage.run_dir = disk / "run"
    stage.unwritable = True
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill(stage: Stage) -> None:
    """Not a byte is free, or a few."""
    with (
        contextlib.suppress(OSError),
        (stage.run_dir.parent / "ballast").open("wb", buffering=0) as file,
    ):
        while file.write(bytes(1 << 16)):
            pass
    with (
        contextlib.suppress(OSError),
        (stage.run_dir.parent / "more").open("wb", buffering=0) as file,
    ):
        while file.write(bytes(512)):
            pass
    stage.say("the disk is full")


def empty(stage: Stage) -> None:
    for name in ("ballast", "more"):
        (stage.run_dir.parent / name).unlink(missing_ok=True)


def make_read_only(stage: Stage) -> None:
    """Make a folder read-only. Root ignores permissions, and a file system in use cannot be mounted
    read-only."""
    folders = [stage.run_dir, *(path for path in stage.run_dir.rglob("*") if path.is_dir())]
    done = subprocess.run(["chattr", "+i", *folders], capture_output=True, text=True)
    stage.unwritable = True
    stage.say(f"read-only: {done.stderr or 'yes'}")


def make_writable(stage: Stage) -> None:
    subprocess.run(["chattr", "-R", "-f", "-i", stage.run_dir], capture_output=True)


def remove_run_dir(stage: Stage) -> None:
    for _ in range(20):
        with contextlib.suppress(OSError):
            shutil.rmtree(stage.run_dir)
    stage.unwritable = True
    stage.lines_lost = True
    stage.say("the run directory removed")


def spoil_image(stage: Stage, job: Running) -> None:
    """Spoil one of the images that all cases share while the run lasts; it is put back at once when
    the run has ended."""
    root = Path(stage.command.value("data.root", ""))
    if not wait(stage, job):
        return
    path = stage.draw.choice(sorted(root.rglob("*.png")))
    content = path.read_bytes()
    stage.say(f"{path.name} is damaged")
    try:
        path.write_bytes(content[:20] if stage.draw.random() < 0.7 else b"")
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(30)
    finally:
        path.write_bytes(content)


def second_command(stage: Stage, job: Running) -> None:
    """The same command once more, while it runs: refused, and the first goes on."""
    from tests.campaigns import fuzz

    if not wait(stage, job, training=True):
        return
    other, began = fuzz.start(stage, {})
    ended = fuzz.finished(other, began)
    stage.say(f"a second one ended with {ended.code}")
    if job.process.poll() is None:
        fuzz.expect(
            ended.code == 2 and "another run is in it" in ended.err,
            f"the second: {ended.code}\n{ended.err}",
        )


# --- the list -------------------------------------------------------------------------------------


def _codes(*codes: int) -> frozenset[int]:
    return frozenset(codes)


KILLED = -int(signal.SIGKILL)
TERM = signal.SIGTERM
INT = signal.SIGINT
KILL = signal.SIGKILL
USR1 = signal.SIGUSR1
HUP = signal.SIGHUP
STOP = signal.SIGSTOP
DIED = "FATAL (died|oom|peer|data_worker) "
WAIT = ("launch.timeout_seconds=2",)


def ends(stage: Stage, job: Running) -> None:
    """One way or the other: killed, stopped, or by itself."""
    how = stage.draw.choice(["killed", "killed", "stopped", "by itself"])
    stage.say(f"the command ends: {how}")
    if how != "by itself":
        strike(KILL if how == "killed" else TERM, launcher)(stage, job)


ENDED = _codes(0, KILLED, 75, 143)


def after_the_end(name: str, after: After, weight: float = 1.0) -> Fault:
    return Fault(name, ENDED, ends, after, damages=True, weight=weight, suits_torchrun=True)


def several(command: Command) -> bool:
    return command.ranks > 1


def may_change(command: Command) -> bool:
    """On another number batch norm and dropout are not the same."""
    return several(command) and command.kind not in ("cnn", "own")


def has_loaders(command: Command) -> bool:
    return command.loaders > 0


def _own(
    name: str, codes: frozenset[int], named: str, fits: Callable[[Command], bool] = lambda _: True
) -> Fault:
    suits = name in ("raises", "nan", "allocates", "sys.exit", "sample raises")
    return Fault(
        f"own code: {name}",
        codes,
        code=name,
        named=named,
        fits=fits,
        weight=0.6,
        suits_torchrun=suits,
    )


FAULTS = (
    Fault("none", _codes(0), weight=0.3),
    Fault("SIGKILL: rank", _codes(0, 70), strike(KILL, a_rank), named=DIED, weight=3),
    Fault("SIGKILL: all ranks", _codes(0, 70), strike(KILL, all_ranks), named=DIED, fits=several),
    Fault(
        "SIGKILL: rank, then another",
        _codes(0, 70),
        then(strike(KILL, a_rank), now(KILL, a_rank), 0.2),
        named=DIED,
        fits=several,
        weight=2,
    ),
    Fault(
        "SIGKILL: rank, twice",
        _codes(0, 70),
        then(strike(KILL, a_rank), strike(KILL, a_rank), 0.1),
        named=DIED,
    ),
    Fault(
        "SIGKILL: launcher",
        _codes(0, KILLED),
        strike(KILL, launcher),
        weight=3,
        suits_torchrun=True,
    ),
    Fault(
        "SIGKILL: launcher and a rank",
        _codes(0, KILLED, 70),
        then(strike(KILL, a_rank), now(KILL, launcher), 0.1),
    ),
    Fault("SIGKILL: everybody", _codes(0, KILLED), strike(KILL, everybody)),
    Fault(
        "SIGKILL: loader",
        _codes(0, 70),
        strike(KILL, a_loader),
        named=DIED,
        fits=has_loaders,
        weight=2,
    ),
    Fault("SIGKILL: fork server", _codes(0), strike(KILL, server)),
    Fault(
        "SIGTERM: launcher",
        _codes(0, 75, 143),
        strike(TERM, launcher),
        weight=2,
        suits_torchrun=True,
    ),
    Fault("SIGTERM: rank", _codes(0, 75, 143), strike(TERM, a_rank), weight=2),
    Fault("SIGTERM: everybody", _codes(0, 75, 143), strike(TERM, everybody)),
    Fault(
        "SIGTERM: twice", _codes(0, 75, 143), then(strike(TERM, launcher), now(TERM, launcher), 0.9)
    ),
    Fault("SIGUSR1: launcher", _codes(0, 75, 143), strike(USR1, launcher)),
    Fault("SIGINT: launcher", _codes(0, 130), strike(INT, launcher)),
    Fault("SIGINT: rank", _codes(0, 75, 130, 143), strike(INT, a_rank)),
    Fault("SIGINT: everybody", _codes(0, 75, 130, 143), strike(INT, everybody)),
    Fault("SIGINT: twice", _codes(0, 130), then(strike(INT, launcher), now(INT, launcher), 0.9)),
    Fault("SIGHUP: launcher", _codes(0, 130), strike(HUP, launcher)),
    Fault(
        "SIGTERM, then SIGKILL: rank",
        _codes(0, 70, 75, 143),
        then(strike(TERM, launcher), now(KILL, a_rank), 0.2),
        named=DIED,
        weight=2,
    ),
    Fault(
        "SIGKILL: rank, then SIGTERM",
        _codes(0, 70, 75, 143),
        then(strike(KILL, a_rank), now(TERM, launcher), 0.3),
        named=DIED,
        weight=2,
    ),
    Fault(
        "SIGTERM, then SIGKILL: launcher",
        _codes(0, 75, 143, KILLED),
        then(strike(TERM, launcher), now(KILL, launcher), 0.3),
    ),
    Fault(
        "SIGSTOP: rank",
        _codes(0, 71),
        strike(STOP, a_rank, training=True),
        words=WAIT,
        named="FATAL hang .*rank",
        weight=2,
    ),
    Fault(
        "SIGSTOP: loader",
        _codes(0, 71),
        strike(STOP, a_loader, training=True),
        words=WAIT,
        named="FATAL hang",
        fits=has_loaders,
    ),
    Fault(
        "SIGSTOP: rank, then SIGTERM",
        _codes(0, 71, 75, 143),
        then(strike(STOP, a_rank, training=True), now(TERM, launcher), 0.5),
        words=(*WAIT, "launch.grace_seconds=3"),
        named="FATAL hang .*rank",
    ),
    Fault(
        "SIGSTOP: rank, then SIGKILL: another",
        _codes(0, 70, 71),
        then(strike(STOP, a_rank, training=True), now(KILL, a_rank), 0.5),
        words=(*WAIT, "launch.grace_seconds=3"),
        named="FATAL (hang|died)",
        fits=several,
    ),
    Fault("resize", _codes(0), resizes, resizes=True, fits=may_change, weight=3),
    Fault(
        "resize, then SIGKILL: rank",
        _codes(0, 70),
        then(resizes, now(KILL, a_rank), 0.6),
        named=DIED,
        resizes=True,
        fits=may_change,
    ),
    Fault(
        "resize, then SIGKILL: launcher",
        _codes(0, KILLED),
        then(resizes, now(KILL, launcher), 0.6),
        resizes=True,
        fits=may_change,
    ),
    Fault(
        "resize, then SIGTERM: launcher",
        _codes(0, 75, 143),
        then(resizes, now(TERM, launcher), 0.6),
        resizes=True,
        fits=may_change,
    ),
    Fault("paused: rank", _codes(0), pause(a_rank, 0.4)),
    Fault("paused: launcher", _codes(0), pause(launcher, 0.4)),
    Fault("paused: everybody", _codes(0), pause(everybody, 0.4)),
    Fault(
        "removed meanwhile: checkpoints",
        _codes(0, 73),
        in_run_dir(remove_checkpoints),
        named="FATAL write",
        damages=True,
    ),
    Fault("removed meanwhile: lock.json", _codes(0), in_run_dir(remove("lock.json"))),
    Fault("removed meanwhile: metrics.jsonl", _codes(0), in_run_dir(remove("metrics.jsonl"))),
    Fault(
        "removed meanwhile: config.yaml",
        _codes(0, 70, 73),
        then(in_run_dir(remove("config.yaml")), strike(KILL, a_rank), 0.1),
        named="FATAL (died|write)",
    ),
    Fault(
        "removed meanwhile: run directory",
        _codes(0, 73),
        in_run_dir(remove_run_dir),
        named="FATAL write",
        damages=True,
    ),
    Fault(
        "disk full",
        _codes(0, 2, 73),
        in_run_dir(fill),
        empty,
        named="FATAL write",
        disk=True,
        weight=2,
    ),
    Fault(
        "disk full, then SIGKILL: rank",
        _codes(0, 2, 70, 73),
        then(in_run_dir(fill), now(KILL, a_rank), 0.3),
        empty,
        named="FATAL (write|died|oom)",
        disk=True,
    ),
    Fault(
        "disk full, then SIGTERM",
        _codes(0, 2, 73, 75, 143),
        then(in_run_dir(fill), now(TERM, launcher), 0.3),
        empty,
        named="FATAL write",
        disk=True,
    ),
    Fault(
        "disk read-only",
        _codes(0, 2, 73),
        in_run_dir(make_read_only),
        make_writable,
        named="FATAL write",
        weight=2,
    ),
    Fault("ulimit -f", _codes(0, 2, 73), named="FATAL write", file_bytes=30_000),
    Fault(
        "image damaged",
        _codes(0, 65),
        spoil_image,
        named=r"FATAL data .*(\n.*)*\.png",
        fits=lambda one: one.kind == "folder",
        weight=3,
    ),
    Fault("second command", _codes(0), second_command),
    after_the_end("after: newest checkpoint damaged", damage_newest, 3),
    after_the_end("after: all checkpoints damaged", damage_all),
    after_the_end("after: NaN in the newest checkpoint", spoil_newest, 2),
    after_the_end("after: checkpoints removed", remove_checkpoints, 2),
    after_the_end("after: config.yaml damaged", damage("config.yaml")),
    after_the_end("after: config.yaml removed", remove("config.yaml")),
    after_the_end("after: metrics.jsonl damaged", damage("metrics.jsonl")),
    after_the_end("after: metrics.jsonl removed", remove("metrics.jsonl")),
    after_the_end("after: summary.json damaged", damage("summary.json")),
    after_the_end("after: lock.json damaged", damage("lock.json")),
    after_the_end("after: commands.jsonl damaged", damage("commands.jsonl")),
    after_the_end("after: strays", leave_strays),
    _own("raises", _codes(70, 0), "FATAL exception .*ValueError: boom"),
    _own("raises lines", _codes(70, 0), "FATAL exception .*RuntimeError: several lines"),
    _own("raises as a peer", _codes(70, 0), "FATAL exception .*ConnectionResetError"),
    _own("raises KeyboardInterrupt", _codes(70, 0), "FATAL exception .*KeyboardInterrupt"),
    _own("raises MemoryError", _codes(70, 0), "FATAL oom"),
    _own("raises OSError", _codes(70, 0), "FATAL exception .*No space left"),
    _own("allocates", _codes(70, 0), "FATAL oom"),
    _own("nan", _codes(70, 0), "FATAL non_finite_loss .*"),
    _own("infinite", _codes(70, 0), "FATAL non_finite_loss .*"),
    _own("segmentation fault", _codes(70, 0), "FATAL died .*SIGSEGV"),
    _own("abort", _codes(70, 0), "FATAL died .*SIGABRT"),
    _own("real-time signal", _codes(70, 0), "FATAL died .*signal 37"),
    _own("sys.exit", _codes(70, 0), r"FATAL exit .*sys.exit\(3\)"),
    _own("os._exit(0)", _codes(70, 0), "FATAL died .*code 0"),
    _own("os._exit(75)", _codes(70, 0), "FATAL died .*code 75"),
    _own("os._exit(70)", _codes(70, 0), "FATAL died .*code 70"),
    Fault("own code: hang", _codes(0, 71), code="hang", words=WAIT, named="FATAL hang .*rank"),
    _own("slow", _codes(0), ""),
    _own(
        "sample raises",
        _codes(0, 65, 70),
        r"FATAL .*sample \d+ is broken",
        lambda one: one.kind == "own",
    ),
    _own("sample stops", _codes(0, 65, 70), r"FATAL .*", lambda one: one.kind == "own"),
)


def drawn_fault(command: Command, draw: random.Random, name: str = "") -> Fault:
    """name: not drawn, but this one."""
    if name:
        return next(fault for fault in FAULTS if fault.name == name)
    root = os.geteuid() == 0
    fitting = [fault for fault in FAULTS if fault.fits(command) and (root or not fault.needs_root)]
    return draw.choices(fitting, [fault.weight for fault in fitting])[0]


assert all(
    fault.code in ("", *fuzz_code.FAULTS) or fault.code.startswith("sample") for fault in FAULTS
)
