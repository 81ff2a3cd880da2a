"""The plan of a run, as a person reads it before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.optim import Optimizer

from ddp_train.config import metrics
from ddp_train.config.metrics import further_metrics
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.optim.config import BuiltInOptimizerConfig
from ddp_train.options.custom import CustomScheduleConfig
from ddp_train.options.schema import Config
from ddp_train.options.sections import TrainConfig, TuningConfig
from ddp_train.recovery.state_row import state_row
from ddp_train.scored_sets import KINDS, VALIDATION
from ddp_train.tasks.task import Task
from ddp_train.telemetry.rates import Rates, shown_flops
from ddp_train.text import counted, shown, snake_case


@dataclass(frozen=True)
class PlanFacts:
    """Facts from which the plan of a run is made."""

    config: Config
    plan: BatchPlan
    task: Task
    base_lr: float
    """The learning rate at this global batch."""
    parameters: int = 0
    """Number of parameters of the model."""
    trained_parameters: int | None = None
    """Number of parameters that train now; None for all."""
    warmup_steps: int = 0
    schedule_metric: str | None = None
    """The metric that the schedule follows; None if it follows the steps."""
    first_step: int = 0
    """The step at which training starts or resumes."""
    set_sizes: Mapping[str, int] = field(default_factory=dict)
    """Samples of each set that is scored, by its name."""
    rates: Rates = Rates()
    optimizer: Optimizer | None = None
    """The optimizer that was built, for what it alone knows."""
    own_statistics: int = 0
    """Number of batch norms that each process computes of its own samples."""
    origin: str | None = None
    """The weights that training begins with; None for drawn or resumed ones."""
    problem_of_stream: str = ""
    """Why the training set, a stream, does not go on by a state of its own; "" if it does."""
    stand_ins_count: bool = False
    """See `Job`."""
    is_kept: bool = False
    """The state is kept outside the processes."""


def plan_rows(facts: PlanFacts) -> dict[str, str]:
    """The rows of the plan, by heading."""
    config = facts.config
    plan = facts.plan
    rows = {"processes": _processes_row(config), "model": _model_row(facts)}
    if facts.origin:
        rows["begins with"] = facts.origin
    rows["data"] = _data_row(config.data, plan, facts.set_sizes)
    if plan.in_order:
        rows["stream"] = _stream_row(facts)
    rows["task"] = task_row(config.task, facts.task)
    metric_names = [metric.name for metric in further_metrics(config)]
    if metric_names:
        rows["metrics"] = f"{', '.join(metric_names)}, besides those of the task"
    if facts.own_statistics and config.process_count > 1 and not config.strategy.fixes_bits:
        rows["batch norm"] = (
            "statistics of each process's own samples, so the result depends on the number of"
            " processes; strategy.sync_bn=true takes the samples of all processes"
        )
    rows["global batch"] = _global_batch_row(plan, config.process_count)
    if facts.stand_ins_count:
        rows["empty batches"] = (
            "the model or the task cannot take an empty batch (the log says why). So a process"
            " without a sample computes a sample of another process with weight 0: the loss is"
            " exact, but samples that your code counts are too many"
        )
    rows["steps"] = _steps_row(config.train, plan, facts.first_step)
    rows["optimizer"] = _optimizer_row(facts)
    if facts.rates.flops_per_sample:
        rows["compute"] = _compute_row(facts.rates.flops_per_sample, facts.rates.peak_flops, plan)
    rows |= tuning_rows(config.tuning, config.reasons)
    rows["state"] = state_row(config, facts.is_kept)
    if config.tracker.classes:
        rows["trackers"] = ", ".join(config.tracker.classes)
    rows["run directory"] = str(config.run_dir)
    return rows


def _name_of(section: Any) -> str:
    """The class of an option that is the user's own; else the name of the option."""
    return getattr(section, "target", None) or section.name


def _processes_row(config: Config) -> str:
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
    text = f"{count} x {config.device}, {backend}, {config.strategy.name}"
    if config.device != "cuda":
        text += f", {counted(int(config.launch.threads_per_process), 'thread')} each"
    return text


def _compute_row(flops_per_sample: float, peak_flops: float | None, plan: BatchPlan) -> str:
    per_step = shown_flops(flops_per_sample * plan.global_batch_size)
    text = f"{per_step} per step, {shown_flops(flops_per_sample)} per sample"
    if peak_flops:
        text += f", of {shown_flops(peak_flops)}/s at most"
    return text


