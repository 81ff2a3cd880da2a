"""The gradients of one wrapped model, exchanged in every backward pass of a loss of `run.mean`.

torch's DDP exchanges what comes after its own forward pass, once, and all parameters must get a
gradient. Here any backward pass is exchanged, whatever was called before it: several forward
passes, a part of the model, a loss through two models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.distributed.process_group import send_from_leader
from ddp_train.distributed.training_step import CURRENT
from ddp_train.parallel.naming_ddp import FixedLayoutDdp
from ddp_train.sessions.gradients import average_reached
from ddp_train.sessions.settings import UsageError

MOST_PASSES = 4
"""Forward passes of the first step whose outputs are kept."""


class GradientExchange:
    """Exchanges the gradients of one wrapped model between the processes.

    torch's DDP exchanges the first backward pass after its own forward pass, while the pass runs.
    After any other backward pass, and always with `find_unused_parameters`, the gradients are
    averaged over the processes when the pass has ended. This is right although they include what
    earlier passes have added up: that is already the same on all processes.

    On one process nothing is exchanged. There too a hook on one parameter sees gradients that come
    without a loss of `run.mean`, so that the mistake is found on a laptop.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any] | None) -> None:
        """
        module: the model, on its device. Rank 0's weights and buffers are sent to all processes.
        options: arguments of DistributedDataParallel; None on one process.

        Raises ModelError for parameters of lazy layers.
        """
        self.module = module
        self.options = options
        self.ddp: FixedLayoutDdp | None = None
        """None on one process, with find_unused_parameters, and as long as nothing has trained."""
        self.is_stale = False
        """A module or a parameter was registered somewhere since the layout."""
        self.is_prepared = False
        """DDP exchanges the gradients of the next backward pass."""
        self.in_backward = False
        """A loss of run.mean goes backward."""
        self.reached: list[nn.Parameter] | None = None
        """The parameters that this backward pass reaches, if it is exchanged when it ends."""
        self.foreign_pass: int | None = None
        """The number of the backward pass in which a gradient came before a loss of run.mean, or
        without one."""
        self.is_local = False
        """A gradient came that was not exchanged."""
        self.keeps_outputs = True
        """This is the first step."""
        self.outputs: list[Any] = []
        """Outputs of the last forward passes of the first step, `MOST_PASSES` at most."""
        self.parameters: list[nn.Parameter] = []
        self.trains: list[bool] = []
        """`requires_grad` of each parameter when DDP was laid out."""
        self.kind: tuple[torch.dtype, torch.device] | None = None
        self.watched: nn.Parameter | None = None
        self.handles: list[Any] = []
        self._lay_out()
        if options is not None and self.ddp is None:
            send_from_leader([*module.parameters(), *module.buffers()])  # as DDP does

    @property
    def finds_unused(self) -> bool:
        return bool(self.options and self.options.get("find_unused_parameters"))

    def is_ready(self) -> bool:
        """True if a forward pass goes through DDP: gradients are taken in a training step.

        Lays DDP out anew, on all processes, if other parameters train.
        """
        if not torch.is_grad_enabled() or CURRENT.step is None or CURRENT.is_shared_out:
            return False
        if not CURRENT.step.all_count:
            return False  # a process without samples may call nothing, and go backward all the same
        trains = [parameter.requires_grad for parameter in self.parameters]
        if trains != self.trains and not any(trains):
            return False  # frozen for a while: the layout stays
        if trains != self.trains or self.is_stale or self._kind() != self.kind:
            self._lay_out()
        return self.ddp is not None

    def forward(self, inputs: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Call the model through DDP."""
        assert self.ddp
        outputs = self.ddp(*inputs, **keywords)
        self.is_prepared = True
        return outputs

    def keep_outputs(self, outputs: Any) -> None:
        """Keep outputs of a forward pass of the first step, for `mixes_rows`."""
        # A compiled caller would be compiled again where the flag changes.
        if torch.compiler.is_compiling() or not self.keeps_outputs:
            return
        if torch.is_grad_enabled():
            self.outputs = [*self.outputs, outputs][-MOST_PASSES:]

    def begin_backward(self, number: int) -> None:
        """Called when the first loss of `run.mean` in a backward pass goes backward.

        number: of the backward pass.

        Raises UsageError where static_graph does not allow this pass.
        """
        self.in_backward = True
        self.reached = None
        if self.foreign_pass == number:
            self.foreign_pass = None  # a parameter beside the loss, as a learned factor
        elif self.watched is not None and self.watched.grad is None:
            self.foreign_pass = None
            self.is_local = False
        if self.options is None or self.is_prepared:
            return
        reached = self._reached()
        if reached is None:
            return
        if CURRENT.step is not None and not CURRENT.step.all_count:
            self.reached = reached  # of no model without samples, where others reach some
            return
        if not reached and not self.finds_unused:
            return
        if self.options.get("static_graph"):
            raise UsageError(
                "static_graph=True allows only one backward pass after each forward pass of the"
                " wrapped model, and no call of the model during a backward pass",
                "use run.wrap(model) without static_graph",
            )
        self.reached = reached

    def is_in_exchange(self) -> bool:
        """True if this backward pass, which has begun, exchanges gradients of the model."""
        if self.reached is not None:
            return True
        if not self.is_prepared or self.watched is None:
            return False
        return bool(_is_reached(self.watched))

    def end_backward(self) -> None:
        """Called when a backward pass has ended. A collective if it was not DDP's."""
        self.in_backward = False
        if self.reached is not None:
            average_reached(list(self.module.parameters()), self.reached)
            self.reached = None

    def end_first_step(self) -> None:
        """Keep no outputs from now on."""
        self.keeps_outputs = False
        self.outputs = []

    def check_gradients(self, name: str) -> None:
        """Raise UsageError, or ModelError, if a step would use gradients that are not of all.

        name: of the model's class.
        """
        if self.foreign_pass is not None:
            raise UsageError(
                f"optimizer.step() was called with gradients of {name} from a loss that was not"
                " computed by run.mean",
                "use run.mean(losses) for every loss that goes backward, with one loss for each"
                " sample (reduction='none'). Add other terms to the result of run.mean",
            )
        if self.is_local:
            raise UsageError(
                f"optimizer.step() was called with gradients of {name} that were not averaged"
                " over the processes: when backward() began, its graph did not contain this"
                " model",
                "if torch.utils.checkpoint.checkpoint calls the model, pass it use_reentrant=False",
            )
        if self.ddp is not None:
            self.ddp.check_finished()

    def release(self) -> None:
        """Let go of DDP, which must not outlive the process group."""
        if self.ddp is not None:
            self.ddp._remove_autograd_hooks()
        self.ddp = None
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _lay_out(self) -> None:
        """Make a DDP for the parameters that train now, unless they are the same as before."""
        self.is_stale = False
        parameters = list(self.module.parameters())
        trains = [parameter.requires_grad for parameter in parameters]
        are_new = [*map(id, parameters)] != [*map(id, self.parameters)]
        self.parameters = parameters
        if not are_new and trains == self.trains and self._kind() == self.kind:
            return
        self.trains = trains
        self.kind = self._kind()
        self.is_prepared = False
        self.release()
        if not any(trains):
            return
        if self.options is not None and not self.finds_unused:
            options = self.options
            if not are_new:
                options = {**options, "init_sync": False}
            self.ddp = FixedLayoutDdp(self.module, **options)
        self.watched = parameters[trains.index(True)]
        self.handles = [self.watched.register_post_accumulate_grad_hook(self._see_gradient)]

    def _kind(self) -> tuple[torch.dtype, torch.device] | None:
        """The type and place of the first parameter: `model.half()` changes all of them."""
        if not self.parameters:
            return None
        return self.parameters[0].dtype, self.parameters[0].device

    def _see_gradient(self, _: Tensor) -> None:
        """Called when the gradient of the watched parameter has come."""
        is_exchanged = self.options is None or self.is_prepared or self.reached is not None
        self.is_prepared = False
        if CURRENT.step is None or CURRENT.is_shared_out:
            return
        if not self.in_backward:
            self.foreign_pass = torch._C._current_graph_task_id()
        elif not is_exchanged:
            self.is_local = True

    def is_in_autograd_grad(self) -> bool:
        """True if this backward pass is that of `torch.autograd.grad`, of these parameters."""
        return self._reached() is None

    def is_reached(self) -> bool:
        """True if this backward pass, which has begun, adds gradients to parameters."""
        return bool(self._reached())

    def _reached(self) -> list[nn.Parameter] | None:
        """The parameters that the backward pass, which has begun, adds gradients to.

        None in `torch.autograd.grad` of some of them, which adds to none.
        """
        reached = []
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                is_reached = _is_reached(parameter)
                if is_reached is None:
                    return None
                if is_reached:
                    reached.append(parameter)
        return reached


def _is_reached(parameter: nn.Parameter) -> bool | None:
    """True if the backward pass, which has begun, adds a gradient to a parameter.

    None in `torch.autograd.grad` of it, which adds to none.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None  # torch's answer there, of a leaf that is asked for
