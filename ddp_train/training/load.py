"""The trained model of a run, for use outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from ddp_train.config.external_checks import code_problems
from ddp_train.config.migrate import bind_frozen
from ddp_train.errors import ConfigError, DataError
from ddp_train.models.zoo import build_model
from ddp_train.training import checkpoint, setup


def load(
    run: str | PathLike[str], which: str = "auto", average: bool = False, trusted_modules: Sequence[str] = ()
) -> nn.Module:
    """The model of a run with its trained weights, in eval mode, on the CPU. Neither data nor processes are needed.

    run: a run directory, or one of its checkpoints. which: of a run's checkpoints the `best`, the `last`, or with auto
    the best if it is kept. average: the average of the weights (train.ema_decay) in their place. trusted_modules: the
    packages of your own code, for a model that is none of ours: what a checkpoint names is not loaded unasked.

    Raises DataError if there is no valid checkpoint or not what is asked for, ConfigError if its model's code is not
    trusted or does not exist.
    """
    found = checkpoint.find(str(run), Path(run), which)
    assert found, "it is named, and find raises if it is not valid"
    manifest = checkpoint.read_manifest(found)
    config, problems = bind_frozen(manifest["config"])
    problems += code_problems("model", config.model, trusted_modules)
    if problems:
        raise ConfigError(problems)
    if average and checkpoint.AVERAGE not in manifest["files"]:
        raise DataError(f"{found} has no average of the weights", "train with train.ema_decay, or leave average out")
    if config.model.name == "custom":
        model = setup.own_model(config.model)
    elif "input_shape" not in manifest:
        raise DataError(f"{found} does not say what its model takes", "go on with its run for a step, which saves that")
    else:
        shape, arguments = torch.Size(manifest["input_shape"]), setup.arguments_of(config.model, *setup.BESIDE_MODEL)
        model = build_model(config.model.name, shape, manifest["outputs"], **arguments)
    if config.tuning.precision == "fp64":
        model.double()
    checkpoint.load_model(found, model, checkpoint.AVERAGE if average else checkpoint.MODEL)
    return model.eval()
