"""Why a job gives another result when it is divided, in words, and what to do about it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_lab.doctor.findings import Finding, failure, ok
from ddp_lab.prove.division import Pass
from ddp_lab.prove.layer_trace import GENERATORS, Culprit, first_mixing
from ddp_lab.study.model_pitfalls import TINY_BATCH
from ddp_train.data.rng import global_states
from ddp_train.errors import DataError
from ddp_train.models.python_state import is_users
from ddp_train.tasks.task import ModelWithTask
from ddp_train.text import counted, see_page

SUMS = (
    "return from loss() the sum of the losses of all units, and the number of units. Take no"
    " mean, and weigh no sample by others of the batch. Multiply what does not depend on samples,"
    " as a penalty on weights, by the number of units: return losses.sum() + penalty * units, units"
)
PADDING = (
    "mask the padding in model and loss, or pack the sequences. Or pad all samples to one"
    " length, since the longest sample of a micro-batch depends on the number of processes"
)
UNITS = (
    "return from loss() the number of units that the losses are summed over. The numbers of the"
    " parts of a batch must add up to the number of the batch"
)
SEEDED_DRAWS = (
    "draw random numbers by torch's functions, which ddp-train seeds by seed, process and step"
)
SEEDED_MODEL = f"{SEEDED_DRAWS}. Use no clock and no id()"
SEEDED_DATA = (
    "draw random numbers by torch, numpy or random, which ddp-train seeds by seed, epoch and"
    " sample. Use no clock, no id() and no generator of your own"
)
SHOWN = 4
"""Most names in a message."""


@dataclass(frozen=True)
class Cause:
    """Why a check does not hold."""

    kind: str
    """unused, batch_norm, mean, units, mixing, padding, batches, randomness, state, augmentation or
    unknown."""
    text: str
    remedy: str


def finding(cause: Cause, found: float | None = None, allowed: float | None = None) -> Finding:
    """The finding of a check that does not hold.

    found: the relative difference.
    allowed: the largest one that would be rounding.
    """
    return failure(cause.text, cause.remedy, cause=cause.kind, found=found, allowed=allowed)


def listed(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    text = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        text += f" and {len(names) - SHOWN} more"
    return text


def place_of(error: BaseException) -> str:
    """The last line of the user's own code in a traceback, in brackets; empty without one."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if is_users(frame.filename)]
    if not of_user:
        return ""
    last = of_user[-1]
    file = last.filename.rpartition("/")[2]
    return f" ({file}:{last.lineno} in {last.name})"


def batch_norms(model: nn.Module) -> list[str]:
    """The names of the layers that use the statistics of a batch in training."""
    layers = model.named_modules()
    return [name for name, layer in layers if isinstance(layer, _BatchNorm) and layer.training]


def moved_generator(before: tuple[bytes, ...]) -> str:
    """The generator that has drawn since; empty if none has.

    before: a result of `rng.global_states`.
    """
    for name, old, new in zip(GENERATORS, before, global_states(), strict=True):
        if old != new:
            return name
    return ""


# --- of a model and a loss ------------------------------------------------------------------------


