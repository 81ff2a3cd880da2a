"""The real commands, as a person types them, on a host without GPUs; and what they leave in the
process table."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.linux import children_of, signal_main_thread
from ddp_train.resilience.stacks import stack_file
from tests.support import zygote

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, str(ROOT / "launch.py")]
PROGRAM = zygote.PROGRAM
ONE = "launch.nproc_per_node=1"
THREE = "launch.nproc_per_node=3"
SMALL = ("model=mlp", "data.limit=200", "schedule=constant")
"""Three steps per epoch, and a learning rate that does not depend on where the run ends."""
ENDLESS = (
    "model=mlp",
    "train.epochs=1000000",
    "train.evaluate_every_epochs=1000000",
    "checkpoint.every_steps=100000000",
)
LIMIT_SECONDS = 120.0
"""For one command: a hang is a failure, a busy machine is not."""

FOREIGN = '''
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

RANK = int(os.environ["RANK"])


class Net(nn.Module):
    """A small net. `fault` happens on one rank, in its given training call; `delay` seconds pass in each. `ballast`:
    numbers that only make a checkpoint larger."""

    def __init__(self, fault="", rank=1, call=1, delay=0.0, marker="", ballast=0):
        super().__init__()
        if ballast:
            self.ballast = nn.Parameter(torch.zeros(ballast), requires_grad=False)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        self.fault, self.rank, self.call, self.delay, self.marker = fault, rank, call, delay, marker
        self.calls = 0
        if fault == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def forward(self, images):
        outputs = self.layers(images)
        if not self.training:
            return outputs
        self.calls += 1
        time.sleep(self.delay)
        if (RANK, self.calls) == (self.rank, self.call):
            if self.fault == "raise":
                raise ValueError("boom")
            if self.fault == "nan":
                return outputs * float("nan")
            if self.fault == "vanish":
                os._exit(13)
            if self.fault == "vanish once" and not Path(self.marker).exists():
                Path(self.marker).touch()
                os._exit(13)
            if self.fault == "remove and vanish":
                Path(self.marker).unlink()
                os._exit(13)
        return outputs


class Halves(Dataset):
    """Random rows of 64 numbers; every second one is shifted."""

    classes = ("left", "right")

    def __init__(self, train, rows=150):
        self.rows = torch.randn(rows if train else 50, 64, generator=torch.Generator().manual_seed(int(train)))
        self.rows[1::2] += 0.5

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number], number % 2
'''
"""Somebody's own module, outside this package."""


def foreign_code(folder: Path) -> dict[str, str]:
    """Writes the module `foreign` into a folder. Returns the environment in which it can be
    imported."""
    (folder / "foreign.py").write_text(FOREIGN)
    return {"PYTHONPATH": str(folder)}


def foreign_net(deterministic: bool = False, **arguments: Any) -> list[str]:
    """The words that train `foreign.Net` on some digits. Deterministic runs take two passes more,
    before step 0."""
    words = [
        f"+model.{name}='{value}'" if isinstance(value, str) else f"+model.{name}={value}"
        for name, value in arguments.items()
    ]
    fixed = [
        "model._target_=foreign.Net",
        "trusted_modules=[foreign]",
        f"deterministic={deterministic}",
    ]
    return [*fixed, "data.limit=200", "schedule=constant", *words]


def torchrun(*options: str) -> list[str]:
    """The start of a command line: three processes under torch's own agent."""
    return [
        str(Path(sys.executable).with_name("torchrun")),
        "--nproc_per_node=3",
        *options,
        str(ROOT / "launch.py"),
    ]


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", **(more or {})}


