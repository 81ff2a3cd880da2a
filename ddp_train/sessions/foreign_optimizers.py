"""Optimizers that run.resume did not get: of other models, or forgotten ones."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from ddp_train.sessions.models import Models
from ddp_train.sessions.parameter_groups import parameters_of
from ddp_train.sessions.settings import UsageError


class ForeignOptimizers:
    """Refuses those that would train a model apart on each process, or lose their state."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.first_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """The step of the session in which each was seen first."""

    def see_step(self, optimizer: Optimizer, step: int, in_step: bool) -> None:
        """Called before a step of such an optimizer.

        step: of the session.
        in_step: the loop has a batch.

        Raises UsageError for one whose weights would come apart, or whose state would be lost.
        """
        first_step = self.first_steps.get(optimizer)
        if first_step is None:
            if self.models.trained_by(optimizer):
                raise UsageError(
                    f"an optimizer ({type(optimizer).__name__}) makes a step, but run.resume did"
                    " not get it: its state would be lost",
                    "use run.resume(model=model, optimizer=optimizer). If you build a new"
                    " optimizer in each epoch to reset its state, call optimizer.state.clear()"
                    " instead",
                )
            self.first_steps[optimizer] = step
            return
        if not in_step or step == first_step:
            return  # made for this step, as a few updates of a copy
        if any(isinstance(parameter, nn.Parameter) for parameter in parameters_of(optimizer)):
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) trains a model that run.wrap did not"
                " get, so each process would train a different model",
                "call model = run.wrap(model) for each model before its optimizer is built, and"
                " pass the optimizer to run.resume",
            )