def _model_row(facts: PlanFacts) -> str:
    model = facts.config.model
    name = getattr(model, "arch", None) or _name_of(model)
    text = f"{name}, {facts.parameters:,} parameters"
    if facts.trained_parameters in (None, facts.parameters):
        return text
    text += f", of which {facts.trained_parameters:,} train"
    if model.freeze_epochs:
        step = model.freeze_epochs * facts.plan.steps_per_epoch
        text += f"; frozen parameters train from step {step:,} on"
    return text


LOSS_METHODS = {"loss", "sum_of_losses"}
"""Methods with which a user's class replaces the loss of the built-in task."""


def task_row(section: Any, task: Task) -> str:
    """The task of a run in words, with its loss where that is ours. section: `config.task`."""
    text = snake_case(type(task).__name__)
    if section.name == "custom":
        text = section.target
    classes_with_loss = [cls for cls in type(task).__mro__ if LOSS_METHODS & vars(cls).keys()]
    loss_is_ours = all(cls.__module__.startswith("ddp_train.") for cls in classes_with_loss)
    if task.loss_name and loss_is_ours:
        text += f", {task.loss_name}"
    text += f", mean over {task.unit}s"
    if section.name == "auto":
        text += " (auto: by the targets)"
    return text


def _data_row(data: Any, plan: BatchPlan, set_sizes: Mapping[str, int]) -> str:
    samples = f"{plan.samples:,} samples to train on"
    if plan.sampled:
        samples = f"{plan.samples:,} draws of {plan.sampled.name} to train on"
    if plan.chosen_batches:
        samples = f"{plan.samples:,} samples in batches of {plan.chosen_batches.name} to train on"
    parts = [_name_of(data), samples]
    left_out = plan.samples - plan.samples_per_epoch
    if left_out:
        parts.append(f"{left_out:,} of them left out in each epoch (data.drop_last)")
    if plan.weights:
        parts.append(
            f"an epoch is {plan.samples:,} draws with replacement (weights {data.weights})"
        )
    if VALIDATION in set_sizes:
        origin = data.validation or "its own split"
        parts.append(f"{set_sizes[VALIDATION]:,} to validate ({origin})")
    for name, samples in set_sizes.items():
        if name not in KINDS:
            parts.append(f"{samples:,} in {name}")
    if getattr(data, "placement", "host") == "device":
        parts.append("in device memory")
    decode = getattr(data, "decode", "")
    if decode:
        parts.append(f"decode {decode}")
    mixing = {"mixup": data.mixup, "cutmix": data.cutmix, "random erasing": data.random_erasing}
    parts += [f"{name} {value:g}" for name, value in mixing.items() if value]
    return ", ".join(parts)


def _stream_row(facts: PlanFacts) -> str:
    text = "in its own order: each process reads the whole stream and keeps its share"
    workers = int(facts.config.tuning.num_workers)
    if workers > 1:
        text += (
            f", in one loader process (with tuning.num_workers={workers}, each would read it all)"
        )
    if facts.problem_of_stream:
        return (
            f"{text}; a resumed run first reads the samples that are done again"
            f" ({facts.problem_of_stream})"
        )
    return f"{text}; a resumed run uses the stream's state_dict"


def _global_batch_row(plan: BatchPlan, processes: int) -> str:
    over_processes = processes * plan.accumulation_steps
    if plan.lengths:
        sizes = plan.lengths.sizes
        parts = plan.virtual_shards or over_processes
        return (
            f"at most {plan.global_batch_size:,} tokens, up to {plan.lengths.padding:.0%} of them"
            f" padding: {sizes.min():,} to {counted(int(sizes.max()), 'sample')} of about one"
            f" length, in {counted(parts, 'part')}"
        )
    if plan.chosen_batches:
        sizes = np.diff(plan.chosen_batches.cuts(0))
        parts = plan.virtual_shards or over_processes
        return (
            f"{sizes.min():,} to {counted(int(sizes.max()), 'sample')}, at most"
            f" {plan.global_batch_size:,}, in {counted(parts, 'part')}"
        )
    if plan.virtual_shards:
        share = plan.global_batch_size // plan.virtual_shards
        parts = f"{share} x {plan.virtual_shards} virtual shards, added up in order"
        return f"{plan.global_batch_size} = {parts}"
    smallest, left_over = divmod(plan.global_batch_size, over_processes)
    share = f"{smallest} or {smallest + 1}" if left_over else str(smallest)
    parts = f"{counted(processes, 'process')} x {plan.accumulation_steps} accumulation"
    return f"{plan.global_batch_size} = {share} per process x {parts}"


