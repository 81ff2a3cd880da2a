"""The benchmarks run: what they measure is in docs/inside/benchmarks/, and must be measured on an idle
machine."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

QUICK = {
    "overhead.py": ("--rounds", "2", "--steps", "60", "--limit", "1e6"),
    "jpeg.py": (
        *(
            "--images",
            "8",
            "--batch",
            "2",
            "--size",
            "32",
            "--arch",
            "mobilenet_v3_small",
            "--eager",
        ),
        *("--steps", "1", "--seconds", "0.1"),
    ),
    "checkpoint_stall.py": ("--batch", "2", "--saves", "2", "--every", "2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=[] if name == "overhead.py" else pytest.mark.nightly)
        for name in QUICK
    ],
)
def test_a_benchmark_writes_its_page(script: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / script),
        *QUICK[script],
        "--output",
        str(page),
    ]
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
    plain = models.PEERS[0]
    names = [*models.PEERS, "launch.py, recommended", "launch.py, captured"]
    assert models.sittings(names, 5) == [names]
    assert models.sittings(names, 3) == [names[:3], [plain, *names[3:]]]
    assert models.sittings([plain], 3) == [[plain]]
    assert models.sittings(names, 1) == [[name] for name in names]


def test_what_needs_gpus_is_done_in_its_order_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that are names: side by side, both for one job, one job over its limit, one that nobody
    has time for; and what has ended is not repeated."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import on_gpus  # pyright: ignore[reportMissingImports]

    def work(name: str, gpus: int, limit: int, code: str) -> object:
        return on_gpus.Work(
            name, gpus, limit, f"PYTHON -c {shlex.quote(f'import os, sys, time; {code}')}"
        )

    meet = "p = 'FOLDER/{}'; open(p.format({!r}), 'w'); t = time.time(); "
    meet += (
        "[time.sleep(.01) for _ in range(2000) if not os.path.exists(p.format({!r}))];"
        " sys.exit(time.time() - t > 9)"
    )
    jobs = [
        work("left", 1, 20, meet.format("{}", "a", "b")),
        work("right", 1, 20, meet.format("{}", "b", "a")),
        work("both", 2, 20, "print(os.environ['CUDA_VISIBLE_DEVICES']); sys.exit(3)"),
        work("long", 1, 1, "time.sleep(60)"),
        work("never", 1, 10_000, ""),
    ]
    monkeypatch.setattr(on_gpus, "WORK", jobs)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("sys.argv", ["on_gpus.py", str(tmp_path), "--seconds", "60"])
    for _ in range(2):
        on_gpus.main()
        lines = [json.loads(line) for line in (tmp_path / "done.jsonl").read_text().splitlines()]
        ended = {line["name"]: (line["exit_code"], line["in_time"]) for line in lines}
        assert len(lines) == 4 and ended.keys() == {"left", "right", "both", "long"}
        assert ended["left"] == ended["right"] == (0, True), "they have waited for each other"
        assert ended["both"] == (3, True) and not ended["long"][1]
        assert (tmp_path / "both.log").read_text().split() == ["0,1"]


def test_the_time_of_a_step_is_divided_by_kinds_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps: kernels that overlap count both, and what none covers is a gap."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpt2_scaling  # pyright: ignore[reportMissingImports]

    def kernel(name: str, begin: float, end: float) -> dict[str, object]:
        return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}

    events = [
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 5000, 9000),
        kernel("nvjet_sm90_tst_192x192_bias_TNN", 1000, 4000),
        kernel("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 4000, 6000),
        kernel("somebody's", 9500, 10_000),
        {"cat": "cpu_op", "name": "nccl:all_reduce", "ts": 0, "dur": 10**6},
        {"name": "without a category", "ts": 0},
    ]
    found = gpt2_scaling.kinds_in(events, steps=2)
    assert found == {
        **{"exchange": 2.0, "matrix products": 1.5, "attention": 1.0},
        **{gpt2_scaling.OTHERS: 0.25, gpt2_scaling.GAPS: 0.25},
    }
    longest = gpt2_scaling.longest(events, steps=2, rows=2)
    assert [line.split()[:2] for line in longest] == [["2.000", "0.5"], ["1.500", "0.5"]]
    with pytest.raises(ValueError, match="no kernel"):
        gpt2_scaling.kinds_in(events[-2:], steps=2)
