"""What a session saves, and how it resumes: the launcher's checkpoints, with any objects of the
user's."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ddp_train.checkpoints import reader
from ddp_train.checkpoints.layout import read_manifest
from ddp_train.checkpoints.writer import Snapshot, Writer, copy_of
from ddp_train.distributed.process_group import from_all_ranks, same_everywhere, set_buffers
from ddp_train.distributed.replicas import check_same_weights
from ddp_train.errors import DataError
from ddp_train.resilience.heartbeat import RankStatus
from ddp_train.sessions.settings import UsageError
from ddp_train.sessions.wrapped import Wrapped
from ddp_train.tensor_tree import map_tensors
from ddp_train.text import counted, first_line


@dataclass
class Position:
    """Where a loop is. `batch` of the current epoch's batches are done."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    """Batches done in all epochs."""


class State:
    """The objects that a run resumes with, in the order and under the names that `run.resume`
    got."""

    def __init__(
        self, run_dir: Path, model: Wrapped, others: dict[str, Any], keep: int, status: RankStatus
    ) -> None:
        self.run_dir = run_dir
        self.model = model
        self.others = others
        self.keep = keep
        self.status = status
        self.writer: Writer | None = None
        self.saved: Position | None = None
        self.found: Path | None = None
        """The checkpoint that the run resumes from."""
        self.loader_then: dict[str, Any] = {}

    def check_batches(self, now: dict[str, Any], position: Position) -> None:
        """Inside of an epoch the batches must be those of before; at its beginning others may
        follow. now: what identifies them. Raises DataError."""
        then = self.loader_then
        differing = [name for name in now if then.get(name) != now[name]]
        if self.found and differing and position.batch:
            name = differing[0]
            if name != "data":
                changed = f"{name} was {then.get(name)} and is {now[name]}"
            else:
                changed = "its samples are others"
            raise DataError(
                f"{self.found} lies inside of epoch {position.epoch}, and run.loader changed since:"
                f" {changed}",
                "finish the epoch with what it began with, or start over in another run_dir",
            )

    def restore(self, device: str, rank: int, processes: int) -> Position:
        """From the newest checkpoint that is whole; from the beginning if there is none. Raises
        DataError if it is of other objects."""
        found = reader.find("auto", self.run_dir)
        step = read_manifest(found)["step"] if found else -1
        same_everywhere(step, device, "the step of the newest checkpoint")
        if found is None:
            return Position()
        training = reader.load_training(found)
        position = Position(**training["position"])
        then = training["objects"]
        if differing := sorted({*then} ^ {*self.others}):
            raise DataError(
                f"{found} has {', '.join(sorted(then)) or 'nothing'} beside the model, and"
                f" run.resume got {', '.join(sorted(self.others)) or 'nothing'}; they differ in"
                f" {', '.join(differing)}",
                "give run.resume what it got when that was saved, or start over in another run_dir",
            )
        reader.load_model(found, self.model.module)
        if len(training["buffers"]) == processes > 1:
            set_buffers(self.model.module, training["buffers"][rank])
        for name, holder in self.others.items():
            holder.load_state_dict(then[name])
        self.saved = replace(position)
        self.found = found
        self.loader_then = training["loader"]
        where = f"epoch {position.epoch}" + (
            f", after {counted(position.batch, 'step')}" if position.batch else ""
        )
        print(f"resumed from step {position.step} ({where}): {found}", file=sys.stderr)
        return position

    def save(
        self, position: Position, loader: dict[str, Any], processes: int, is_leader: bool
    ) -> None:
        """On all processes alike. Training continues while rank 0 writes."""
        self.saved = replace(position)
        check_same_weights(self.model.module)
        with averaged_buffers(self.model.module) as buffers:
            if is_leader:
                self.writer = self.writer or Writer(
                    self.run_dir, self.keep, None, self.status.set_saving
                )
                self.writer.submit(lambda: self._snapshot(position, loader, processes, buffers))

    def _snapshot(
        self, position: Position, loader: dict[str, Any], processes: int, buffers: Tensor
    ) -> Snapshot:
        training = {
            "objects": {name: holder.state_dict() for name, holder in self.others.items()},
            "buffers": buffers,
            "position": asdict(position),
            "loader": loader,
        }
        module = self.model.module
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        facts = {"world_size": processes, "torch": torch.__version__, "trained": trained}
        weights = map_tensors(copy_of, dict(module.state_dict()))
        return Snapshot(position.step, weights, map_tensors(copy_of, training), facts)

    def finish(self) -> None:
        """Waits until all is written. Raises WriteError if the last one could not be."""
        if self.writer:
            self.writer.finish()


def check_objects(objects: dict[str, Any], model: Wrapped | None) -> dict[str, Any]:
    """The objects beside the model, which must be among them. Raises UsageError for what cannot be
    saved."""
    if model is None:
        raise UsageError(
            "run.resume: there is no model yet", "call model = run.wrap(model) before it"
        )
    if not any(one is model or one is model.module for one in objects.values()):
        raise UsageError(
            "run.resume: the model of run.wrap is not among its arguments, and would not be saved",
            "run.resume(model=model, optimizer=optimizer)",
        )
    others = {
        name: one for name, one in objects.items() if one is not model and one is not model.module
    }
    ours = {id(parameter) for parameter in model.parameters()}
    for name, one in others.items():
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise UsageError(
                f"run.resume: {name} is a {type(one).__name__}, without state_dict and"
                " load_state_dict",
                "give it objects that have both, as models, optimizers and schedulers have",
            )
        if isinstance(one, torch.optim.Optimizer):
            held = [parameter for group in one.param_groups for parameter in group["params"]]
            if not any(id(parameter) in ours for parameter in held):
                raise UsageError(
                    f"run.resume: {name} was built on parameters that are not those of the model of"
                    " run.wrap",
                    "build it after model = run.wrap(model), on model.parameters()",
                )
        content = io.BytesIO()
        torch.save(one.state_dict(), content)
        content.seek(0)
        try:
            torch.load(content, weights_only=True, map_location="cpu")
        except UnpicklingError as error:
            raise UsageError(
                f"run.resume: the state_dict of {name} is not plain data: {first_line(error)}",
                "keep tensors, numbers and texts in it, in dicts and lists: no code runs when a"
                " checkpoint is read",
            ) from None
    return others


@contextlib.contextmanager
def averaged_buffers(module: nn.Module) -> Iterator[Tensor]:
    """As `process_group.averaged_buffers`; where they are the same on all ranks they keep their
    very bits, which a mean over three would round. Yields the buffers of all ranks: [ranks, n],
    float64."""
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if not buffers:
        yield torch.empty(0, 0)
        return
    own = torch.cat([buffer.detach().double().flatten() for buffer in buffers])
    gathered = from_all_ranks(own)
    alike = bool(((gathered == gathered[0]) | gathered.isnan()).all())
    if not alike:
        set_buffers(module, gathered.mean(0))
    try:
        yield gathered
    finally:
        if not alike:
            set_buffers(module, own)
