"""The trial of a user's task before the first step: are its loss and its scores sums?"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_train.data.batch_plan import evaluation_batch
from ddp_train.data.rng import moved_by_marks_alone
from ddp_train.distributed.empty_batch import step_without_samples
from ddp_train.distributed.process_group import buffer_places, ranks
from ddp_train.distributed.training_step import CURRENT, scored
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.models.put_back import leaving_nothing
from ddp_train.models.python_state import attribute_of, replaced, state_of
from ddp_train.tasks.task import ModelWithTask, ScoreSums, Task
from ddp_train.text import first_line

log = logging.getLogger(__name__)

BatchOf = Callable[[np.ndarray], Any]
"""Sample numbers, int64 [n] -> a batch of these samples on the device."""
Sum = tuple[float, float]
"""A sum over a batch, and what it is taken over: units, or a weight."""
COPIES = (1, 2, 5)
"""Sizes of the batches that consist of copies of the first sample."""
DISTINCT_SAMPLES = 7
"""The most samples of the batch without copies."""
TOLERANCE = 0.02
"""Relative difference below which two losses count as equal: bfloat16 has 8 bits."""
EXACT_TOLERANCE = 1e-9
"""The same in float64."""
CPU_TOLERANCE = 1e-3
"""The same in float32 on CPUs, with a margin for losses that are small beside the outputs."""
UNIT_TOLERANCE = 1e-5
"""The same of two counts of units, which may be weights that are added up in float32."""
LINE_TOLERANCE = 1e-4
"""The same of losses on a line: copies that draw their own numbers lie on one within TOLERANCE by
chance. In 16 bits a penalty is left to `mode=prove`."""
DEPENDS_ON_PROCESSES = "the result would depend on the number of processes"
MIXED = (
    "loss() of several samples is not the sum of their losses: it compares samples (in-batch"
    " negatives, mining, statistics of the batch), or depends on padding or on what a collate_fn"
    " mixes or draws. Each process has its own samples only, so the loss depends on the number of"
    " processes. To compare the samples of all processes, use `rows, own ="
    " ddp_train.all_gather(outputs)`"
)
CHANGED_BY_TESTS = (
    "score() returns no entry 'loss', so evaluations call loss(), which changes {}: samples of the"
    " test set change it too. Return {{'loss': (sum, units), ...}} from score(), or let loss()"
    " change it only if model.training"
)
KEPT_BY_SCORE = (
    "score() changes {}: each process scores batches of its own, so what is kept there is of these"
    " alone, and a metric that derive() or a hook makes of it depends on the number of processes."
    " Return sums from score(), or use metrics=[{{_target_: torchmetrics.NAME}}]"
)
CHANGES = "changes the buffer "
MOST_NAMES = 3
"""The most names that a warning lists."""
MIXED_BY_MODEL = (
    "the output for a sample depends on the other samples of its batch: on a mean, a maximum or"
    " other statistics, on padding, or on what a collate_fn mixes or draws. Each process has its"
    " own samples only, so the result depends on the number of processes. To use the samples of all"
    " processes, take such statistics from `rows, own = ddp_train.all_gather(inputs)`"
)
RETURN_SUMS = "return the sum of the losses of all units, and their number"


@dataclass(frozen=True)
class LossTrial:
    """The sums that `loss` returned for a few batches."""

    of_copies: list[Sum]
    """The sums of batches with the sizes in COPIES."""
    of_distinct: Sum
    of_each: list[Sum]
    """The sum of each distinct sample by itself."""
    is_repeatable: bool = True
    """Neither random numbers nor buffers were touched: else each batch may have others."""
    has_gathered: bool = False
    """The loss called `all_gather`."""
    tolerance: float = TOLERANCE
    """See `_tolerance`."""

    def problem(self, task: Task) -> str:
        """The reason why the loss is not a sum over its units, with a remedy; "" if it is."""
        samples = len(self.of_each)
        distinct_units = self.of_distinct[1]
        losses, units = zip(*self.of_copies, strict=True)
        if task.units_are_samples:
            for count, batch in zip((*units, distinct_units), (*COPIES, samples), strict=True):
                if count != batch:
                    return (
                        f"units_are_samples is True, but loss() counts {_counted(count, 'unit')} in"
                        f" a batch of {batch}; leave units_are_samples out, or count the samples"
                    )
        if not all(map(math.isfinite, losses)) or not units[0]:
            return ""  # a loss of one sample need not have a value, nor the first sample a unit
        findings = (
            f"loss() gives {losses[0]:.6g} for one sample and {losses[-1]:.6g} for a batch of"
            f" {COPIES[-1]} copies of it"
        )
        if len(set(units)) == 1:
            return (
                f"{findings}, and counts {_counted(units[0], task.unit)} for both:"
                f" {DEPENDS_ON_PROCESSES}; {RETURN_SUMS} (for one loss of n samples together:"
                " loss * n and n)"
            )
        if losses[0] and all(math.isclose(loss, losses[0], rel_tol=TOLERANCE) for loss in losses):
            remedy = f'{RETURN_SUMS}, as with reduction="sum"; multiply a penalty by that number'
            return f"{findings}: that is a mean, not a sum; {remedy}"
        constant = self.constant_part
        if constant:
            return (
                f"{findings}, of which {constant:.6g} does not grow with the batch, as a penalty on"
                f" weights: each process adds it to its own sum, so {DEPENDS_ON_PROCESSES};"
                " multiply it by the number of units:"
                " return losses.sum() + penalty * units, units"
            )
        units_one_by_one = math.fsum(count for _, count in self.of_each)
        if not math.isclose(distinct_units, units_one_by_one, rel_tol=UNIT_TOLERANCE):
            return (
                f"loss() counts {_counted(distinct_units, task.unit)} in a batch of {samples}"
                f" samples, and {units_one_by_one:g} if they come one by one:"
                f" {DEPENDS_ON_PROCESSES}; count only valid units, as mask.sum() does, and no"
                " padding"
            )
        return ""

    @property
    def constant_part(self) -> float:
        """The part of each loss that does not depend on the number of samples; 0 without one.

        Losses of 1, 2 and 5 copies are a + b, a + 2 b and a + 5 b then. Those that compare samples
        are on no line.
        """
        one, two, five = [loss for loss, _ in self.of_copies]
        of_each = two - one
        constant = one - of_each
        is_line = math.isclose(five - two, 3 * of_each, rel_tol=LINE_TOLERANCE)
        if is_line and abs(constant) > TOLERANCE * max(abs(one), abs(two)):
            return constant
        return 0.0

    @property
    def compares_own_samples(self) -> bool:
        """True if the loss of a sample depends on others of its process."""
        return self.is_repeatable and not self.has_gathered and self.mixes_samples

    @property
    def mixes_samples(self) -> bool:
        """True if the loss of a batch is not the sum of the losses of its samples by themselves."""
        losses = [loss for loss, _ in self.of_each]
        whole = self.of_distinct[0]
        if not all(map(math.isfinite, [whole, *losses])):
            return False
        allowed = self.tolerance * math.fsum(map(abs, losses))
        return abs(whole - math.fsum(losses)) > allowed


def _counted(units: float, unit: str) -> str:
    """`1 token`, `2.5 tokens`."""
    if units == 1:
        return f"1 {unit}"
    return f"{units:g} {unit}s"


@torch.no_grad()
def check_loss(module: ModelWithTask, batch_of: BatchOf, samples: int, key: str) -> None:
    """Raise ConfigError if `loss` is no sum over its units, or these are not those of the batch.

    A sum over five copies of a sample is five times that of one, and has five times the units. A
    mean stays what it is; it would weight the samples of a small micro-batch more than those of a
    large one. Units of a batch are those of its samples one by one: padding, which depends on what
    else is in the batch, has none.

    Warns of a loss that compares the samples of one process, where there are several.

    samples: of the data set.
    key: key and value that name the task.
    """
    try:
        trial = _tried(module, batch_of, samples)
    except LaunchError:
        raise
    except Exception as error:  # noqa: BLE001  code of the user's may raise anything
        _warn_of_failure("loss", key, error)
        return
    problem = trial.problem(module.task)
    if problem:
        raise ConfigError([f"{key}: {problem}"])
    in_training = _tried_in_training(module, batch_of, samples)
    if in_training and in_training.is_repeatable:
        problem = in_training.problem(module.task)
        if problem:
            raise ConfigError([f"{key}: in train mode {problem}"])
    is_told = trial.compares_own_samples or (in_training and in_training.compares_own_samples)
    if ranks() > 1 and is_told:
        log.warning("%s: %s", key, MIXED)


@torch.no_grad()
def check_model(module: ModelWithTask, batch_of: BatchOf, samples: int, key: str) -> None:
    """Warn of a model whose output for a sample depends on others of its process, where there are
    several.

    In eval mode alone: passes in train mode may count, write or wait, which nothing puts back.

    samples: of the data set.
    key: key and value that name the model.
    """
    if ranks() == 1:
        return
    try:
        trial = _tried(module, batch_of, samples)
    except LaunchError:
        raise
    except Exception as error:  # noqa: BLE001  training itself will raise it, if it is one
        log.info("no trial of the model: %s: %s", type(error).__name__, first_line(error))
        return
    if trial.compares_own_samples:
        log.warning("%s: %s", key, MIXED_BY_MODEL)


def _tried(
    module: ModelWithTask, batch_of: BatchOf, samples: int, in_training: bool = False
) -> LossTrial:
    """Call the loss for a few batches, in eval mode or in train mode. Raises what it raises."""
    numbers = np.arange(min(samples, DISTINCT_SAMPLES))

    def loss_of(batch: np.ndarray) -> Sum:
        with scored(evaluation_batch(0, batch)):
            loss, units = module.loss_of(batch_of(batch))
        return _number(loss), _number(units)

    roots = {"model": module.model, "task": module.task}
    gathers = CURRENT.gathers
    with undisturbed(module, "the trial of loss()") as effects:
        before = state_of(roots)
        if in_training:
            _train_own_layers(module)
        trial = LossTrial(
            of_copies=[loss_of(np.zeros(copies, np.int64)) for copies in COPIES],
            of_distinct=loss_of(numbers),
            of_each=[loss_of(number) for number in numbers[:, None]],
        )
        if in_training and replaced(before, state_of(roots)):
            effects.append("changes attributes")  # a count of steps, as of an annealed loss
    return replace(
        trial,
        is_repeatable=not effects,
        has_gathered=CURRENT.gathers > gathers,
        tolerance=_tolerance(module),
    )


def _number(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)  # float() warns of gradients


def _tolerance(module: ModelWithTask) -> float:
    """Relative difference below which two sums of the same losses count as equal."""
    if module.autocast is not None or module.device_type != "cpu":
        return TOLERANCE  # with TensorFloat-32 too
    types = {parameter.dtype for parameter in module.parameters()}
    if types == {torch.float64}:
        return EXACT_TOLERANCE
    return CPU_TOLERANCE if types <= {torch.float32, torch.float64} else TOLERANCE


def _tried_in_training(module: ModelWithTask, batch_of: BatchOf, samples: int) -> LossTrial | None:
    """The same in train mode, with gradients; None for what cannot be tried."""
    try:
        with torch.enable_grad():
            return _tried(module, batch_of, samples, in_training=True)
    except Exception as error:  # noqa: BLE001  training itself will raise it, if it is one
        log.info("no trial in train mode: %s: %s", type(error).__name__, first_line(error))
        return None


def _train_own_layers(module: ModelWithTask) -> None:
    """Put a module into train mode, but for the layers of torch: they have no penalties, but some
    draw numbers, or use the statistics of a batch."""
    module.train()
    for layer in module.model.modules():
        if layer is not module.model and type(layer).__module__.startswith("torch."):
            layer.training = False


@torch.no_grad()
def check_scores(module: ModelWithTask, batch_of: BatchOf, samples: int, key: str) -> None:
    """Raise ConfigError if `score` returns a mean; the parameters are those of `check_loss`.

    Seven samples are scored in one batch, and each by itself: a mean is their mean there, a sum
    their sum. A score that compares samples with each other is neither.
    """
    numbers = np.arange(min(samples, DISTINCT_SAMPLES))
    try:
        with undisturbed(module, "the trial of score()"):
            of_all = _scores(module, batch_of, numbers)
            of_each = [_scores(module, batch_of, number) for number in numbers[:, None]]
    except Exception as error:
        # A cause is an error of loss(), asked because score() gives no loss: one that fails for
        # a single sample, or without gradients, may be right in training.
        if isinstance(error, LaunchError) and not error.__cause__:
            raise
        _warn_of_failure("score", key, error)
        return
    for name, whole in of_all.items():
        parts = [scores.get(name, (math.nan, 0.0)) for scores in of_each]
        problem = _problem_of_score(name, whole, parts)
        if problem:
            raise ConfigError([f"{key}: {problem}"])


def _scores(module: ModelWithTask, batch_of: BatchOf, numbers: np.ndarray) -> dict[str, Sum]:
    """Sum and weight of each metric, over all classes."""
    sums = {}
    with scored(evaluation_batch(0, numbers)):
        scores = module.score(batch_of(numbers))
    for name, pair in scores.sums.items():
        value, weight = (torch.as_tensor(part, dtype=torch.float64).sum() for part in pair)
        sums[name] = (float(value), float(weight))
    return sums


def _problem_of_score(name: str, whole: Sum, parts: Sequence[Sum]) -> str:
    """The reason why a metric is not a sum, with a remedy; "" if it may be one.

    whole: sum and weight of all samples.
    parts: those of each sample.
    """
    value, weight = whole
    values, weights = zip(*parts, strict=True)
    if len(parts) < 2 or not all(map(math.isfinite, [value, *values])):
        return ""
    findings = f"score() gives {name} = ({value:.6g}, {weight:g}) for {len(parts)} samples"
    if weight and set(weights) == {weight}:
        return (
            f"{findings} and ({values[0]:.6g}, {weight:g}) for the first of them: the result would"
            " depend on train.evaluate_batch_size; return (sum, number of units in the sum)"
        )
    means = [math.fsum(values) / len(values)]
    if sum(weights):
        means.append(math.fsum(map(operator.mul, values, weights)) / sum(weights))
    is_mean = any(math.isclose(value, mean, rel_tol=TOLERANCE) for mean in means)
    is_sum = math.isclose(value, math.fsum(values), rel_tol=TOLERANCE)
    if is_mean and not is_sum and len(set(values)) > 1:
        return f"{findings}, which is the mean over them; return (sum, weight), not (mean, weight)"
    return ""


@torch.no_grad()
def check_evaluation(module: ModelWithTask, batch_of: BatchOf, samples: int, key: str) -> None:
    """Warn if test samples would change what `loss` keeps, since evaluations call it for a `score`
    without an entry "loss", and of what `score` keeps on several processes.

    The parameters are those of `check_loss`.
    """
    task = module.task

    def score() -> ScoreSums:
        if module.further_metrics:
            return task.score_and_predict(module.model, batch)[0]
        return task.score(module.model, batch)

    try:
        batch = batch_of(np.arange(min(samples, DISTINCT_SAMPLES)))
        scores, of_score = _changes(module, score)
        kept = sorted(name for name in of_score if name.startswith("task."))
        if kept and ranks() > 1:
            log.warning("%s: %s", key, KEPT_BY_SCORE.format(", ".join(kept[:MOST_NAMES])))
        if "loss" in scores:
            return
        _, of_loss = _changes(module, lambda: module.loss_of(batch))
    except Exception as error:  # noqa: BLE001  told by the other trials
        log.info("no trial of an evaluation: %s: %s", type(error).__name__, first_line(error))
        return
    names = sorted(of_loss - of_score)
    if names:
        log.warning("%s: %s", key, CHANGED_BY_TESTS.format(", ".join(names[:MOST_NAMES])))


def _changes(module: ModelWithTask, function: Callable[[], Any]) -> tuple[Any, set[str]]:
    """The result of a function in eval mode, and the attributes of the task and buffers that it
    changed. A cache that it filled is none of them."""
    roots = {"task": module.task}
    with undisturbed(module, "the trial of an evaluation") as effects:
        before = state_of(roots)
        result = function()
        paths = replaced(before, state_of(roots))
    names = {attribute_of(path) for path in paths if path.startswith("task.")}
    return result, names | {effect.removeprefix(CHANGES) for effect in effects if CHANGES in effect}


def _warn_of_failure(method: str, key: str, error: Exception) -> None:
    cause = f"{type(error).__name__}: {first_line(error)}"
    log.warning(
        "%s: %s() fails in a trial in eval mode, without gradients (%s). The run goes on, but"
        " nothing has checked that %s() returns sums over the samples; if you did not expect that"
        " error, correct it",
        key,
        method,
        cause,
        method,
    )


def takes_empty_batch(module: ModelWithTask, batch_of: BatchOf) -> bool:
    """True if a batch of the length 0 has the loss 0, of no units, and gradients where others do.

    It is tried in eval mode, in which no layer waits for other processes.
    """
    try:
        with undisturbed(module, "the trial of an empty batch"):
            loss, _ = module.loss_of(batch_of(np.zeros(2, np.int64)))
            reached = _has_gradients(module, loss)
            with step_without_samples():
                loss, units = module.loss_of(batch_of(np.zeros(0, np.int64)))
                is_nothing = loss.item() == float(units) == 0
                return is_nothing and _has_gradients(module, loss) == reached
    except LaunchError:
        raise
    except Exception as error:  # noqa: BLE001  code of the user's may raise anything
        log.info("no batch of the length 0: %s: %s", type(error).__name__, first_line(error))
        return False


def _has_gradients(module: ModelWithTask, loss: Tensor) -> list[bool]:
    """Whether a loss has a gradient, for each parameter that wants one. None is accumulated."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [gradient is not None for gradient in gradients]


