"""The state of a job between two steps: its tensors, and what lies beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_train.distributed.process_group import buffer_places
from ddp_train.engine.loop import Job
from ddp_train.optim.nan_guard import DeviceNonFiniteCheck
from ddp_train.optim.stepper import Stepper
from ddp_train.plain_state import plain_extra_state
from ddp_train.recovery.kept_layout import KeptNorm, KeptTensor, Layout
from ddp_train.tensor_tree import map_tensors, tensors

BUFFERS = "buffers"
MODEL = "model"
STEPPER = "stepper"
AVERAGE = "average"
SKIPPED = "steps_skipped"
GATHERED = "gathered"
PLAIN = (type(None), bool, int, float, str)
OWN_HEAD = 2
"""Numbers of a rank before those of its buffers in GATHERED: sum and units of its losses."""


@dataclass(frozen=True)
class LiveState:
    """The tensors of a job, as they are now and after each step that changes them in place."""

    tree: dict[str, Any]
    """The state, with a `KeptTensor` in the place of each tensor.

    MODEL: the model's state_dict.
    BUFFERS: the buffers of model and task, in their order.
    STEPPER: see `Stepper.state`.
    AVERAGE: None, or the average of the weights: its updates, and under MODEL and BUFFERS the same
        as above.
    GATHERED: what each rank alone has, of all ranks; only where it was sent to all.
    """
    common: list[Tensor]
    own: Callable[[], list[Tensor]]
    """Looks them up: a model may put other tensors in the places of its buffers."""
    is_made_anew: bool
    """The model or the optimizer makes a part of its state when it is asked for it."""
    changes_in_place: bool
    """A step changes only tensors that are there."""
    extent: tuple[int, bool, int, int]
    """See `extent_of`."""
    identity: list[Any]
    """See `identity_of`."""
    own_shapes: list[Any]
    """See `shapes_of`."""
    places: list[tuple[dict[str, Tensor | None], str]]
    """Of the buffers."""

    def layout(self, ranks: int) -> Layout:
        return Layout.of(self.own(), self.common, ranks)

    def is_of(self, job: Job, after_hooks: bool) -> bool:
        """Whether these are still the tensors of a job.

        after_hooks: hooks may have put others in their places.
        """
        if self.is_made_anew or self.own_shapes != shapes_of(self.places):
            return False
        if self.extent != extent_of(job.stepper):
            return False
        is_sure = self.changes_in_place and not after_hooks
        return is_sure or self.identity == identity_of(job)

    def is_like(self, other: LiveState) -> bool:
        """Whether another state has the same tensor objects, and equal values beside them."""
        return self.identity == other.identity and _comparable(self.tree) == _comparable(other.tree)


def _comparable(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree without the optimizer's groups, whose rates a resume takes from the config."""
    stepper = tree[STEPPER]
    return {**tree, STEPPER: {**stepper, "optimizer": stepper["optimizer"]["state"]}}


def extent_of(stepper: Stepper) -> tuple[int, bool, int, int]:
    """How many parameters the optimizer has a state of, whether the norm of the gradients is
    known, and how many steps were skipped, in all and in a row."""
    check = stepper.check_finite
    is_norm_known = stepper.norm is not None
    return len(stepper.optimizer.state), is_norm_known, check.skipped, check.skipped_in_a_row


def shapes_of(places: list[tuple[dict[str, Tensor | None], str]]) -> list[Any]:
    """The shape and the dtype of each buffer; None for one that is not there."""
    buffers = [holder.get(name) for holder, name in places]
    return [None if buffer is None else (buffer.shape, buffer.dtype) for buffer in buffers]


def identity_of(job: Job) -> list[Any]:
    """What differs if a parameter, or a value in the state of the optimizer, is another one."""
    values = _values(job.stepper.optimizer.state.values())
    return [*map(id, job.module.parameters()), *map(_identity, values)]


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, PLAIN):
        return value
    return object()  # equal to nothing: it may have changed inside


