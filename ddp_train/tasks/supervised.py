"""The base of the built-in tasks, and what they share of outputs and targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ddp_train.errors import ConfigError, DataError
from ddp_train.tasks.task import ScoreSums, Task
from ddp_train.text import counted

PAIR = (tuple, list)
"""As `tuple | list`, which is made anew in each step."""
NUMBERS_IN_MESSAGE = 5


class TargetForm(NamedTuple):
    """Kind and dimensions of the targets of a batch."""

    kind: str
    """integers or numbers."""
    ndim: int
    """Dimensions, the batch's included."""


def form_of(targets: Tensor) -> TargetForm:
    """The form of the targets of a batch, [n, ...]."""
    kind = "numbers" if targets.is_floating_point() else "integers"
    return TargetForm(kind, targets.ndim)


def describe_targets(targets: Tensor) -> str:
    """Kind and shape of the targets of a batch, for a message."""
    shape = ", ".join(["n", *map(str, targets.shape[1:])])
    return f"{form_of(targets).kind} of shape [{shape}]"


class BuiltIn(Task, ABC):
    """A task whose scores and predictions come from the same forward pass."""

    @classmethod
    def misfit(cls, batch: Any) -> str:
        """The reason why a batch does not fit the task, whatever the model; "" if it does."""
        return ""

    def check(self, batch: Any) -> None:
        """Raise ConfigError if the targets of a batch cannot be right, whatever the model."""

    @abstractmethod
    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The outputs of the model, [n, ...], and the targets."""

    @abstractmethod
    def scores_of(self, outputs: Tensor, targets: Tensor) -> ScoreSums:
        """The metrics of a batch; see `Task.score`."""

    @abstractmethod
    def predictions_of(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, in float32 at least, and targets for metrics; see `Task.predict`."""

    def score(self, model: nn.Module, batch: Any) -> ScoreSums:
        return self.scores_of(*self.outputs_and_targets(model, batch))

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return self.predictions_of(*self.outputs_and_targets(model, batch))

    def score_and_predict(
        self, model: nn.Module, batch: Any
    ) -> tuple[ScoreSums, tuple[Tensor, Tensor]]:
        outputs, targets = self.outputs_and_targets(model, batch)
        return self.scores_of(outputs, targets), self.predictions_of(outputs, targets)


class Supervised(BuiltIn):
    """A task of inputs and targets whose model returns one tensor."""

    unit = "sample"
    units_are_samples = True
    target_forms: ClassVar[tuple[TargetForm, ...]]
    """The forms that its targets may have."""
    needed_targets: ClassVar[str]
    """The same in words."""

    @classmethod
    def misfit(cls, batch: Any) -> str:
        targets = batch[1]
        if form_of(targets) in cls.target_forms:
            return ""
        return f"needs targets that are {cls.needed_targets}, not {describe_targets(targets)}"

    @classmethod
    def advice(cls, targets: Tensor) -> str:
        """A way to make targets fit that do not; "" if there is none."""
        return ""

    def outputs_and_targets(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = self.pair(batch)
        return one_tensor(model(inputs)), targets

    def pair(self, batch: Any) -> tuple[Any, Tensor]:
        """Inputs and targets. Raises DataError if the batch is something else."""
        if isinstance(batch, PAIR) and len(batch) == 2 and isinstance(batch[1], Tensor):
            inputs, targets = batch
            if targets.dtype == torch.int64 or targets.is_floating_point():
                return inputs, targets
            # Integers of other widths, and truth values, as numpy has them, are labels too.
            return inputs, targets.long()
        kind = type(batch).__name__
        if isinstance(batch, PAIR):
            kind = f"{kind} of {len(batch)}"
        remedy = "return (input, target) for each sample, or write a task of your own"
        raise DataError(f"a batch is a {kind}", remedy)

    def check(self, batch: Any) -> None:
        _, targets = self.pair(batch)
        self.check_targets(targets)

    def check_targets(self, targets: Tensor) -> None:
        """Raise ConfigError if these targets cannot be right; see `BuiltIn.check`."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
        outputs, targets = self.outputs_and_targets(model, batch)
        # Not len(), which takes a microsecond more.
        return self.sum_of_losses(outputs, targets), targets.shape[0]

    @abstractmethod
    def sum_of_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum over all units of the batch, a scalar."""

    def predictions(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """The columns of a batch, or of inputs alone: data may have no targets."""
        if isinstance(batch, Tensor):
            return self.columns(logits_of_any_model(model(batch)))
        inputs, targets = self.pair(batch)
        outputs = logits_of_any_model(model(inputs))
        return {**self.columns(outputs), "target": targets}

    @abstractmethod
    def columns(self, outputs: Tensor) -> dict[str, Tensor]:
        """The columns of mode=predict that follow from outputs alone, a row per sample."""


class OutputFactors:
    """Numbers of the config, one for each output of the model, as a tensor on its device."""

    def __init__(self, key: str, numbers: Any) -> None:
        """Keep the numbers. key: that of the task, without its section."""
        self.key = key
        self.numbers = numbers
        self.tensors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        """One for each GPU: the threads of DataParallel share this object."""

    def like(self, outputs: Tensor) -> Tensor | None:
        """The numbers for outputs [n, k, ...]; None if the config gives none.

        Raises DataError if there are not k numbers.
        """
        if self.numbers is None:
            return None
        count = outputs.shape[1]
        if isinstance(self.numbers, Sequence) and len(self.numbers) not in (1, count):
            numbers = counted(len(self.numbers), "number")
            raise DataError(
                f"task.{self.key} has {numbers}, but the model has {count} outputs",
                "give one number for each output",
            )
        place = (outputs.device, outputs.dtype)
        if place not in self.tensors:
            self.tensors[place] = outputs.new_tensor(self.numbers)
        return self.tensors[place]


def at_least_float32(outputs: Tensor) -> Tensor:
    """Outputs as autocast computes losses of them; weights of classes would be rounded too."""
    if outputs.dtype in (torch.bfloat16, torch.float16):
        return outputs.float()
    return outputs


def one_tensor(outputs: Any) -> Tensor:
    """The outputs of a model, or their `logits`, as transformers' models return.

    Raises DataError if they are something else.
    """
    # First: looking for an attribute that a tensor lacks takes a microsecond.
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise DataError(
        f"the model returns a {type(outputs).__name__}",
        "return one tensor, [n, ...], in train and in eval mode, or write a task of your own",
    )


def logits_of_any_model(outputs: Any) -> Tensor:
    """As `one_tensor`, and of torchvision's segmentation models, which return {"out": logits}."""
    if isinstance(outputs, Mapping) and "out" in outputs:
        outputs = outputs["out"]
    return one_tensor(outputs)


def first_numbers(numbers: Tensor) -> str:
    """The first numbers of a tensor, for a message."""
    first = [f"{number:g}" for number in numbers.flatten()[:NUMBERS_IN_MESSAGE].tolist()]
    if numbers.numel() > NUMBERS_IN_MESSAGE:
        first.append("...")
    return f"[{', '.join(first)}]"


def refuse(outputs: Tensor, expected: str) -> NoReturn:
    """Raise DataError for outputs that do not fit."""
    raise DataError(
        f"the model's outputs are of shape {list(outputs.shape)}, but {expected}",
        "correct the model's last layer, or the targets, or choose another task=",
    )


def refuse_targets(task: str, problem: str, remedy: str) -> NoReturn:
    """Raise ConfigError for targets that cannot be right."""
    raise ConfigError([f"task={task}: {problem}; {remedy}"])
