"""Why a job gives another result when it is divided, in words, and what to do about it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_lab.doctor.findings import SKIPPED, Finding, failure, ok
from ddp_lab.prove.division import GENERATORS, Pass, first_mixing
from ddp_lab.prove.runs import LATE, MORE_TIME
from ddp_lab.study.model_pitfalls import TINY_BATCH
from ddp_train.data.rng import global_states
from ddp_train.errors import LaunchError
from ddp_train.models.python_state import is_users
from ddp_train.tasks.task import ModelWithTask
from ddp_train.text import counted

SUMS = (
    "return the sum of the losses of all units, and their number: no mean, and no factor computed"
    " from the batch"
)
PADDING = (
    "mask what pads, or pack the sequences, in model and loss; or pad all samples to one length:"
    " the longest of a micro-batch is another one on another number of processes"
)
UNITS = (
    "return the number of what the losses are summed over: it must add up over the parts of a batch"
)
SHOWN = 4


@dataclass(frozen=True)
class Cause:
    """kind: unused, batch_norm, mean, units, mixing, padding, batches, randomness, state,
    augmentation, unknown."""

    kind: str
    words: str
    remedy: str


def finding(
    check: str, cause: Cause, found: float | None = None, allowed: float | None = None
) -> Finding:
    """A check that does not hold."""
    return failure(
        check,
        cause.words,
        cause.remedy,
        LaunchError.exit_code,
        cause=cause.kind,
        found=found,
        allowed=allowed,
    )


def out_of_time(check: str) -> Finding:
    """Not a pass: the proof is incomplete."""
    return Finding(check, SKIPPED, LATE, MORE_TIME, exit_code=LaunchError.exit_code)


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def place_of(error: BaseException) -> str:
    """The last line of the user's own code in a traceback."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    if own:
        return f" ({own[-1].filename.rpartition('/')[2]}:{own[-1].lineno} in {own[-1].name})"
    return ""


