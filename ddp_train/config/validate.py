"""What can be known to be wrong before anything starts. Every problem is one line: key=value, the rule, the remedy."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from ddp_train.config import conflicts, external_checks
from ddp_train.config.auto import IMAGE_MODELS, IN_MEMORY, LAYER_WISE, process_count
from ddp_train.config.hardware import Hardware
from ddp_train.config.schema import OPTIONS, SECTIONS, Config
from ddp_train.distributed.environment import hosts_requested, srun_tasks
from ddp_train.distributed.world import World
from ddp_train.text import counted, did_you_mean, shown


def check(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """The problems of a config whose values obey `check_rules`. asked: what the user wrote; config: after `resolve`."""
    problems: list[str] = []
    for one_check in (
        _mode,
        _processes,
        _batch,
        _strategy,
        _reduction,
        conflicts.problems,
        _numbers,
        *external_checks.CHECKS,
    ):
        problems += one_check(asked, config, hardware, world)
    return problems


def check_rules(config: Config) -> list[str]:
    """The rules that stand beside each field of the schema."""
    problems = section_rules(config, "")
    for section in (*SECTIONS, *OPTIONS):
        problems += section_rules(getattr(config, section), section + ".")
    return problems


def section_rules(section: Any, prefix: str) -> list[str]:
    """What breaks the rules beside the fields of one section, whose keys begin with `prefix`."""
    problems = []
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        for item in value if isinstance(value, list) and f.name.endswith("_mb_list") else [value]:
            rule = _broken_rule(item, f.metadata)
            if rule:
                problems.append(f"{prefix}{f.name}={shown(value)}: {rule}")
    return problems


def _broken_rule(value: Any, rules: Any) -> str:
    if value == "" and not rules.get("may_be_empty"):
        return "must not be empty"
    if isinstance(value, str):
        allowed = rules.get("choices", ())
        if allowed and value not in allowed:
            return f"must be one of {', '.join(allowed)}{did_you_mean(value, list(allowed))}"
        if "words" in rules and value not in rules["words"]:
            kind = "a whole number" if "at_least" in rules else "true, false"
            return f"must be {kind} or {' or '.join(rules['words'])}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return "must be a finite number"
    bounds = (
        ("at_least", "at least", lambda bound: value >= bound),
        ("above", "above", lambda bound: value > bound),
        ("at_most", "at most", lambda bound: value <= bound),
        ("below", "below", lambda bound: value < bound),
    )
    broken = [f"{words} {rules[name]}" for name, words, holds in bounds if name in rules and not holds(rules[name])]
    return f"must be {' and '.join(broken)}" if broken else ""


def _mode(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    """A study is no single run: it is known by the word itself, before anything is composed."""
    if config.mode != "study":
        return []
    return [f"mode={config.mode}: is no run that can be swept or frozen; type mode={config.mode} as it stands here"]


def _processes(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    problems, launch, wanted = [], asked.launch, int(config.launch.nproc_per_node)
    if config.device == "cuda" and not hardware.gpus:
        problems.append("device=cuda: no GPU is visible on this host; use device=cpu")
    elif config.device == "cuda" and hardware.lost and config.mode != "doctor":  # which examines them
        problems.append(
            f"device=cuda: the driver cannot reach {', '.join(hardware.lost)}; reset it or reboot (see `dmesg | "
            "grep -i xid`), or leave it out with CUDA_VISIBLE_DEVICES"
        )
    elif config.device == "cuda" and wanted > hardware.gpus:
        problems.append(
            f"launch.nproc_per_node={wanted}: {counted(hardware.gpus, 'GPU')} visible on this host, one per "
            f"process is needed; use launch.nproc_per_node={hardware.gpus} or device=cpu"
        )
    if config.device == "cpu" and wanted > 8 * hardware.cpus:
        cores = counted(hardware.cpus, "core")
        problems.append(f"launch.nproc_per_node={wanted}: this host has {cores}; use at most {8 * hardware.cpus}")
    if config.launch.backend == "nccl" and config.device == "cpu":
        why = "no GPU is visible on this host" if not hardware.gpus else "device=cpu"
        problems.append(f"launch.backend=nccl: NCCL connects GPUs and {why}; use launch.backend=gloo")
    if world:
        # Asked for two hosts and started with one: that is no mistake in the config, distributed.preflight tells.
        hosts = (hosts_requested() or (world.hosts,))[0]
        for name, actual in (("nproc_per_node", world.local_size), ("nnodes", hosts)):
            if getattr(launch, name) not in ("auto", 1, actual):
                problems.append(
                    f"launch.{name}={getattr(launch, name)}: torchrun started {actual}; leave it out, or "
                    f"use torchrun --{name}={getattr(launch, name)}"
                )
        if launch.max_restarts:
            problems.append(
                f"launch.max_restarts={launch.max_restarts}: under torchrun it is torchrun that restarts; "
                f"use torchrun --max-restarts={launch.max_restarts}"
            )
        if config.probe != "none":
            problems.append(f"probe={config.probe}: torchrun's workers measure nothing; use python launch.py")
        if world.hosts > 1 and not asked.run_dir and world.run_id in ("", "none"):
            problems.append(
                "run_dir=null: several hosts need one name for the run; add run_dir=PATH on a shared file "
                "system, or torchrun --rdzv-id=NAME"
            )
    elif srun_tasks() not in (1, launch.nnodes):
        problems.append(
            f"launch.nnodes={launch.nnodes}: srun started {srun_tasks()} launchers, and each starts all processes of "
            "its node; use srun --ntasks-per-node=1, with launch.nnodes as many as there are nodes (deploy/slurm)"
        )
    elif launch.nnodes > 1 and not launch.rdzv_endpoint:
        problems.append(
            f"launch.nnodes={launch.nnodes}: hosts need a place to meet; add launch.rdzv_endpoint=HOST:PORT"
        )
    elif launch.nnodes > 1 and not asked.run_dir:
        problems.append(
            f"launch.nnodes={launch.nnodes}: hosts need one name for the run; add run_dir=PATH on a shared file system"
        )
    elif launch.nnodes == 1 and launch.rdzv_endpoint:
        problems.append(
            f"launch.rdzv_endpoint={launch.rdzv_endpoint}: one host needs none; add launch.nnodes=2, or leave it out"
        )
    if launch.rdzv_endpoint and not re.fullmatch(r"[^\s:]+:\d{1,5}", launch.rdzv_endpoint):
        problems.append(f"launch.rdzv_endpoint={launch.rdzv_endpoint}: must be HOST:PORT")
    if config.strategy.name != "ddp" and process_count(config) > 1:
        problems.append(
            f"strategy={config.strategy.name}: runs in one process, {process_count(config)} were asked "
            "for; use strategy=ddp, or launch.nproc_per_node=1 launch.nnodes=1"
        )
    return problems


def _batch(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    batch, accumulation, processes = (
        config.train.global_batch_size,
        config.train.accumulation_steps,
        process_count(config),
    )
    ordered = config.train.reduction == "ordered"
    unit = config.train.virtual_shards if ordered else processes * accumulation
    if not unit or batch % unit == 0:
        return []
    over = f"{counted(processes, 'process')} x {counted(accumulation, 'accumulation step')}"
    if ordered:
        over = counted(unit, "virtual shard")
    lower, upper = batch // unit * unit, -(-batch // unit) * unit
    use = f"{lower} or {upper}" if lower else f"{upper}"
    return [f"train.global_batch_size={batch}: cannot be split over {over}; use train.global_batch_size={use}"]


def _strategy(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    strategy, problems = config.strategy, []
    if strategy.name != "ddp":
        return []
    if strategy.bucket_cap_mb is not None and strategy.bucket_cap_mb_list is not None:
        problems.append(
            f"strategy.bucket_cap_mb_list={shown(strategy.bucket_cap_mb_list)}: contradicts "
            f"strategy.bucket_cap_mb={strategy.bucket_cap_mb}; give one of them"
        )
    if strategy.skip_all_reduce_unused_params and not strategy.find_unused_parameters:
        problems.append("strategy.skip_all_reduce_unused_params=true: needs strategy.find_unused_parameters=true")
    if strategy.static_graph and strategy.find_unused_parameters:
        problems.append(
            "strategy.find_unused_parameters=true: strategy.static_graph=true finds them once by itself; "
            "give one of them"
        )
    if strategy.static_graph and config.train.accumulation_steps > 1:
        problems.append(
            f"strategy.static_graph=true: torch's reducer fails if some passes exchange no gradients, as with "
            f"train.accumulation_steps={config.train.accumulation_steps}; "
            "use strategy.static_graph=false, or train.accumulation_steps=1"
        )
    if strategy.comm_hook != "powersgd" and strategy.powersgd_rank != 1:
        problems.append(
            f"strategy.powersgd_rank={strategy.powersgd_rank}: has an effect only with strategy.comm_hook=powersgd"
        )
    if strategy.comm_hook == "powersgd" and strategy.static_graph:
        problems.append(
            "strategy.comm_hook=powersgd: cannot follow strategy.static_graph=true, whose buckets it sees "
            "rebuilt; use strategy.static_graph=false"
        )
    if strategy.comm_hook != "none" and config.tuning.precision == "fp64":
        problems.append(f"strategy.comm_hook={strategy.comm_hook}: would undo tuning.precision=fp64; drop one of them")
    return problems


def _reduction(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    train, strategy, processes = config.train, config.strategy, process_count(config)
    shards, mode = train.virtual_shards, "train.reduction=ordered"
    if train.reduction != "ordered":
        unused = shards != type(train)().virtual_shards
        return [f"train.virtual_shards={shards}: has an effect only with {mode}"] if unused else []
    problems, lower = [], 1 << shards.bit_length() - 1
    if shards != lower:
        problems.append(f"train.virtual_shards={shards}: must be a power of two; use {lower} or {2 * lower}")
    elif shards % processes:
        more = processes > shards and not processes & processes - 1
        use = f"train.virtual_shards={processes}" if more else f"a power of two up to {shards}"
        problems.append(
            f"launch.nproc_per_node={config.launch.nproc_per_node}: {mode} cannot deal "
            f"{counted(shards, 'virtual shard')} out evenly to {counted(processes, 'process')}; use {use}"
        )
    shapes = "it compiles for the shapes that a process meets first"
    needed = {  # key: what it is, what it must be, why
        "train.accumulation_steps": (train.accumulation_steps, 1, "raise train.virtual_shards for smaller passes"),
        "strategy": (strategy.name, "ddp" if strategy.name == "dp" else strategy.name, "DataParallel splits otherwise"),
        "deterministic": (config.deterministic, True, "it is about bits"),
        "launch.threads_per_process": (config.launch.threads_per_process, 1, "their number changes the bits"),
        "tuning.compile": (config.tuning.compile, False, shapes),
        "model.fused": (getattr(config.model, "fused", False), False, shapes),
    }
    for name, default in dataclasses.asdict(type(strategy)()).items():
        needed.setdefault(f"strategy.{name}", (getattr(strategy, name), default, "it does without torch's DDP"))
    return problems + [
        f"{key}={shown(value)}: {mode} needs {key}={shown(allowed)}; {why}"
        for key, (value, allowed, why) in needed.items()
        if value != allowed
    ]


def _numbers(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    problems = []
    if getattr(config.optimizer, "nesterov", False) and not config.optimizer.momentum:
        problems.append("optimizer.nesterov=true: needs optimizer.momentum above 0")
    optimizer, scaling = config.optimizer, getattr(config.optimizer, "lr_scaling", "")
    if scaling == "none" and optimizer.lr_base_batch != type(optimizer)().lr_base_batch:
        problems.append(
            f"optimizer.lr_base_batch={optimizer.lr_base_batch}: has an effect only with optimizer.lr_scaling=linear "
            "or sqrt"
        )
    steps, warmup, epochs = config.train.max_steps, config.schedule.warmup_steps, config.schedule.warmup_epochs
    if epochs is not None and warmup:
        problems.append(
            f"schedule.warmup_epochs={epochs:g}: contradicts schedule.warmup_steps={warmup}; give one of them"
        )
    elif epochs is not None and epochs >= config.train.epochs:
        problems.append(
            f"schedule.warmup_epochs={epochs:g}: the run ends before, train.epochs={config.train.epochs}; "
            f"use less than {config.train.epochs}"
        )
    if steps is not None and warmup >= steps:
        problems.append(
            f"schedule.warmup_steps={warmup}: the run ends before, train.max_steps={steps}; use less than {steps}"
        )
    regression = config.data.name == "linear_regression"
    if regression and config.train.loss == "cross_entropy":
        problems.append("train.loss=cross_entropy: data=linear_regression has numbers for targets; use train.loss=mse")
    if not regression and config.data.name in IN_MEMORY and config.train.loss == "mse":
        problems.append(
            f"train.loss=mse: data={config.data.name} has class labels for targets; use train.loss=cross_entropy"
        )
    if config.train.label_smoothing and (regression or config.train.loss == "mse"):
        problems.append(f"train.label_smoothing={config.train.label_smoothing}: belongs to the cross entropy; use 0")
    if regression and asked.objective == "test.accuracy":
        problems.append("objective=test.accuracy: data=linear_regression has no classes; use objective=test.loss")
    return problems


def notices(asked: Config, config: Config) -> list[str]:
    """Switches that the user set and that have no effect here. Not errors: the same command runs elsewhere."""
    found = []
    on_gpus_only = ("pin_memory", "non_blocking", "copy_stream", "cudnn_benchmark", "tf32", "cuda_graph")
    if config.device == "cpu":
        found += [
            f"tuning.{name}=true has no effect on CPU" for name in on_gpus_only if getattr(asked.tuning, name) is True
        ]
    if config.tuning.num_workers == 0 and asked.tuning.prefetch_factor != type(asked.tuning)().prefetch_factor:
        found.append(
            f"tuning.prefetch_factor={asked.tuning.prefetch_factor} has no effect without loader processes "
            "(tuning.num_workers=0)"
        )
    if config.tuning.num_workers == 0 and getattr(asked.data, "decode", "") == "threads":
        found.append("data.decode=threads has no effect without threads (tuning.num_workers=0): training waits")
    if not config.tuning.compile and config.tuning.compile_mode != "default":
        found.append(f"tuning.compile_mode={config.tuning.compile_mode} has no effect: tuning.compile=false")
    if config.strategy.name == "dp" and config.device == "cpu":
        found.append("strategy=dp has no GPUs to spread over: DataParallel runs the model once, on the CPU")
    if getattr(config.strategy, "sync_bn", False) and getattr(config.model, "norm", "batch") != "batch":
        found.append(
            f"strategy.sync_bn=true has no effect: model={config.model.name} has no batch norm here (model.norm=batch)"
        )
    if config.strategy.name != "ddp" and asked.launch.backend != "auto":
        found.append(
            f"launch.backend={asked.launch.backend} has no effect: strategy={config.strategy.name} connects nobody"
        )
    decays = getattr(config.optimizer, "weight_decay", True) or config.optimizer.name in LAYER_WISE
    if not decays and not config.optimizer.decay_norm_and_bias:
        found.append("optimizer.decay_norm_and_bias=false has no effect: optimizer.weight_decay=0.0")
    if asked.tuning.channels_last is True and config.model.name not in (*IMAGE_MODELS, "custom"):
        found.append(f"tuning.channels_last=true has no effect: model={config.model.name} has no convolution")
    if config.tracker.details and not config.tracker.tensorboard:
        found.append("tracker.details=true has no effect without tracker=tensorboard")
    if config.launch.backend == "gloo" and config.device == "cuda":
        found.append("launch.backend=gloo sends gradients of GPUs through host memory: expect it to be slow")
    return found
