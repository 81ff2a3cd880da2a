"""Proofs in tests of your own: `prove("experiment=mine")` is mode=prove as an assertion.

Torch-free.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_train.config.program import find_program

SECONDS = 900.0
"""Limit of the whole proof; prove.seconds ends it much earlier."""


def prove(*overrides: str, seconds: float = SECONDS) -> dict[str, Any]:
    """Prove a job, as `ddp-train mode=prove OVERRIDES` does it in the folder that one stands in.

    What does not apply to a job is skipped: see `findings`.

    Returns the content of prove.json. Raises AssertionError with the table if the job does not
    hold, if the proof is incomplete or if the overrides are wrong, and TimeoutExpired.
    """
    program, accepted = find_program(None, list(overrides))
    with tempfile.TemporaryDirectory(prefix="prove_") as folder:
        run_dir = Path(folder, "proof")
        named = [word for word in accepted if word.startswith("run_dir=")]
        if named:
            run_dir = Path(named[0].removeprefix("run_dir="))
        else:
            accepted.append(f"run_dir={run_dir}")
        command = replace(program, typed="ddp-train").again(["mode=prove", *accepted])
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        if done.returncode:
            report = f"{done.stdout}{done.stderr}"
            raise AssertionError(f"mode=prove {' '.join(overrides)}\n{report}")
        return json.loads((run_dir / "prove.json").read_text())
