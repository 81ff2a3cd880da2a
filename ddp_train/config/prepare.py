"""All that happens before a process starts: compose, bind, resolve, check, freeze."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_train.config.auto import resolve
from ddp_train.config.external_checks import changed, held_run, manifest_config, unwritable
from ddp_train.config.freeze import freeze, to_text
from ddp_train.config.hardware import detect_hardware
from ddp_train.config.overrides import Overrides, read_config, read_overrides
from ddp_train.config.schema import Config
from ddp_train.config.validate import check, check_rules, notices
from ddp_train.distributed.environment import visible_devices
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.resilience import run_lock


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its config, the text that was frozen, and what the user should know."""

    config: Config
    text: str
    """Empty for this host's part of several: there, rank 0 freezes the config, under torchrun."""
    notices: list[str]
    lock: run_lock.Lock | None = None
    """Held for the life of the run, so that no second one works in its directory."""


def prepare(conf: Path, overrides: list[str], world: World | None, run_dir: str | None = None) -> Prepared:
    """Raises ConfigError with every problem. run_dir: that of a trial, in place of the one that the words name."""
    config, problems = read_run(conf, read_overrides(conf, overrides))
    if run_dir:
        config = replace(config, run_dir=run_dir)
    return settle(config, problems, world)


def read_run(conf: Path, overrides: Overrides) -> tuple[Config, list[str]]:
    """The config, composed and bound, and all problems; an evaluation's with its checkpoint's model and data."""
    config, problems = read_config(conf, overrides)
    if config.mode == "evaluate" and not problems:
        config, problems = read_config(conf, overrides, adopted_sections(Path(config.checkpoint.resume)))
    elif (
        config.run_dir
        and config.mode != "doctor"  # which finds out by itself whether that disk answers
        and config.checkpoint.resume != "never"
        and getattr(config.data, "decode", "") == "auto"
    ):
        # Another hardware may decode otherwise, to slightly other pixels: a run keeps to what it began with.
        then = manifest_config(Path(config.run_dir)).get("data", {})
        if then.get("name") == config.data.name:
            config.data = replace(config.data, decode=then.get("decode", "auto"))
    return config, problems


def examine(config: Config, world: World | None) -> tuple[Config, list[str]]:
    """The config as this hardware will run it, and everything that is wrong with it."""
    problems = check_rules(config)
    if problems:  # arithmetic on values that break their rules would only add noise
        return config, problems
    hardware = detect_hardware(visible_devices())
    resolved = resolve(config, hardware, world)
    return resolved, check(config, resolved, hardware, world)


def settle(config: Config, problems: list[str], world: World | None) -> Prepared:
    """The rest of `prepare`, for a config that was composed and bound already."""
    resolved, more = examine(config, world)
    if problems or more:
        raise ConfigError(list(dict.fromkeys(problems + more)))
    told = notices(config, resolved)
    if world is None and resolved.launch.nnodes > 1:
        return Prepared(resolved, "", told)
    if resolved.mode == "doctor":  # it may look on while a run is in that directory, and leaves that run's files alone
        return Prepared(resolved, to_text(resolved), told)
    held = lock_run_dir(resolved, world)
    before = held_run(resolved)
    if before and (other := changed(before, resolved)):
        told.append(f"run_dir={resolved.run_dir} goes on with {', '.join(other)}")
    if resolved.mode == "train" and resolved.checkpoint.resume == "never" and not (world and world.attempt):
        told += archive_previous_run(Path(str(resolved.run_dir)))
    return Prepared(resolved, freeze(resolved), told, held)


def lock_run_dir(config: Config, world: World | None) -> run_lock.Lock:
    """Raises ConfigError, naming the holder, if another run works in the run directory."""
    # A new rank 0 may start while torchrun still ends the old one, on another host: SIGKILL comes 30 s after SIGTERM.
    patience_seconds = 35.0 if world and (world.attempt or world.hosts > 1) else 0.0
    try:
        return run_lock.acquire(Path(str(config.run_dir)) / run_lock.FILE, patience_seconds)
    except run_lock.LockHeldError as error:
        remedy = "wait for it, stop it, or name another run_dir"
        raise ConfigError([f"run_dir={config.run_dir}: another run is in it, {error}; {remedy}"]) from None
    except OSError as error:
        raise ConfigError([unwritable(config.run_dir, error.strerror or str(error))]) from None


LEFT_BY_RUNS = ("checkpoints", "metrics.jsonl", "trackers.json", "tensorboard")


def archive_previous_run(run_dir: Path) -> list[str]:
    """Renames what a run that is not continued left: nothing is lost, and none is taken for new. Says what it did."""
    left = [path for name in LEFT_BY_RUNS if (path := run_dir / name).exists()]
    number = next(n for n in itertools.count(1) if not any(run_dir.glob(f"*_before_{n}*")))
    aside = [path.rename(path.with_stem(f"{path.stem}_before_{number}")) for path in left]
    names = ", ".join(path.name for path in aside)
    return [f"checkpoint.resume=never: what an earlier run left in {run_dir} is called {names} now"] if left else []


def adopted_sections(resume: Path) -> dict[str, Any]:
    """The model and the data that a checkpoint was trained with, from its manifest; nothing if there is none."""
    frozen = manifest_config(resume)
    if "data" in frozen:  # where its samples are held and decoded is this hardware's affair
        frozen["data"] = {name: value for name, value in frozen["data"].items() if name not in ("loader", "decode")}
    return {section: frozen[section] for section in ("model", "data") if section in frozen}