def run(
    *words: str, command: list[str] = LAUNCH, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The whole command, to its end."""
    return zygote.run([*command, *words], LIMIT_SECONDS, cwd=cwd, env=environment(env), text=True)


@dataclass
class Running:
    """A command that is going on in `run_dir`."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path

    def workers(self) -> dict[int, int]:
        """The process id of each rank. A loader process, which has the same command line, is a
        child of one of them."""
        ranks = {pid: rank for pid, rank in processes_of(self.run_dir).items() if rank is not None}
        loaders = {child for pid in ranks for child in children_of(pid)}
        return {rank: pid for pid, rank in ranks.items() if pid not in loaders}

    def wait_for_step(self) -> None:
        """Until training has begun."""
        self.wait_for_file("metrics.jsonl")
        wait_until(
            lambda: (self.run_dir / "metrics.jsonl").stat().st_size > 0, "a line in metrics.jsonl"
        )

    def wait_for_file(self, name: str) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.said()
            return (self.run_dir / name).exists()

        wait_until(there, name)

    def end(self, seconds: float = LIMIT_SECONDS) -> int:
        """Its exit code. Where a time limit ends a test, it says what the ranks were doing."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"not done after {seconds} s\n{self.said()}\n{self.stacks()}"
            ) from None

    def stacks(self) -> str:
        """Where the ranks are, in Python."""
        asked = {pid: rank for pid, rank in processes_of(self.run_dir).items() if rank is not None}
        for pid in asked:  # loader processes too: they write to the file of their rank
            signal_main_thread(pid, signal.SIGUSR2)
        time.sleep(1)
        files = [(rank, stack_file(self.run_dir, rank)) for rank in sorted({*asked.values()})]
        return "\n".join(
            f"rank {rank}:\n{file.read_text()}" for rank, file in files if file.exists()
        )

    def said(self) -> str:
        """Standard error so far."""
        return self.output.with_suffix(".err").read_text()


def hear_signals() -> None:
    """A test run in the background of a script was started to ignore some, and would hand that
    on."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def running(
    run_dir: Path, *words: str, env: dict[str, str] | None = None, command: list[str] = LAUNCH
) -> Iterator[Running]:
    """Starts `python launch.py` with a run directory; leaves nothing of it behind, whatever the
    test does."""
    output = run_dir.with_name(run_dir.name + ".out")
    with output.open("w") as out, output.with_suffix(".err").open("w") as err:
        # Into files: nobody reads a pipe while the test waits, and a full one would stop the run.
        process = zygote.Command(
            [*command, f"run_dir={run_dir}", *words],
            cwd=ROOT,
            env=environment(env),
            stdout=out,
            stderr=err,
            preexec_fn=hear_signals,
        )
    try:
        yield Running(process, run_dir, output)
    finally:
        process.kill()
        process.wait()
        for pid in processes_of(run_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_of(run_dir: Path) -> dict[int, int | None]:
    """Processes that carry a run directory on their command line, and their ranks: None for
    launchers."""
    found: dict[int, int | None] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended in between
            command = (folder / "cmdline").read_bytes()
            if str(run_dir).encode() in command and (
                rank := re.search(rb"\0rank=(\d+)\0", command)
            ):
                found[int(folder.name)] = int(rank[1])
            elif str(run_dir).encode() in command:
                variables = dict(
                    part.partition(b"=")[::2]
                    for part in (folder / "environ").read_bytes().split(b"\0")
                )
                found[int(folder.name)] = int(variables[b"RANK"]) if b"RANK" in variables else None
    return found


def server_of(launcher: int) -> int:
    """The process id of a launcher's fork server. Its command line is there a little later than the
    process."""
    found: list[int] = []

    def is_there() -> bool:
        found.clear()
        for pid in children_of(launcher):
            with contextlib.suppress(OSError):  # it ended in between
                found.extend(
                    [pid] if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
                )
        return bool(found)

    wait_until(is_there, "fork server")
    (pid,) = found
    return pid


def wait_until(condition: Callable[[], bool], what: str, seconds: float = LIMIT_SECONDS) -> float:
    """The seconds it took."""
    began = looked = time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now - began < seconds, f"no {what} in {seconds} s"
        time.sleep(min(max(0.01, 2 * (now - looked)), 0.1))  # all of /proc takes 20 ms to read
        looked = time.monotonic()
    return time.monotonic() - began


def read(run_dir: Path, name: str) -> dict[str, Any]:
    """summary.json or failure.json."""
    return json.loads((run_dir / name).read_text())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def checkpoints(run_dir: Path) -> list[str]:
    """Their names, the oldest first; half-written ones would show up too."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def weights(run_dir: Path) -> bytes:
    """The newest checkpoint's model.safetensors; its manifest must be true.

    A process that was killed while it wrote may have left a part behind.
    """
    whole = [name for name in checkpoints(run_dir) if ".part-" not in name]
    newest = run_dir / "checkpoints" / whole[-1]
    files = read(newest, "manifest.json")["files"]
    assert set(files) == {path.name for path in newest.iterdir()} - {"manifest.json"}
    for name, expected in files.items():
        content = (newest / name).read_bytes()
        assert expected == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return (newest / "model.safetensors").read_bytes()


def spoil(run_dir: Path, checkpoint: str) -> None:
    """Flips a bit in the middle of the weights: the size stays."""
    path = run_dir / "checkpoints" / checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def fatal_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("FATAL")]
