"""One process of a session: what it says before it trains."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_train.sessions.process import seed_in_vain
from tests.support.commands import LIMIT_SECONDS, environment

KILLED_BEFORE_THE_SESSION = """
import os
import signal
import sys

import ddp_train

if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
with ddp_train.session(sys.argv[1], processes=3):
    pass
"""


@pytest.mark.parametrize(
    ("earlier", "seed", "is_in_vain"),
    [(999, 0, True), (0, 7, True), (7, 7, False), (2**63 + 999, 0, False)],
)
def test_a_seed_before_the_session_is_told(earlier: int, seed: int, is_in_vain: bool) -> None:
    note = seed_in_vain(torch.Generator().manual_seed(earlier).initial_seed(), seed)
    assert (note is not None) is is_in_vain
    if note:
        assert f"session(..., seed={earlier})" in note


@pytest.mark.slow
def test_a_rank_killed_before_its_session_has_the_log_that_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED_BEFORE_THE_SESSION)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    log = tmp_path / "run/logs/rank_1.log"
    assert done.returncode == 70
    assert f"  log: {log}\n" in done.stderr and "cannot be written" not in done.stderr
    assert "the process was killed by SIGKILL" in log.read_text()
