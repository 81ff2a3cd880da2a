"""Find, verify, describe and load checkpoints. The files in one: writer.py."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
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

MODEL = "model.safetensors"
AVERAGE = "ema.safetensors"
TRAINING = "training.pt"
EXTRA_STATE = "extra_state"
"""Entry of training.pt with what a model's state_dict has beside tensors: what the modules'
`get_extra_state` returned."""
BEST = "best"
"""The link to the best checkpoint of a run, beside it."""
NOT_PLAIN = (
    "cannot be loaded by torch.load(weights_only=True): it is damaged, or holds objects other than"
    " tensors, numbers, strings, lists and dicts"
)
NAMES_SHOWN = 6
"""Names of weights in the message about another model."""
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
    folder = run_dir if resume == "auto" else Path(resume)
    candidates = _candidates(folder, which)
    for path in candidates:
        defect = defect_of(path) or _nan_weight(path)
        if defect is None:
            return path
        log.warning("checkpoint %s is skipped: %s", path, defect)
    if candidates:
        raise _none_valid(folder, candidates[0], which)
    if resume != "auto":
        raise _none_there(folder)
    reached = last_step(run_dir)
    if reached:
        log.warning(
            "%s had reached step %d but holds no checkpoint; starting from step 0", run_dir, reached
        )
    return None


def _candidates(folder: Path, which: str) -> list[Path]:
    """The checkpoints in question, the first choice first.

    folder: a run's or a checkpoint's.
    """
    if (folder / MANIFEST).is_file():
        return [_target(folder)]
    link = folder / "checkpoints" / BEST
    if which == "last" or (which == "auto" and not link.is_symlink()):
        return places(folder)
    if not link.is_symlink():
        raise DataError(
            f"{folder} has no best checkpoint: it was trained without checkpoint.best",
            "use checkpoint.which=last, or in Python which='last'",
        )
    return [_target(link)]


def _target(path: Path) -> Path:
    """The checkpoint that a link to it points to."""
    return path.parent / path.readlink() if path.is_symlink() else path


def _none_there(folder: Path) -> DataError:
    manifests = folder.glob(f"*/checkpoints/step_*/{MANIFEST}")
    runs = sorted(manifest.parents[2] for manifest in manifests)
    remedy = "give a checkpoint, or the folder of a run that has saved one"
    if runs:
        remedy = f"give a run in that folder, for example {runs[-1]}"
    return DataError(f"{folder} holds no valid checkpoint", remedy)


def _none_valid(folder: Path, candidate: Path, which: str) -> DataError:
    remedy = (
        "use another checkpoint, checkpoint.resume=PATH, or start over: checkpoint.resume=never"
    )
    if which != "last" and candidate.parent == folder / "checkpoints":
        remedy = "use the last checkpoint of the run: checkpoint.which=last"
    return DataError(f"{folder} holds no valid checkpoint", remedy)


def best_step(manifests: Mapping[int, dict[str, Any]], selection: Selection) -> int | None:
    """The step with the best score, the earliest of equal ones; None if none has a finite score.

    manifests: by step.
    """
    ranked = []
    for step, manifest in manifests.items():
        score = manifest.get(selection.split)
        if isinstance(score, dict):
            rank = selection.rank(score)
            if math.isfinite(rank[0]):
                ranked.append((rank, step))
    return min(ranked)[1] if ranked else None


def existing(run_dir: Path, step: int) -> str | None:
    """The path of the checkpoint of a step; None if there is none."""
    path = place_of(run_dir, step)
    return str(path) if path.is_dir() else None


def described(path: Path) -> dict[str, Any]:
    """Facts of a checkpoint for people and for summary.json.

    Its path and step; whether it is the `best` or the `last` of its run; for the best the metric
    by which it is, with its value.
    """
    manifest = read_manifest(path)
    facts: dict[str, Any] = {
        "path": str(path),
        "step": manifest["step"],
        "which": None,
        "metric": None,
        "value": None,
    }
    link = path.parent / BEST
    newest = next(iter(places(path.parent.parent)), path)
    if link.is_symlink() and link.readlink() == Path(path.name):
        selection = Selection(**manifest["best_by"])
        score = manifest[selection.split]
        metric = selection.metrics_of(score)[0]
        facts["which"] = "best"
        facts["metric"] = f"{selection.split}.{metric}"
        facts["value"] = score[metric]
    elif path == newest:
        facts["which"] = "last"
    return facts


def has_average(path: Path) -> bool:
    """Whether a checkpoint has an average of the weights.

    By its manifest: a file server may show a file to some ranks only later.
    """
    return AVERAGE in read_manifest(path)["files"]


def weights_file(path: Path, average: bool) -> str:
    """The file of the weights, or of their average. Raises DataError if there is no average."""
    if average and not has_average(path):
        raise DataError(
            f"{path} has no average of the weights",
            "train with train.ema_decay=0.999, or use the weights themselves:"
            " checkpoint.average=false (in Python average=False)",
        )
    return AVERAGE if average else MODEL


def load_model(path: Path, model: nn.Module, file: str = MODEL) -> None:
    """Load the weights of a checkpoint.

    file: MODEL, or AVERAGE for the average of the weights.

    Raises DataError with the names that differ if they belong to another model.
    """
    weights: dict[str, Any] = load_file(path / file)
    own = model.state_dict()
    tensors = {name for name, value in own.items() if isinstance(value, Tensor)}
    if len(tensors) < len(own):
        weights |= extra_state_of(path)
    differing = sorted(set(weights) ^ set(own))
    if not differing:
        differing = [name for name in tensors if own[name].shape != weights[name].shape]
    if differing:
        names = ", ".join(differing[:NAMES_SHOWN])
        if len(differing) > NAMES_SHOWN:
            names += f" and {len(differing) - NAMES_SHOWN} more"
        raise DataError(
            f"{path} belongs to another model; it differs in {names}",
            "use the model= and data= that the checkpoint was trained with",
        )
    model.load_state_dict(weights)


def load_checkpoint(
    folder: str | PathLike[str],
) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """Load the newest valid checkpoint that `save_checkpoint` wrote.

    Call it on every process: all load the same one from the same folder. A corrupt checkpoint is
    skipped, with a warning.

    folder: as given to `save_checkpoint`.

    Returns (step, model, training) as given to `save_checkpoint`, with all tensors on the CPU, or
    None if nothing was saved yet. Raises DataError if there are checkpoints and none is valid.
    """
    path = find("auto", Path(folder))
    if path is None:
        return None
    step = read_manifest(path)["step"]
    training = load_training(path)
    model = load_file(path / MODEL) | training.pop(EXTRA_STATE, {})
    return step, model, training


def extra_state_of(path: Path) -> dict[str, Any]:
    """The values beside tensors that a saved model's state_dict had."""
    return load_training(path).get(EXTRA_STATE, {})


