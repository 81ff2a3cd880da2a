"""The plan of a run, as a person reads it before the first step: processes, batch, steps,
optimizer, switches."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer

from ddp_train.config import metrics
from ddp_train.config.auto import optimizer_at_batch, process_count, warmup_asked
from ddp_train.config.metrics import further
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.optim.muon.optimizer import Muon
from ddp_train.options.schema import Config
from ddp_train.options.sections import TrackerConfig, TuningConfig
from ddp_train.tasks.task import Task
from ddp_train.telemetry.rates import Rates, shown_flops
from ddp_train.text import counted, shown, snake_case


def plan_rows(
    config: Config,
    plan: BatchPlan,
    task: Task,
    parameters: int,
    base_lr: float,
    warmup_steps: int,
    first_step: int,
    validation_samples: int | None = None,
    rates: Rates = Rates(),  # noqa: B008  it is frozen
    optimizer: Optimizer | None = None,
    trained: int | None = None,
    begun: str | None = None,
) -> dict[str, str]:
    """Heading -> text. parameters: of the model. trained: how many of them, now; None: all. begun:
    with which weights, if not with drawn ones. base_lr: at this global batch. first_step: where
    training resumes. validation_samples: None if nothing validates. rates: of the model. optimizer:
    the one that was built, for what only it knows."""
    return {
        "processes": _processes(config),
        "model": (
            f"{_model_name(config.model)}, {parameters:,} parameters"
            + _trained(config.model.freeze_epochs, plan, parameters, trained)
        ),
        **({"begins with": begun} if begun else {}),
        "data": _data(config.data, plan, validation_samples),
        "task": _task(config.task, task),
        **_further([item.name for item in further(config)]),
        "global batch": _global_batch(plan, process_count(config)),
        "steps": (
            _steps(plan, config.train.epochs, first_step) + _time_limit(config.train.max_minutes)
        ),
        "optimizer": _optimizer(config, plan, base_lr, warmup_steps, optimizer),
        **_compute(plan, rates),
        **tuning_rows(config.tuning, config.reasons),
        **_trackers(config.tracker),
        "run directory": str(config.run_dir),
    }


def _processes(config: Config) -> str:
    count = process_count(config)
    hosts = counted(int(config.launch.nnodes), "host")
    of_range = f" of {config.process_range}" if config.process_range else ""
    if config.host_range:
        on = f"{count} on {hosts} of {config.host_range}"
    else:
        on = f"{count}{of_range}"
    if int(config.launch.nnodes) > 1 and not config.host_range:
        on = f"{count} on {hosts}"
    else:
        on = on
    if config.strategy.has_process_group:
        backend = config.launch.backend
    else:
        backend = "no process group"
    if config.device == "cuda":
        threads = ""
    else:
        threads = f", {counted(int(config.launch.threads_per_process), 'thread')} each"
    return f"{on} x {config.device}, {backend}, {config.strategy.name}{threads}"


def _compute(plan: BatchPlan, rates: Rates) -> dict[str, str]:
    if not rates.flops_per_sample:
        return {}
    each = f"{shown_flops(rates.flops_per_sample)} per sample"
    peak = f", of {shown_flops(rates.peak_flops)}/s at most" if rates.peak_flops else ""
    return {
        "compute": (
            f"{shown_flops(rates.flops_per_sample * plan.global_batch_size)} per step, {each}{peak}"
        )
    }


def _model_name(model: Any) -> str:
    return getattr(model, "arch", None) or getattr(model, "target", None) or model.name


def _trained(
    freeze_epochs: int | None, plan: BatchPlan, parameters: int, trained: int | None
) -> str:
    if trained is None or trained == parameters:
        return ""
    if freeze_epochs:
        later = f"; what is frozen trains from step {freeze_epochs * plan.steps_per_epoch:,} on"
    else:
        later = ""
    return f", of which {trained:,} train{later}"


_OF_LOSS = {"loss", "sum_of_losses"}
"""Methods that a class of the user's own may have in place of the built-in task's loss."""


def _task(section: Any, task: Task) -> str:
    name = section.target if section.name == "custom" else snake_case(type(task).__name__)
    is_ours = all(
        one.__module__.startswith("ddp_train.")
        for one in type(task).__mro__
        if _OF_LOSS & vars(one).keys()
    )
    loss = f", {task.loss_name}" if task.loss_name and is_ours else ""
    return f"{name}{loss}, mean over {task.unit}s" + (
        " (auto: by the targets)" if section.name == "auto" else ""
    )


def _further(names: list[str]) -> dict[str, str]:
    if names:
        return {"metrics": f"{', '.join(names)}, beside the task's"}
    return {}


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


def _time_limit(minutes: float | None) -> str:
    return f", at most {minutes:g} minutes" if minutes else ""


def _optimizer(
    config: Config, plan: BatchPlan, base_lr: float, warmup_steps: int, built: Optimizer | None
) -> str:
    optimizer = config.optimizer
    lr = f"{base_lr:g}"
    scaling = getattr(optimizer, "lr_scaling", "none")
    if scaling != "none":
        ratio = f"{plan.global_batch_size:,} / {optimizer.lr_base_batch:,}"
        lr += f" = {optimizer.lr:g} x {ratio if scaling == 'linear' else f'sqrt({ratio})'}"
    warmup = counted(warmup_steps, "step")
    asked = warmup_asked(config.schedule, plan.steps_per_epoch)
    if asked > warmup_steps:
        warmup += (
            f" (cut from {asked:,}: schedule.warmup_at_most={config.schedule.warmup_at_most:g} of"
            " the run)"
        )
    decay = config.train.ema_decay
    if decay:
        average = (
            f", average of weights {decay:g}{' with warm-up' if config.train.ema_warmup else ''}"
        )
    else:
        average = ""
    parts = [f"{group['match']} with {_arguments(group)}" for group in optimizer.groups]
    if optimizer.layer_decay is not None:
        parts.append(f"layer decay {optimizer.layer_decay:g}")
    groups = f", but {', '.join(parts)}" if parts else ""
    name = getattr(optimizer, "target", None) or optimizer.name
    if isinstance(built, Muon):
        rest = f"AdamW's {optimizer_at_batch(config).adamw_lr:g} for the rest"
        lr += f" for {built.orthogonalised_parameters:,} parameters, {rest}"
    return f"{name}, lr {lr}{groups}, {config.schedule.name} schedule, warm-up {warmup}{average}"


def _arguments(group: dict[str, Any]) -> str:
    return " and ".join(f"{name} {value:g}" for name, value in group.items() if name != "match")


def _trackers(tracker: TrackerConfig) -> dict[str, str]:
    if tracker.classes:
        return {"trackers": ", ".join(tracker.classes)}
    return {}


def tuning_rows(tuning: TuningConfig, reasons: dict[str, str]) -> dict[str, str]:
    """The switches that are on, and those that `auto` left off for another reason than that there
    is no GPU."""
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
    """A note if the test set decides which weights are kept or when training ends. validates:
    whether there is a validation set."""
    asked = {
        "checkpoint.best=true": config.checkpoint.best,
        f"train.early_stopping.patience={config.train.early_stopping.patience}": (
            config.train.early_stopping.patience
        ),
    }
    by = [key for key, applies in asked.items() if applies]
    if not by or validates:
        return []
    return [f"note: {' and '.join(by)}: {metrics.by_test(config)}"]
