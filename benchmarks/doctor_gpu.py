"""The doctor on real GPUs: its findings for healthy GPUs, and whether it finds faults made on
purpose.

    NCCL_NVLS_ENABLE=0 python benchmarks/doctor_gpu.py [--out runs/doctor_gpu]

Runs `launch.py mode=doctor` on 1, 2 and 4 GPUs, if there are as many, and prints its tables. Then,
on the first two: another process that holds memory, one that computes, an unused link (NCCL over
sockets), a stopped process; on one GPU, the first alone. Exits with 1 if the doctor takes more than
30 s on healthy GPUs, fails on them, or misses a fault; with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 30.0
OTHER_PROCESS = """
import sys, torch
held = torch.empty(int(sys.argv[2]) * 2**28, device=f"cuda:{sys.argv[1]}")  # GiB
print("ready", flush=True)
a = torch.ones(8192, 8192, dtype=torch.bfloat16, device=held.device)
while True:
    if sys.argv[3] == "computes":
        for _ in range(100): a @ a
        torch.cuda.synchronize()
    else:
        import time; time.sleep(1)
"""


@contextlib.contextmanager
def other_process(gpu: int, gib: int, what: str) -> Iterator[None]:
    """Inside, another process uses a GPU."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, str(gpu), str(gib), what], stdout=subprocess.PIPE
    )
    assert process.stdout
    try:
        assert process.stdout.readline() == b"ready\n", "the other process could not start"
        yield
    finally:
        process.kill()
        process.wait()


def run_doctor(
    out: Path, gpus: int, env: dict[str, str] | None = None, stop_rank: int | None = None
) -> dict[str, Any]:
    """One run of the doctor. Returns its report, with the wall time of the whole command."""
    run_dir = out.absolute()
    words = ["mode=doctor", f"launch.nproc_per_node={gpus}", f"run_dir={run_dir}"]
    variables = {**os.environ, **(env or {})}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), *words], env=variables, cwd=ROOT
    )
    if stop_rank is not None:
        os.kill(_test_process(process.pid, stop_rank), signal.SIGSTOP)
    code = process.wait(240)
    report = json.loads((run_dir / "doctor.json").read_text())
    assert code == report["exit_code"], (code, report["exit_code"])
    return report | {"wall_seconds": time.perf_counter() - began}


def _test_process(launcher: int, rank: int) -> int:
    """The process id of a rank's test process, as soon as it has started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if (
                    b"doctor.collective_test" in Path(f"/proc/{pid}/cmdline").read_bytes()
                    and f"RANK={rank}".encode() in variables
                ):
                    return int(pid)
        time.sleep(0.01)
    raise TimeoutError("no test process has started")


def found(report: dict[str, Any], check: str) -> tuple[str, str]:
    """Status and detail of a check."""
    return next((f["status"], f["detail"]) for f in report["findings"] if f["check"] == check)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/doctor_gpu"))
    out = parser.parse_args().out
    present = torch.cuda.device_count()
    bad = []
    if not present:
        print("no GPU here")
        return 2
    rows = []

    def expect(name: str, report: dict[str, Any], check: str, *statuses: str) -> None:
        status, detail = found(report, check)
        rows.append(f"| {name} | {check} | {status} | {detail} | {report['wall_seconds']:.1f} |")
        if status not in statuses:
            bad.append(
                f"{name}: {check} is {status}, {' or '.join(statuses)} was expected: {detail}"
            )

    for gpus in (1, 2, 4):
        if gpus > present:
            break
        name = f"{gpus} healthy"
        report = run_doctor(out / f"healthy_{gpus}", gpus)
        for check in (
            "gpus",
            "gpu models",
            "gpu memory",
            "gpu processes",
            "gpu ecc",
            "gpu links",
            "torch",
        ):
            expect(name, report, check, "ok")
        expect(name, report, "gpu throttling", "ok")
        expect(name, report, "gpu clocks", "ok")
        for check in ("exchange", "all-reduce", "stragglers"):
            expect(name, report, check, "ok" if gpus > 1 else "skipped")
        if report["wall_seconds"] > LIMIT_SECONDS:
            bad.append(f"{name}: {report['wall_seconds']:.1f} s, {LIMIT_SECONDS:g} are allowed")
        if report["counts"]["failure"]:
            bad.append(f"{name}: {report['counts']['failure']} failures")
    with other_process(0, 16, "waits"):
        report = run_doctor(out / "memory", min(2, present))
        expect("another process holds 16 GiB", report, "gpu memory", "warning")
        expect(
            "another process holds 16 GiB", report, "gpu processes", "warning", "ok"
        )  # a container hides processes
    if present > 1:
        with other_process(1, 1, "computes"):
            expect(
                "another process computes",
                run_doctor(out / "straggler", 2),
                "stragglers",
                "warning",
            )
        sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        expect(
            "NCCL over sockets", run_doctor(out / "sockets", 2, sockets), "all-reduce", "warning"
        )
        expect(
            "rank 1 is stopped", run_doctor(out / "stopped", 2, stop_rank=1), "exchange", "failure"
        )
    print(
        f"\n{present} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}, one run each\n"
    )
    print("| what | check | status | found | command s |\n|---|---|---|---|---|", *rows, sep="\n")
    print(*(["", *bad] if bad else ["", "as expected"]), sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