def load_training(path: Path) -> dict[str, Any]:
    """The contents of training.pt, on the host.

    Raises DataError if it is not plain data: no code runs.
    """
    try:
        return torch.load(path / TRAINING, weights_only=True, map_location="cpu")
    except UnpicklingError as error:
        raise DataError(
            f"{path / TRAINING} {NOT_PLAIN}", "use another checkpoint, checkpoint.resume=PATH"
        ) from error


def defect_of(path: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None if it can."""
    return defect_of_files(path) or defect_of_state(path)


def defect_of_files(path: Path) -> str | None:
    """Why a checkpoint's files are not those that its manifest lists, or None if they are."""
    try:
        files = read_manifest(path).get("files", {})
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be used: {error}"
    for name in {MODEL: 0, TRAINING: 0, **files}:
        defect = _defect_of_file(path / name, files.get(name))
        if defect:
            return defect
    return None


def defect_of_state(path: Path) -> str | None:
    """Why training.pt cannot be read without running code, or None if it can."""
    try:
        # On the device meta, and mapped: reads no tensor.
        torch.load(path / TRAINING, weights_only=True, map_location="meta", mmap=True)
    except (UnpicklingError, RuntimeError):
        return f"{TRAINING} {NOT_PLAIN}"  # torch's own words are of its options
    return None


def _defect_of_file(file: Path, expected: Any) -> str | None:
    """
    expected: size and sha256 by the manifest.
    """
    if not isinstance(expected, dict):
        return f"{MANIFEST} does not list {file.name}"
    try:
        if file.stat().st_size != expected.get("bytes"):
            return f"{file.name} has the wrong size"
        if sha256_of(file) != expected.get("sha256"):
            return f"{file.name} does not match its sha256"
    except (OSError, ValueError) as error:
        return f"{file.name} cannot be read: {error}"
    return None


def _nan_weight(path: Path) -> str | None:
    """The defect that a trained weight is NaN; None if none is.

    No run saves such: every loss would be NaN. Buffers may be NaN, and what is not trained. Those
    of `save_checkpoint` do not say which is which.
    """
    trained = read_manifest(path).get("trained", [])
    with safe_open(path / MODEL, "pt") as file:
        for name in file.keys():  # noqa: SIM118  it is not a mapping
            if name in trained and file.get_tensor(name).isnan().any():
                return f"{name} is NaN in {MODEL}"
    return None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