class _Listing:
    """Tensors that are put down once each."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.known: dict[int, KeptTensor] = {}
        """By the ids of tensors, which live as long as their owners."""

    def add(self, tensor: Tensor) -> KeptTensor:
        kept = self.known.get(id(tensor))
        if kept is None:
            kept = KeptTensor(False, len(self.tensors))
            self.tensors.append(tensor)
            self.known[id(tensor)] = kept
        return kept


def state_of(job: Job, gathered: Callable[[], Tensor] | None = None) -> LiveState:
    """The state of a job. Reads no tensor.

    gathered: what each rank alone has, of all ranks, see `lost_host.OwnNumbers`; None where each
        rank keeps it by itself.
    """
    stepper = job.stepper
    average = stepper.average
    places = buffer_places(job.module)
    averaged_buffers = average.average[len(average.trained) :] if average else []
    listing = _Listing()
    listing.known = {
        id(buffer): KeptTensor(True, number) for number, buffer in enumerate(buffers_at(places))
    }
    optimizer_state = _optimizer_state(stepper)
    tree = {
        MODEL: _model_state(job.module.model, listing),
        BUFFERS: [KeptTensor(True, number) for number in range(len(places))],
        STEPPER: map_tensors(listing.add, optimizer_state),
        AVERAGE: _average_state(job, listing, len(places)) if average else None,
    }

    if gathered:
        tree[GATHERED] = KeptTensor(True, len(places) + len(averaged_buffers))

    def own() -> list[Tensor]:
        of_ranks = [gathered()] if gathered else []
        return [*buffers_at(places), *averaged_buffers, *of_ranks]

    return LiveState(
        tree=tree,
        common=listing.tensors,
        own=own,
        is_made_anew=_is_made_anew(job, listing.tensors, tree[MODEL]),
        changes_in_place=_changes_in_place(stepper.optimizer),
        extent=extent_of(stepper),
        identity=identity_of(job),
        own_shapes=shapes_of(places),
        places=places,
    )


def buffers_at(places: list[tuple[dict[str, Tensor | None], str]]) -> list[Tensor]:
    return [cast(Tensor, holder[name]) for holder, name in places]


def _model_state(model: nn.Module, listing: _Listing) -> dict[str, Any]:
    """The model's state_dict with the model's own tensors, where torch returns views of them."""
    by_name = dict(model.named_parameters(remove_duplicate=False))
    by_name |= dict(model.named_buffers(remove_duplicate=False))
    state = {}
    for name, value in model.state_dict().items():
        tensor = by_name.get(name, value)
        if isinstance(tensor, Tensor):
            state[name] = listing.add(tensor)
        else:
            state[name] = plain_extra_state(name, tensor)
    return state


def _optimizer_state(stepper: Stepper) -> dict[str, Any]:
    """What `Stepper.state` returns, with the tensors of the loss scaler, and without what changes
    in each step."""
    state = stepper.state()
    del state["logged"]
    if stepper.norm is not None:
        state["gradient_norm"] = KeptNorm(stepper.norm.dtype)
    if isinstance(stepper.check_finite, DeviceNonFiniteCheck) and not stepper.scaled:
        state[SKIPPED] = stepper.check_finite.steps_skipped
    scaler = stepper.scaler
    if stepper.scaled and scaler._scale is not None:
        state["scaler"] |= {"scale": scaler._scale, "_growth_tracker": scaler._growth_tracker}
    return state


def _average_state(job: Job, listing: _Listing, buffer_count: int) -> dict[str, Any]:
    """The average of the weights, in the form of the model's state.

    What is not averaged is the model's own.
    """
    average = job.stepper.average
    assert average
    trained = len(average.trained)
    instead = {
        id(parameter): listing.add(mean)
        for parameter, mean in zip(average.trained, average.average[:trained], strict=True)
    }
    for number, (owner, name) in enumerate(average.buffers):
        instead[id(getattr(owner, name))] = KeptTensor(True, buffer_count + number)
    by_name = dict(job.module.model.named_parameters(remove_duplicate=False))
    by_name |= dict(job.module.model.named_buffers(remove_duplicate=False))
    model = {}
    for name in job.module.model.state_dict():
        tensor = by_name.get(name)
        if tensor is not None:
            model[name] = instead.get(id(tensor)) or listing.known[id(tensor)]
    buffers = [instead.get(id(b)) or listing.known[id(b)] for b in job.module.buffers()]
    return {"updates": listing.add(average.updates), MODEL: model, BUFFERS: buffers}


def _is_made_anew(job: Job, listed: list[Tensor], model: dict[str, Any]) -> bool:
    """Whether `state_dict` gives numbers, or tensors, that are nobody's: they may be others after
    each step."""
    stepper = job.stepper
    held: list[Any] = [*stepper.optimizer.state.values(), vars(stepper.scaler)]
    if isinstance(stepper.check_finite, DeviceNonFiniteCheck):
        held.append(stepper.check_finite.steps_skipped)
    if stepper.average:
        held += [stepper.average.average, stepper.average.updates]
    known = {id(tensor) for tensor in [*job.module.parameters(), *tensors(held)]}
    has_numbers = not all(isinstance(value, KeptTensor) for value in model.values())
    return has_numbers or any(id(tensor) not in known for tensor in listed)


def _changes_in_place(optimizer: Optimizer) -> bool:
    """Whether a step only changes tensors that are there, as in torch and in this package."""
    if not type(optimizer).__module__.startswith(("torch.optim.", "ddp_train.")):
        return False
    values = _values(optimizer.state.values())
    return all(value is None or isinstance(value, Tensor) for value in values)


def _values(states: Any) -> Iterator[Any]:
    for state in states:
        yield from state.values()
