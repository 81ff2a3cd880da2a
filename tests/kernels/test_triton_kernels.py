"""tuning.triton_kernels without a GPU, by Triton's interpreter. On one:
tests/end_to_end/test_gpu.py."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from ddp_train.distributed.environment import set_triton_cache
from tests.support.commands import ROOT


# Triton 3.6, which is torch 2.11's, cannot interpret them with NumPy 2.4 (triton#9171).
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/end_to_end/test_gpu.py computes them on the GPU"
)
@pytest.mark.slow
def test_our_kernels_compute_what_torchs_do() -> None:
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment = os.environ | {"TRITON_INTERPRET": "1"} | one_thread
    command = [sys.executable, "-m", "tests.kernels.triton_kernels"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_kernels_are_kept_where_the_process_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "restored behind the test")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    set_triton_cache()
    assert "TRITON_CACHE_DIR" not in os.environ, "Triton's own place, ~/.triton"
    monkeypatch.setenv("HOME", "/nonexistent")
    set_triton_cache()
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent == Path(tempfile.gettempdir())
