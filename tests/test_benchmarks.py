"""The benchmarks run: what they measure is in docs/benchmarks/, and must be measured on an idle machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

QUICK = {
    "overhead.py": ("--rounds", "2", "--steps", "60", "--limit", "1e6"),
    "jpeg.py": (
        *("--images", "8", "--batch", "2", "--size", "32", "--arch", "mobilenet_v3_small", "--eager"),
        *("--steps", "1", "--seconds", "0.1"),
    ),
    "checkpoint_stall.py": ("--batch", "2", "--saves", "2", "--every", "2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[] if name == "overhead.py" else pytest.mark.nightly) for name in QUICK]
)
def test_a_benchmark_writes_its_page(script: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, str(ROOT / "benchmarks" / script), *QUICK[script], "--output", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "Traceback" not in done.stderr, done.stderr
    text = page.read_text()
    assert text == done.stdout and text.startswith("# ")
    assert all(f"- {fact}: " in text for fact in ("Hardware", "Versions", "Date", "Command"))


def test_each_sitting_of_models_has_plain_ddp_to_compare_with() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import models  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    plain, names = models.PEERS[0], [*models.PEERS, "launch.py, recommended", "launch.py, captured"]
    assert models.sittings(names, 5) == [names]
    assert models.sittings(names, 3) == [names[:3], [plain, *names[3:]]]
    assert models.sittings([plain], 3) == [[plain]]
    assert models.sittings(names, 1) == [[name] for name in names]
