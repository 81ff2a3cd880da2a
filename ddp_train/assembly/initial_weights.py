"""The weights that training begins with, as a config names them."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ddp_train.checkpoints import reader
from ddp_train.checkpoints.layout import places
from ddp_train.distributed.process_group import local_leader_first
from ddp_train.distributed.world import World
from ddp_train.errors import DataError
from ddp_train.models.initial_weights import (
    Origin,
    Weights,
    load_initial_weights,
    read_weights,
    torchvision_weights,
)
from ddp_train.models.torchvision.config import TorchvisionConfig
from ddp_train.options.schema import Config


def load_named_weights(
    config: Config, model: nn.Module, world: World, device: str
) -> Origin | None:
    """Give a model the weights that the config names; None if it names none.

    A collective, if weights may have to be downloaded: one process of a host does. Raises DataError
    or ConfigError, on all processes alike, if they do not fit.
    """
    section = config.model
    if section.init_from is not None:
        return load_initial_weights(model, weights_of(section.init_from), section.init_ignore)
    if not isinstance(section, TorchvisionConfig) or section.weights is None:
        return None
    with local_leader_first(world, device):
        weights = torchvision_weights(section.arch, section.weights)
    return load_initial_weights(model, weights, section.init_ignore)


def weights_of(init_from: str) -> Weights:
    """The weights of a file, of a checkpoint, or of a run: its best one if that is kept, else its
    last.

    Raises DataError if there are none that can be trusted.
    """
    path = Path(init_from)
    key = f"model.init_from={init_from}"
    if not path.is_dir():
        return read_weights(path, key)
    try:
        found = reader.find(init_from, path, "auto")
    except DataError as error:
        remedy = error.remedy
        if places(path):  # none of its checkpoints is valid: find's remedy names another key
            remedy = "name another run, a checkpoint, or a file: model.init_from=PATH"
        raise DataError(f"{key}: {error}", remedy) from error
    assert found, "it is named, and find raises if it is not valid"
    return read_weights(found / reader.MODEL, key if found == path else f"{key} ({found.name})")