@dataclass(frozen=True)
class Divided:
    """A global batch, computed as a whole and in parts that do not make up the whole."""

    module: ModelWithTask
    whole: Pass
    parts: Pass
    tolerance: float
    samples_per_micro_batch: int
    """Samples per micro-batch of the job itself; 0 if it is not known."""
    loss_of_cut: Callable[[], float | None]
    """The loss of the parts if they are cut from the whole batch as it was put together, padding
    and all; None if it cannot be cut."""

    def cause(self) -> Cause:
        """The first cause that fits, the most specific one first."""
        if self._differ(self.parts.units, self.whole.units):
            return self._units()
        losses_differ = self._differ(self.parts.loss, self.whole.loss)
        if losses_differ:
            loss_of_cut = self.loss_of_cut()
            if loss_of_cut is not None and not self._differ(loss_of_cut, self.whole.loss):
                return self._padding()
        culprit = self._first_mixing()
        if culprit and culprit.is_batch_norm:
            return self._batch_norm(culprit)
        if culprit:
            return self._mixing(culprit)
        if losses_differ:
            return self._mean()
        text = (
            "the losses add up, but the gradients do not: the cause is a custom backward pass, or"
            " a layer that could not be watched"
        )
        remedy = (
            "check the custom autograd functions and the hooks of the model; try parts of the"
            " model one by one"
        )
        return Cause("unknown", text, remedy)

    def _differ(self, value: float, reference: float) -> bool:
        return abs(reference - value) > self.tolerance * abs(reference)

    def _first_mixing(self) -> Culprit | None:
        """The first layer that mixes samples, if all layers could be watched."""
        one = self.whole.forwards[0]
        parts = self.parts.forwards
        if not one.is_complete or not all(part.is_complete for part in parts):
            return None
        return first_mixing(self.module.model, one, parts, self.tolerance)

    def _units(self) -> Cause:
        text = (
            f"loss() counts {self.whole.units:g} {self.module.task.unit}s in the global batch and"
            f" {self.parts.units:g} in its parts"
        )
        return Cause("units", text, UNITS)

    def _padding(self) -> Cause:
        text = (
            "the result depends on how a batch is collated (for example on padding to its"
            f" longest sample). The loss is {self.whole.loss:.6g} for the whole global batch, and"
            f" for parts that are cut from it, but {self.parts.loss:.6g} for parts that are"
            " collated separately"
        )
        return Cause("padding", text, PADDING)

    def _batch_norm(self, culprit: Culprit) -> Cause:
        text = f"batch norm ({culprit.name}) uses the statistics of each process's own samples"
        samples = self.samples_per_micro_batch
        if samples:
            text += f": {counted(samples, 'sample')} in each micro-batch"
            if samples < TINY_BATCH:
                text += ", which is too few"
        remedy = (
            "use strategy.sync_bn=true, or a norm that does not depend on the batch:"
            " model.norm=group where the model has that key, else torch's GroupNorm"
        )
        return Cause("batch_norm", text, remedy)

    def _mixing(self, culprit: Culprit) -> Cause:
        layer = f"the layer {culprit.name}" if culprit.name else "the model's own forward"
        text = (
            f"{layer} mixes the samples of a micro-batch: its output for one sample depends on the"
            " others"
        )
        remedy = (
            "compute the output for each sample separately, or from the rows of all processes"
            " (ddp_train.all_gather)"
        )
        return Cause("mixing", text, remedy)

    def _mean(self) -> Cause:
        parts = counted(len(self.parts.forwards), "part")
        text = (
            f"the loss is not a sum over its units: {self.whole.loss:.6g} for the whole global"
            f" batch, but {self.parts.loss:.6g} as the sum of its {parts}. The loss is averaged"
            " or weighted within each micro-batch, or has a part that does not depend on samples"
        )
        return Cause("mean", text, SUMS)


def unused(everywhere: list[str], somewhere: list[str], is_allowed: bool) -> Finding:
    """The finding of parameters without a gradient: DDP would refuse the second step, or wait.

    everywhere: parameters without one on all processes.
    somewhere: parameters without one on some processes.
    is_allowed: whether the strategy allows it.
    """
    if not everywhere and not somewhere:
        return ok("every parameter gets a gradient on every process")
    names = everywhere or somewhere
    got = "got no gradient" if everywhere else "got a gradient on some processes only"
    text = f"{counted(len(names), 'parameter')} {got}: {listed(names)}"
    if is_allowed:
        return ok(f"{text}; the strategy allows it")
    remedy = (
        "use these parameters in forward, remove or freeze them, or add"
        " strategy.find_unused_parameters=true"
    )
    return failure(text, remedy, DataError.exit_code, cause="unused")


def outside_generator(model: nn.Module, generator: str, layer: str) -> Cause:
    """Draws that no step seeds. layer: its name; empty outside of all layers."""
    where = "the loss, or the model's own forward"
    if layer:
        kind = type(model.get_submodule(layer)).__name__
        where = f"the layer {layer} ({kind})"
    text = (
        f"{where} draws from {generator} generator, which is not seeded in each step. So the"
        " numbers differ between processes, and after a resume"
    )
    return Cause("randomness", text, SEEDED_DRAWS)


