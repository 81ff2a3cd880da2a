"""Where the checkpoints of a run are, and what their manifests say. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ddp_train.errors import WriteError

MANIFEST = "manifest.json"


def place_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is, if there is one."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def places(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the newest first. Whatever else lies beside them is not looked
    at."""
    found = (run_dir / "checkpoints").glob("step_" + "[0-9]" * 8)
    return sorted((place for place in found if place.is_dir()), reverse=True)


def step_of(place: Path) -> int:
    """That a checkpoint is of."""
    return int(place.name.removeprefix("step_"))


def newest_step(run_dir: Path) -> int:
    """The step of a run's newest checkpoint; -1 if there is none."""
    return max(map(step_of, places(run_dir)), default=-1)


def check_writable(folder: Path) -> None:
    """Raises WriteError if a folder that is there takes no file: better before the first step than
    after the last."""
    probe = folder / f"best.part-{os.getpid()}"
    try:
        if folder.exists():
            probe.touch()
            probe.unlink()
    except OSError as error:
        remedy = "make it writable, or continue in another run_dir with checkpoint.resume=PATH"
        raise WriteError(
            f"no checkpoint can be written to {folder}: {error.strerror}", remedy
        ) from error


def reason_of(error: BaseException) -> str:
    """In the words of the operating system, if it is behind it: torch's own are of the file that it
    could not end."""
    seen: BaseException | None = error
    while seen and not (isinstance(seen, OSError) and seen.strerror):
        seen = seen.__context__
    return str(seen.strerror if isinstance(seen, OSError) else error)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: step, files, config. Raises OSError or ValueError if it cannot
    be trusted."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        digest = manifest.pop("sha256", None) if isinstance(manifest, dict) else None
        if digest != digest_of(manifest):
            raise ValueError(f"{MANIFEST} does not match its sha256")
    except RecursionError:
        raise ValueError(f"{MANIFEST} is nested too deeply") from None
    maps = ("config", "files", "data_digests", "scored_digests", "best_by")
    plain = {**dict.fromkeys(maps, dict), "trained": list}
    odd = [name for name, kind in plain.items() if not isinstance(manifest.get(name, kind()), kind)]
    odd += [] if type(manifest.get("step")) is int and manifest["step"] >= 0 else ["step"]
    if odd:
        raise ValueError(f"{MANIFEST} has no {odd[0]} that can be used")
    return manifest


def digest_of(manifest: Any) -> str:
    """The sha256 of a manifest, without the entry of that name."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
