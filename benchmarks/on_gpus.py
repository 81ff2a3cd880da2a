"""What needs GPUs, on all GPUs of this machine and within a time: tests and benchmarks, the most
wanted first.

    python benchmarks/on_gpus.py FOLDER [--seconds 1500] [--only NAME ...] [--list]

A job has one GPU or two, and their share of the cores; as many run at the same time as there are
GPUs. FOLDER has the output of each, and in done.jsonl one line for each that has ended: the same
command continues with the others. A job begins only if its limit ends within SECONDS; at its limit
it is stopped (SIGINT, then SIGKILL) and not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
DONE = "done.jsonl"
PYTEST = "PYTHON -m pytest -p no:cacheprovider -q -rA --tb=short"
ONE_BY_ONE = f"{PYTEST} -x"
GPU_TESTS = "tests/end_to_end/test_gpu.py"
"""pytest prints failures at its end, which a job that is stopped at its limit does not reach."""
OF_BAD_LOSSES = ("stays_out", "waits_once")
ON_TWO = (
    "costs_no_step",
    "go_and_come_back",
    "exchange_gradients",
    "capture_together",
    "suspended",
    "hangs_before",
    "session_learns",
)
OF_SUMS = ("sum_up_their", "by_the_sums")
OF_KERNELS = "our_kernels"
ELSEWHERE = (*ON_TWO, "test_each_network", OF_KERNELS, *OF_SUMS)
"""Parts of the names of tests."""
FP16 = "launch.py tuning=max, fp16, batch 1024"
SCALING = "PYTHON benchmarks/gpt2_scaling.py"
TORCHRUN = "PYTHON -m torch.distributed.run --standalone --nproc_per_node=2"
BUCKETS, KERNELS = (
    " ".join(f"'launch.py, {steps}, buckets={size}'" for size in ("large", "one"))
    for steps in ("tuning=max", "kernel by kernel")
)
AS_RECOMMENDED = (
    "'plain DDP, compiled' 'Accelerate, compiled' 'Lightning Trainer, compiled' 'launch.py,"
    " recommended'"
)
SUMS_IN_FP16 = "'launch.py, fp16' 'launch.py, fp16, conv_sums'"


@dataclass(frozen=True)
class Work:
    """A test or benchmark to run.

    limit: in seconds.
    command: PYTHON and FOLDER stand for this Python and for the folder of results.
    """

    name: str
    gpus: int
    limit: int
    command: str


def models(
    name: str,
    job: str = "models",
    contenders: str = AS_RECOMMENDED,
    flags: str = "",
    limit: int = 270,
    gpus: int = 1,
) -> Work:
    """flags: of benchmarks/models.py."""
    only = shlex.quote(name)
    job += "_" + re.sub(r"\W+", "_", name).strip("_")
    kept = f"--kept FOLDER/{job}.jsonl --output FOLDER/{job}.md"
    command = f"PYTHON benchmarks/models.py --turns 3 --steps 30 --processes {gpus} {flags}"
    return Work(job, gpus, limit, f"{command} --only {only} {kept} --contenders {contenders}")


def gpt2(name: str, gpus: int, limit: int) -> Work:
    only = "--batches 64 --only 'launch.py, tuning=max' 'plain DDP, compiled'"
    if gpus > 1:
        only += " 'launch.py, tuning=max, buckets=default'"
    return Work(
        name,
        gpus,
        limit,
        f"PYTHON benchmarks/gpt2.py --processes {gpus} {only} --output FOLDER/{name}.md",
    )


def speed(name: str, only: str) -> Work:
    return Work(
        name, 1, 240, f"PYTHON benchmarks/speed.py resnet50 --steps 75 --only {shlex.quote(only)}"
    )


WORK = [
    *(
        models(name, f"buckets_of_{batch}", BUCKETS, f"--batch {batch}", gpus=2)
        for name, batch in (("GPT 24", 8), ("GPT 12", 8), ("GPT 24", 16), ("vgg16", 128))
    ),
    models("GPT 24", "kernel_by_kernel", KERNELS, "--batch 4", gpus=2),
    Work(
        "gpt2_scaling",
        2,
        330,
        f"{SCALING} --steps 60 --output FOLDER/gpt2_scaling.md tuning.buckets=large",
    ),
    *(Work(f"test_{name}", 2, 270, f"{ONE_BY_ONE} {GPU_TESTS} -k {name}") for name in ON_TWO),
    models("resnet50", "sums_fp16", SUMS_IN_FP16, flags="--batch 1024 --at-once 1", limit=420),
    models("resnet18", "sums_fp16", SUMS_IN_FP16),
    Work(
        "test_conv_sums",
        1,
        240,
        f"{PYTEST} {GPU_TESTS} -k '{' or '.join(OF_SUMS)}'",
    ),
    *(
        Work(
            f"buckets_{name}",
            2,
            280,
            f"{TORCHRUN} benchmarks/buckets.py --models {name} --output FOLDER/{name}.md",
        )
        for name in ("gpt2", "vit_b_16", "resnet50")
    ),
    Work(
        "test_bad_losses",
        1,
        120,
        f"{PYTEST} {GPU_TESTS} -k '{' or '.join(OF_BAD_LOSSES)}'",
    ),
    Work(
        "test_others",
        1,
        360,
        f"{PYTEST} {GPU_TESTS} -k 'not {' and not '.join(ELSEWHERE)}'",
    ),
    Work("test_kernels", 1, 330, f"{PYTEST} {GPU_TESTS} -k {OF_KERNELS}"),
    gpt2("gpt2_two", 2, 400),
    gpt2("gpt2_one", 1, 240),
    speed("resnet50_fp16", FP16),
    Work("test_networks", 1, 300, f"{PYTEST} -n 6 {GPU_TESTS} -k test_each_network"),
    *(
        models(name)
        for name in (
            "vit",
            "GPT 12",
            "densenet121",
            "vgg16",
            "resnet18",
            "GPT 6",
            "swin",
            "wide",
            "GPT 24",
        )
    ),
]
"""The jobs in their order. Those for two GPUs are side by side: one that waits for its second GPU
leaves the first idle."""


def run(work: Work, gpus: list[int], folder: Path, cores: list[int]) -> subprocess.Popen[bytes]:
    command = work.command.replace("PYTHON", shlex.quote(sys.executable)).replace(
        "FOLDER", shlex.quote(str(folder))
    )
    cache = folder / f"inductor_{gpus[0]}"  # two at once would time the same kernels
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONUNBUFFERED": "1",
    }
    with (folder / f"{work.name}.log").open("wb") as log:
        process = subprocess.Popen(
            shlex.split(command),
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    os.sched_setaffinity(process.pid, cores)
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    for number, patience in ((signal.SIGINT, 15), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue


@dataclass(frozen=True)
class RunningWork:
    """One job that has begun."""

    work: Work
    gpus: list[int]
    began: float
    process: subprocess.Popen[bytes]


class Schedule:
    """Jobs in their order, on the GPUs that are free."""

    def __init__(self, todo: list[Work], gpus: int, folder: Path, seconds: float) -> None:
        self.todo = todo
        self.gpus = gpus
        self.folder = folder
        self.end = time.monotonic() + seconds
        self.free = set(range(gpus))
        self.cores = sorted(os.sched_getaffinity(0))
        self.running: list[RunningWork] = []

    def run(self) -> None:
        """Run all jobs for which there is time."""
        try:
            while True:
                if self._begin_next():
                    continue
                if not self.running:
                    return  # nothing fits any more
                time.sleep(0.2)
                for job in list(self.running):
                    self._end_if_over(job)
        finally:
            for job in self.running:
                stop(job.process)

    def _begin_next(self) -> bool:
        """Begin the first job that there is time for. False if its GPUs are not free."""
        now = time.monotonic()
        fitting = (
            work for work in self.todo if work.gpus <= self.gpus and now + work.limit < self.end
        )
        work = next(fitting, None)
        if work is None or work.gpus > len(self.free):
            return False
        gpus = sorted(self.free)[: work.gpus]
        share = len(self.cores) // self.gpus
        cores = [core for gpu in gpus for core in self.cores[gpu * share : (gpu + 1) * share]]
        self.free -= set(gpus)
        self.todo.remove(work)
        self.running.append(RunningWork(work, gpus, now, run(work, gpus, self.folder, cores)))
        return True

    def _end_if_over(self, job: RunningWork) -> None:
        seconds = time.monotonic() - job.began
        in_time = job.process.poll() is not None
        if not in_time:
            if seconds < job.work.limit:
                return
            stop(job.process)
        self.running.remove(job)
        self.free |= set(job.gpus)
        log = self.folder / f"{job.work.name}.log"
        line = {
            "name": job.work.name,
            "exit_code": job.process.returncode,
            "in_time": in_time,
            "seconds": round(seconds),
        }
        with (self.folder / DONE).open("a") as file:
            file.write(json.dumps(line) + "\n")
        last_lines = log.read_text(errors="replace").splitlines()[-6:]
        print(json.dumps(line), *last_lines, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--only", nargs="+", help="jobs by their names, in this order")
    parser.add_argument("--list", action="store_true", help="say what there is, and do nothing")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ended = set()
    if (folder / DONE).exists():
        lines = (folder / DONE).read_text().splitlines()
        ended = {json.loads(line)["name"] for line in lines}
    by_name = {work.name: work for work in WORK}
    names = arguments.only or list(by_name)
    unknown = set(names) - set(by_name)
    if unknown:
        sys.exit(f"--only {' '.join(sorted(unknown))}: no such job; there are {', '.join(by_name)}")
    todo = [by_name[name] for name in names if name not in ended]
    if arguments.list:
        for work in todo:
            print(f"{work.name}: {work.gpus} GPU, at most {work.limit} s: {work.command}")
        return
    gpus = torch.cuda.device_count()
    if not gpus:
        sys.exit(
            "torch.cuda.device_count() is 0: there is no GPU here; --list says what there would be"
            " to do"
        )
    schedule = Schedule(todo, gpus, folder, arguments.seconds)
    schedule.run()
    left = [work.name for work in schedule.todo]
    print(f"not begun: {', '.join(left)}" if left else "all done")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # jobs are stopped on the way out
    main()
