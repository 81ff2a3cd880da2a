"""Keys that contradict each other or the hardware, and switches that have no effect here.

Each check is given what the user wrote (asked), the same after `resolve` (config), and the hardware.
"""

from __future__ import annotations

import shutil

from ddp_train.config.auto import OWN_GRAPHS, capture_blockers, process_count
from ddp_train.config.hardware import Hardware
from ddp_train.config.schema import Config, CustomConfig, DdpConfig, OrderedConfig, SgdConfig
from ddp_train.distributed.world import World
from ddp_train.text import counted, shown


def _batch(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    batch, accumulation = config.train.global_batch_size, config.train.accumulation_steps
    processes = process_count(config)
    if isinstance(config.strategy, OrderedConfig):
        unit, over = config.strategy.virtual_shards, counted(config.strategy.virtual_shards, "virtual shard")
    else:
        unit = processes * accumulation
        over = f"{counted(processes, 'process')} x {counted(accumulation, 'accumulation step')}"
    if not unit or batch % unit == 0:
        return []
    lower, upper = batch // unit * unit, -(-batch // unit) * unit
    use = f"{lower} or {upper}" if lower else f"{upper}"
    return [f"train.global_batch_size={batch}: cannot be split over {over}; use train.global_batch_size={use}"]


def _ddp(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    strategy, problems = config.strategy, []
    if not isinstance(strategy, DdpConfig):
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
            "strategy.find_unused_parameters=true: strategy.static_graph=true already finds them, once; "
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
            "strategy.comm_hook=powersgd: cannot be combined with strategy.static_graph=true, which rebuilds the "
            "buckets; use strategy.static_graph=false"
        )
    if strategy.comm_hook != "none" and config.tuning.precision == "fp64":
        problems.append(f"strategy.comm_hook={strategy.comm_hook}: would undo tuning.precision=fp64; drop one of them")
    return problems


def _ordered(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    if not isinstance(config.strategy, OrderedConfig):
        return []
    shards, processes, problems = config.strategy.virtual_shards, process_count(config), []
    lower = 1 << shards.bit_length() - 1
    if shards != lower:
        problems.append(f"strategy.virtual_shards={shards}: must be a power of two; use {lower} or {2 * lower}")
    elif shards % processes:
        more = processes > shards and not processes & processes - 1
        use = f"strategy.virtual_shards={processes}" if more else f"a power of two up to {shards}"
        problems.append(
            f"launch.nproc_per_node={config.launch.nproc_per_node}: strategy=ordered cannot divide "
            f"{counted(shards, 'virtual shard')} evenly among {counted(processes, 'process')}; use {use}"
        )
    shapes = "torch.compile depends on the shapes that a process meets first"
    needed = {  # key: its value, the required value, why
        "train.accumulation_steps": (config.train.accumulation_steps, 1, "raise strategy.virtual_shards instead"),
        "deterministic": (config.deterministic, True, "else the bits vary"),
        "launch.threads_per_process": (config.launch.threads_per_process, 1, "the number of threads changes the bits"),
        "tuning.compile": (config.tuning.compile, False, shapes),
        "model.fused": (config.model.fused, False, shapes),
    }
    return problems + [
        f"{key}={shown(value)}: strategy=ordered needs {key}={shown(required)}; {why}"
        for key, (value, required, why) in needed.items()
        if value != required
    ]


def _precision(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    precision = config.tuning.precision
    if precision == "fp16" and config.device == "cpu":
        return ["tuning.precision=fp16: needs a GPU; use tuning.precision=bf16 or fp32 on CPU"]
    if precision == "bf16" and config.device == "cuda" and (0, 0) < hardware.compute_capability < (8, 0):
        return [f"tuning.precision=bf16: {hardware.gpu_name} has no bfloat16 units; use tuning.precision=fp16"]
    return []


def _tuning(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    tuning, found = config.tuning, []
    if config.deterministic and tuning.cudnn_benchmark:
        found.append(
            "tuning.cudnn_benchmark=true: chooses algorithms by timing, which deterministic=true forbids; "
            "drop one of them"
        )
    if tuning.compile and config.strategy.spreads_over_gpus:
        found.append(
            "tuning.compile=true: DataParallel's replicas would all run the compiled model of the first GPU; "
            "use strategy=ddp, or tuning.compile=false"
        )
    if tuning.compile and tuning.compile_mode in OWN_GRAPHS and config.train.accumulation_steps > 1:
        found.append(
            f"tuning.compile_mode={tuning.compile_mode}: its CUDA graphs overwrite gradients that are still being "
            "accumulated (pytorch#169545); use default or max-autotune-no-cudagraphs, or train.accumulation_steps=1"
        )
    if tuning.cuda_graph and config.device == "cuda":
        found += [
            f"tuning.cuda_graph=true: needs {key}={rule}; or use tuning.cuda_graph=false"
            for key, rule in capture_blockers(config).items()
        ]
    if (tuning.compile or config.model.fused) and config.device == "cpu" and not shutil.which("g++"):
        key = "tuning.compile" if tuning.compile else "model.fused"
        found.append(f"{key}=true: torch.compile needs a C++ compiler on CPU and there is no g++; install one")
    return found


def _placement(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    data, workers = config.data, config.tuning.num_workers
    if data.placement != "device":
        return []
    if data.in_memory_bytes() is None:
        return [f"data.placement=device: data={data.name} is not held in memory; use data.placement=host"]
    if not workers:
        return []
    return [
        f"tuning.num_workers={workers}: data.placement=device has no use for loader processes; "
        "use tuning.num_workers=0, or data.placement=host"
    ]


def _optimizer(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    optimizer, implementation, problems = config.optimizer, config.tuning.optimizer, []
    if isinstance(optimizer, CustomConfig):
        if implementation == "default":
            return []
        return [
            f"tuning.optimizer={implementation}: has no effect on optimizer._target_={optimizer.target}; use "
            "tuning.optimizer=default and the class's own arguments, for example optimizer.foreach=true"
        ]
    if implementation == "fused" and not optimizer.has_fused:
        problems.append(f"tuning.optimizer=fused: torch has no fused {optimizer.name}; use tuning.optimizer=foreach")
    if isinstance(optimizer, SgdConfig) and optimizer.nesterov and not optimizer.momentum:
        problems.append("optimizer.nesterov=true: needs optimizer.momentum above 0")
    if optimizer.lr_scaling == "none" and optimizer.lr_base_batch != type(optimizer)().lr_base_batch:
        problems.append(
            f"optimizer.lr_base_batch={optimizer.lr_base_batch}: has an effect only with optimizer.lr_scaling=linear "
            "or sqrt"
        )
    return problems


def _warmup(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    steps, warmup, epochs = config.train.max_steps, config.schedule.warmup_steps, config.schedule.warmup_epochs
    problems = []
    if epochs is not None and warmup:
        problems.append(
            f"schedule.warmup_epochs={epochs:g}: contradicts schedule.warmup_steps={warmup}; give one of them"
        )
    elif epochs is not None and epochs >= config.train.epochs:
        problems.append(
            f"schedule.warmup_epochs={epochs:g}: the run ends before the warm-up, train.epochs={config.train.epochs}; "
            f"use less than {config.train.epochs}"
        )
    if steps is not None and warmup >= steps:
        problems.append(
            f"schedule.warmup_steps={warmup}: the run ends before the warm-up, train.max_steps={steps}; use less than "
            f"{steps}"
        )
    return problems


def _task(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    data, loss, problems = config.data, config.train.loss, []
    if data.is_regression and loss == "cross_entropy":
        problems.append(f"train.loss=cross_entropy: data={data.name} has numbers as targets; use train.loss=mse")
    if data.is_regression is False and data.in_memory_bytes() is not None and loss == "mse":
        problems.append(f"train.loss=mse: data={data.name} has class labels as targets; use train.loss=cross_entropy")
    if config.train.label_smoothing and (data.is_regression or loss == "mse"):
        problems.append(f"train.label_smoothing={config.train.label_smoothing}: applies to cross entropy only; use 0")
    if data.is_regression and asked.objective == "test.accuracy":
        problems.append(f"objective=test.accuracy: data={data.name} has no classes; use objective=test.loss")
    return problems


CHECKS = (_batch, _ddp, _ordered, _precision, _tuning, _placement, _optimizer, _warmup, _task)


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
    if not config.tuning.compile and config.tuning.compile_mode != "default":
        found.append(f"tuning.compile_mode={config.tuning.compile_mode} has no effect: tuning.compile=false")
    if config.strategy.spreads_over_gpus and config.device == "cpu":
        found.append(f"strategy={config.strategy.name} has no GPUs to spread over: the model runs once, on the CPU")
    if config.strategy.sync_bn and config.model.has_batch_norm() is False:
        found.append(f"strategy.sync_bn=true has no effect: model={config.model.name} has no batch norm here")
    if not config.strategy.has_process_group and asked.launch.backend != "auto":
        found.append(
            f"launch.backend={asked.launch.backend} has no effect: strategy={config.strategy.name} runs in one process "
            "and opens no process group"
        )
    optimizer = config.optimizer
    if not isinstance(optimizer, CustomConfig) and not (
        optimizer.decay_norm_and_bias or optimizer.weight_decay or optimizer.adapts_per_layer
    ):
        found.append("optimizer.decay_norm_and_bias=false has no effect: optimizer.weight_decay=0.0")
    if asked.tuning.channels_last is True and config.model.takes_images is False:
        found.append(f"tuning.channels_last=true has no effect: model={config.model.name} has no convolution")
    if config.tracker.details and not config.tracker.tensorboard:
        found.append("tracker.details=true has no effect without tracker=tensorboard")
    if config.launch.backend == "gloo" and config.device == "cuda":
        found.append("launch.backend=gloo copies the gradients of GPUs through host memory, which is slow")
    return found
