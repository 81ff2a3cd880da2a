"""The places of the checkpoints of a run, and the contents of their manifests. Torch-free."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ddp_train.errors import WriteError

MANIFEST = "manifest.json"
KINDS: dict[str, type] = {
    "config": dict,
    "files": dict,
    "data_digests": dict,
    "scored_digests": dict,
    "best_by": dict,
    "trained": list,
    "hosts": list,
}
"""Entries of a manifest, and what each is if it is there."""


def place_of(run_dir: Path, step: int) -> Path:
    """The path of the checkpoint of a step, whether or not there is one."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def places(run_dir: Path) -> list[Path]:
    """The paths of a run's checkpoints, the newest first. Anything else beside them is ignored."""
    paths = (run_dir / "checkpoints").glob("step_" + "[0-9]" * 8)
    return sorted((path for path in paths if path.is_dir()), reverse=True)


def step_of(path: Path) -> int:
    """The step of the checkpoint at a path."""
    return int(path.name.removeprefix("step_"))


def readable_manifests(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Manifests of a run's checkpoints by step, but for corrupt ones."""
    manifests = {}
    for path in places(run_dir):
        with contextlib.suppress(OSError, ValueError):
            manifests[step_of(path)] = read_manifest(path)
    return manifests


def newest_step(run_dir: Path) -> int:
    """The step of a run's newest checkpoint; -1 if there is none."""
    return max(map(step_of, places(run_dir)), default=-1)


def check_writable(folder: Path) -> None:
    """Raise WriteError if a folder that is there takes no file.

    Better before the first step than after the last.
    """
    probe = folder / f"best.part-{os.getpid()}"
    try:
        if folder.exists():
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise WriteError(
            f"no checkpoint can be written to {folder}: {error.strerror}",
            "make the folder writable, then start the same command again",
        ) from error


def reason_of(error: BaseException) -> str:
    """The words of the operating system, if it is behind an error.

    torch's own words are about the file that it could not finish.
    """
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return str(error)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: step, files, config.

    Raises OSError or ValueError if it cannot be trusted.
    """
    return parse_manifest((path / MANIFEST).read_bytes())


def parse_manifest(content: bytes) -> dict[str, Any]:
    """The manifest in a file's content. Raises ValueError if it cannot be trusted."""
    try:
        manifest = json.loads(content)
        digest = manifest.pop("sha256", None) if isinstance(manifest, dict) else None
        if digest != digest_of(manifest):
            raise ValueError(f"{MANIFEST} does not match its sha256")
    except RecursionError:
        raise ValueError(f"{MANIFEST} is nested too deeply") from None
    for name, kind in KINDS.items():
        if not isinstance(manifest.get(name, kind()), kind):
            raise ValueError(f"{MANIFEST} has no {name} that can be used")
    step = manifest.get("step")
    if type(step) is not int or step < 0:
        raise ValueError(f"{MANIFEST} has no step that can be used")
    return manifest


def digest_of(manifest: Any) -> str:
    """The sha256 of a manifest, without the entry of that name."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
