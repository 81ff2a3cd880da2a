"""The schedule of the learning rates that a config names, for an optimizer."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_train.assembly.arguments import arguments_of, needs_argument
from ddp_train.assembly.plan import warmup_steps
from ddp_train.config import metrics
from ddp_train.config.user_code import (
    build_scheduler,
    named_function,
    parameters_of,
    takes_optimizer,
)
from ddp_train.data.batch_plan import BatchPlan
from ddp_train.errors import ConfigError
from ddp_train.optim.schedules.factors import Factor, build_schedule
from ddp_train.optim.schedules.schedule import FactorSchedule, Pace, Schedule
from ddp_train.optim.schedules.torch_schedules import (
    PlateauSchedule,
    StandIn,
    SteppedSchedule,
)
from ddp_train.options.custom import Code, CustomScheduleConfig
from ddp_train.options.schema import ScheduleConfig
from ddp_train.text import first_line

log = logging.getLogger(__name__)
SECTION = "schedule"
LENGTH_OF_RUN = ("T_max", "total_steps", "num_training_steps")
"""Arguments that stand for the steps of a whole run; left out, they are those of this one."""
LENGTH_OF_ONE_CYCLE = ("total_steps", "epochs", "steps_per_epoch")
"""Arguments by which OneCycleLR is told its length."""
MOST_TRIED = 20_000
"""The most steps of a schedule that are tried before training, in at most half a second."""


def schedule_of(
    section: ScheduleConfig,
    plan: BatchPlan,
    optimizer: Optimizer,
    better: Mapping[str, str | None],
    captured: bool = False,
) -> Schedule:
    """The schedule of an optimizer. section: `config.schedule`.

    better: the direction of each metric, max or min.
    captured: steps will be captured as CUDA graphs.

    Raises ConfigError if the warm-up is longer than the run, or for code that makes no schedule.
    """
    warmup = warmup_steps(section, plan)
    if not isinstance(section, CustomScheduleConfig):
        arguments = arguments_of(section, "warmup_steps", "warmup_epochs", "warmup_at_most")
        factor = build_schedule(section.name, plan.steps, warmup, **arguments)
        return FactorSchedule(factor, optimizer)
    period = plan.steps_per_epoch if section.interval == "epoch" else 1
    pace = Pace(plan.steps, warmup, period)
    if not takes_optimizer(SECTION, section.code):
        return FactorSchedule(_factor_of(section.code, pace), optimizer)
    return _scheduler_of(section, pace, optimizer, better, captured)


def split_of_metric(section: ScheduleConfig) -> str | None:
    """The set whose metric a schedule looks at; None: the first that is scored."""
    if section.metric == metrics.AUTO:
        return None
    return section.metric.partition(".")[0]


def metric_of(section: ScheduleConfig) -> str:
    """The name of the metric that a schedule looks at."""
    if section.metric == metrics.AUTO:
        return "loss"
    return section.metric.partition(".")[2]


# --- a function -----------------------------------------------------------------------------------


def _factor_of(code: Code, pace: Pace) -> Factor:
    """The factors that a function of (step, steps) returns, after the warm-up."""
    target = named_function(f"{SECTION}._target_", code.target)
    function = partial(target, **code.arguments)
    try:
        inspect.signature(target).bind(0, pace.length, **code.arguments)
    except TypeError as error:
        rule = f"must accept (step, steps) and the other keys of schedule: {error}"
        raise ConfigError([f"{SECTION}._target_={code.target}: {rule}"]) from error
    except ValueError:  # written in C, without a signature: the call itself fails
        pass

    def factor(step: int) -> float:
        place = pace.place(step)
        value = function(place, pace.length)
        return _checked(value, code, place, pace) * pace.warmup(step)

    for place in range(min(pace.length, MOST_TRIED)):
        _checked(function(place, pace.length), code, place, pace)
    return factor


def _checked(value: Any, code: Code, place: int, pace: Pace) -> float:
    """A factor as a number. Raises ConfigError for what is none, or below 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and number >= 0:
        return number
    raise ConfigError(
        [
            f"{SECTION}._target_={code.target}: returned {value!r} for the arguments"
            f" ({place}, {pace.length});"
            " it must return the factor of the learning rate, a finite number of at least 0"
        ]
    )


# --- a scheduler of torch's -----------------------------------------------------------------------


