"""Proofs in tests of your own: `prove("experiment=mine")` is mode=prove as an assertion.

Torch-free.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ddp_train.config.program import find_program

SECONDS = 900.0
"""Limit of the whole proof; prove.seconds ends it much earlier."""


def prove(
    *overrides: str, seconds: float = SECONDS, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Prove a job, as `ddp-train mode=prove OVERRIDES` does it in the folder that one stands in.

    What does not apply to a job is skipped: see `findings`.

    tell: is called with each line that the proof prints, as it comes; a proof takes minutes.

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
        code, report = _told(command, seconds, tell)
        if code:
            raise AssertionError(f"mode=prove {' '.join(overrides)}\n{report}")
        return json.loads((run_dir / "prove.json").read_text())


def _told(command: list[str], seconds: float, tell: Callable[[str], None]) -> tuple[int, str]:
    """Run a command, and pass each line on as it comes.

    Returns the exit code and all that was printed. Raises TimeoutExpired.
    """
    lines: list[str] = []

    def read(output: IO[str]) -> None:
        for line in output:
            lines.append(line)
            tell(line.rstrip("\n"))

    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    with process:
        assert process.stdout is not None
        reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            code = process.wait(seconds)
        except BaseException:
            process.kill()
            raise
        reader.join()
    return code, "".join(lines)
