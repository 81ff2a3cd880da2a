"""All that happens before a process starts: compose, bind, resolve, check, freeze."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_train.config.check import check, notices
from ddp_train.config.compose import read_config, read_overrides
from ddp_train.config.freeze import freeze
from ddp_train.config.machine import this_machine
from ddp_train.config.resolve import resolve
from ddp_train.config.schema import Config
from ddp_train.distributed.world import World, visible_devices
from ddp_train.errors import ConfigError


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its config, the text that was frozen, and what the user should know."""

    config: Config
    text: str
    notices: list[str]


def prepare(conf: Path, words: list[str], world: World | None) -> Prepared:
    """Raises ConfigError with every problem."""
    overrides = read_overrides(conf, words)
    config, problems = read_config(conf, overrides)
    if config.mode == "evaluate" and not problems:
        config, problems = read_config(conf, overrides, adopted_sections(Path(config.checkpoint.resume)))
    return settle(config, problems, world)


def problems_of(config: Config, world: World | None) -> list[str]:
    """Everything that `check` says of a config on this machine."""
    machine = this_machine(visible_devices())
    return check(config, resolve(config, machine, world), machine, world)


def settle(config: Config, problems: list[str], world: World | None) -> Prepared:
    """The rest of `prepare`, for a config that was composed and bound already."""
    machine = this_machine(visible_devices())
    resolved = resolve(config, machine, world)
    problems = problems + check(config, resolved, machine, world)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Prepared(resolved, freeze(resolved), notices(config, resolved))


def adopted_sections(resume: Path) -> dict[str, Any]:
    """The model and the data that a checkpoint was trained with, from its manifest; nothing if there is none."""
    newest = sorted((resume / "checkpoints").glob("step_????????"), reverse=True)
    for place in (resume, *newest):
        try:
            frozen = json.loads((place / "manifest.json").read_text())["config"]
            return {"model": frozen["model"], "data": frozen["data"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}
