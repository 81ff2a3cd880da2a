"""The number of trials of a sweep at a time on this host, and of GPUs for each.

The launcher that runs them is in hydra_plugins/ddp_train_pool, for any application of Hydra.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_train.hardware import Hardware
from ddp_train.options.schema import Config
from ddp_train.sweeps.overrides import key_of, last_value
from ddp_train.text import counted

POOL = "pool"
LOG = "log.txt"
"""The output of a trial that runs beside others, in its run directory."""


@dataclass(frozen=True)
class TrialPool:
    """The part of a host that each trial of a sweep gets."""

    at_once: int
    gpus_per_trial: int
    """0: on CPU."""

    def overrides(self, arguments: list[str]) -> list[str]:
        """Overrides that have Hydra use the pool. arguments: the others, which come first."""
        settings = {
            "hydra.launcher.gpus_per_trial": self.gpus_per_trial,
            "hydra.launcher.processes_at_once": self.at_once,
            "hydra.launcher.output": LOG,
        }
        given = {key_of(argument) for argument in arguments}
        missing = [f"{key}={value}" for key, value in settings.items() if key not in given]
        return [f"hydra/launcher={POOL}", *missing]


@dataclass(frozen=True)
class LauncherSettings:
    """Keys of hydra.launcher that say the same as keys of `sweep`; None: not given."""

    gpus_per_trial: int | None = None
    processes_at_once: int | None = None
    devices: tuple[str, ...] | None = None

    @property
    def are_given(self) -> bool:
        return self != LauncherSettings()


def read_settings(arguments: list[str]) -> tuple[LauncherSettings, list[str]]:
    """The settings on the command line, and what is wrong with them."""
    settings = LauncherSettings()
    problems = []
    for name, least in (("gpus_per_trial", 0), ("processes_at_once", 1)):
        text = last_value(arguments, f"hydra.launcher.{name}")
        if text.isdigit() and int(text) >= least:
            settings = replace(settings, **{name: int(text)})
        elif text not in ("", "null"):
            problems.append(
                f"hydra.launcher.{name}={text}: must be a whole number, at least {least}"
            )
    text = last_value(arguments, "hydra.launcher.devices")
    if text not in ("", "null"):
        entries = [entry.strip() for entry in text.strip("[]").split(",")]
        devices = tuple(entry for entry in entries if entry)
        settings = replace(settings, devices=devices)
    return settings, problems


def with_settings(config: Config, settings: LauncherSettings) -> tuple[Config, list[str]]:
    """The config whose keys of `sweep` say what the settings say, and where the two contradict."""
    defaults = type(config.sweep)()
    problems = []
    changes = {}
    for name in ("gpus_per_trial", "processes_at_once"):
        value = getattr(settings, name)
        typed = getattr(config.sweep, name)
        if value is not None and typed not in (value, getattr(defaults, name)):
            problems.append(
                f"hydra.launcher.{name}={value}: contradicts sweep.{name}={typed}; leave one of"
                " them out"
            )
        elif value:
            changes[name] = value
    return replace(config, sweep=replace(config.sweep, **changes)), problems


def hardware_of_trial(config: Config, hardware: Hardware) -> Hardware:
    """The part of this host that one trial sees."""
    gpus = config.sweep.gpus_per_trial
    if gpus and gpus <= hardware.gpus:
        return replace(hardware, gpus=gpus)
    return hardware


def pool_problems(config: Config, hardware: Hardware) -> list[str]:
    """Problems of the keys of `sweep`. hardware: the whole host."""
    gpus = config.sweep.gpus_per_trial
    processes = config.launch.nproc_per_node
    if not gpus or not hardware.gpus or config.device == "cpu":
        return []
    if gpus > hardware.gpus:
        return [
            f"sweep.gpus_per_trial={gpus}: this host has {counted(hardware.gpus, 'usable GPU')};"
            f" use at most sweep.gpus_per_trial={hardware.gpus}"
        ]
    if isinstance(processes, int) and processes > gpus and config.strategy.has_process_group:
        remedy = f"use sweep.gpus_per_trial={processes}"
        return [
            f"sweep.gpus_per_trial={gpus}: launch.nproc_per_node={processes} needs {processes}"
            f" GPUs for each trial; {remedy}"
        ]
    return []


def pool_notes(config: Config, resolved: Config, settings: LauncherSettings) -> list[str]:
    """Notes on keys without an effect on this hardware: the same command runs elsewhere."""
    gpus = config.sweep.gpus_per_trial
    at_once = config.sweep.processes_at_once
    on_cpu = resolved.device == "cpu"
    if settings.gpus_per_trial:  # of any devices: they may be names
        return []
    if on_cpu and settings.devices is not None:
        return [
            "hydra.launcher.devices has no effect on CPU; for several trials at a time use"
            " sweep.processes_at_once"
        ]
    if on_cpu and gpus:
        return [
            f"sweep.gpus_per_trial={gpus} has no effect on CPU; for several trials at a time use"
            " sweep.processes_at_once"
        ]
    if not on_cpu and at_once != 1:
        return [
            f"sweep.processes_at_once={at_once} has no effect on GPUs; for more trials at a time"
            " lower sweep.gpus_per_trial"
        ]
    return []


def pool_of(
    config: Config,
    trials: Sequence[Config],
    total: int,
    hardware: Hardware,
    settings: LauncherSettings = LauncherSettings(),
) -> TrialPool:
    """The number of trials at a time.

    config: as typed.
    trials: resolved configs.
    total: the number of trials; 0 if it is not known yet.
    """
    on_gpus = [trial for trial in trials if trial.device == "cuda"]
    devices = len(settings.devices or ()) or hardware.gpus
    gpus = 0
    if settings.gpus_per_trial:
        gpus = settings.gpus_per_trial
        at_once = devices // gpus
    elif on_gpus and settings.gpus_per_trial is None:
        wanted = [_gpus_of(trial, hardware) for trial in on_gpus]
        gpus = config.sweep.gpus_per_trial or max(wanted)
        at_once = devices // gpus
    elif config.sweep.processes_at_once == "auto":
        threads = config.launch.threads_per_process
        processes = max(int(trial.launch.nproc_per_node) for trial in trials)
        cores = processes * (1 if threads == "auto" else int(threads))
        at_once = hardware.cpus // cores
    else:
        at_once = int(config.sweep.processes_at_once)
    return TrialPool(max(1, min(at_once, total or at_once)), gpus)


def _gpus_of(trial: Config, hardware: Hardware) -> int:
    """The number of GPUs that a trial uses, if it sees all of them."""
    processes = int(trial.launch.nproc_per_node)
    if trial.strategy.spreads_over_gpus:
        return max(hardware.gpus, processes)
    return max(1, processes)


def trial_problems(config: Config) -> list[str]:
    """Why a config cannot be that of a trial, wherever it runs."""
    if config.launch.nnodes != 1:
        return [
            f"launch.nnodes={config.launch.nnodes}: a sweep runs on one host; leave out"
            " launch.nnodes"
        ]
    if config.checkpoint.mirror:
        return [
            f"checkpoint.mirror={config.checkpoint.mirror}: all trials would copy their"
            " checkpoints to the same place; leave out checkpoint.mirror"
        ]
    if config.mode == "doctor":
        return ["mode=doctor: cannot be swept; leave out -m"]
    return []