def batch_norms(model: nn.Module) -> list[str]:
    """Those that use the statistics of a batch while they train."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training
    ]


# --- generators -----------------------------------------------------------------------------------


def moved(before: tuple[bytes, ...]) -> str:
    """Which generator has drawn since; "" if none has."""
    pairs = zip(GENERATORS, before, global_states(), strict=True)
    return next((name for name, one, other in pairs if one != other), "")


# --- of a model and a loss ------------------------------------------------------------------------


def of_division(
    module: ModelWithTask,
    whole: Pass,
    many: Pass,
    loose: float,
    each: int,
    loss_of_cut: Callable[[], float | None],
) -> Cause:
    """Why the gradients of the parts do not make up those of the whole.

    loss_of_cut: that of the parts if they are cut from the whole batch as it was put together,
    padding and all; None if it cannot be cut.
    """
    one = whole.forwards[0]
    parts = many.forwards
    if abs(whole.units - many.units) > loose * abs(whole.units):
        words = (
            f"loss() counts {whole.units:g} {module.task.unit}s in the global batch and"
            f" {many.units:g} in its parts"
        )
        return Cause("units", words, UNITS)
    losses_differ = abs(whole.loss - many.loss) > loose * abs(whole.loss)
    cut = loss_of_cut() if losses_differ else None
    if cut is not None and abs(whole.loss - cut) <= loose * abs(whole.loss):
        words = (
            "the result depends on how a batch is put together (padding to its longest sample,"
            f" say): the loss is {whole.loss:.6g} for the whole global batch, the same for its"
            f" parts if they are cut from it, and {many.loss:.6g} if each part is put together by"
            " itself"
        )
        return Cause("padding", words, PADDING)
    complete = one.complete and all(part.complete for part in parts)
    culprit = first_mixing(module.model, one, parts, loose) if complete else None
    if culprit and culprit.is_batch_norm:
        few = f": {each} in this job" if each else ""
        few += ", too few for them" if 0 < each < TINY_BATCH else ""
        words = (
            f"batch norm ({culprit.name}) uses the statistics of each process's own samples{few}"
        )
        tiny = (
            "strategy.sync_bn=true, or model.norm=group where the model has it; a norm over"
            " channels alone (GroupNorm)"
        )
        return Cause("batch_norm", words, tiny)
    if culprit:
        name = f"the layer {culprit.name}" if culprit.name else "the model's own forward"
        words = (
            f"{name} mixes the samples of a micro-batch: what it gives for one depends on the"
            " others beside it"
        )
        return Cause(
            "mixing",
            words,
            "compute it for each sample by itself; of all processes' rows: ddp_train.all_gather",
        )
    if losses_differ:
        words = (
            f"the loss is no sum over its units: {whole.loss:.6g} of the whole global batch,"
            f" {many.loss:.6g} as the sum of its {counted(len(parts), 'part')}; it averages, or is"
            " weighted, per micro-batch"
        )
        return Cause("mean", words, SUMS)
    words = (
        "the losses add up, the gradients do not: a backward pass of its own, or a layer that could"
        " not be watched"
    )
    return Cause(
        "unknown",
        words,
        "look at autograd functions and hooks of the model; try parts of it by themselves",
    )


def unused(never: list[str], some: list[str], may_miss: bool) -> Finding:
    """What DDP would say in the second step, or wait for."""
    check = "unused parameters"
    remedy = "use them in forward, remove or freeze them, or strategy.find_unused_parameters=true"
    if not never and not some:
        return ok(check, "every parameter gets a gradient on every process")
    which = never or some
    where = "from no sample" if never else "on some processes alone"
    words = f"{counted(len(which), 'parameter')} got a gradient {where}: {listed(which)}"
    if may_miss:
        return ok(check, f"{words}; the strategy allows it")
    return failure(check, words, remedy, 65, cause="unused")


def outside_generator(model: nn.Module, generator: str, layer: str) -> Cause:
    """Draws that no step seeds."""
    if layer:
        where = f"the layer {layer} ({type(model.get_submodule(layer)).__name__})"
    else:
        where = "the loss, or the model's own forward"
    words = (
        f"{where} draws from {generator} generator, which no step seeds: others on each process and"
        " after a resume"
    )
    return Cause(
        "randomness",
        words,
        "draw with torch's functions, which are seeded by seed, process and step",
    )


def unrepeatable(asked: list[str], again: Pass) -> Cause:
    """The same samples, weights and seed gave something else."""
    words = "the same samples, weights and seed give other gradients the second time"
    if asked:
        return Cause("randomness", f"{words}: model or loss ask {listed(asked)}", _keys("model"))
    return Cause("randomness", f"{words}, and no state was seen that changes", _keys("model"))


def hidden_state(names: str) -> Cause:
    """That decides a result."""
    words = f"{names} changes in forward passes, and with it the gradients of the same samples"
    remedy = (
        "keep it in a buffer (register_buffer), which checkpoints have; or compute it from the"
        " batch alone"
    )
    return Cause("state", words, remedy)


def _keys(what: str) -> str:
    if what == "model":
        return (
            "draw with torch's functions, which are seeded by seed, process and step; no clock, no"
            " id()"
        )
    return (
        "draw with torch, numpy or random, which are seeded by seed, epoch and sample; no clock,"
        " id() or own generator"
    )


# --- of data --------------------------------------------------------------------------------------


def of_samples(where: str, asked: list[str], now_changed: list[str]) -> Cause:
    """Why the same sample is another one the second time. where: data set, transform or collate_fn,
    with its name."""
    words = f"{where}: the same sample of the same epoch is another tensor the second time"
    if asked:
        return Cause("randomness", f"{words}; it asks {listed(asked)}", _keys("data"))
    if now_changed:
        remedy = (
            "a sample must depend on its number, the epoch's draws and nothing that calls leave"
            " behind"
        )
        return Cause("state", f"{words}; {listed(now_changed)} changes with each call", remedy)
    return Cause("randomness", f"{words}, by numbers that nobody has seeded", _keys("data"))


def same_in_each_epoch(where: str, now_changed: list[str]) -> Cause:
    """What should draw anew, and does not."""
    words = f"{where} draws random numbers, and gives each sample the same in every epoch"
    if now_changed:
        return Cause(
            "state",
            f"{words}: it keeps what it has drawn ({listed(now_changed)})",
            "keep samples before they are augmented",
        )
    words = f"{where} seeds a generator itself: each sample is augmented alike in every epoch"
    return Cause(
        "randomness", words, "leave seeding to ddp-train, which does it by seed, epoch and sample"
    )


def of_batch_size(words: str) -> Cause:
    """A score that depends on train.evaluate_batch_size."""
    remedy = (
        "return sums and numbers of units from score(), and derive a ratio from their totals"
        " (docs/tasks.md); mask what pads a batch"
    )
    return Cause(
        "batches",
        f"{words}: it is averaged by batch, or a sample's depends on the others in its batch",
        remedy,
    )


def of_evaluation(metric: str, drew: str, asked: list[str], now_changed: list[str]) -> Cause:
    """Why a score depends on who computed which batch."""
    words = f"{metric} depends on which process scores which batch"
    if drew:
        return Cause(
            "randomness",
            f"{words}: {drew} generator is drawn from while a set is scored",
            "draw nothing in eval mode",
        )
    if asked:
        return Cause(
            "randomness", f"{words}: model, data set or score ask {listed(asked)}", _keys("model")
        )
    if now_changed:
        remedy = "compute the score of a batch from that batch and the weights alone"
        return Cause(
            "state", f"{words}: {listed(now_changed)} changes while a set is scored", remedy
        )
    return Cause(
        "unknown", f"{words}, for a reason that was not found", "score one batch twice, and compare"
    )
