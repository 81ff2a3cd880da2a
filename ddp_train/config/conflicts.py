"""Keys that contradict each other or the hardware, and switches that have no effect here.

Each check is given what the user wrote (asked), the same after `resolve` (config), and the
hardware.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

from ddp_train.config import fine_tuning, metrics
from ddp_train.config.auto import OWN_GRAPHS, capture_blockers, process_count, why_no_buckets
from ddp_train.distributed.world import World
from ddp_train.hardware import Hardware, why_no_triton
from ddp_train.optim.config import SgdConfig
from ddp_train.options.custom import CustomConfig
from ddp_train.options.key import range_of
from ddp_train.options.schema import Config
from ddp_train.parallel.ddp.config import DdpConfig
from ddp_train.parallel.ordered.config import OrderedConfig
from ddp_train.text import counted, shown


def _batch(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    batch = config.train.global_batch_size
    accumulation = config.train.accumulation_steps
    processes = process_count(config)
    unevenly = ""
    if (
        config.uses_trained or config.data.batch_by == "tokens"
    ):  # by tokens, samples are dealt out one by one
        return []
    if isinstance(config.strategy, OrderedConfig):
        unit = config.strategy.virtual_shards
        over = counted(config.strategy.virtual_shards, "virtual shard")
    elif range_of(asked.launch.nproc_per_node) or config.host_range:
        # some have a sample less than others with some numbers; `config.processes` looks at them
        return []
    else:
        unit = processes * accumulation
        over = f"{counted(processes, 'process')} x {counted(accumulation, 'accumulation step')}"
        if not world and 1 < processes == config.launch.nproc_per_node and unit <= batch:
            unevenly = (
                f", or a range, launch.nproc_per_node=1:{processes}, which shares it unevenly"
            )
    if not unit or batch % unit == 0:
        return []
    lower = batch // unit * unit
    upper = -(-batch // unit) * unit
    use = f"{lower} or {upper}" if lower else f"{upper}"
    return [
        f"train.global_batch_size={batch}: cannot be split over {over}; use"
        f" train.global_batch_size={use}{unevenly}"
    ]


def _export(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    if config.mode != "export":
        return []
    processes = process_count(config)
    libraries = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    formats = shown(config.export.formats)
    problems = []
    if processes > 1:
        problems.append(
            f"mode=export: one process exports, and there would be {processes}; use"
            " launch.nproc_per_node=1"
        )
    if missing and "onnx" in config.export.formats:
        problems.append(
            f"export.formats={formats}: {' and '.join(missing)} must be installed; run"
            f" {sys.executable} -m pip install '.[onnx]'"
        )
    if not config.export.formats:
        problems.append("export.formats=[]: names none; use export.formats=[torch]")
    return problems


def _predict(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    if (
        config.mode != "predict"
        or config.predict.format != "parquet"
        or importlib.util.find_spec("pyarrow")
    ):
        return []
    remedy = f"run {sys.executable} -m pip install '.[parquet]', or use predict.format=npz"
    return [f"predict.format=parquet: pyarrow is not installed; {remedy}"]


def _ddp(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    strategy = config.strategy
    steps = config.train.accumulation_steps
    if not isinstance(strategy, DdpConfig):
        return []
    hook = strategy.comm_hook
    sizes = strategy.sizes_of_buckets(asked.tuning.buckets)
    first, second, *_ = [*(f"{name}={shown(value)}" for name, value in sizes.items()), "", ""]
    problems = []
    if len(sizes) > 1:
        problems.append(f"{first}: contradicts {second}; give one of them")
    if strategy.skip_all_reduce_unused_params and not strategy.find_unused_parameters:
        problems.append(
            "strategy.skip_all_reduce_unused_params=true: needs"
            " strategy.find_unused_parameters=true"
        )
    if strategy.static_graph and strategy.find_unused_parameters:
        problems.append(
            "strategy.find_unused_parameters=true: strategy.static_graph=true finds them already,"
            " in its first step; give one of them"
        )
    if strategy.static_graph and steps > 1:
        problems.append(
            "strategy.static_graph=true: torch's reducer fails if some passes exchange no"
            f" gradients, as with train.accumulation_steps={steps}; use"
            " strategy.static_graph=false, or train.accumulation_steps=1"
        )
    if hook != "powersgd" and strategy.powersgd_rank != 1:
        problems.append(
            f"strategy.powersgd_rank={strategy.powersgd_rank}: has an effect only with"
            " strategy.comm_hook=powersgd"
        )
    if hook == "powersgd" and strategy.static_graph:
        problems.append(
            "strategy.comm_hook=powersgd: cannot be combined with strategy.static_graph=true, which"
            " rebuilds the buckets; use strategy.static_graph=false"
        )
    if hook != "none" and config.tuning.precision == "fp64":
        problems.append(
            f"strategy.comm_hook={hook}: would undo tuning.precision=fp64; drop one of them"
        )
    return problems


def _ordered(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    if not isinstance(config.strategy, OrderedConfig):
        return []
    shards = config.strategy.virtual_shards
    processes = process_count(config)
    problems = []
    lower = 1 << shards.bit_length() - 1
    if shards != lower:
        problems.append(
            f"strategy.virtual_shards={shards}: must be a power of two; use {lower} or {2 * lower}"
        )
    elif (
        shards % processes
        and not range_of(asked.launch.nproc_per_node)
        and not range_of(asked.launch.nnodes)
    ):
        more = processes > shards and not processes & processes - 1
        if more:
            use = f"strategy.virtual_shards={processes}"
        else:
            use = f"a power of two up to {shards}"
        problems.append(
            f"launch.nproc_per_node={config.launch.nproc_per_node}: strategy=ordered cannot divide"
            f" {counted(shards, 'virtual shard')} evenly among {counted(processes, 'process')}; use"
            f" {use}"
        )
    shapes = "the code of torch.compile depends on the shapes that a process meets first"
    needed = {  # key: its value, the required value, why
        "train.accumulation_steps": (
            config.train.accumulation_steps,
            1,
            "raise strategy.virtual_shards instead",
        ),
        "deterministic": (config.deterministic, True, "otherwise bits vary between runs"),
        "launch.threads_per_process": (
            config.launch.threads_per_process,
            1,
            "the number of threads changes the bits",
        ),
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
    if (
        precision == "bf16"
        and config.device == "cuda"
        and (0, 0) < hardware.compute_capability < (8, 0)
    ):
        return [
            f"tuning.precision=bf16: {hardware.gpu_name} has no bfloat16 units; use"
            " tuning.precision=fp16"
        ]
    return []


def _tuning(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    tuning = config.tuning
    found = []
    if config.deterministic and tuning.cudnn_benchmark:
        found.append(
            "tuning.cudnn_benchmark=true: chooses algorithms by timing, which deterministic=true"
            " forbids; drop one of them"
        )
    why_not = why_no_triton() if config.device == "cuda" else ""
    if why_not:
        found += [
            f"tuning.{name}=true: Triton makes its kernels, and there is {why_not}; install it, or"
            f" use tuning.{name}=false"
            for name in ("compile", "triton_kernels")
            if getattr(tuning, name)
        ]
    if tuning.compile and config.strategy.spreads_over_gpus:
        found.append(
            "tuning.compile=true: DataParallel's replicas would all run the compiled model of the"
            " first GPU; use strategy=ddp, or tuning.compile=false"
        )
    if tuning.compile and tuning.compile_mode in OWN_GRAPHS and config.train.accumulation_steps > 1:
        found.append(
            f"tuning.compile_mode={tuning.compile_mode}: its CUDA graphs overwrite gradients that"
            " are still being accumulated (pytorch#169545); use default or"
            " max-autotune-no-cudagraphs, or train.accumulation_steps=1"
        )
    if tuning.cuda_graph and config.device == "cuda":
        found += [
            f"tuning.cuda_graph=true: needs {key}={rule}; or use tuning.cuda_graph=false"
            for key, rule in capture_blockers(config).items()
        ]
    needed = {
        ("rehearse", "tuning.cuda_graph=true"): tuning.cuda_graph,
        ("rehearse", "train.ema_decay=null"): not config.train.ema_decay,
        (
            "conv_sums",
            "nvidia-cudnn-frontend (pip install -e '.[cudnn]')",
        ): importlib.util.find_spec("cudnn"),
        ("conv_sums", "tuning.compile=true"): tuning.compile,
        ("conv_sums", "tuning.precision=fp16 or bf16"): tuning.precision in ("fp16", "bf16"),
        ("conv_sums", "tuning.channels_last=true"): tuning.channels_last,
        (
            "conv_sums",
            "deterministic=false, as it chooses kernels by timing",
        ): not config.deterministic,
    }
    for (name, what), holds in needed.items():
        if config.device == "cuda" and getattr(tuning, name) and not holds:
            found.append(f"tuning.{name}=true: needs {what}; or leave it out")
    if (
        (tuning.compile or config.model.fused)
        and config.device == "cpu"
        and not shutil.which("g++")
    ):
        key = "tuning.compile" if tuning.compile else "model.fused"
        found.append(
            f"{key}=true: torch.compile needs a C++ compiler on CPU and there is no g++;"
            " install one"
        )
    return found


def _placement(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    data = config.data
    workers = config.tuning.num_workers
    if data.placement != "device":
        return []
    if data.in_memory_bytes() is None:
        return [
            f"data.placement=device: data={data.name} is not held in memory; use"
            " data.placement=host"
        ]
    if not workers:
        return []
    return [
        f"tuning.num_workers={workers}: data.placement=device has no use for loader processes; "
        "use tuning.num_workers=0, or data.placement=host"
    ]


def _optimizer(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    optimizer = config.optimizer
    implementation = config.tuning.optimizer
    problems = []
    if isinstance(optimizer, CustomConfig):
        if implementation == "default":
            return []
        return [
            f"tuning.optimizer={implementation}: has no effect on"
            f" optimizer._target_={optimizer.target}; use tuning.optimizer=default and the class's"
            " own arguments, for example optimizer.foreach=true"
        ]
    if implementation == "fused" and not optimizer.has_fused:
        problems.append(
            f"tuning.optimizer=fused: torch has no fused {optimizer.name}; use"
            " tuning.optimizer=foreach"
        )
    if isinstance(optimizer, SgdConfig) and optimizer.nesterov and not optimizer.momentum:
        problems.append("optimizer.nesterov=true: needs optimizer.momentum above 0")
    if (
        optimizer.lr_scaling == "none"
        and optimizer.lr_base_batch != type(optimizer)().lr_base_batch
    ):
        problems.append(
            f"optimizer.lr_base_batch={optimizer.lr_base_batch}: has an effect only with"
            " optimizer.lr_scaling=linear or sqrt"
        )
    return problems


def _warmup(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    steps = config.train.max_steps
    warmup = config.schedule.warmup_steps
    epochs = config.schedule.warmup_epochs
    length = f"{epochs or 0:g}"
    most = config.train.epochs
    cut = config.schedule.warmup_at_most is not None
    problems = []
    if epochs is not None and warmup:
        problems.append(
            f"schedule.warmup_epochs={length}: contradicts schedule.warmup_steps={warmup}; give one"
            " of them"
        )
    if epochs is not None and not warmup and not cut and epochs >= most:
        problems.append(
            f"schedule.warmup_epochs={length}: must end before the run, which has"
            f" train.epochs={most}; use less than {most}"
        )
    if steps is not None and not cut and warmup >= steps:
        problems.append(
            f"schedule.warmup_steps={warmup}: must end before the run, which has"
            f" train.max_steps={steps}; use less than {steps}"
        )
    return problems


def _task(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    data = config.data
    task = config.task.name
    problems = []
    fitting = data.task or {True: "regression", False: "classification"}.get(data.is_regression)
    if fitting and task not in ("auto", "custom", fitting):
        what = {
            "regression": "numbers",
            "classification": "class labels",
            "language_model": "tokens",
        }[fitting]
        problems.append(f"task={task}: data={data.name} has {what} as targets; use task={fitting}")
    if not getattr(config.task, "sample_tokens", 1):
        default = type(config.task)()
        problems += [
            f"task.{name}={shown(getattr(config.task, name))}: has an effect only with"
            " task.sample_tokens"
            for name in ("sample_prompt", "sample_temperature")
            if getattr(config.task, name) != getattr(default, name)
        ]
    if data.validation and data.task == "language_model":
        problems.append(
            f"data.validation={data.validation:g}: windows of data={data.name} overlap those of"
            " other epochs, so that none can be held out; leave it out: data.test_part, or a file"
            " named val, is held out"
        )
    return problems


def _recipe(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    data = config.data
    task = config.task.name
    train = config.train
    what = (
        f"mixes class labels, and task={task} is not known to take parts of classes; use"
        " task=classification"
    )
    problems = [
        f"data.{name}={getattr(data, name):g}: {what}, or data.{name}=0"
        for name in ("mixup", "cutmix")
        if getattr(data, name) and task not in ("auto", "classification")
    ]
    if (data.mixup or data.cutmix) and data.batch_by == "tokens":
        problems.append(
            "data.batch_by=tokens: samples of different lengths cannot be mixed; use data.mixup=0"
            " data.cutmix=0"
        )
    if train.ema_warmup and train.ema_decay is None:
        problems.append(
            "train.ema_warmup=true: has an effect only with train.ema_decay; add"
            " train.ema_decay=0.999"
        )
    return problems


def _sampling(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    data = config.data
    optimizer = config.optimizer
    by_tokens = config.data.batch_by == "tokens"
    scaling = optimizer.lr_scaling
    default = scaling != "none" and optimizer.lr_base_batch == type(optimizer)().lr_base_batch
    problems = []
    if data.weights and by_tokens:
        problems.append(
            f"data.weights={data.weights}: contradicts data.batch_by=tokens: the number of steps"
            " would depend on the draws; give one of them"
        )
    if data.weights == "balanced" and (data.is_regression or data.task == "language_model"):
        problems.append(
            f"data.weights={data.weights}: data={data.name} has no class labels; use"
            " data.weights=FILE with a weight for each sample, or leave it out"
        )
    if by_tokens and default:
        problems.append(
            f"optimizer.lr_scaling={scaling}: with data.batch_by=tokens optimizer.lr_base_batch"
            " counts tokens too; give it"
        )
    return problems


def _metrics(asked: Config, config: Config, hardware: Hardware, world: World | None) -> list[str]:
    return metrics.further_problems(config) + metrics.problems(
        config, metrics.has_validation(config)
    )


def _true(problems: dict[str, Any]) -> list[str]:
    """The problems whose condition holds."""
    return [problem for problem, holds in problems.items() if holds]


CHECKS = (
    *(_batch, _ddp, _ordered, _precision, _tuning, _placement, _optimizer, _warmup),
    *(_task, _recipe, _sampling, _metrics, _predict, _export),
)


def notices(asked: Config, config: Config) -> list[str]:
    """Switches that the user set and that have no effect here. Not errors: the same command runs
    elsewhere."""
    tuning = config.tuning
    strategy = config.strategy
    model = config.model
    launch = config.launch
    on_cpu = config.device == "cpu"
    optimizer = config.optimizer
    prefetch = asked.tuning.prefetch_factor
    buckets = asked.tuning.buckets
    why_not = why_no_buckets(config, asked.tuning.buckets)
    stopping = config.train.early_stopping
    resume = config.checkpoint.resume
    which = config.checkpoint.which
    on_gpus_only = (
        *(
            "pin_memory",
            "non_blocking",
            "copy_stream",
            "cudnn_benchmark",
            "tf32",
            "cuda_graph",
            "rehearse",
        ),
        *("triton_kernels", "conv_sums"),
    )
    applies = strategy.notices(max(config.process_counts, default=process_count(config))) | {
        f"tuning.{name}=true has no effect on CPU": on_cpu and getattr(asked.tuning, name) is True
        for name in on_gpus_only
    }
    messages = _true(applies | fine_tuning.notices(config))
    if tuning.num_workers == 0 and prefetch != type(tuning)().prefetch_factor:
        messages.append(
            f"tuning.prefetch_factor={prefetch} has no effect without loader processes"
            " (tuning.num_workers=0)"
        )
    if not tuning.compile and tuning.compile_mode != "default":
        messages.append(
            f"tuning.compile_mode={tuning.compile_mode} has no effect: tuning.compile=false"
        )
    if buckets not in ("auto", "default") and why_not:
        messages.append(f"tuning.buckets={buckets} has no effect: {why_not}")
    if strategy.spreads_over_gpus and on_cpu:
        messages.append(
            f"strategy={strategy.name} has no GPUs to spread over: the model runs once, on the CPU"
        )
    if strategy.sync_bn and model.has_batch_norm() is False:
        messages.append(
            f"strategy.sync_bn=true has no effect: model={model.name} has no batch norm here"
        )
    if not strategy.has_process_group and asked.launch.backend != "auto":
        messages.append(
            f"launch.backend={asked.launch.backend} has no effect: strategy={strategy.name} runs in"
            " one process and opens no process group"
        )
    if not isinstance(optimizer, CustomConfig) and not (
        optimizer.decay_norm_and_bias or optimizer.weight_decay or optimizer.adapts_per_layer
    ):
        messages.append(
            "optimizer.decay_norm_and_bias=false has no effect: optimizer.weight_decay=0.0"
        )
    if asked.tuning.channels_last is True and model.takes_images is False:
        messages.append(
            f"tuning.channels_last=true has no effect: model={model.name} has no convolution"
        )
    if stopping.patience is None and stopping != type(stopping)():
        messages.append(
            f"train.early_stopping.metric={stopping.metric} and min_delta={stopping.min_delta:g}"
            " have no effect without train.early_stopping.patience"
        )
    if which != "auto" and (Path(resume) / "manifest.json").is_file():
        messages.append(
            f"checkpoint.which={which} has no effect: checkpoint.resume={resume} names one"
            " checkpoint"
        )
    if config.tracker.details and "tensorboard" not in config.tracker.classes:
        messages.append("tracker.details=true has no effect without tracker=tensorboard")
    if config.host_range and not on_cpu:
        messages.append(
            f"launch.nnodes={asked.launch.nnodes}: on GPUs a lost host costs the steps since the"
            " last checkpoint"
        )
    if launch.backend == "gloo" and config.device == "cuda":
        messages.append(
            "launch.backend=gloo copies the gradients of GPUs through host memory;"
            " launch.backend=nccl is faster"
        )
    if config.hooks and config.uses_trained:
        messages.append(
            f"hooks={shown(config.hooks)} has no effect: mode={config.mode} does not train"
        )
    if config.sweep != type(config.sweep)():
        messages.append(
            "sweep.gpus_per_trial and sweep.processes_at_once have no effect without -m"
        )
    if config.checkpoint.average and config.mode not in ("predict", "export"):
        messages.append(
            "checkpoint.average=true has no effect: it is for mode=predict and export, and"
            f" mode={config.mode}"
        )
    return messages