def _steps_row(train: TrainConfig, plan: BatchPlan, first_step: int) -> str:
    epochs = train.most_epochs
    if epochs is None and plan.in_order and plan.steps_per_epoch == plan.steps:
        text = f"{plan.steps:,}; the stream is read until they are done"
    elif epochs is None:
        text = f"{plan.steps:,}, of which {plan.steps_per_epoch:,} go once through the data"
    else:
        whole = plan.steps_per_epoch * epochs
        text = f"{whole:,} = {counted(epochs, 'epoch')} x {plan.steps_per_epoch:,}"
        if plan.steps < whole:
            text += f", cut to {plan.steps:,} by train.max_steps"
        elif train.max_steps and train.max_steps > whole:
            text += f", before train.max_steps={train.max_steps:,}"
    if train.evaluate_every_steps:
        text += f", scored every {train.evaluate_every_steps:,}"
    if first_step:
        text += f", from step {first_step:,}"
    if train.max_minutes:
        text += f", at most {train.max_minutes:g} minutes"
    return text


def _optimizer_row(facts: PlanFacts) -> str:
    section = facts.config.optimizer
    train = facts.config.train
    text = f"{_name_of(section)}, lr {_learning_rate(facts)}"
    groups = [_group(group) for group in section.groups]
    if section.layer_decay is not None:
        groups.append(f"layer decay {section.layer_decay:g}")
    if groups:
        text += f", but {', '.join(groups)}"
    text += f", {_schedule(facts)}, warm-up {_warmup(facts)}"
    if train.ema_decay:
        text += f", average of weights {train.ema_decay:g}"
        if train.ema_warmup:
            text += " with warm-up"
    return text


def _schedule(facts: PlanFacts) -> str:
    section = facts.config.schedule
    text = f"{_name_of(section)} schedule"
    if facts.schedule_metric:
        return f"{text} by the {facts.schedule_metric} of each evaluation"
    if isinstance(section, CustomScheduleConfig):
        return f"{text} by {section.interval}"
    return text


def _group(group: dict[str, Any]) -> str:
    values = [f"{name} {value:g}" for name, value in group.items() if name != "match"]
    return f"{group['match']} with {' and '.join(values)}"


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
        scaled = section.at_batch(facts.config.train.global_batch_size)
        text += scaled.rates_in_words(facts.optimizer)
    return text


def _warmup(facts: PlanFacts) -> str:
    schedule = facts.config.schedule
    text = counted(facts.warmup_steps, "step")
    wanted = schedule.warmup_asked(facts.plan.steps_per_epoch)
    if wanted > facts.warmup_steps:
        limit = f"schedule.warmup_at_most={schedule.warmup_at_most:g}"
        text += f" (cut from {wanted:,}: {limit} of the run)"
    return text


SILENT = {"name", "prefetch_factor", "bias_lint"}
"""Keys of `tuning` that the plan does not show."""


def tuning_rows(tuning: TuningConfig, reasons: dict[str, str]) -> dict[str, str]:
    """The switches that are on, and those that `auto` left off although there is a GPU."""
    on = []
    left_off = []
    for name, value in vars(tuning).items():
        if name in SILENT or (name == "persistent_workers" and not tuning.num_workers):
            continue
        reason = reasons.get(name)
        why = f" ({reason})" if reason else ""
        if value is True:
            on.append(name + why)
        elif value not in (False, 0, [], "default"):
            on.append(f"{name} {shown(value)}{why}")
        elif reason and reason != "no GPU":
            left_off.append(name + why)
    rows = {"tuning": f"{tuning.name}: {', '.join(on)}"}
    if left_off:
        rows["left off"] = ", ".join(left_off)
    return rows


def selects_by_test(config: Config, validates: bool, follows_scores: bool = False) -> list[str]:
    """A note if the test set decides which weights are kept, when training ends, or how fast it is.

    validates: whether there is a validation set.
    follows_scores: the learning rate does.
    """
    keys = []
    if config.checkpoint.best:
        keys.append("checkpoint.best=true")
    patience = config.train.early_stopping.patience
    if patience:
        keys.append(f"train.early_stopping.patience={patience}")
    if follows_scores:
        keys.append("the schedule, which follows the scores")
    if not keys or validates:
        return []
    return [f"note: {' and '.join(keys)}: {metrics.by_test(config)}"]
