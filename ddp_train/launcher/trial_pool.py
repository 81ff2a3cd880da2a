"""How many trials of a sweep run at a time on this host, with how many GPUs each: what `hydra/launcher=pool` is told.

The launcher itself is in hydra_plugins/ddp_train_pool, which any application of Hydra can use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_train.config.hardware import Hardware
from ddp_train.config.schema import Config

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
        return [f"hydra/launcher={NAME}", *(word for word in own if word.partition("=")[0] not in given)]


def hardware_of_trial(config: Config, hardware: Hardware) -> Hardware:
    """The part of this host that one trial sees."""
    asked = config.sweep.gpus_per_trial
    return replace(hardware, gpus=asked) if asked and asked <= hardware.gpus else hardware


def problems(config: Config, hardware: Hardware) -> list[str]:
    """What is wrong with the keys of `sweep`. hardware: the whole host."""
    asked, processes = config.sweep.gpus_per_trial, config.launch.nproc_per_node
    if not asked or not hardware.gpus or config.device == "cpu":
        return []
    if asked > hardware.gpus:
        return [f"sweep.gpus_per_trial={asked}: this host has {hardware.gpus} for it; use at most {hardware.gpus}"]
    if isinstance(processes, int) and processes > asked and config.strategy.has_process_group:
        remedy = f"use sweep.gpus_per_trial={processes}, or leave one of them out"
        return [f"sweep.gpus_per_trial={asked}: launch.nproc_per_node={processes} needs as many GPUs; {remedy}"]
    return []


def notes(config: Config, resolved: Config) -> list[str]:
    """Keys of `sweep` that have no effect on this hardware: the same command runs elsewhere."""
    asked, at_once, on_cpu = config.sweep.gpus_per_trial, config.sweep.processes_at_once, resolved.device == "cpu"
    if on_cpu and asked:
        return [f"sweep.gpus_per_trial={asked} has no effect on CPU; sweep.processes_at_once says how many trials run"]
    if not on_cpu and at_once != 1:
        return [
            f"sweep.processes_at_once={at_once} has no effect on GPUs; sweep.gpus_per_trial says how many trials run"
        ]
    return []


def pool_of(asked: Config, trials: Sequence[Config], total: int, hardware: Hardware) -> TrialPool:
    """asked: the config as typed. trials: resolved ones. total: the number of trials; 0 if nobody knows it yet."""
    on_gpus = [trial for trial in trials if trial.device == "cuda"]
    gpus = 0
    if on_gpus:
        spread = [hardware.gpus if trial.strategy.spreads_over_gpus else 1 for trial in on_gpus]
        own = [int(trial.launch.nproc_per_node) for trial in on_gpus]
        gpus = asked.sweep.gpus_per_trial or max(1, *spread, *own)
        at_once = hardware.gpus // gpus
    elif asked.sweep.processes_at_once == "auto":
        threads = asked.launch.threads_per_process
        each = max(int(trial.launch.nproc_per_node) for trial in trials) * (1 if threads == "auto" else int(threads))
        at_once = hardware.cpus // each
    else:
        at_once = int(asked.sweep.processes_at_once)
    return TrialPool(max(1, min(at_once, total or at_once)), gpus)


def refused(config: Config) -> list[str]:
    """Why this cannot be a trial, wherever it runs."""
    if config.launch.nnodes != 1:
        return [
            f"launch.nnodes={config.launch.nnodes}: a sweep runs on one host; leave it out, or start each run alone"
        ]
    if config.checkpoint.mirror:
        return [f"checkpoint.mirror={config.checkpoint.mirror}: all trials would share it; leave it out of a sweep"]
    return ["mode=doctor: cannot be swept; leave out -m"] if config.mode == "doctor" else []
