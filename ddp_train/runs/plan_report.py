"""The plan of a run, as a person reads it before the first step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from ddp_train.config import metrics
from ddp_train.config.auto import optimizer_at_batch
from ddp_train.config.metrics import further
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.optim.config import BuiltInOptimizerConfig
from ddp_train.options.schema import Config
from ddp_train.options.sections import TuningConfig
from ddp_train.tasks.task import Task
from ddp_train.telemetry.rates import Rates, shown_flops
from ddp_train.text import counted, shown, snake_case


@dataclass(frozen=True)
class PlanFacts:
    """What the plan of a run is made from."""

    config: Config
    plan: BatchPlan
    task: Task
    base_lr: float
    """The learning rate at this global batch."""
    parameters: int = 0
    """Number of parameters of the model."""
    trained_parameters: int | None = None
    """How many of them train now; None for all."""
    warmup_steps: int = 0
    first_step: int = 0
    """The step at which training starts or resumes."""
    validation_samples: int | None = None
    """None without a validation set."""
    rates: Rates = Rates()
    optimizer: Optimizer | None = None
    """The optimizer that was built, for what it alone knows."""
    origin: str | None = None
    """The weights that training begins with; None for drawn or resumed ones."""


def plan_rows(facts: PlanFacts) -> dict[str, str]:
    """The rows of the plan, by heading."""
    config = facts.config
    plan = facts.plan
    rows = {"processes": _processes(config), "model": _model(facts)}
    if facts.origin:
        rows["begins with"] = facts.origin
    rows["data"] = _data(config.data, plan, facts.validation_samples)
    rows["task"] = _task(config.task, facts.task)
    metric_names = [metric.name for metric in further(config)]
    if metric_names:
        rows["metrics"] = f"{', '.join(metric_names)}, beside the task's"
    rows["global batch"] = _global_batch(plan, config.process_count)
    rows["steps"] = _steps(plan, config.train.epochs, facts.first_step)
    if config.train.max_minutes:
        rows["steps"] += f", at most {config.train.max_minutes:g} minutes"
    rows["optimizer"] = _optimizer(facts)
    if facts.rates.flops_per_sample:
        rows["compute"] = _compute(facts.rates.flops_per_sample, facts.rates.peak_flops, plan)
    rows |= tuning_rows(config.tuning, config.reasons)
    if config.tracker.classes:
        rows["trackers"] = ", ".join(config.tracker.classes)
    rows["run directory"] = str(config.run_dir)
    return rows


def _processes(config: Config) -> str:
    count = str(config.process_count)
    host_count = int(config.launch.nnodes)
    hosts = counted(host_count, "host")
    if config.host_range:
        count += f" on {hosts} of {config.host_range}"
    elif host_count > 1:
        count += f" on {hosts}"
    elif config.process_range:
        count += f" of {config.process_range}"
    backend = "no process group"
    if config.strategy.has_process_group:
        backend = config.launch.backend
    threads = ""
    if config.device != "cuda":
        threads = f", {counted(int(config.launch.threads_per_process), 'thread')} each"
    return f"{count} x {config.device}, {backend}, {config.strategy.name}{threads}"


def _compute(flops_per_sample: float, peak_flops: float | None, plan: BatchPlan) -> str:
    per_step = shown_flops(flops_per_sample * plan.global_batch_size)
    text = f"{per_step} per step, {shown_flops(flops_per_sample)} per sample"
    if peak_flops:
        text += f", of {shown_flops(peak_flops)}/s at most"
    return text


def _model(facts: PlanFacts) -> str:
    model = facts.config.model
    name = getattr(model, "arch", None) or getattr(model, "target", None) or model.name
    text = f"{name}, {facts.parameters:,} parameters"
    if facts.trained_parameters in (None, facts.parameters):
        return text
    text += f", of which {facts.trained_parameters:,} train"
    if model.freeze_epochs:
        step = model.freeze_epochs * facts.plan.steps_per_epoch
        text += f"; what is frozen trains from step {step:,} on"
    return text


LOSS_METHODS = {"loss", "sum_of_losses"}
"""Methods with which a user's class replaces the loss of the built-in task."""


def _task(section: Any, task: Task) -> str:
    name = snake_case(type(task).__name__)
    if section.name == "custom":
        name = section.target
    classes_with_loss = [one for one in type(task).__mro__ if LOSS_METHODS & vars(one).keys()]
    loss_is_ours = all(one.__module__.startswith("ddp_train.") for one in classes_with_loss)
    text = name
    if task.loss_name and loss_is_ours:
        text += f", {task.loss_name}"
    text += f", mean over {task.unit}s"
    if section.name == "auto":
        text += " (auto: by the targets)"
    return text


def _data(data: Any, plan: BatchPlan, validation_samples: int | None) -> str:
    parts = [getattr(data, "target", None) or data.name, f"{plan.samples:,} samples to train on"]
    if plan.weights:
        parts.append(
            f"an epoch is {plan.samples:,} draws with replacement (weights {data.weights})"
        )
    if validation_samples is not None:
        parts.append(f"{validation_samples:,} to validate ({data.validation or 'its own split'})")
    if getattr(data, "placement", "host") == "device":
        parts.append("held on the device")
    if decode := getattr(data, "decode", ""):
        parts.append(f"decode {decode}")
    mixing = {"mixup": data.mixup, "cutmix": data.cutmix, "random erasing": data.random_erasing}
    parts += [f"{name} {value:g}" for name, value in mixing.items() if value]
    return ", ".join(parts)


