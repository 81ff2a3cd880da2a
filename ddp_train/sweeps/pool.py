"""How many trials of a sweep run at a time on this host, with how many GPUs each: what
`hydra/launcher=pool` is told.

The launcher itself is in hydra_plugins/ddp_train_pool, which any application of Hydra can use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_train.hardware import Hardware
from ddp_train.options.schema import Config
from ddp_train.sweeps import sweep_overrides as sweep_words

NAME = "pool"
LOG = "log.txt"
"""What a trial prints, in its run directory, while others run."""
KEYS = ("gpus_per_trial", "processes_at_once", "output")
"""Of hydra.launcher: set from the keys of `sweep`, unless they are given."""


@dataclass(frozen=True)
class TrialPool:
    """What the trials of a sweep share."""

    at_once: int
    gpus_per_trial: int
    """0: on CPU."""

    def words(self, arguments: list[str]) -> list[str]:
        """The words for Hydra. arguments: those it gets in any case, which come first."""
        given = {word.partition("=")[0] for word in arguments}
        values = zip(KEYS, (self.gpus_per_trial, self.at_once, LOG), strict=True)
        own = [f"hydra.launcher.{name}={value}" for name, value in values]
        return [
            f"hydra/launcher={NAME}",
            *(word for word in own if word.partition("=")[0] not in given),
        ]


def told(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What the launcher is told directly (`hydra.launcher.processes_at_once=2`), and what is wrong
    with it."""
    found: dict[str, Any] = {}
    problems = []
    for name, least in (("gpus_per_trial", 0), ("processes_at_once", 1)):
        text = sweep_words.last(arguments, f"hydra.launcher.{name}")
        if text.isdigit() and int(text) >= least:
            found[name] = int(text)
        elif text not in ("", "null"):
            problems.append(f"hydra.launcher.{name}={text}: must be a number, at least {least}")
    devices = sweep_words.last(arguments, "hydra.launcher.devices")
    if devices not in ("", "null"):
        found["devices"] = [
            entry.strip() for entry in devices.strip("[]").split(",") if entry.strip()
        ]
    return found, problems


def with_told(config: Config, told: dict[str, Any]) -> tuple[Config, list[str]]:
    """The config in which the keys of `sweep` say what the launcher was told, and where the two
    contradict."""
    usual = type(config.sweep)()
    problems = []
    changed = {}
    for name in ("gpus_per_trial", "processes_at_once"):
        value = told.get(name)
        own = getattr(config.sweep, name)
        if value is not None and own not in (value, getattr(usual, name)):
            problems.append(
                f"hydra.launcher.{name}={value}: sweep.{name}={own} says otherwise; leave one of"
                " them out"
            )
        elif value:
            changed[name] = value
    return replace(config, sweep=replace(config.sweep, **changed)), problems


def hardware_of_trial(config: Config, hardware: Hardware) -> Hardware:
    """The part of this host that one trial sees."""
    asked = config.sweep.gpus_per_trial
    if asked and asked <= hardware.gpus:
        return replace(hardware, gpus=asked)
    return hardware


def problems(config: Config, hardware: Hardware) -> list[str]:
    """What is wrong with the keys of `sweep`. hardware: the whole host."""
    asked = config.sweep.gpus_per_trial
    processes = config.launch.nproc_per_node
    if not asked or not hardware.gpus or config.device == "cpu":
        return []
    if asked > hardware.gpus:
        return [
            f"sweep.gpus_per_trial={asked}: this host has {hardware.gpus} for it; use at most"
            f" {hardware.gpus}"
        ]
    if isinstance(processes, int) and processes > asked and config.strategy.has_process_group:
        remedy = f"use sweep.gpus_per_trial={processes}, or leave one of them out"
        return [
            f"sweep.gpus_per_trial={asked}: launch.nproc_per_node={processes} needs as many GPUs;"
            f" {remedy}"
        ]
    return []


def notes(config: Config, resolved: Config, told: dict[str, Any]) -> list[str]:
    """Keys of `sweep` that have no effect on this hardware: the same command runs elsewhere."""
    asked = config.sweep.gpus_per_trial
    at_once = config.sweep.processes_at_once
    on_cpu = resolved.device == "cpu"
    if told.get("gpus_per_trial"):  # whatever there is: they may be names
        return []
    if on_cpu and "devices" in told:
        return [
            "hydra.launcher.devices has no effect on CPU; sweep.processes_at_once says how many"
            " trials run"
        ]
    if on_cpu and asked:
        return [
            f"sweep.gpus_per_trial={asked} has no effect on CPU; sweep.processes_at_once says how"
            " many trials run"
        ]
    if not on_cpu and at_once != 1:
        return [
            f"sweep.processes_at_once={at_once} has no effect on GPUs; sweep.gpus_per_trial says"
            " how many trials run"
        ]
    return []


def pool_of(
    asked: Config,
    trials: Sequence[Config],
    total: int,
    hardware: Hardware,
    told: dict[str, Any] | None = None,
) -> TrialPool:
    """asked: the config as typed. trials: resolved ones. total: the number of trials; 0 if nobody
    knows it yet. told: see there."""
    on_gpus = [trial for trial in trials if trial.device == "cuda"]
    gpus = 0
    told = told or {}
    devices = len(told.get("devices", ())) or hardware.gpus
    if told.get("gpus_per_trial"):
        gpus = told["gpus_per_trial"]
        at_once = devices // gpus
    elif on_gpus and "gpus_per_trial" not in told:
        spread = [hardware.gpus if trial.strategy.spreads_over_gpus else 1 for trial in on_gpus]
        own = [int(trial.launch.nproc_per_node) for trial in on_gpus]
        gpus = asked.sweep.gpus_per_trial or max(1, *spread, *own)
        at_once = devices // gpus
    elif asked.sweep.processes_at_once == "auto":
        threads = asked.launch.threads_per_process
        each = max(int(trial.launch.nproc_per_node) for trial in trials) * (
            1 if threads == "auto" else int(threads)
        )
        at_once = hardware.cpus // each
    else:
        at_once = int(asked.sweep.processes_at_once)
    return TrialPool(max(1, min(at_once, total or at_once)), gpus)


def refused(config: Config) -> list[str]:
    """Why this cannot be a trial, wherever it runs."""
    if config.launch.nnodes != 1:
        return [
            f"launch.nnodes={config.launch.nnodes}: a sweep runs on one host; leave it out, or"
            " start each run alone"
        ]
    if config.checkpoint.mirror:
        return [
            f"checkpoint.mirror={config.checkpoint.mirror}: all trials would share it; leave it out"
            " of a sweep"
        ]
    if config.mode == "doctor":
        return ["mode=doctor: cannot be swept; leave out -m"]
    return []
