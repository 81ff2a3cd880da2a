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
    program, words_left = started(None, list(words))
    with tempfile.TemporaryDirectory(prefix="prove_") as folder:
        run_dir = Path(folder, "proof")
        if any(word.startswith("run_dir=") for word in words_left):
            named = []
        else:
            named = [f"run_dir={run_dir}"]
        if named:
            run_dir = run_dir
        else:
            run_dir = Path(
                next(w for w in words_left if w.startswith("run_dir=")).partition("=")[2]
            )
        command = replace(program, typed="ddp-train").again(["mode=prove", *words_left, *named])
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            raise AssertionError(f"mode=prove {' '.join(words)}\n{done.stdout}{done.stderr}")
        return json.loads((run_dir / "prove.json").read_text())
