"""Sweeps on eight devices at once: speed-up against one after the other, how long a device waits,
and kills.

    python benchmarks/pool.py [--trials 64] [--seconds 1] [--kills 50] [--output FILE]

The devices are names without hardware behind them, and the trials sleep, so that any machine can
say what the launcher itself costs. It is driven as any Hydra application drives it: an app of ten
lines, hydra/launcher=pool. The kills are SIGKILLs of a job or of the sweep at a random moment:
whose lock is held afterwards, which process is left?
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from page import conditions, load_average, publish

from ddp_train.linux import children_of, state_of
from hydra_plugins.ddp_train_pool import Locks

ROOT = Path(__file__).resolve().parent.parent
APP = """
import os, time
import hydra

@hydra.main(config_path=None, config_name=None, version_base="1.3")
def main(cfg):
    began = time.time()
    time.sleep(cfg.seconds)
    with open("ledger", "a") as file:
        file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {began} {time.time()}\\n")

main()
"""


def sweep(folder: Path, trials: int, devices: int, seconds: float) -> subprocess.Popen[bytes]:
    (folder / "app.py").write_text(APP)
    names = ",".join(f"device_{number}" for number in range(devices))
    words = [
        f"+x=range({trials})",
        f"+seconds={seconds}",
        "hydra/launcher=pool",
        f"hydra.launcher.devices=[{names}]",
    ]
    words += [
        f"hydra.launcher.lock_folder={folder}/locks",
        f"hydra.sweep.dir={folder}/out",
        "hydra.output_subdir=null",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "app.py", "-m", *words]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def jobs(folder: Path) -> list[tuple[str, float, float]]:
    """The jobs of a sweep: the device, the start and the end of each."""
    lines = [line.split() for line in (folder / "ledger").read_text().splitlines()]
    return sorted((device, float(began), float(ended)) for device, began, ended in lines)


def speed(trials: int, devices: int, seconds: float) -> tuple[float, float, float]:
    """Seconds from the first begin of a job to the last end, the longest wait of a device between
    two jobs, and seconds of the whole command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        assert sweep(folder, trials, devices, seconds).wait(3600) == 0
        whole = time.monotonic() - began
        done = jobs(folder)
    assert len(done) == trials
    by_device = [list(own) for _, own in itertools.groupby(done, key=lambda job: job[0])]
    idle = [
        later[1] - earlier[2] for own in by_device for earlier, later in itertools.pairwise(own)
    ]
    assert len(by_device) == devices and min(idle) >= 0, "a device had two jobs at a time"
    return max(job[2] for job in done) - min(job[1] for job in done), max(idle), whole


def killed(of_sweep: bool) -> tuple[int, int, int]:
    """Kill a process, and count what it leaves: locks that are held and processes that live half a
    second after the end, and jobs that were not done though their process was not the one that was
    killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = sweep(folder, 4, 2, 0.5)
        while process.poll() is None and len(children_of(process.pid)) < 2:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.4))
        own = children_of(process.pid)
        os.kill(process.pid if of_sweep else random.choice(own), signal.SIGKILL)
        process.wait(60)
        time.sleep(0.5)
        locks = Locks(folder / "locks")
        held = sum(locks.take(f"device_{number}") is None for number in range(2))
        left = sum(state_of(pid) not in ("", "Z") for pid in own)
        return (
            held,
            left,
            0 if of_sweep else max(0, 3 - len(jobs(folder))),
        )  # the killed one may have been done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if asked.trials <= asked.devices:
        parser.error("--trials: more than --devices, or no device has two")
    before = load_average()
    rows = []
    for seconds in (asked.seconds, 5 * asked.seconds):
        alone = asked.trials * seconds
        span, idle, whole = speed(asked.trials, asked.devices, seconds)
        times = " | ".join(f"{one:.2f} s" for one in (seconds, alone, span, whole))
        rows.append(f"| {times} | {alone / span:.2f} | {idle:.3f} s |")
    kills = [killed(number % 2 == 0) for number in range(asked.kills)]
    held, left, lost = (sum(column) for column in zip(*kills, strict=True)) if kills else (0, 0, 0)
    page = [
        "# A sweep on eight devices that are names",
        "",
        (
            f"{asked.trials} trials that sleep, on {asked.devices} devices, under"
            " `hydra/launcher=pool`."
        ),
        (
            "One after the other: the sum of the sleeping. From the first to the last: begin of the"
            " first trial to"
        ),
        "the end of the last. Idle: the longest time between two trials of a device, of all.",
        "",
        (
            "| trial | one after the other | from the first to the last | whole command | speed-up"
            " | longest idle |"
        ),
        "|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        (
            "SIGKILLs at a random moment of sweeps of four trials on two devices, of the sweep and"
            " of a trial in turn:"
        ),
        (
            f"{asked.kills}. Half a second after the end {held} locks were held, {left} processes"
            f" left, and {lost}"
        ),
        "trials other than the killed one were not done.",
        "",
        *conditions(
            " ".join(["pool.py", *sys.argv[1:]]),
            f"{before} before, {load_average()} after",
            ("hydra-core",),
        ),
    ]
    publish(page, asked.output)


if __name__ == "__main__":
    main()
