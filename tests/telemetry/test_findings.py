"""What held a run back, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddp_train.telemetry.pages.findings import findings
from ddp_train.telemetry.pages.run_files import RunFiles


def timed(*ranks: dict[str, float], **summary: Any) -> list[str]:
    config = {"strategy": {"name": "ddp"}}
    found = RunFiles(
        Path("r"), config, summary={"status": "completed"} | summary, timeline={"seconds": [*ranks]}
    )
    return findings(found)


def test_finding_trusts_the_code_of_the_run_again() -> None:
    config = {"trusted_modules": ["my_net"]}
    stopped = RunFiles(Path("r"), config, summary={"status": "preempted"})
    assert findings(stopped) == [
        "Stopped and saved; run_dir=r 'trusted_modules=[my_net]' resumes the run."
    ]


def test_findings_say_only_what_the_figures_support() -> None:
    even = {"data": 1.0, "forward": 20.0, "backward": 40.0, "optimizer step": 1.0}
    assert timed(even | {"data": 0.1}, even | {"data": 0.1})[0].startswith("Not input-bound: 0.2%")
    waits = timed(even | {"data": 40.0}, even | {"data": 40.0})
    assert waits[0].startswith("Input-bound: 40%") and "tuning.num_workers" in waits[0]
    busy = timed(even | {"data": 40.0}, figures={"gpu_utilisation": 95.0})
    assert not any("nput-bound" in text for text in busy), "the host waits while the GPU computes"
    late = timed(even, even | {"forward": 40.0, "backward": 20.0}, even)
    assert any("Straggler: the other ranks wait" in text and "for rank 1" in text for text in late)
    assert not any("Straggler" in text for text in timed(even, even))
    assert any("Checkpoints took 20%" in text for text in timed(even | {"checkpoint": 15.5}))
    assert any(
        "29%" in text and "train.evaluate_every_epochs" in text
        for text in timed(even | {"evaluation data": 25.0})
    )
    assert timed({"forward": 2.0}) == [], "too short to say"
    assert any(
        "GPUs computed only 40 % of the time" in text
        for text in timed(figures={"gpu_utilisation": 40.0})
    )
