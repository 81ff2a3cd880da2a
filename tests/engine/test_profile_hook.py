"""A trace of some steps: those that were asked for, and no others."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ddp_train.engine.profile_hook import profile_hooks
from ddp_train.performance.memory_snapshot import snapshot_file, take_when_out_of_memory
from ddp_train.resilience.preemption import StopController
from ddp_train.telemetry.console import Display
from tests.support.commands import ONE, SMALL, THREE, fatal_lines, read, run

pytestmark = pytest.mark.timeout(120)


def steps_in(trace: Path) -> list[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::addmm" for event in events)
    return sorted(
        {event["name"] for event in events if re.fullmatch(r"step \d+", event.get("name", ""))}
    )


@pytest.mark.slow
def test_the_steps_asked_for_are_traced_on_every_rank(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = run(*SMALL, THREE, "train.max_steps=5", "train.profile_steps=3:4", f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert steps_in(run_dir / f"profile/rank_{rank}.json.gz") == ["step 3", "step 4"]
        assert "c10d::allreduce_" in (run_dir / f"profile/rank_{rank}.txt").read_text()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("profile: ")]
    assert (
        line.startswith("profile: steps 3 to 4 in ")
        and "rank_0.json.gz; open it at https://ui.perfetto" in line
    )

    again = run(f"run_dir={run_dir}", ONE, "train.max_steps=8", "train.profile_steps=4:99")
    assert again.returncode == 0, again.stderr
    assert steps_in(run_dir / "profile/rank_0.json.gz") == [
        "step 7",
        "step 8",
    ], "to the end, but for the first step"

    late = run(f"run_dir={run_dir}", ONE, "train.max_steps=9", "train.profile_steps=7:8")
    assert (
        late.returncode == 0
        and "profile: nothing is traced, since 8 steps of the run are done already" in late.stdout
    )

    never = run(
        *SMALL, ONE, "train.max_steps=5", "train.profile_steps=6:9", f"run_dir={tmp_path}/never"
    )
    assert never.returncode == 2 and len(fatal_lines(never.stderr)) == 1, never.stderr
    said = (
        "train.profile_steps=6:9: the run has 5 steps; trace earlier steps, or raise train.epochs or"
        " train.max_steps"
    )
    assert said in read(tmp_path / "never", "failure.json")["detail"]


def test_stop_within_the_steps_leaves_a_trace_of_those_done(tmp_path: Path) -> None:
    stop = StopController()
    job: Any = SimpleNamespace(step=3, plan=SimpleNamespace(steps=99), stop=stop)
    (hook,) = profile_hooks("4:50", job, tmp_path / "rank_0", "cpu", Display(False))
    hook.act(job)
    for job.step in (4, 5):
        torch.addmm(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2))
        if job.step == 5:
            stop.end_at(5)
        hook.act(job)
    assert steps_in(tmp_path / "rank_0.json.gz") == ["step 4", "step 5"]


def test_a_snapshot_that_cannot_be_written_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The observer is called while torch raises the error of the full memory."""
    observers: list[Any] = []
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", mock.Mock(side_effect=RuntimeError("no history"))
    )
    take_when_out_of_memory(snapshot_file(tmp_path, 1), history=False)
    observers[0](0, 1, 2, 3)
    assert "rank_1.pickle cannot be written: no history" in caplog.text


@pytest.mark.parametrize("value", ["1:4", "5", "9:7", "2:auto", "a:b"])
def test_what_is_no_range_of_steps_is_refused(value: str, tmp_path: Path) -> None:
    done = run(f"train.profile_steps={value}", f"run_dir={tmp_path}/run")
    said = f"train.profile_steps={value}: must be FIRST:LAST, two numbers from 2 on, as 100:105"
    assert done.returncode == 2 and said in done.stderr, done.stderr
