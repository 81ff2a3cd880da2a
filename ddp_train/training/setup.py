"""From the frozen config to the collaborators of the loop. Config objects stop here: constructors take plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.config.auto import optimizer_at_batch, process_count
from ddp_train.config.schema import TRACKERS, Config, OrderedConfig, TuningConfig
from ddp_train.data.batch_plan import BatchPlan, evaluation_batches
from ddp_train.data.datasets import BatchSource
from ddp_train.data.loader import Batch, Loader
from ddp_train.data.rng import StepSeed, hash_key
from ddp_train.distributed.world import World
from ddp_train.errors import ConfigError
from ddp_train.models.zoo import build_model
from ddp_train.optim.optimizers import build_optimizer
from ddp_train.optim.schedules import build_schedule, warmup_steps
from ddp_train.optim.stepper import Stepper
from ddp_train.parallel.ordered_reduction import OrderedReduction
from ddp_train.parallel.strategy import Strategy, build_strategy, warm_up_ddp_buckets
from ddp_train.performance import switches
from ddp_train.performance.bias_lint import biases_before_norm
from ddp_train.performance.cuda_graph import GraphedStepper, on_stream
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.task import ModelWithLoss, Scorer, cross_entropy, squared_error
from ddp_train.tensor_tree import map_tensors
from ddp_train.text import counted, shown
from ddp_train.training.loop import Evaluation, Job


def build_module(config: Config, source: BatchSource, device: str) -> ModelWithLoss:
    """The model with its loss, placed and tuned; the same weights on every process."""
    inputs, targets = source.get_batch(np.array([0]), None)
    regression = config.train.loss == "mse" or (config.train.loss == "auto" and targets.is_floating_point())
    if regression != targets.is_floating_point():
        kind = "numbers" if targets.is_floating_point() else "class labels"
        raise ConfigError(
            [f"train.loss={config.train.loss}: the targets of data={config.data.name} are {kind}; use train.loss=auto"]
        )
    custom = config.model.name == "custom"
    try:
        outputs = source.outputs
    except ConfigError:  # the data set does not say; a model of the user's own knows
        if not custom:
            raise
        outputs = 0
    loss = squared_error if regression else cross_entropy(outputs, config.train.label_smoothing)
    torch.manual_seed(hash_key(config.seed, "model"))
    model = build_model(config.model, () if custom else inputs.shape[1:], 0 if custom else outputs)
    module = ModelWithLoss(model, loss, device, switches.AUTOCAST[config.tuning.precision])
    module = build_strategy(config.strategy, device).place(module)
    switches.shape_model(module, config.tuning)
    return module


def advice(config: Config, module: ModelWithLoss, source: BatchSource) -> list[str]:
    """What the user may want to change in the model, a line each."""
    if not config.tuning.bias_lint:
        return []
    dtype = next(module.model.parameters()).dtype
    sample = map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() or tensor.dtype == torch.uint8 else tensor,
        source.get_batch(np.array([0]), None)[0],
    )
    names = biases_before_norm(module.model, sample) or []
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    what = f"{counted(len(names), 'bias')} directly before a norm layer, which takes the mean away again"
    return [f"note: {what}: {some}; build such layers with bias=False"] if names else []


def build_evaluation(
    config: Config, world: World, device: str, module: ModelWithLoss, source: BatchSource, status: RankStatus
) -> Evaluation:
    """What `evaluate` needs."""
    batch_size = config.train.evaluate_batch_size
    micro_batches = evaluation_batches(len(source), batch_size, world.rank, world.size)
    return Evaluation(
        module=module,
        strategy=_strategy(config, device),
        batches=Loader(source, micro_batches, config.tuning, device, status, "evaluation ", _resident(config)),
        new_scorer=lambda: Scorer(-(-len(source) // batch_size), device),
    )


def _strategy(config: Config, device: str) -> Strategy:
    if isinstance(config.strategy, OrderedConfig):
        return OrderedReduction(device, config.seed, config.strategy.virtual_shards)
    return build_strategy(config.strategy, device)


def _resident(config: Config) -> bool:
    return config.data.placement == "device"


def build_plan(config: Config, world: World, samples: int) -> BatchPlan:
    """Who computes what, in numbers."""
    plan = BatchPlan(
        samples=samples,
        global_batch_size=config.train.global_batch_size,
        accumulation_steps=config.train.accumulation_steps,
        steps=0,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        virtual_shards=config.strategy.virtual_shards if isinstance(config.strategy, OrderedConfig) else None,
    )
    whole = config.train.epochs * plan.steps_per_epoch
    return replace(plan, steps=min(whole, config.train.max_steps or whole))


def build_job(
    config: Config,
    world: World,
    device: str,
    module: ModelWithLoss,
    sources: tuple[BatchSource, BatchSource],
    status: RankStatus,
    first_step: int,
) -> Job:
    """What `fit` needs, `first_step` optimizer steps being done. The weights are those of `module` on rank 0."""
    train_source, test_source = sources
    plan = build_plan(config, world, len(train_source))
    warmup, warmup_epochs = warmup_steps(config.schedule, plan.steps_per_epoch), config.schedule.warmup_epochs
    if warmup >= plan.steps:
        asked = (
            f"warmup_steps={warmup}" if warmup_epochs is None else f"warmup_epochs={warmup_epochs:g} ({warmup} steps)"
        )
        rule = f"the run ends before, after {plan.steps} steps; use less than {plan.steps} steps"
        raise ConfigError([f"schedule.{asked}: {rule}"])
    strategy = _strategy(config, device)
    stream = torch.cuda.Stream(device) if config.tuning.cuda_graph and config.device == "cuda" else None
    with on_stream(stream):
        wrapped = strategy.wrap(module)
        by_ddp = config.strategy.has_process_group and not plan.virtual_shards
        if config.deterministic and by_ddp and world.size > 2:
            warm_up_ddp_buckets(wrapped, first_batch(config, plan, train_source, device, status))
    parts = (
        build_optimizer(
            module.model.parameters(), optimizer_at_batch(config), config.tuning.optimizer, recorded=stream is not None
        ),
        build_schedule(config.schedule, plan.steps, plan.steps_per_epoch),
        config.train.max_grad_norm,
        torch.amp.GradScaler(torch.device(device).type, enabled=config.tuning.precision == "fp16"),
        status,
        # Without DDP nobody asks that every shard uses every parameter.
        plan.virtual_shards is not None or config.strategy.find_unused_parameters,
        config.train.on_non_finite == "skip",
    )
    forward: Callable[[Any, Tensor], Tensor] = wrapped
    if stream:
        stepper: Stepper = GraphedStepper(wrapped, stream, plan.is_full, *parts)
        forward = stepper.forward
    else:
        stepper = Stepper(*parts)
    return Job(
        plan=plan,
        module=module,
        wrapped=forward,
        strategy=strategy,
        stepper=stepper,
        batches=Loader(
            train_source, _Shares(plan, first_step), config.tuning, device, status, resident=_resident(config)
        ),
        evaluation=build_evaluation(config, world, device, module, test_source, status),
        seed_step=StepSeed(config.seed, world.rank, device),
        step=first_step,
    )


def first_batch(config: Config, plan: BatchPlan, source: BatchSource, device: str, status: RankStatus) -> Batch:
    """This process's first micro-batch, as training sees it; no loader process is started for it."""
    here = replace(config.tuning, num_workers=0)
    return next(iter(Loader(source, [next(plan.micro_batches())], here, device, status)))


