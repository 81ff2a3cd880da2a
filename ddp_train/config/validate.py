"""What can be known to be wrong before anything starts. Every problem is one line: key=value, the
rule, the remedy."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ddp_train.config import conflicts, external_checks, fine_tuning
from ddp_train.config.auto import process_count
from ddp_train.config.processes import hosts_at_start, problems_of_hosts
from ddp_train.config.processes import problems as range_problems
from ddp_train.distributed.environment import hosts_requested, srun_tasks
from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware
from ddp_train.options.key import broken_rule, range_of
from ddp_train.options.schema import Config
from ddp_train.text import counted, shown

MOST_BESIDE = 256
"""Loader processes, or threads, of a host of whatever size."""


def check(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """The problems of a config whose values obey `check_rules`. asked: what the user wrote; config:
    after `resolve`."""
    checks = (
        *(
            _mode,
            _devices,
            _too_many,
            _backend,
            _under_torchrun,
            _under_srun,
            _hosts,
            _process_count,
        ),
        *(range_problems, problems_of_hosts),
        *conflicts.CHECKS,
        *external_checks.CHECKS,
        fine_tuning.check,
    )
    return [
        problem for one_check in checks for problem in one_check(asked, config, hardware, world)
    ]


def check_rules(config: Config) -> list[str]:
    """What breaks the rules beside the fields of the schema."""
    return section_rules(config, "")


def section_rules(section: Any, prefix: str) -> list[str]:
    """What breaks the rules beside the fields of one section, and of those within it; its keys
    begin with `prefix`."""
    problems = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            problems += section_rules(value, f"{prefix}{f.name}.")
            continue
        for item in value if isinstance(value, list) else [value]:
            rule = broken_rule(item, f.metadata)
            if rule:
                problems.append(f"{prefix}{f.name}={shown(value)}: {rule}")
                break
    return problems


def _mode(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """A study and a proof are recognised by mode=... on the command line, before anything is
    composed."""
    if config.mode not in ("study", "prove"):
        return []
    return [
        f"mode={config.mode}: cannot be set in a config file or a sweep; pass it on the command"
        " line"
    ]


def _devices(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    wanted = int(config.launch.nproc_per_node)
    if config.device == "cpu":
        most = 8 * hardware.cpus
        if wanted <= most:
            return []
        return [
            f"launch.nproc_per_node={wanted}: this host has {counted(hardware.cpus, 'core')}; use"
            f" at most {most}"
        ]
    if not hardware.gpus:
        return ["device=cuda: no GPU is visible on this host; use device=cpu"]
    if hardware.lost and config.mode != "doctor":  # the doctor examines them
        return [
            f"device=cuda: the driver cannot reach {', '.join(hardware.lost)}; reset it or reboot"
            " (see `dmesg | grep -i xid`), or leave it out with CUDA_VISIBLE_DEVICES"
        ]
    if wanted > hardware.gpus:
        asked_for = asked.launch.nproc_per_node if range_of(asked.launch.nproc_per_node) else wanted
        return [
            f"launch.nproc_per_node={asked_for}: needs one GPU per process, and"
            f" {counted(hardware.gpus, 'GPU')} {'is' if hardware.gpus == 1 else 'are'} visible on"
            f" this host; use launch.nproc_per_node={hardware.gpus} or device=cpu"
        ]
    return []


def _too_many(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """Loader processes and threads of all ranks of this host: each has a cost, whether it has work
    or not."""
    ranks = int(config.launch.nproc_per_node)
    most = max(MOST_BESIDE, 8 * hardware.cpus)
    wanted = {
        "tuning.num_workers": int(config.tuning.num_workers),
        "launch.threads_per_process": int(config.launch.threads_per_process),
    }
    return [
        f"{key}={number}: would be {number * ranks:,} on this host, which has"
        f" {counted(hardware.cpus, 'core')}; use at most {most // ranks}"
        for key, number in wanted.items()
        if number * ranks > max(most, ranks)
    ]


def _backend(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    if config.launch.backend != "nccl" or config.device != "cpu":
        return []
    why = "no GPU is visible on this host" if not hardware.gpus else "device=cpu"
    return [f"launch.backend=nccl: NCCL connects GPUs and {why}; use launch.backend=gloo"]


def _under_torchrun(
    asked: Config, config: Config, hardware: Hardware, world: World | None
) -> list[str]:
    if not world:
        return []
    problems = []
    launch = asked.launch
    # More hosts asked for than started is no mistake in the config: distributed.preflight reports
    # it.
    hosts = (hosts_requested() or (world.hosts,))[0]
    for name, actual in (("nproc_per_node", world.local_size), ("nnodes", hosts)):
        if getattr(launch, name) not in ("auto", 1, actual) and not range_of(getattr(launch, name)):
            problems.append(
                f"launch.{name}={getattr(launch, name)}: torchrun started {actual}; leave it out,"
                f" or use torchrun --{name}={getattr(launch, name)}"
            )
    if launch.max_restarts:
        problems.append(
            f"launch.max_restarts={launch.max_restarts}: torchrun restarts its own workers; "
            f"use torchrun --max-restarts={launch.max_restarts}"
        )
    if world.hosts > 1 and not asked.run_dir and world.run_id in ("", "none"):
        problems.append(
            "run_dir=null: several hosts need the same run directory; add run_dir=PATH on a shared"
            " file system, or torchrun --rdzv-id=NAME"
        )
    return problems


def _under_srun(
    asked: Config, config: Config, hardware: Hardware, world: World | None
) -> list[str]:
    nnodes = asked.launch.nnodes
    tasks = srun_tasks()
    if world or _may_be_of(tasks, nnodes):
        return []
    return [
        f"launch.nnodes={nnodes}: srun started {tasks} launchers, and each starts all processes of"
        " its node; use srun --ntasks-per-node=1, with launch.nnodes equal to the number of nodes"
        " (deploy/slurm)"
    ]


def _may_be_of(tasks: int, nnodes: int | str) -> bool:
    """Whether srun has started one launcher per host, or none is of srun's."""
    found = range_of(nnodes)
    return tasks in (1, nnodes) or (
        found is not None and found.low <= tasks <= hosts_at_start(nnodes)
    )


