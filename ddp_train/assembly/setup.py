"""From the frozen config to the collaborators of the loop. Config objects stop here: constructors
take plain values."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_train.assembly.fine_tuning import UnfreezeHook, optimizer_of, trained_parameters
from ddp_train.assembly.metrics import build_further
from ddp_train.config.auto import CAPTURED_IF_IT_PAYS, warmup_asked
from ddp_train.config.metrics import further
from ddp_train.config.user_code import instantiate
from ddp_train.data.batch import Batch
from ddp_train.data.batch_plan import BatchPlan, MicroBatch, evaluation_batches
from ddp_train.data.datasets import BatchSource
from ddp_train.data.length_batches import LengthBatches
from ddp_train.data.loader import Loader, LoaderOptions
from ddp_train.data.mix import Mix, mix_of
from ddp_train.data.rng import StepSeed, hash_key
from ddp_train.data.sample_facts import lengths_of
from ddp_train.data.splits import Splits
from ddp_train.data.weighted_draws import WeightedDraws
from ddp_train.distributed.world import World
from ddp_train.engine.loop import Evaluation, Job
from ddp_train.engine.step_observers import PhaseReports, ReportedBatches
from ddp_train.errors import ConfigError
from ddp_train.models.freezing import Frozen
from ddp_train.models.zoo import build_model
from ddp_train.optim.ema import WeightAverage
from ddp_train.optim.schedules.factors import build_schedule
from ddp_train.optim.stepper import Stepper
from ddp_train.options.model import FineTuning
from ddp_train.options.schema import Config
from ddp_train.parallel.alone import Alone
from ddp_train.parallel.ordered.reduction import OrderedReduction
from ddp_train.parallel.strategy import DataParallel, DistributedDataParallel, Single, Strategy
from ddp_train.performance import switches
from ddp_train.performance.cuda_graph import GraphedStepper, on_stream
from ddp_train.performance.flops import flops_of_samples
from ddp_train.performance.worth_capturing import CaptureTrial
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.tasks.builtin import Classification, Supervised
from ddp_train.tasks.choose import MANY, TASKS, check_numbers, choose
from ddp_train.tasks.own import complete
from ddp_train.tasks.score import Scorer
from ddp_train.tasks.task import ModelWithTask, Task
from ddp_train.tasks.try_out import check_loss, check_scores

BESIDE_MODEL = tuple(each.name for each in fields(FineTuning))
"""Keys of `model` that are no arguments of a network."""
AUTOCAST = {"fp32": None, "fp64": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def arguments_of(section: Any, *but: str) -> dict[str, Any]:
    """The keys of a section as the arguments of what it names."""
    return {name: value for name, value in vars(section).items() if name not in ("name", *but)}


def keys_taken_by(function: Callable[..., Any], section: Any) -> dict[str, Any]:
    """The keys of a section that a function takes, by name: a switch reaches the place where it
    acts without a list."""
    return {
        name: vars(section)[name]
        for name in inspect.signature(function).parameters
        if name in vars(section)
    }


def build_strategy(config: Config, world: World, device: str) -> Strategy:
    """The one strategy of the run."""
    name = config.strategy.name
    if name == "ordered":
        return OrderedReduction(device, config.seed, config.strategy.virtual_shards)
    if name == "ddp":
        # On a GPU the bits of a gradient's norm depend on its place in its bucket.
        fixed_buckets = bool(config.deterministic) and (world.size > 2 or device.startswith("cuda"))
        if world.size == 1 and config.strategy.is_plain:
            strategy = Alone
        else:
            strategy = DistributedDataParallel
        given = {"fixed_buckets": fixed_buckets, "buckets": config.tuning.buckets}
        return strategy(device, **given, **arguments_of(config.strategy))
    return DataParallel(device) if name == "dp" else Single(device)


def build_module(
    config: Config, source: BatchSource, strategy: Strategy, device: str
) -> ModelWithTask:
    """The model with its task, placed, tuned and frozen as asked; the same weights on every
    process."""
    sample = source.get_batch(np.array([0]), None)
    task = build_task(config.task, source, sample)
    torch.manual_seed(hash_key(config.seed, "model"))
    if config.model.name == "custom":
        model = own_model(config.model)
    else:
        shape = _input_shape(sample, config.model.name)
        model = build_model(
            config.model.name, shape, source.outputs, **arguments_of(config.model, *BESIDE_MODEL)
        )
    return placed(config, model, task, strategy, device)


def placed(
    config: Config, model: nn.Module, task: Task, strategy: Strategy, device: str
) -> ModelWithTask:
    """A model with its task on the device of this process, tuned."""
    module = strategy.place(ModelWithTask(model, task, device, AUTOCAST[config.tuning.precision]))
    module.further = build_further(further(config), task, device)
    tuning = config.tuning
    switches.tune_model(
        module,
        float64=tuning.precision == "fp64",
        channels_last=bool(tuning.channels_last),
        checkpointed_blocks=tuning.activation_checkpointing,
        compile_mode=tuning.compile_mode if tuning.compile else None,
        triton_kernels=bool(tuning.triton_kernels) and config.device == "cuda",
        conv_sums=tuning.conv_sums and config.device == "cuda",
    )
    if (
        config.model.freeze
    ):  # last: what is converted above, batch norms among others, is another object there
        module.frozen = Frozen(module.model, config.model.freeze)
    return module.train()


def build_task(section: Any, source: BatchSource, sample: Any) -> Task:
    """What the model is trained for. sample: a batch of one sample. Raises ConfigError if it does
    not fit the data."""
    if section.name == "custom":
        return complete(instantiate("task", section))
    name = choose(section.name, sample)
    if section.name == "auto" and name == "regression":
        spread = np.linspace(0, len(source) - 1, MANY).astype(int)  # the first may be of one class
        check_numbers(source.get_batch(spread, None))
    task = TASKS[name]
    facts = {"bytes_per_token": getattr(source, "bytes_per_token", None)}
    with contextlib.suppress(ConfigError):  # a data set that does not say how many classes it has
        facts["classes"] = source.outputs
    taken = inspect.signature(task).parameters
    made = task(
        **keys_taken_by(task, section),
        **{name: fact for name, fact in facts.items() if name in taken},
    )
    made.check(sample)
    return made


def try_own_task(config: Config, module: ModelWithTask, source: BatchSource, device: str) -> None:
    """Raises ConfigError if the loss or the scores of a task of the user's own are not what they
    must be."""

    def batch_of(numbers: np.ndarray) -> Any:
        return _batch(
            config, source, MicroBatch(None, 0, numbers, len(numbers), 1.0, True), device
        ).data

    if config.task.name == "custom":
        for check in (check_loss, check_scores):
            check(module, batch_of, len(source), f"task._target_={config.task.target}")


def _input_shape(sample: Any, model: str) -> torch.Size:
    """Of one sample, for a built-in model."""
    inputs = sample[0] if isinstance(sample, tuple | list) else sample
    if isinstance(inputs, Tensor):
        return inputs.shape[1:]
    raise ConfigError(
        [
            f"model={model}: takes one tensor, and an input is a {type(inputs).__name__}; use"
            " model._target_"
        ]
    )


def own_model(model: Any) -> nn.Module:
    made = instantiate("model", model)
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        raise ConfigError(
            [
                f"model._target_={model.target}: made an object of {kind}, which is no"
                " torch.nn.Module"
            ]
        )
    return made


def build_plan(
    config: Config,
    world: World,
    samples: int,
    weights: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> BatchPlan:
    """Which process computes which samples in which step. weights, lengths: of the samples, where
    the config asks for draws by weight, or for batches by length."""
    plan = BatchPlan(
        samples=samples,
        global_batch_size=config.train.global_batch_size,
        accumulation_steps=config.train.accumulation_steps,
        steps=0,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        virtual_shards=getattr(config.strategy, "virtual_shards", None),
        weights=None if weights is None else WeightedDraws(weights),
        lengths=None if lengths is None else LengthBatches(lengths, config.train.global_batch_size),
    )
    whole = config.train.epochs * plan.steps_per_epoch
    return replace(plan, steps=min(whole, config.train.max_steps or whole))


def warmup_steps(schedule: Any, plan: BatchPlan) -> int:
    """The optimizer steps of the warm-up. Raises ConfigError if it is longer than the run."""
    steps = warmup_asked(schedule, plan.steps_per_epoch)
    asked = f"warmup_steps={steps}"
    if schedule.warmup_epochs is not None:
        asked = f"warmup_epochs={schedule.warmup_epochs:g} ({steps} steps)"
    if schedule.warmup_at_most is not None:
        return min(steps, int(schedule.warmup_at_most * plan.steps))
    if steps >= plan.steps:
        rule = f"the run ends before, after {plan.steps} steps; use less than {plan.steps} steps"
        raise ConfigError([f"schedule.{asked}: {rule}"])
    return steps


def build_job(
    config: Config,
    world: World,
    device: str,
    module: ModelWithTask,
    strategy: Strategy,
    sources: tuple[BatchSource, BatchSource] | Splits,
    status: RankStatus,
    first_step: int,
) -> Job:
    """What `fit` needs, `first_step` optimizer steps being done. The weights are those of `module`
    on rank 0."""
    splits = sources if isinstance(sources, Splits) else Splits(*sources)
    train_source = splits.train
    scored_source = splits.scored[1]
    units = 1.0
    if not module.task.units_are_samples:
        units = module.task.units_per_sample(train_source.get_batch(np.array([0]), None))
    if config.data.batch_by == "tokens":
        lengths = lengths_of(train_source, config.train.global_batch_size)
    else:
        lengths = None
    plan = replace(
        build_plan(config, world, len(train_source), splits.weights, lengths),
        units_per_sample=units,
    )
    factor = build_schedule(
        config.schedule.name,
        plan.steps,
        warmup_steps(config.schedule, plan),
        **arguments_of(config.schedule, "warmup_steps", "warmup_epochs", "warmup_at_most"),
    )
    classifies = isinstance(module.task, Classification)
    mix = mix_of(train_source, config.seed, config.data.mixup, config.data.cutmix, classifies)
    if config.tuning.cuda_graph and config.device == "cuda":
        stream = torch.cuda.Stream(device)
    else:
        stream = None
    frozen = module.frozen if config.model.freeze_epochs else None
    unfreezing = (config.model.freeze_epochs or 0) * plan.steps_per_epoch
    if frozen and first_step >= unfreezing:
        frozen.unfreeze()
        module.train()

    def wrap() -> nn.Module:
        with on_stream(stream):
            wrapped = strategy.wrap(module, lambda: flops_of_samples(module, train_source, share))
            strategy.warm_up(lambda: first_batch(config, plan, train_source, device, mix))
        return wrapped

    share = (
        0 if lengths is not None else plan.global_batch_size / world.size
    )  # of tokens: samples differ in cost
    trained = trained_parameters(config, module)
    wrapped = wrap()
    optimizer = optimizer_of(config, module, captured=stream is not None)
    scaler = torch.amp.GradScaler(
        torch.device(device).type, enabled=config.tuning.precision == "fp16"
    )
    decay = config.train.ema_decay
    skips = scaler.is_enabled()
    options = {
        "mean_of_units": strategy.mean_of_units,
        "check_gradients": strategy.check_gradients,
        "max_grad_norm": config.train.max_grad_norm,
        "allow_missing_grads": strategy.allow_missing_grads,
        "skip_non_finite": config.train.on_non_finite == "skip",
        "observers": [PhaseReports(status)],
        "average": (
            WeightAverage(module, decay, config.train.ema_warmup, skips, trained.values())
            if decay
            else None
        ),
    }
    forward: Callable[[Any], tuple[Tensor, Tensor | None]] = wrapped
    if stream:
        why = config.reasons.get("cuda_graph")  # nothing if the user asked for it
        roots = {"model": module.model, "task": module.task}
        trial = CaptureTrial(device, roots, asked=not why, if_it_pays=why == CAPTURED_IF_IT_PAYS)
        graphed = GraphedStepper(
            wrapped, stream, plan.is_full, optimizer, factor, scaler, trial=trial, **options
        )
        stepper: Stepper = graphed
        forward = graphed.forward
    else:
        stepper = Stepper(optimizer, factor, scaler, **options)
    # One iterator lives through all epochs.
    loading = replace(
        loader_options(config, module.task),
        persistent_workers=False,
        resident=_is_resident(config.data),
    )
    loader = Loader(train_source, plan.from_step(first_step), device, loading, mix)
    return Job(
        plan=plan,
        module=module,
        wrapped=forward,
        strategy=strategy,
        stepper=stepper,
        batches=ReportedBatches(loader, status),
        evaluation=build_evaluation(config, world, device, module, strategy, scored_source, status),
        seed_step=StepSeed(config.seed, world.rank, device),
        hooks=[UnfreezeHook(unfreezing, frozen, wrap)] if frozen else [],
        step=first_step,
    )


def build_evaluation(
    config: Config,
    world: World,
    device: str,
    module: ModelWithTask,
    strategy: Strategy,
    source: BatchSource,
    status: RankStatus,
) -> Evaluation:
    """What `evaluate` needs."""
    batch_size = config.train.evaluate_batch_size
    micro_batches = evaluation_batches(len(source), batch_size, world.rank, world.size)
    loading = replace(loader_options(config, module.task), resident=_is_resident(config.data))
    loader = Loader(source, micro_batches, device, loading)
    return Evaluation(
        module=module,
        strategy=strategy,
        batches=ReportedBatches(loader, status, "evaluation "),
        new_scorer=lambda: Scorer(
            -(-len(source) // batch_size), device, module.task.derive, module.further
        ),
        close=loader.close,
    )


def loader_options(config: Config, task: Task | None = None) -> LoaderOptions:
    """How batches come to the device. task: None: whatever is in them."""
    dtype = torch.float64 if config.tuning.precision == "fp64" else None
    each = isinstance(task, Supervised) and task.units_are_samples
    return LoaderOptions(
        dtype=dtype, one_target_per_sample=each, **keys_taken_by(LoaderOptions, config.tuning)
    )


def _is_resident(data: Any) -> bool:
    return getattr(data, "placement", "host") == "device"


def first_batch(
    config: Config, plan: BatchPlan, source: BatchSource, device: str, mix: Mix | None = None
) -> Batch:
    """This process's first micro-batch, as training sees it. mix: None leaves the samples
    unmixed."""
    return _batch(config, source, next(plan.micro_batches()), device, mix)


def scored_batches(config: Config, source: BatchSource, device: str) -> Iterator[Batch]:
    """Those of an evaluation, on all processes the same."""
    for each in evaluation_batches(
        len(source), config.train.evaluate_batch_size, rank=0, world_size=1
    ):
        yield _batch(config, source, each, device)


def _batch(
    config: Config,
    source: BatchSource,
    micro_batch: MicroBatch,
    device: str,
    mix: Mix | None = None,
) -> Batch:
    """One batch; no loader process is started for it."""
    options = replace(loader_options(config), num_workers=0)
    return next(iter(Loader(source, [micro_batch], device, options, mix)))
