"""Checks of the file or run with whose weights a model begins. Workers check what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddp_train.checkpoints.layout import places
from ddp_train.config.earlier_runs import EarlierRun, checkpoints_in
from ddp_train.options.problem import Problem
from ddp_train.options.schema import Config
from ddp_train.text import shell_word

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files with weights. All but the first are read by torch.load(weights_only=True)."""


def starts_from_nothing(config: Config) -> bool:
    """Tell whether the model of a run does not come from a checkpoint of its own.

    Only then the weights to begin with are needed.
    """
    resumes = config.checkpoint.resume == "auto" and bool(places(Path(str(config.run_dir))))
    return config.mode == "train" and config.checkpoint.resume in ("auto", "never") and not resumes


def problems(config: Config) -> Iterator[Problem]:
    init_from = config.model.init_from
    if init_from is None:
        return
    if config.checkpoint.resume not in ("auto", "never"):
        yield from _beside_a_checkpoint(init_from, config)
    if not starts_from_nothing(config):
        return
    path = Path(init_from)
    found = f"model.init_from={init_from}"
    if path.is_dir():
        if not checkpoints_in(path):
            yield Problem(found, "holds no checkpoint", _remedy_without_checkpoint(path))
    elif not path.is_file():
        yield Problem(
            found, "no such file or folder", f"give the full path, or one from {Path.cwd()}"
        )
    elif path.suffix not in SUFFIXES:
        yield Problem(
            found,
            f"must be a run, a checkpoint, or a file that ends with {', '.join(SUFFIXES)}",
        )


def _beside_a_checkpoint(init_from: str, config: Config) -> Iterator[Problem]:
    """The problem of a file that checkpoint.resume=PATH leaves unread, unless the run there began
    with that file."""
    resume = config.checkpoint.resume
    earlier = EarlierRun.of(Path(resume))
    if earlier is None or earlier.config().model.init_from == init_from:
        return
    remedy = "leave model.init_from out"
    if config.mode == "train":
        remedy += ", or leave checkpoint.resume out to begin with the weights of that file"
    yield Problem(
        f"model.init_from={init_from}",
        f"has no effect, since the weights are those of checkpoint.resume={resume}",
        remedy,
    )


def _remedy_without_checkpoint(folder: Path) -> str:
    files = sorted(file.name for file in folder.iterdir() if file.suffix in SUFFIXES)
    if files:
        return f"name the file: {shell_word('model.init_from', folder / files[0])}"
    return "name a run that has saved a checkpoint"
