"""Checkpoints that are there: found, verified, described, loaded. What is in one:
writer.py."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ddp_train.checkpoints.layout import MANIFEST, place_of, places, read_manifest
from ddp_train.engine.selection import Selection
from ddp_train.errors import DataError
from ddp_train.telemetry.metrics_log import last_step
from ddp_train.text import first_line

MODEL = "model.safetensors"
AVERAGE = "ema.safetensors"
TRAINING = "training.pt"
BEST = "best"
"""The link to the best checkpoint of a run, beside it."""
log = logging.getLogger(__name__)


def find(resume: str, run_dir: Path, which: str = "last") -> Path | None:
    """The checkpoint that a run starts from, verified; None to start from nothing.

    resume: auto (the newest valid one in run_dir), never, or the path of a checkpoint or of a run.
    which: of a run's path the `last`, the `best`, or, with `auto`, the best if the run has one.
    Raises DataError if a path, or a run with checkpoints, holds no valid one: a run never starts
    over silently.
    """
    if resume == "never":
        return None
    place = run_dir if resume == "auto" else Path(resume)
    link = place / "checkpoints" / BEST
    if (place / MANIFEST).is_file():
        candidates = [place.parent / place.readlink() if place.is_symlink() else place]
    elif which == "best" or (which == "auto" and link.is_symlink()):
        if not link.is_symlink():
            raise DataError(
                f"{place} has no best checkpoint: it was trained without checkpoint.best",
                "use checkpoint.which=last",
            )
        candidates = [link.parent / link.readlink()]
    else:
        candidates = places(place)
    for path in candidates:
        defect = defect_of(path) or _nan(path)
        if defect is None:
            return path
        log.warning("checkpoint %s is passed over: %s", path, defect)
    if resume == "auto" and not candidates:
        if done := last_step(run_dir):
            log.warning(
                "%s had reached step %d but holds no checkpoint; starting from step 0",
                run_dir,
                done,
            )
        return None
    if not candidates:
        runs = sorted(
            manifest.parents[2] for manifest in place.glob(f"*/checkpoints/step_*/{MANIFEST}")
        )
        if runs:
            remedy = f"name a run inside, as {runs[-1]}"
        else:
            remedy = "name a checkpoint, or a run that has saved one"
        raise DataError(f"{place} holds no valid checkpoint", remedy)
    if candidates[0].parent == link.parent and which != "last":
        last = "checkpoint.which=last, "
    else:
        last = ""
    raise DataError(
        f"{place} holds no valid checkpoint",
        f"name another checkpoint.resume=PATH, or {last}checkpoint.resume=never",
    )


def best_of(kept: list[Path], selection: Selection) -> Path | None:
    """The checkpoint whose score is the best, the earliest of equal ones; None if none has a finite
    score."""
    scored = []
    for place in sorted(kept):
        with contextlib.suppress(OSError, ValueError):  # a corrupt one is nobody's best
            score = read_manifest(place).get(selection.split)
            rank = selection.rank(score) if score else [math.inf]
            scored += [] if math.isinf(rank[0]) else [(rank, place)]
    return min(scored)[1] if scored else None


def existing(run_dir: Path, step: int) -> str | None:
    """The path of the checkpoint of a step; None if there is none."""
    place = place_of(run_dir, step)
    return str(place) if place.is_dir() else None


def described(path: Path) -> dict[str, Any]:
    """Which checkpoint of its run it is, for people and for summary.json: its path and step,
    whether it is the `best` or the `last`, and for the best the metric by which it is, with its
    value."""
    manifest = read_manifest(path)
    link = path.parent / BEST
    found: dict[str, Any] = {
        "path": str(path),
        "step": manifest["step"],
        "which": None,
        "metric": None,
        "value": None,
    }
    if link.is_symlink() and link.readlink() == Path(path.name):
        selection = Selection(**manifest["best_by"])
        score = manifest[selection.split]
        metric = selection.metrics_of(score)[0]
        found |= {"which": "best", "metric": f"{selection.split}.{metric}", "value": score[metric]}
    elif path == next(iter(places(path.parent.parent)), path):
        found["which"] = "last"
    return found


def weights_file(path: Path, average: bool) -> str:
    """The file of the weights, or of their average. Raises DataError if there is no average."""
    if average and AVERAGE not in read_manifest(path)["files"]:
        raise DataError(
            f"{path} has no average of the weights",
            "train with train.ema_decay, or leave average out",
        )
    return AVERAGE if average else MODEL


def load_model(path: Path, model: nn.Module, file: str = MODEL) -> None:
    """Loads the weights. Raises DataError with the names that differ if they belong to another
    model. file: AVERAGE for the average of the weights."""
    weights = load_file(path / file)
    own = model.state_dict()
    differing = sorted(set(weights) ^ set(own)) or [
        name for name in own if own[name].shape != weights[name].shape
    ]
    if differing:
        raise DataError(
            f"{path} belongs to another model; it differs in {', '.join(differing[:6])}"
            + (f" and {len(differing) - 6} more" if len(differing) > 6 else ""),
            "use the model= and data= that it was trained with",
        )
    model.load_state_dict(weights)


def load_checkpoint(
    folder: str | PathLike[str],
) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """What `save_checkpoint` was given: step, model and training, on the CPU; None if nothing was
    saved yet. The newest that is whole: a corrupt one is passed over, with a warning. On every
    process alike. Raises DataError if there are checkpoints, and none that can be trusted."""
    found = find("auto", Path(folder))
    if found is None:
        return None
    return read_manifest(found)["step"], load_file(found / MODEL), load_training(found)


def load_training(path: Path) -> dict[str, Any]:
    """The `training` of the snapshot, on the host. Raises DataError if it is not plain data: no
    code runs."""
    try:
        return torch.load(path / TRAINING, weights_only=True, map_location="cpu")
    except UnpicklingError as error:
        raise DataError(
            f"{path / TRAINING} is not plain data", "name another checkpoint.resume=PATH"
        ) from error


def defect_of(path: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None if it can."""
    try:
        files = read_manifest(path).get("files", {})
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be used: {error}"
    for name in {MODEL: 0, TRAINING: 0, **files}:
        expected = files.get(name)
        if not isinstance(expected, dict):
            return f"{MANIFEST} does not list {name}"
        try:
            if (path / name).stat().st_size != expected.get("bytes"):
                return f"{name} has the wrong size"
            if sha256_of(path / name) != expected.get("sha256"):
                return f"{name} does not match its sha256"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read: {error}"
    try:
        torch.load(
            path / TRAINING, weights_only=True, map_location="meta", mmap=True
        )  # reads no tensor
    except (UnpicklingError, RuntimeError) as error:
        return f"{TRAINING} is not plain data: {first_line(error)}"
    return None


def _nan(path: Path) -> str | None:
    """Which trained weight is NaN; None if none is. No run saves such: every loss would be NaN.
    Buffers may be NaN, and what is not trained; older checkpoints do not say which is which."""
    trained = read_manifest(path).get("trained", [])
    with safe_open(path / MODEL, "pt") as file:
        for name in [name for name in file.keys() if name in trained]:  # noqa: SIM118  it is no mapping
            if file.get_tensor(name).isnan().any():
                return f"{name} is NaN in {MODEL}"
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
