"""Command lines with flags: help, and what Hydra does (-m, --cfg, --info, shell completion)."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from ddp_train import launcher
from ddp_train.config.compose import bind, plain, read_config, read_overrides, shown
from ddp_train.config.prepare import examine, settle
from ddp_train.config.schema import OPTIONS, SECTIONS, Config
from ddp_train.distributed.world import World, new_run_id
from ddp_train.errors import ConfigError
from ddp_train.health import FILE as FAILURE
from ddp_train.health import SUMMARY
from ddp_train.stopping import SAVED, UNSAVED

RESULTS = "results.jsonl"


def through_hydra(usage: str, script: Path, conf: Path, words: list[str], world: World | None) -> int:
    """Does what the flags ask. Returns the exit code; raises ConfigError before any trial starts."""
    flags = [word for word in words if word.startswith("-")]
    if {"-h", "--help"} & set(flags):
        print(help_text(usage, conf))
        return 0
    sweep = bool({"-m", "--multirun"} & set(flags)) or "hydra.mode=MULTIRUN" in words
    if world and sweep:
        instead = f"python launch.py {' '.join(words)} launch.nproc_per_node={world.local_size}"
        raise ConfigError([f"-m: torchrun would start one sweep per rank; use: {instead}"])
    sweep_dir = None
    if {"-sc", "--shell-completion", "--hydra-help", "--version"}.isdisjoint(flags):
        words, sweep_dir = _checked(conf, words, sweep)
    trials = Trials(script, sweep_dir)
    sys.argv = [str(script), *words]
    hydra.main(config_path=str(conf), config_name="config", version_base="1.3")(trials.run)()
    return trials.finish()


def _checked(conf: Path, words: list[str], sweep: bool) -> tuple[list[str], Path | None]:
    """Checks the overrides among the words before Hydra sees them; in a sweep, every swept value by itself.

    Returns the words for Hydra and, for a sweep, its directory.
    """
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    read = read_overrides(conf, overrides, sweep)
    problems, config = list(read.problems), Config()
    fixed = [word for word in overrides if word.split("=")[0].lstrip("+") not in read.swept]
    for one in [[], *([f"{key}={value}"] for key, values in read.swept.items() for value in values)]:
        config, found = read_config(conf, read_overrides(conf, fixed + one))
        problems += found or (examine(config, None)[1] if sweep else [])
    if sweep and config.launch.nnodes > 1:
        problems.append(f"launch.nnodes={config.launch.nnodes}: a sweep (-m) runs on one host; leave one of them out")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    ready = [word for word in words if word not in overrides] + read.words
    if not sweep:
        return ready, None
    sweep_dir = Path(config.run_dir or f"runs/{config.name}/sweep_{new_run_id(None)}")
    return [*ready, f"hydra.sweep.dir='{sweep_dir}'"], sweep_dir


class Trials:
    """The trials that Hydra asks for, each in fresh processes; a row of results for each, also for those that fail."""

    def __init__(self, script: Path, sweep_dir: Path | None) -> None:
        self.script, self.sweep_dir = script, sweep_dir
        self.rows: list[dict[str, Any]] = []

    def run(self, composed: DictConfig) -> float:
        """One trial. Returns its objective, or NaN if it failed, so that the sweep goes on."""
        hydra_config = HydraConfig.get()
        config, problems = bind(plain(composed))
        asked = [word.lstrip("+") for word in hydra_config.overrides.task]
        row: dict[str, Any] = {
            "trial": 0,
            "overrides": asked,
            "status": "failed",
            "exit_code": 2,
            "objective": math.nan,
        }
        if self.sweep_dir:
            row["trial"] = hydra_config.job.num
            config = dataclasses.replace(config, run_dir=hydra_config.runtime.output_dir)
        stop = launcher.Stop()
        try:
            prepared = settle(config, problems, None)
            print(f"trial {row['trial']}: {' '.join(asked)}", flush=True)
            try:
                row["exit_code"] = launcher.launch(prepared.config, self.script.parent, stop)
            finally:
                if prepared.lock:
                    prepared.lock.release()
            row |= _outcome(prepared.config) if row["exit_code"] == 0 else _failure(prepared.config)
        except ConfigError as error:
            print(error, file=sys.stderr)
            row["reason"] = str(error)
        self.rows.append(row)
        if self.sweep_dir:
            with (self.sweep_dir / RESULTS).open("a") as file:
                file.write(json.dumps(row) + "\n")
        if stop.received or row["exit_code"] in (SAVED, UNSAVED):
            raise SystemExit(row["exit_code"] or stop.exit_code(UNSAVED))
        return row["objective"]

    def finish(self) -> int:
        """Shows the table. Returns 0 if every trial was completed, else the exit code of the first that was not."""
        if self.sweep_dir and self.rows:
            Console(soft_wrap=False).print(_table(self.rows))
            print(f"results {self.sweep_dir / RESULTS}")
        return next((row["exit_code"] for row in self.rows if row["exit_code"]), 0)


def _outcome(config: Config) -> dict[str, Any]:
    summary = json.loads((Path(str(config.run_dir)) / SUMMARY).read_text())
    objective: Any = summary
    for part in config.objective.split("."):
        objective = objective[part]
    return {
        "status": "completed",
        "objective": float(objective),
        **summary["test"],
        "seconds": summary["seconds"],
        "samples_per_second": summary.get("samples_per_second"),
    }


def _failure(config: Config) -> dict[str, Any]:
    path = Path(str(config.run_dir)) / FAILURE
    return {"reason": json.loads(path.read_text())["detail"] if path.exists() else "stopped"}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="trials")
    for heading in ("trial", "overrides", "status", "accuracy", "loss", "seconds", "samples/s"):
        words = heading in ("overrides", "status")
        table.add_column(heading, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in rows:
        formats = (("accuracy", ".2%"), ("loss", ".4f"), ("seconds", ".1f"), ("samples_per_second", ",.0f"))
        numbers = [format(row[name], spec) if row.get(name) is not None else "-" for name, spec in formats]
        status = (
            row["status"] if row["status"] == "completed" else f"failed ({row['exit_code']}): {row.get('reason', '')}"
        )
        table.add_row(str(row["trial"]), " ".join(row["overrides"]), status, *numbers)
    return table


def help_text(usage: str, conf: Path) -> str:
    """Usage, the groups and their options, and every key with its default, its rule and its meaning."""
    lines = [usage.strip(), "", "Groups (group=option; the files are in conf/):"]
    for group in sorted(path for path in conf.iterdir() if path.is_dir()):
        lines.append(f"  {group.name:<11} {', '.join(sorted(path.stem for path in group.glob('*.yaml')))}")
    lines += ["", "Keys (key=value):", *_keys("", Config)]
    for section, schema in SECTIONS.items():
        lines += ["", f"{section}:", *_keys(section + ".", schema)]
    for section, options in OPTIONS.items():
        for name, schema in options.items():
            about = "" if (schema.__doc__ or "").startswith(schema.__name__ + "(") else schema.__doc__ or ""
            lines += [
                "",
                f"{section}={name}: {about.splitlines()[0] if about else ''}".rstrip(": "),
                *_keys(section + ".", schema),
            ]
    return "\n".join(lines)


def _keys(prefix: str, schema: type) -> list[str]:
    lines = []
    for f in dataclasses.fields(schema):
        if "meaning" in f.metadata:
            default = getattr(schema(), f.name)
            lines.append(f"  {prefix + f.name + '=' + shown(default):<44} {f.metadata['meaning']}")
    return lines
