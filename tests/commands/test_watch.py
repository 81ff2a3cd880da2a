"""`ddp-train watch`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ddp_train.commands.watch import screen, watch
from ddp_train.errors import ConfigError
from ddp_train.resilience import run_lock
from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.pages.run_files import glance, is_locked
from tests.support.pages import leave_run


def test_watch_shows_the_state_of_each_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("done", "fails", "lives", "dead"):
        leave_run(tmp_path / "runs/a" / name)
    write_json(tmp_path / "runs/a/fails/summary.json", {"status": "failed"})
    write_json(
        tmp_path / "runs/a/fails/failure.json", {"kind": "oom", "detail": "out of\nmemory " * 9}
    )
    for name in ("lives", "dead"):
        (tmp_path / "runs/a" / name / "summary.json").unlink()
    held = run_lock.acquire(tmp_path / "runs/a/lives/lock.json")
    try:
        assert watch([str(tmp_path / "runs")]) == 0
        assert is_locked(tmp_path / "runs/a/lives/lock.json") and run_lock.is_held(
            tmp_path / "runs/a/lives/lock.json"
        )
    finally:
        held.release()
    assert not is_locked(tmp_path / "runs/a/lives/lock.json") and not is_locked(
        tmp_path / "nowhere"
    )
    shown = {
        line.split()[0]: line
        for line in capsys.readouterr().out.splitlines()
        if line.strip().startswith("a/")
    }
    assert {name: line.split()[1:4] for name, line in shown.items()} == {
        "a/done": ["completed", "40", "4"],
        "a/fails": ["failed", "40", "4"],
        "a/lives": ["running", "40", "4"],
        "a/dead": ["ended", "40", "4"],
    }
    assert (
        "90.00" in shown["a/done"]
        and "ago" in shown["a/lives"]
        and "oom: out of memory out of" in shown["a/fails"]
    )
    for words in ([], ["a", "b"], [str(tmp_path / "run")]):
        with pytest.raises(ConfigError, match="watch"):
            watch(words)


@pytest.fixture(scope="module")
def thirty_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep whose last trial failed."""
    folder = tmp_path_factory.mktemp("thirty")
    for number in range(30):
        leave_run(folder / f"a_sweep_with_a_rather_long_name/{number}")
    failed = folder / "a_sweep_with_a_rather_long_name/29"
    write_json(failed / "summary.json", {"status": "failed"})
    write_json(failed / "failure.json", {"kind": "oom", "detail": "out of memory " * 9})
    return folder


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 12), (120, 30)])
@pytest.mark.slow
def test_watch_fits_the_terminal_and_says_why_a_run_failed(
    thirty_runs: Path, width: int, height: int
) -> None:
    console = Console(
        width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None
    )
    sweep = thirty_runs / "a_sweep_with_a_rather_long_name"
    runs = [glance(sweep / str(number)) for number in range(30)]
    console.print(screen(thirty_runs, runs, console))
    lines = console.file.getvalue().splitlines()  # type: ignore
    assert (
        len(lines) < height
        and max(map(len, lines)) <= width
        and lines[-1].startswith("Ctrl-C ends")
    )
    newest = next(line for line in lines if "long_name/29" in line)
    assert "failed" in newest and "oom: out of memory out of" in newest
    assert any("older runs not shown" in line for line in lines)
