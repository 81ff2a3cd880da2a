"""Runs and sweeps that have ended, and the document in a page."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.pages.compare_page import compare_page
from ddp_train.telemetry.pages.report import Report
from ddp_train.telemetry.pages.run_files import read_run
from ddp_train.telemetry.pages.sweep_page import Sweep, sweep_page

BOUND = 2_000_000
"""Most bytes of a page."""


def leave_run(folder: Path, epochs: int = 4, best: float = 0.9, **summary: Any) -> Path:
    """The files of a run of some epochs, of 10 steps each."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        step = 10 * epoch
        moment = 1.7e9 + 60 * epoch
        figures = {"cpu_cores": [0.9, 0.8], "resident_gib": [0.5, 0.5]}
        lines.append(
            {
                "kind": "train",
                "step": step,
                "epoch": epoch,
                "time": moment,
                "loss": 2 / epoch,
                "lr": 0.1,
                "lrs": [0.1],
                "samples_per_second": 900.0,
                "figures": figures,
            }
        )
        lines.append(
            {
                "kind": "test",
                "step": step,
                "epoch": epoch,
                "time": moment,
                "loss": 1 / epoch,
                "accuracy": best - 0.1 * (epochs - epoch),
                "correct": 9,
                "samples": 10,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = "name: a\ndevice: cpu\nlaunch: {nproc_per_node: 2}\nstrategy: {name: ddp}\n"
    config += "train: {epochs: 4, max_steps: null}\noptimizer: {lr: 0.1}\n"
    (folder / "config.yaml").write_text(config)
    command = {
        "command": "python launch.py model=mlp",
        "started": "2023-11-14T22:13:20+00:00",
        "git_revision": "abc",
    }
    (folder / "commands.jsonl").write_text(json.dumps(command) + "\n")
    write_json(
        folder / "summary.json",
        {
            "status": "completed",
            "epochs": epochs,
            "seconds": 60.0,
            "better": {"accuracy": "max", "loss": "min"},
            **summary,
        },
    )
    return folder


def sweep_rows(folder: Path, **keys: list[Any]) -> list[dict[str, Any]]:
    """Rows of a grid, with their runs: the accuracy depends on the first key alone, and a little on
    the last."""
    rows = []
    for number, values in enumerate(itertools.product(*keys.values())):
        best = (
            0.5
            + 0.1 * next(iter(keys.values())).index(values[0])
            + 0.01 * list(keys.values())[-1].index(values[-1])
        )
        run_dir = leave_run(folder / str(number), best=best)
        words = [
            f"{key.replace('__', '.')}={value}" for key, value in zip(keys, values, strict=True)
        ]
        rows.append(
            {
                "trial": number,
                "overrides": words,
                "status": "completed",
                "exit_code": 0,
                "objective": best,
                "accuracy": best,
                "loss": 0.1,
                "seconds": 1.0,
                "run_dir": str(run_dir),
            }
        )
    return rows


def page_of_sweep(folder: Path, rows: list[dict[str, Any]]) -> Report:
    return sweep_page(Sweep(folder, rows, "test.accuracy", "max", "python launch.py -m"))


def compared(folder: Path, *bests: float, repeats: int = 1) -> Report:
    """Runs that differ in their learning rate, each repeated with other seeds."""
    runs = []
    for number, best in enumerate(bests):
        for seed in range(repeats):
            run_dir = leave_run(folder / f"{number}_{seed}", best=best + 0.01 * seed)
            text = (run_dir / "config.yaml").read_text().replace("lr: 0.1", f"lr: 0.{number + 1}")
            (run_dir / "config.yaml").write_text(f"seed: {seed}\nrun_dir: {run_dir}\n{text}")
            runs.append(read_run(run_dir))
    return compare_page(runs, "ddp-train compare")


def report_in(page: str) -> dict[str, Any]:
    """The report that a page holds as JSON."""
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page)
    assert found, "the page has no report"
    return json.loads(found[1])


def section_of(page: str, title: str) -> dict[str, Any]:
    """The section of a page with this title."""
    return next(part for part in report_in(page)["sections"] if part["title"] == title)