def _global_batch(plan: BatchPlan, processes: int) -> str:
    if not plan.lengths:
        return f"{plan.global_batch_size} = {_split(plan, processes)}"
    sizes = plan.lengths.sizes
    parts = plan.virtual_shards or processes * plan.accumulation_steps
    return (
        f"at most {plan.global_batch_size:,} tokens, up to {plan.lengths.padding:.0%} of them"
        f" padding: {sizes.min():,} to {counted(int(sizes.max()), 'sample')} of about one length,"
        f" in {counted(parts, 'part')}"
    )


def _split(plan: BatchPlan, processes: int) -> str:
    if plan.virtual_shards:
        each = plan.global_batch_size // plan.virtual_shards
        return f"{each} x {plan.virtual_shards} virtual shards, added up in order"
    over = f"{counted(processes, 'process')} x {plan.accumulation_steps} accumulation"
    each = plan.global_batch_size / (processes * plan.accumulation_steps)
    if each.is_integer():
        share = f"{each:.0f}"
    else:
        share = f"{math.floor(each)} or {math.ceil(each)}"
    return f"{share} per process x {over}"


def _steps(plan: BatchPlan, epochs: int, first_step: int) -> str:
    whole = plan.steps_per_epoch * epochs
    text = f"{whole:,} = {counted(epochs, 'epoch')} x {plan.steps_per_epoch:,}"
    if plan.steps < whole:
        text += f", cut to {plan.steps:,} by train.max_steps"
    if first_step:
        text += f", from step {first_step:,}"
    return text


def _optimizer(facts: PlanFacts) -> str:
    section = facts.config.optimizer
    name = getattr(section, "target", None) or section.name
    groups = [f"{group['match']} with {_arguments(group)}" for group in section.groups]
    if section.layer_decay is not None:
        groups.append(f"layer decay {section.layer_decay:g}")
    text = f"{name}, lr {_learning_rate(facts)}"
    if groups:
        text += f", but {', '.join(groups)}"
    text += f", {facts.config.schedule.name} schedule, warm-up {_warmup(facts)}"
    train = facts.config.train
    if train.ema_decay:
        text += f", average of weights {train.ema_decay:g}"
        if train.ema_warmup:
            text += " with warm-up"
    return text


def _learning_rate(facts: PlanFacts) -> str:
    section = facts.config.optimizer
    text = f"{facts.base_lr:g}"
    scaling = section.lr_scaling
    if isinstance(section, BuiltInOptimizerConfig) and scaling != "none":
        factor = f"{facts.plan.global_batch_size:,} / {section.lr_base_batch:,}"
        if scaling != "linear":
            factor = f"sqrt({factor})"
        text += f" = {section.lr:g} x {factor}"
    if facts.optimizer is not None:
        text += optimizer_at_batch(facts.config).rates_in_words(facts.optimizer)
    return text


def _warmup(facts: PlanFacts) -> str:
    schedule = facts.config.schedule
    text = counted(facts.warmup_steps, "step")
    asked = schedule.warmup_asked(facts.plan.steps_per_epoch)
    if asked > facts.warmup_steps:
        text += (
            f" (cut from {asked:,}: schedule.warmup_at_most={schedule.warmup_at_most:g} of the run)"
        )
    return text


def _arguments(group: dict[str, Any]) -> str:
    return " and ".join(f"{name} {value:g}" for name, value in group.items() if name != "match")


def tuning_rows(tuning: TuningConfig, reasons: dict[str, str]) -> dict[str, str]:
    """The switches that are on, and those that `auto` left off although there is a GPU."""
    silent = {"name", "prefetch_factor", "bias_lint"}
    if not tuning.num_workers:
        silent.add("persistent_workers")
    switches = {name: value for name, value in vars(tuning).items() if name not in silent}
    why = {name: f" ({reason})" for name, reason in reasons.items() if reason}
    on = []
    left_off = []
    for name, value in switches.items():
        if value not in (False, 0, [], "default"):
            on.append((name if value is True else f"{name} {shown(value)}") + why.get(name, ""))
        elif name in why and reasons[name] != "no GPU":
            left_off.append(name + why[name])
    rows = {"tuning": f"{tuning.name}: {', '.join(on)}"}
    if left_off:
        rows["left off"] = ", ".join(left_off)
    return rows


def selects_by_test(config: Config, validates: bool) -> list[str]:
    """A note if the test set decides which weights are kept, or when training ends.

    validates: whether there is a validation set.
    """
    keys = []
    if config.checkpoint.best:
        keys.append("checkpoint.best=true")
    patience = config.train.early_stopping.patience
    if patience:
        keys.append(f"train.early_stopping.patience={patience}")
    if not keys or validates:
        return []
    return [f"note: {' and '.join(keys)}: {metrics.by_test(config)}"]
