"""For tests of your own: `prove("experiment=mine")` is mode=prove as an assertion. Does not import
torch."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_train.config.program import started

SECONDS = 900.0
"""For the whole proof; prove.seconds ends it much earlier."""


def prove(*words: str, seconds: float = SECONDS) -> dict[str, Any]:
    """Proves a job, as `ddp-train mode=prove WORDS` does it in the folder that one stands in.

    Returns what prove.json has. Raises AssertionError with the table if the job does not hold, if
    the proof is incomplete or if the words are wrong, and TimeoutExpired. What does not apply to a
    job is skipped: see `findings`.
    """
    program, overrides = started(None, list(words))
    with tempfile.TemporaryDirectory(prefix="prove_") as folder:
        if not run_dirs_named(overrides):
            overrides.append(f"run_dir={Path(folder, 'proof')}")
        run_dir = Path(run_dirs_named(overrides)[0])
        command = replace(program, typed="ddp-train").again(["mode=prove", *overrides])
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            raise AssertionError(f"mode=prove {' '.join(words)}\n{done.stdout}{done.stderr}")
        return json.loads((run_dir / "prove.json").read_text())


def run_dirs_named(overrides: list[str]) -> list[str]:
    """The values of `run_dir` among overrides."""
    return [word.removeprefix("run_dir=") for word in overrides if word.startswith("run_dir=")]