def unrepeatable(asked: list[str]) -> Cause:
    """The same samples, weights and seed give something else. asked: see `unseeded`."""
    text = "the same samples, weights and seed give other gradients the second time"
    if asked:
        text += f", since the model or the loss uses {listed(asked)}"
    else:
        text += ". No state was found that changes"
    return Cause("randomness", text, SEEDED_MODEL)


def hidden_state(names: str) -> Cause:
    """State that decides a result, and that no checkpoint has."""
    text = f"forward passes change {names}, and with that the gradients of the same samples"
    remedy = (
        "keep that state in a buffer (register_buffer), which checkpoints save, and fill it from"
        " the samples of all processes (ddp_train.all_gather); or compute it from the batch alone"
    )
    return Cause("state", text, remedy)


def state_in_buffers(names: list[str]) -> Cause:
    """State that forward passes change, one after the other, on each process by itself."""
    text = (
        f"forward passes change {listed(names)}, on which the loss depends. So the loss depends"
        " on the order of the micro-batches, and on the samples of the process"
    )
    remedy = (
        "change that state once in a step, by the samples of all processes"
        " (ddp_train.all_gather), or compute it from the batch alone"
    )
    return Cause("state", text, remedy)


# --- of data --------------------------------------------------------------------------------------


def of_samples(where: str, asked: list[str], changed_state: list[str]) -> Cause:
    """Why the same sample is another one the second time.

    where: data set, transform or collate_fn, with its name.
    asked: what the user's code asks that is another in each process.
    changed_state: names of what changes with each call.
    """
    text = f"{where}: the same sample, read twice in the same epoch, gives two different tensors"
    if asked:
        return Cause("randomness", f"{text}, since the code uses {listed(asked)}", SEEDED_DATA)
    if changed_state:
        remedy = (
            "let a sample depend on its number and on seeded random numbers alone, not on earlier"
            " calls"
        )
        return Cause("state", f"{text}; {listed(changed_state)} changes with each call", remedy)
    return Cause("randomness", f"{text}, since it draws random numbers without a seed", SEEDED_DATA)


def same_in_each_epoch(where: str, changed_state: list[str]) -> Cause:
    """Why augmentation that should draw anew in each epoch does not."""
    if changed_state:
        text = (
            f"{where} draws random numbers, but augments each sample in the same way in every"
            f" epoch, since it stores what it has drawn ({listed(changed_state)})"
        )
        return Cause("state", text, "store the samples before the augmentation, not after it")
    text = (
        f"{where} seeds a generator itself, so each sample is augmented in the same way in every"
        " epoch"
    )
    remedy = "seed no generator: ddp-train seeds torch, numpy and random by seed, epoch and sample"
    return Cause("randomness", text, remedy)


def of_batch_size(scores: str) -> Cause:
    """A score that depends on train.evaluate_batch_size. scores: both, in words."""
    text = (
        f"{scores}. The metric is averaged per batch, or the score of a sample depends on the"
        " other samples of its batch"
    )
    remedy = (
        "return sums and numbers of units from score(), and compute a ratio from their totals"
        f"{see_page('Tasks')}. Mask the padding of a batch"
    )
    return Cause("batches", text, remedy)


def of_evaluation(metric: str, generator: str, asked: list[str], changed_state: list[str]) -> Cause:
    """Why a score depends on who computed which batch.

    generator: the one that is drawn from while a set is scored; empty if none is.
    asked: what the user's code asks that is another in each process.
    changed_state: names of what changes while a set is scored.
    """
    text = f"{metric} depends on which process scores which batch"
    if generator:
        text += f", since random numbers are drawn from {generator} generator while a set is scored"
        return Cause("randomness", text, "draw no random numbers in eval mode")
    if asked:
        text += f", since the model, the data set or score() uses {listed(asked)}"
        return Cause("randomness", text, SEEDED_MODEL)
    if changed_state:
        text += f", since {listed(changed_state)} changes while a set is scored"
        remedy = "compute the score of a batch from that batch and the weights alone"
        return Cause("state", text, remedy)
    text += ", for a reason that was not found"
    return Cause("unknown", text, "score one batch twice, and compare the results")
