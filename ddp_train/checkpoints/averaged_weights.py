"""Where the average of the weights takes the model's place: in evaluations and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_train.checkpoints import reader
from ddp_train.checkpoints.writer import copy_of
from ddp_train.distributed.process_group import ranks, set_buffers
from ddp_train.engine.loop import Evaluation, evaluate
from ddp_train.engine.scoring import join_scores
from ddp_train.optim.ema import WeightAverage
from ddp_train.parallel.strategy import Strategy
from ddp_train.tasks.score import Score
from ddp_train.tasks.task import ModelWithTask
from ddp_train.tensor_tree import map_tensors

STATE = "average"
"""The entry of `training.pt`."""


def scored_checkpoint(path: Path, evaluation: Evaluation) -> Score | None:
    """The score of a checkpoint, which is loaded, and of its average if it has one. None if one was
    stopped."""
    reader.load_model(path, evaluation.module.model)
    score = evaluate(evaluation)
    if score is None or not has_average(path):
        return score
    reader.load_model(path, evaluation.module.model, reader.AVERAGE)
    return join_scores(score, evaluate(evaluation))


def has_average(path: Path) -> bool:
    """Whether a checkpoint has an average. By its manifest: a file server may show a file to some
    ranks only later."""
    return reader.AVERAGE in reader.read_manifest(path)["files"]


Taken = tuple[dict[str, Tensor], dict[str, Any]]
"""The average under the model's names, and what else `restore` needs."""


def taken(average: WeightAverage, strategy: Strategy, module: ModelWithTask, copies: bool) -> Taken:
    """For a checkpoint. A collective: every process must call it. Buffers are the mean over the
    processes, and those of each process are in the second part. copies: whether this process
    writes; the others need no weights."""
    with average.in_model(), strategy.averaged(module) as buffers:
        weights = map_tensors(copy_of, module.model.state_dict()) if copies else {}
    return weights, {**average.state(), "buffers": buffers}


def restore(
    path: Path,
    training: dict[str, Any],
    average: WeightAverage | None,
    module: ModelWithTask,
    rank: int,
) -> str:
    """Continues the average of a checkpoint; the model is overwritten, so it must be loaded after
    this. training: what `reader.load_training` returned. Returns what the user should know, "" if
    nothing."""
    state = training.get(STATE)
    if average is None:
        if state:
            return (
                f"note: {path.name} has an average of the weights, which ends here: add"
                " train.ema_decay"
            )
        return ""
    if state is None:
        reader.load_model(path, module.model)
        average.begin()
        return (
            f"note: {path.name} has no average of the weights: it begins with the weights after the"
            " next step"
        )
    reader.load_model(path, module.model, reader.AVERAGE)
    if len(state["buffers"]) == ranks() > 1:
        set_buffers(module, state["buffers"][rank])
    average.begin(state)
    return ""