class _Shares:
    """The micro-batches of a plan, to be iterated more than once as DataLoader's samplers are."""

    def __init__(self, plan: BatchPlan, first_step: int) -> None:
        self.plan, self.first_step = plan, first_step

    def __iter__(self):
        return self.plan.micro_batches(self.first_step)


def plan_rows(config: Config, job: Job, reasons: dict[str, str]) -> dict[str, str]:
    """What is about to happen, for the user's eyes. reasons: why switches are what they are, see `resolve.reasons`."""
    plan, processes = job.plan, process_count(config)
    parameters = sum(parameter.numel() for parameter in job.module.model.parameters())
    split = f"{plan.micro_batch_size} per process x {counted(processes, 'process')} x "
    split += f"{plan.accumulation_steps} accumulation"
    if plan.virtual_shards:
        split = (
            f"{plan.global_batch_size // plan.virtual_shards} x {plan.virtual_shards} virtual shards, added up in order"
        )
    resumed = f", from step {job.step:,}" if job.step else ""
    whole = plan.steps_per_epoch * config.train.epochs
    cut = f", cut to {plan.steps:,} by train.max_steps" if plan.steps < whole else ""
    on = f"{processes} on {config.launch.nnodes} hosts" if config.launch.nnodes > 1 else str(processes)
    back_end = config.launch.backend if config.strategy.has_process_group else "no process group"
    scaled = ""
    if (scaling := config.optimizer.lr_scaling) != "none":
        ratio = f"{plan.global_batch_size:,} / {config.optimizer.lr_base_batch:,}"
        scaled = f" = {config.optimizer.lr:g} x {ratio if scaling == 'linear' else f'sqrt({ratio})'}"
    decode = config.data.decode
    trackers = [name for name in TRACKERS if getattr(config.tracker, name)]
    model = getattr(config.model, "arch", None) or getattr(config.model, "target", None) or config.model.name
    return {
        "processes": f"{on} x {config.device}, {back_end}, {config.strategy.name}",
        "model": f"{model}, {parameters:,} parameters",
        "data": f"{config.data.name}, {plan.samples:,} samples to train on"
        + (", held on the device" if _resident(config) else "")
        + (f", decode {decode}" if decode else ""),
        "global batch": f"{plan.global_batch_size} = {split}",
        "steps": f"{whole:,} = {counted(config.train.epochs, 'epoch')} x {plan.steps_per_epoch:,}{cut}{resumed}",
        "optimizer": f"{config.optimizer.name}, lr {job.stepper.base_lrs[0]:g}{scaled}, "
        f"{config.schedule.name} schedule, "
        f"warm-up {counted(warmup_steps(config.schedule, plan.steps_per_epoch), 'step')}",
        **tuning_rows(config.tuning, reasons),
        **({"trackers": ", ".join(trackers)} if trackers else {}),
        "run directory": str(config.run_dir),
    }


def tuning_rows(tuning: TuningConfig, reasons: dict[str, str]) -> dict[str, str]:
    """The switches that are on, and those that `auto` left off, unless it is because there is no GPU."""
    passive = {"name", "prefetch_factor", "bias_lint", *([] if tuning.num_workers else ["persistent_workers"])}
    tips = {name: value for name, value in vars(tuning).items() if name not in passive}
    off = {name for name, value in tips.items() if value in (False, 0, [], "default")}
    why = {name: f" ({reason})" for name, reason in reasons.items() if reason}
    on = [
        (name if value is True else f"{name} {shown(value)}") + why.get(name, "")
        for name, value in tips.items()
        if name not in off
    ]
    rows = {"tuning": f"{tuning.name}: {', '.join(on)}"}
    if left_off := [name + why[name] for name in tips if name in off & why.keys() and reasons[name] != "no GPU"]:
        rows["left off"] = ", ".join(left_off)
    return rows
