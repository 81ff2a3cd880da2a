"""How long it takes until hosts go on: with `launch.nnodes=2:3`, over network namespaces. Needs
root.

    python -m tests.campaigns.host_losses [--trials 5] [--timeout 6] [--what "a host joins"]

Each trial is a run of three hosts with one process each (two where one joins), in which one thing
happens. Times are from that moment, by the clock, to the time of the first step in metrics.jsonl
that the processes of the next start have done. Steps done twice are counted by the run itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from tests.recovery.test_lost_hosts import NET, Elastic
from tests.support.commands import metrics, read
from tests.support.netlab import NetLab

WORDS = (*NET, "train.log_every_steps=1", "train.epochs=25", "train.evaluate_every_epochs=1000")
WHAT = (
    "a host crashes",
    "a worker is killed",
    "a host is asked to leave",
    "a host loses power",
    "a host joins",
    "the host of the endpoint crashes",
)


def trial(what: str, timeout: float) -> tuple[float, int]:
    """Seconds from the moment, steps done twice."""
    with tempfile.TemporaryDirectory() as folder, NetLab(3) as lab:
        hosts = Elastic(lab, Path(folder))
        words = (*WORDS, f"launch.timeout_seconds={timeout:g}")
        hosts.begin(*words, hosts=2 if what == WHAT[4] else 3)
        before = hosts.wait_for(9)
        moment = time.time()
        stay = {"node0", "node1"}
        if what == WHAT[1]:
            os.kill(hosts.worker_of(2), signal.SIGKILL)
        elif what == WHAT[2]:
            hosts.processes["node2"].send_signal(signal.SIGTERM)
        elif what == WHAT[4]:
            hosts.join(2, *words)
        elif what == WHAT[5]:
            lab.hosts[0].power_off(silent=False)
            stay = {"node1", "node2"}
        else:
            lab.hosts[2].power_off(silent=what == WHAT[3])
        assert hosts.ends(*stay) == [0, 0], hosts.all_said()
        lines = metrics(hosts.run_dir)
        summary = read(hosts.run_dir, "summary.json")
    first = [one["step"] for one in (*summary["recoveries"], *summary["resizes"])]
    assert first and min(first) >= before, "the run was over, or lost steps"
    next_one = next(line for line in lines if line["kind"] == "train" and line["step"] > first[0])
    return next_one["time"] - moment, summary["steps_redone"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=6.0)
    parser.add_argument("--what", nargs="+", default=WHAT)
    arguments = parser.parse_args()
    print(
        f"load average {os.getloadavg()[0]:.1f}, launch.timeout_seconds={arguments.timeout:g}",
        flush=True,
    )
    print("| what | trials | median s | best | worst | steps done twice |")
    print("|---|---:|---:|---:|---:|---:|")
    for what in arguments.what:
        found = [trial(what, arguments.timeout) for _ in range(arguments.trials)]
        seconds = [one[0] for one in found]
        spread = f"{statistics.median(seconds):.1f} | {min(seconds):.1f} | {max(seconds):.1f}"
        print(f"| {what} | {len(found)} | {spread} | {sum(one[1] for one in found)} |", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
