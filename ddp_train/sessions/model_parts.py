"""What the models of a session consist of, looked up once as long as they stay as they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ddp_train.distributed.process_group import buffer_places
from ddp_train.distributed.replicas import measured_parameters
from ddp_train.plain_state import plain_extra_state
from ddp_train.recovery.packing import StatePacker


class ModelParts:
    """The parameters and buffers of all models of a session, and of copies of these models."""

    def __init__(self, module: nn.Module, copies: nn.Module, registrations: int) -> None:
        """
        module: all models, as one module.
        copies: the copies of models that run.resume got, as one module.
        registrations: see `Models`; once that number is another, the parts may be others.
        """
        self.module = module
        self.registrations = registrations
        self.named = list(module.named_parameters())
        self.parameters = [*module.parameters(), *copies.parameters()]
        self.measured = measured_parameters(module)
        """The parameters whose norms are compared between processes, by their names."""
        self.places = buffer_places(module)
        self.places_of_copies = buffer_places(copies)
        self.packed: bytes | None = None
        """The state of the models, if it consists of these parameters and buffers alone."""

    def add_to(self, packer: StatePacker) -> None:
        """List all tensors in a packer: buffers as each rank's own, parameters as common."""
        for holder, name in [*self.places, *self.places_of_copies]:
            buffer = holder.get(name)
            if buffer is not None:
                packer.add_own(buffer)
        for parameter in self.parameters:
            packer.add(parameter, is_same=True)

    def packed_state(self, packer: StatePacker) -> bytes:
        """The state of the models as bytes.

        packer: a packer in which `add_to` has listed the tensors.
        """
        if self.packed is not None:
            return self.packed
        listed = len(packer.common)
        state = {
            name: plain_extra_state(name, value) for name, value in state_of(self.module).items()
        }
        packed = packer.packed(state, is_same=False)
        has_others = not all(isinstance(value, Tensor) for value in state.values())
        if not has_others and len(packer.common) == listed:
            self.packed = packed
        return packed


def state_of(holder: Any) -> Any:
    """The state_dict of an object; of a module with its own tensors, not with views of these."""
    if isinstance(holder, nn.Module) and type(holder).state_dict is nn.Module.state_dict:
        return dict(holder.state_dict(keep_vars=True))
    return holder.state_dict()
