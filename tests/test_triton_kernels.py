"""tuning.triton_kernels without a GPU, by Triton's interpreter. On one: tests/test_gpu.py."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.commands import ROOT


def test_our_kernels_compute_what_torchs_do() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.triton_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