@contextlib.contextmanager
def undisturbed(module: ModelWithTask, what: str) -> Iterator[list[str]]:
    """Put a module into eval mode, and all as it was at the end, see `leaving_nothing`.

    Yields a list that says at the end which random numbers and buffers were touched.

    what: the pass inside.
    """
    gpus = sorted({weight.device.index or 0 for weight in module.parameters() if weight.is_cuda})
    effects: list[str] = []
    module.eval()
    try:
        with leaving_nothing(what, {"model": module.model, "task": module.task}):
            contents = [
                (holder, name, buffer.clone())
                for holder, name in buffer_places(module)
                if (buffer := holder[name]) is not None
            ]
            generators = _generators(gpus)
            marks = CURRENT.marks
            yield effects
            pairs = zip(generators, _generators(gpus), strict=True)
            if not all(moved_by_marks_alone(*pair, CURRENT.marks - marks) for pair in pairs):
                effects.append("draws random numbers")
            for holder, name, content in contents:
                if _has_other_numbers(holder.get(name), content):
                    effects.append(f"{CHANGES}{name}")
    finally:
        module.train()


def _has_other_numbers(buffer: Tensor | None, content: Tensor) -> bool:
    """False too for another size, as of a cache that grows, and for what cannot be compared."""
    # Sparse, or on another device; deleted.
    with contextlib.suppress(RuntimeError, AttributeError):
        now, before = (part.contiguous().view(-1).view(torch.uint8) for part in (buffer, content))  # type: ignore[union-attr]
        return now.shape == before.shape and not torch.equal(now, before)
    return False


def _generators(gpus: list[int]) -> list[Tensor]:
    """The states of torch's random number generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]
