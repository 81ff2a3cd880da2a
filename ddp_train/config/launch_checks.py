"""Checks of processes, hosts and devices."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_train.config.processes import HOSTS, PROCESSES, counts_of, hosts_at_start
from ddp_train.distributed.agent import hosts_requested
from ddp_train.distributed.environment import tasks_started
from ddp_train.options.key import Range, range_of
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config, RequestedRun
from ddp_train.text import counted, see_page

MOST_BESIDE = 256
"""Loader processes, or threads, of a host of whatever size."""


def problems(run: RequestedRun) -> Iterator[Problem]:
    yield from _mode(run.config)
    yield from _devices(run)
    yield from _too_many_beside(run)
    yield from _backend(run)
    yield from _under_torchrun(run)
    yield from _under_a_task_launcher(run)
    yield from _hosts(run)
    yield from _range_of_processes(run)
    yield from _range_of_hosts(run)


def _mode(config: Config) -> Iterator[Problem]:
    """Modes that are recognised on the command line alone, before anything is composed."""
    if config.mode in ("study", "prove"):
        yield Problem(
            f"mode={config.mode}",
            "cannot be set in a config file or a sweep",
            "pass it on the command line",
        )


def _devices(run: RequestedRun) -> Iterator[Problem]:
    hardware = run.hardware
    wanted = int(run.config.launch.nproc_per_node)
    if run.config.device == "cpu":
        most = 8 * hardware.cpus
        if wanted > most:
            yield Problem(
                f"launch.nproc_per_node={wanted}",
                "a host runs at most 8 processes per core, and this one has"
                f" {counted(hardware.cpus, 'core')}",
                f"use at most launch.nproc_per_node={most}",
            )
    elif not hardware.gpus:
        yield Problem("device=cuda", "no GPU is visible on this host", "use device=cpu")
    elif hardware.lost and run.config.mode != "doctor":  # the doctor examines them
        yield Problem(
            "device=cuda",
            f"the driver cannot reach {', '.join(hardware.lost)}",
            "reset this GPU or reboot the host (`dmesg | grep -i xid` shows the cause), or set"
            " CUDA_VISIBLE_DEVICES to the numbers of the others",
        )
    elif wanted > hardware.gpus:
        asked = run.asked.launch.nproc_per_node
        if not range_of(asked):
            asked = wanted
        gpus = f"{hardware.gpus} GPUs are"
        if hardware.gpus == 1:
            gpus = "1 GPU is"
        yield Problem(
            f"launch.nproc_per_node={asked}",
            f"needs one GPU per process, and {gpus} visible on this host",
            f"use launch.nproc_per_node={hardware.gpus} or device=cpu",
        )


def _too_many_beside(run: RequestedRun) -> Iterator[Problem]:
    """Loader processes and threads of all ranks of this host: each costs, with or without work."""
    config = run.config
    cpus = run.hardware.cpus
    ranks = int(config.launch.nproc_per_node)
    most = max(MOST_BESIDE, 8 * cpus, ranks)
    wanted = {
        "tuning.num_workers": int(config.tuning.num_workers),
        "launch.threads_per_process": int(config.launch.threads_per_process),
    }
    made = {"tuning.num_workers": "loader process", "launch.threads_per_process": "thread"}
    for name, number in wanted.items():
        if number * ranks > most:
            yield Problem(
                f"{name}={number}",
                f"makes {counted(number * ranks, made[name])} for {counted(ranks, 'process')}, and"
                f" a host with {counted(cpus, 'core')} runs at most {most}",
                f"use at most {name}={most // ranks}",
            )


def _backend(run: RequestedRun) -> Iterator[Problem]:
    if run.config.launch.backend != "nccl" or run.config.device != "cpu":
        return
    reason = "device=cpu"
    if not run.hardware.gpus:
        reason = "no GPU is visible on this host"
    yield Problem(
        "launch.backend=nccl", f"NCCL needs GPUs, and {reason}", "use launch.backend=gloo"
    )


def _under_torchrun(run: RequestedRun) -> Iterator[Problem]:
    world = run.world
    launch = run.asked.launch
    if not world:
        return
    # More hosts asked for than started is not a mistake in the config: distributed.preflight
    # reports it.
    hosts = (hosts_requested() or (world.hosts,))[0]
    started = {
        "nproc_per_node": (launch.nproc_per_node, world.local_size),
        "nnodes": (launch.nnodes, hosts),
    }
    for name, (asked, actual) in started.items():
        if asked not in ("auto", 1, actual) and not range_of(asked):
            yield Problem(
                f"launch.{name}={asked}",
                f"torchrun was started with --{name}={actual}",
                f"leave launch.{name} out, or start torchrun with --{name}={asked}",
            )
    if launch.max_restarts:
        yield Problem(
            f"launch.max_restarts={launch.max_restarts}",
            "torchrun restarts its own workers",
            f"start torchrun with --max-restarts={launch.max_restarts}",
        )
    if world.hosts > 1 and not run.asked.run_dir and world.run_id in ("", "none"):
        yield Problem(
            "run_dir=null",
            "several hosts need the same run directory, and each would choose its own",
            "add run_dir=PATH on a shared file system, or start torchrun with --rdzv-id=NAME",
        )


def _under_a_task_launcher(run: RequestedRun) -> Iterator[Problem]:
    """Problems of a launcher that srun, mpirun or their like have started several times."""
    nnodes = run.asked.launch.nnodes
    tasks = tasks_started()
    if run.world or _fits_tasks(tasks.count, nnodes):
        return
    remedy = (
        f"start one launcher, or one on each host with launch.nnodes={tasks.count} (if you did not"
        f" use {tasks.command}, first run `unset {' '.join(tasks.variables)}`)"
    )
    if tasks.command == "srun":
        remedy = (
            f"use srun --ntasks-per-node=1, and launch.nnodes=NUMBER of nodes{see_page('SLURM')}"
        )
    yield Problem(
        f"launch.nnodes={nnodes}",
        f"{tasks.command} started {tasks.count} launchers, and each would start all processes of"
        " its node",
        remedy,
    )


def _fits_tasks(tasks: int, nnodes: int | str) -> bool:
    """Tell whether there is one launcher per host, of those that srun or mpirun has started."""
    span = range_of(nnodes)
    if tasks in (1, nnodes):
        return True
    return span is not None and span.low <= tasks <= hosts_at_start(nnodes)


def _hosts(run: RequestedRun) -> Iterator[Problem]:
    nnodes = run.asked.launch.nnodes
    endpoint = run.asked.launch.rdzv_endpoint
    several = nnodes != 1
    if endpoint and (several or run.world) and not re.fullmatch(r"[^\s:]+:\d{1,5}", endpoint):
        yield Problem(
            f"launch.rdzv_endpoint={endpoint}",
            "must be HOST:PORT",
            "for example launch.rdzv_endpoint=node0:29400",
        )
    if run.world or not _fits_tasks(tasks_started().count, nnodes):
        return  # `_under_torchrun` and `_under_a_task_launcher` report it
    if several and not endpoint:
        yield Problem(
            f"launch.nnodes={nnodes}",
            "the hosts need an address where they meet",
            "add launch.rdzv_endpoint=HOST:PORT of one of the hosts",
        )
    elif several and not run.asked.run_dir:
        yield Problem(
            f"launch.nnodes={nnodes}",
            "the hosts need the same run directory",
            "add run_dir=PATH on a shared file system",
        )
    elif endpoint and not several:
        yield Problem(
            f"launch.rdzv_endpoint={endpoint}",
            "has an effect only with several hosts",
            "add launch.nnodes=2, or leave launch.rdzv_endpoint out",
        )


def _range_of_processes(run: RequestedRun) -> Iterator[Problem]:
    """Problems of `launch.nproc_per_node=LOW:HIGH`."""
    config = run.config
    asked = run.asked.launch
    span = range_of(asked.nproc_per_node)
    if span is None:
        return
    found = f"{PROCESSES}={asked.nproc_per_node}"
    if run.world:
        yield Problem(
            found,
            f"torchrun has set the number of processes to {run.world.local_size}",
            "leave it out",
        )
    elif int(config.launch.nnodes) > 1:
        yield Problem(
            found,
            f"the number of processes can change on one host only, and {HOSTS}={asked.nnodes}",
            f"use one number, {PROCESSES}={config.launch.nproc_per_node}",
        )
    elif not config.strategy.has_process_group:
        yield _one_process(found, config)
    elif config.strategy.virtual_shards is not None:
        ends = [end for end in (span.low, span.high) if end is not None]
        remedy = f"use powers of two up to {config.strategy.virtual_shards}, for example 1:2"
        yield from _not_divided(found, ends, config, remedy)
    else:
        counts = counts_of(span, config, run.hardware)
        yield from _too_few_samples(found, span, counts[-1], config)


def _one_process(found: str, config: Config) -> Problem:
    return Problem(
        found,
        f"strategy={config.strategy.name} runs in one process",
        f"use strategy=ddp, or leave {PROCESSES} out",
    )


def _not_divided(found: str, counts: list[int], config: Config, remedy: str) -> Iterator[Problem]:
    """The problem of numbers of processes among which the strategy cannot divide a step."""
    strategy = config.strategy
    undivided = [str(count) for count in counts if not strategy.can_run_on(count)]
    if undivided:
        yield Problem(
            found,
            f"strategy=ordered cannot divide {strategy.virtual_shards} virtual shards evenly"
            f" among {' or '.join(undivided)} processes",
            remedy,
        )


def _too_few_samples(found: str, span: Range, most: int, config: Config) -> Iterator[Problem]:
    """The problem of a global batch that leaves some processes of a range without a sample.

    found: the range as it was typed, `launch.nproc_per_node=LOW:HIGH`.
    most: its largest number of processes on this hardware.
    """
    batch = config.train.global_batch_size
    accumulation = config.train.accumulation_steps
    most_with_samples = batch // accumulation
    if most <= most_with_samples or config.data.batch_by == "tokens":
        return
    processes = f"{most} processes"
    fewest_without = max(span.low, most_with_samples + 1)
    if fewest_without < most:
        processes = f"{fewest_without} to {processes}"
    if accumulation > 1:
        processes += f" and {accumulation} accumulation steps each"
    remedy = f"train.global_batch_size={most * accumulation} or more"
    if span.low <= most_with_samples:
        remedy = f"{PROCESSES}={span.low}:{most_with_samples}, or {remedy}"
    yield Problem(
        found,
        f"train.global_batch_size={batch} is too small for {processes}",
        f"use {remedy}",
    )


def _range_of_hosts(run: RequestedRun) -> Iterator[Problem]:
    """Problems of `launch.nnodes=LOW:HIGH`.

    Under torchrun the range was checked before its agent was started, or it is the agent's own.
    """
    config = run.config
    nnodes = run.asked.launch.nnodes
    span = range_of(nnodes)
    if span is None or run.world:
        return
    found = f"{HOSTS}={nnodes}"
    high = span.high or span.low
    if not config.strategy.has_process_group:
        yield _one_process(found, config)
        return
    if high == 1:
        yield Problem(found, "a range must allow more than one host", f"use {HOSTS}=1")
        return
    if not config.launch.max_restarts:
        yield Problem(
            found,
            "a lost host costs a restart, and launch.max_restarts=0 allows none",
            "add launch.max_restarts=10",
        )
    each = int(config.launch.nproc_per_node)
    counts = [hosts * each for hosts in range(span.low, high + 1)]
    if config.strategy.virtual_shards is not None:
        yield from _not_divided(found, counts, config, _divided_hosts(config))
        return
    batch = config.train.global_batch_size
    accumulation = config.train.accumulation_steps
    most = counts[-1] * accumulation
    if most > batch and config.data.batch_by != "tokens":
        processes = f"{high} hosts with {counted(each, 'process')} each"
        if accumulation > 1:
            processes += f" and {accumulation} accumulation steps in each process"
        yield Problem(
            found,
            f"train.global_batch_size={batch} is too small for {processes}",
            f"use train.global_batch_size={most} or more",
        )


def _divided_hosts(config: Config) -> str:
    """The remedy for a range of hosts among which virtual shards cannot be divided evenly.

    Among the ranges only 1:2 has powers of two alone.
    """
    each = int(config.launch.nproc_per_node)
    divided = [count for count in range(1, each + 1) if config.strategy.can_run_on(2 * count)]
    if not divided:
        return f"use strategy.virtual_shards=2 {HOSTS}=1:2 {PROCESSES}=1"
    if divided[-1] == each:
        return f"use {HOSTS}=1:2"
    return f"use {HOSTS}=1:2 {PROCESSES}={divided[-1]}"
