"""Checkpoints: a directory per step, written aside and renamed, verified before it is trusted.

step_00000150/
    model.safetensors    the weights under the model's own names, whatever strategy trained them
    training.pt          optimizer and scaler state, plain data that loads with weights_only=True
    manifest.json        the step, the config, and size and sha256 of each file
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ddp_train.errors import DataError, WriteError

MODEL, TRAINING, MANIFEST = "model.safetensors", "training.pt", "manifest.json"
log = logging.getLogger(__name__)


def save(
    run_dir: Path, step: int, model: nn.Module, training: dict[str, Any], config: dict[str, Any], keep: int
) -> Path:
    """Writes the checkpoint of `step` and removes all but the newest `keep`. For one process only, rank 0.

    Raises WriteError, with all earlier checkpoints intact, if it cannot be written.
    """
    final = run_dir / "checkpoints" / f"step_{step:08d}"
    part = final.with_name(final.name + f".part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, part / MODEL)
        torch.save(training, part / TRAINING)
        files = {
            name: {"bytes": (part / name).stat().st_size, "sha256": _digest(part / name)} for name in (MODEL, TRAINING)
        }
        (part / MANIFEST).write_text(json.dumps({"step": step, "files": files, "config": config}, indent=1))
        for name in (MODEL, TRAINING, MANIFEST):
            _flush(part / name)
        if final.exists():  # the same step once more, after a resume from an older one
            shutil.rmtree(final)
        part.rename(final)
        _flush(final.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is an OSError, or a RuntimeError of torch's
        shutil.rmtree(part, ignore_errors=True)
        free = shutil.disk_usage(run_dir).free if run_dir.exists() else 0
        raise WriteError(
            f"the checkpoint of step {step} cannot be written to {final}: {error} ({free:,} bytes free)",
            "free some space, or continue in another run_dir with checkpoint.resume=PATH",
        ) from error
    # A later step than this one's was passed over when the run resumed: it goes before any that can be trusted.
    others = sorted(path for path in final.parent.glob("step_????????") if path != final)
    others.sort(key=lambda path: path < final)
    for old in others[: max(0, len(others) - (keep - 1))]:
        shutil.rmtree(old)
    return final


def find(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint that a run starts from, verified; None to start from nothing.

    resume: auto (the newest valid one in run_dir), never, or the path of a checkpoint or of a run. Raises DataError if
    a path, or a run with checkpoints, holds no valid one: a run never starts over silently.
    """
    if resume == "never":
        return None
    place = run_dir if resume == "auto" else Path(resume)
    if (place / MANIFEST).is_file():
        candidates = [place]
    else:
        candidates = sorted((place / "checkpoints").glob("step_????????"), reverse=True)
    for path in candidates:
        flaw = _flaw(path)
        if flaw is None:
            return path
        log.warning("checkpoint %s is passed over: %s", path, flaw)
    if resume == "auto" and not candidates:
        return None
    raise DataError(
        f"{place} holds no valid checkpoint", "name another checkpoint.resume=PATH, or checkpoint.resume=never"
    )


def load_model(path: Path, model: nn.Module) -> None:
    """Loads the weights. Raises DataError with the names that differ if they belong to another model."""
    weights = load_file(path / MODEL)
    own = model.state_dict()
    differing = sorted(set(weights) ^ set(own)) or [name for name in own if own[name].shape != weights[name].shape]
    if differing:
        raise DataError(
            f"{path} belongs to another model; it differs in {', '.join(differing[:6])}"
            + (f" and {len(differing) - 6} more" if len(differing) > 6 else ""),
            "use the model= and data= that it was trained with",
        )
    model.load_state_dict(weights)


def load_training(path: Path) -> dict[str, Any]:
    """What `save` was given as `training`."""
    return torch.load(path / TRAINING, weights_only=True, map_location="cpu")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: step, files, config."""
    return json.loads((path / MANIFEST).read_text())


def _flaw(path: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None if it can."""
    try:
        manifest = read_manifest(path)
        int(manifest["step"])
        for name, expected in manifest["files"].items():
            if (path / name).stat().st_size != expected["bytes"]:
                return f"{name} has the wrong size"
            if _digest(path / name) != expected["sha256"]:
                return f"{name} does not match its sha256"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {error!r}"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """To the disk, so that the rename that follows never outruns the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
