"""What held a run back, in words, with the key that helps. Only what its figures support is
said."""

from __future__ import annotations

import shlex
import statistics
from typing import Any

from ddp_train.telemetry.pages.run_files import FAILED, RUNNING, STOPPED, RunFiles
from ddp_train.text import counted, word

LEAST_SECONDS = 5.0
"""Of observed training: less says nothing."""
MUCH = 0.15
"""Of the time: what takes less is not worth a word."""
IDLE_GPU = 70.0
"""Per cent of the time in which a GPU computes, below which something else limits."""
STEP = ("data", "forward", "backward", "optimizer step")
"""The phases of a training step."""
SPLIT_STEPS = "hooks=[ddp_lab.study.step_times.StepTimes]"


def findings(run: RunFiles) -> list[str]:
    """Sentences, the end of the run first."""
    return [*_end(run), *_times(run), *_gpus(run), *_start(run)]


def _end(run: RunFiles) -> list[str]:
    failure = run.failure
    found = []
    if run.state == FAILED and failure:
        where = f"rank {failure['rank']}, " if failure.get("rank") is not None else ""
        step = f"step {failure['step']}, " if failure.get("step") is not None else ""
        found.append(
            f"Failed ({failure.get('kind')}; {where}{step}{failure.get('phase')}):"
            f" {failure.get('detail')}"
        )
        found.append(f"Remedy: {failure.get('remedy')}. Log: {failure.get('log')}")
    elif run.state == STOPPED:
        found.append(f"Stopped and saved; {shlex.quote(word('run_dir', run.run_dir))} goes on.")
    elif run.state not in (FAILED, RUNNING) and not run.summary:
        found.append(
            "Its processes were killed, or their host was lost;"
            f" {shlex.quote(word('run_dir', run.run_dir))} goes on."
        )
    recoveries = run.summary.get("recoveries") or []
    if recoveries:
        redone = run.summary.get("steps_redone") or 0
        found.append(
            f"A rank was lost {counted(len(recoveries), 'time')}; {counted(redone, 'step')}"
            " computed again."
        )
    if run.summary.get("stopped_early"):
        found.append(f"Stopped early: {run.summary['stopped_early']['reason']}.")
    return found


def _times(run: RunFiles) -> list[str]:
    """By the phases that the launcher saw."""
    ranks = [rank for rank in run.timeline.get("seconds", []) if rank]
    total = sum(sum(rank.values()) for rank in ranks)
    step = sum(rank.get(phase, 0.0) for rank in ranks for phase in STEP)
    if not ranks or total < LEAST_SECONDS * len(ranks) or not step:
        return []
    share = {
        name: sum(rank.get(name, 0.0) for rank in ranks)
        for name in {*ranks[0], *STEP, "checkpoint"}
    }
    utilisation = (run.summary.get("figures") or {}).get("gpu_utilisation")
    found = []
    waits = share["data"] / step
    if waits > MUCH and (utilisation is None or utilisation < IDLE_GPU):
        helps = (
            "raise tuning.num_workers, or hold the data on the device (data.placement=device) where"
            " it fits"
        )
        found.append(
            f"Input-bound: {waits:.0%} of the time of a step was waiting for a batch; {helps}."
        )
    elif waits <= 0.05:
        found.append(f"Not input-bound: {waits:.1%} of the time of a step was waiting for a batch.")
    found += _straggler(ranks)
    saving = share["checkpoint"] / total
    if saving > MUCH:
        helps = "save less often (checkpoint.every_steps), or to a faster disk (run_dir)"
        found.append(f"Slow checkpoints: {saving:.0%} of the time; {helps}.")
    evaluation = (
        sum(
            value for rank in ranks for name, value in rank.items() if name.startswith("evaluation")
        )
        / total
    )
    if evaluation > MUCH:
        helps = "train.evaluate_every_epochs, train.evaluate_batch_size"
        found.append(f"Evaluation took {evaluation:.0%} of the time: {helps}.")
    if len(ranks) > 1 and run.config.get("strategy", {}).get("name") in ("ddp", "ordered"):
        backward = share["backward"] / step
        found.append(
            f"Backward pass with the exchange of gradients: {backward:.0%} of a step. {SPLIT_STEPS}"
            " measures the two apart, and so whether the run is exchange-bound."
        )
    return found


def _straggler(ranks: list[dict[str, float]]) -> list[str]:
    """A rank that is longer in what it does alone; the others wait for it in their backward
    pass."""
    if len(ranks) < 2:
        return []
    own = [sum(rank.get(phase, 0.0) for phase in ("data", "forward")) for rank in ranks]
    steps = [sum(rank.get(phase, 0.0) for phase in STEP) for rank in ranks]
    slowest = max(range(len(ranks)), key=own.__getitem__)
    others = statistics.median(value for rank, value in enumerate(own) if rank != slowest)
    late = (own[slowest] - others) / max(steps[slowest], 1e-9)
    if late <= MUCH:
        return []
    in_data = ranks[slowest].get("data", 0.0) > own[slowest] / 2
    if in_data:
        why = "its data are slow to come"
    else:
        why = "its model or its device is slower: look for other work there"
    return [
        f"Straggler: rank {slowest} is {late:.0%} of a step behind the others, which wait for it;"
        f" {why}."
    ]


def _gpus(run: RunFiles) -> list[str]:
    figures: dict[str, Any] = run.summary.get("figures") or {}
    utilisation = figures.get("gpu_utilisation")
    if utilisation is None or utilisation >= IDLE_GPU:
        return []
    helps = (
        "tuning.cuda_graph=true, tuning.compile=true or a larger train.global_batch_size, unless it"
        " waits for data"
    )
    return [f"The GPUs computed {utilisation:.0f} % of the time: {helps}."]


def _start(run: RunFiles) -> list[str]:
    wall = run.summary.get("wall_seconds")
    seconds = run.summary.get("seconds")
    if (
        len(run.commands) != 1
        or not wall
        or not seconds
        or wall - seconds < LEAST_SECONDS
        or seconds > wall
    ):
        return []
    share = (wall - seconds) / wall
    if share > MUCH:
        return [f"Start and end took {wall - seconds:.0f} s, {share:.0%} of the whole."]
    return []