def _scheduler_of(
    section: CustomScheduleConfig,
    pace: Pace,
    optimizer: Optimizer,
    better: Mapping[str, str | None],
    captured: bool,
) -> Schedule:
    code = Code(section.target, section.arguments | _of_this_run(section, pace, better))
    make = partial(_make, code)
    scheduler = _translated(code, partial(make, StandIn.of(optimizer)))
    _warn_of_one_rate(code, scheduler.optimizer, optimizer)
    if needs_argument(scheduler.step):  # the value of a metric
        return PlateauSchedule(make, optimizer, pace)
    _check_length(code, scheduler, pace)
    tried = SteppedSchedule(make, optimizer, pace)
    _translated(code, partial(_try_steps, code, tried, min(pace.length, MOST_TRIED)))
    if captured and tried.written != ["lr"]:
        rule = (
            f"{section.target} changes {', '.join(tried.written)}, but a captured step can change"
            " lr only"
        )
        raise ConfigError([f"tuning.cuda_graph=true: {rule}; use tuning.cuda_graph=false"])
    return SteppedSchedule(make, optimizer, pace)


def _of_this_run(
    section: CustomScheduleConfig, pace: Pace, better: Mapping[str, str | None]
) -> dict[str, Any]:
    """Arguments that follow from the run: its length, and the direction of the metric.

    Raises ConfigError if another direction was given.
    """
    parameters = parameters_of(SECTION, section.code)
    arguments = {}
    if "epochs" not in section.arguments:
        for name in LENGTH_OF_RUN:
            if name in parameters and name not in section.arguments:
                arguments[name] = pace.length
    direction = better.get(metric_of(section))
    if "mode" in parameters and "min_lr" in parameters and direction:
        given = section.arguments.get("mode", direction)
        if given != direction:
            better_is = "higher" if direction == "max" else "lower"
            rule = f"a {better_is} {metric_of(section)} is better; leave {SECTION}.mode out"
            raise ConfigError([f"{SECTION}.mode={given}: {rule}"])
        arguments["mode"] = direction
    return arguments


def _make(code: Code, optimizer: Optimizer) -> LRScheduler:
    scheduler = build_scheduler(SECTION, code, optimizer)
    if isinstance(scheduler, LRScheduler):
        return scheduler
    rule = (
        f"returns an object of {type(scheduler).__name__}, which is not a scheduler of"
        " torch.optim.lr_scheduler"
    )
    remedy = "use a class derived from LRScheduler, or a function of (step, steps)"
    raise ConfigError([f"{SECTION}._target_={code.target}: {rule}; {remedy}"])


def _warn_of_one_rate(code: Code, written: Optimizer, optimizer: Optimizer) -> None:
    """Say that a scheduler gives all groups one rate, as OneCycleLR with one number does.

    written: the optimizer that the scheduler was made for.
    """
    rates = {group["lr"] for group in written.param_groups}
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    if len(rates) == 1 and len(set(base_lrs)) > 1:
        log.warning(
            "%s._target_=%s sets the same learning rate for all %d groups of parameters,"
            " although optimizer.groups gives them different ones; give the arguments of the"
            " schedule as lists, with a number for each group",
            SECTION,
            code.target,
            len(base_lrs),
        )


def _check_length(code: Code, scheduler: LRScheduler, pace: Pace) -> None:
    """Raise ConfigError for a scheduler that ends before the run does: OneCycleLR."""
    total_steps = getattr(scheduler, "total_steps", None)
    if isinstance(total_steps, int) and total_steps < pace.length:
        rule = f"the schedule ends after {total_steps:,} steps, but the run has {pace.length:,}"
        given = [name for name in LENGTH_OF_ONE_CYCLE if name in code.arguments]
        keys = " and ".join(f"{SECTION}.{name}" for name in given)
        remedy = f"choose arguments that make {pace.length:,} steps"
        if given:
            remedy = f"leave out {keys}: the schedule then has the length of the run"
        raise ConfigError([f"{SECTION}._target_={code.target}: {rule}; {remedy}"])


def _try_steps(code: Code, schedule: SteppedSchedule, length: int) -> None:
    """Raise ConfigError if one of the first steps gives no learning rate."""
    for place in range(length):
        step = place * schedule.pace.period + schedule.pace.warmup_steps
        rates = [group["lr"] for group in schedule.values(step)]
        if not all(math.isfinite(rate) for rate in rates):
            rule = f"the learning rates in step {step + 1:,} would be {rates}"
            remedy = "choose arguments that keep all learning rates finite"
            raise ConfigError([f"{SECTION}._target_={code.target}: {rule}; {remedy}"])


def _translated(code: Code, call: Callable[[], Any]) -> Any:
    """The result of a call. Raises ConfigError for what torch says of the arguments."""
    try:
        return call()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError([f"{SECTION}._target_={code.target}: {text}"]) from error