def _hosts(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    nnodes = asked.launch.nnodes
    endpoint = asked.launch.rdzv_endpoint
    several = nnodes != 1
    problems = []
    if world or not _may_be_of(srun_tasks(), nnodes):  # reported by the two above
        pass
    elif several and not endpoint:
        problems.append(
            f"launch.nnodes={nnodes}: the hosts need a meeting point; add"
            " launch.rdzv_endpoint=HOST:PORT"
        )
    elif several and not asked.run_dir:
        problems.append(
            f"launch.nnodes={nnodes}: the hosts need the same run directory; add run_dir=PATH on a"
            " shared file system"
        )
    elif not several and endpoint:
        problems.append(
            f"launch.rdzv_endpoint={endpoint}: has an effect only with several hosts; add"
            " launch.nnodes=2, or leave it out"
        )
    if endpoint and (several or world) and not re.fullmatch(r"[^\s:]+:\d{1,5}", endpoint):
        problems.append(f"launch.rdzv_endpoint={endpoint}: must be HOST:PORT")
    return problems


def _process_count(
    asked: Config, config: Config, hardware: Hardware, world: World | None
) -> list[str]:
    count = process_count(config)
    ranges = range_of(asked.launch.nproc_per_node) or range_of(
        asked.launch.nnodes
    )  # `config.processes` looks at them
    if config.strategy.has_process_group or count == 1 or ranges:
        return []
    return [
        f"strategy={config.strategy.name}: runs in one process, and {count} were asked for; "
        "use strategy=ddp, or launch.nproc_per_node=1 launch.nnodes=1"
    ]
