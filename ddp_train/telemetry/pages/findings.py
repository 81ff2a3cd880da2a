"""Causes that held a run back, in words, with the key that helps.

Only what the figures of a run support is said.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from ddp_train.telemetry.pages.run_files import FAILED, RUNNING, STOPPED, RunFiles
from ddp_train.telemetry.summary_lines import skipped_line
from ddp_train.text import counted, words_to_resume

LEAST_SECONDS = 5.0
"""Observed training of a rank below which nothing is said."""
MUCH = 0.15
"""Share of the time below which a cause is not worth a word."""
LITTLE = 0.05
IDLE_GPU = 70.0
"""Per cent of the time in which a GPU computes, below which something else limits."""
MOST_CAUSES = 5
"""Most failures that are named."""
STEP = ("data", "forward", "backward", "optimizer step")
"""The phases of a training step."""
SPLIT_STEPS = "hooks=[ddp_lab.study.step_times.StepTimes]"
Phases = Mapping[str, float]
"""Seconds of a rank by phase."""


def findings(run: RunFiles) -> list[str]:
    """Sentences, the end of the run first."""
    if run.is_session:  # the keys that help are those of a config
        return [*_end(run), *_recoveries(run)]
    return [*_end(run), *_recoveries(run), *_phases(run), *_gpus(run), *_start(run)]


def _end(run: RunFiles) -> Iterator[str]:
    resume = words_to_resume(run.run_dir, run.config.get("trusted_modules") or [])
    if run.is_session:
        resume = "the same command"
    if run.state == FAILED and run.failure:
        yield from _failure(run.failure)
    elif run.state == STOPPED:
        yield f"Stopped and saved; {resume} resumes the run."
    elif run.state not in (FAILED, RUNNING) and not run.summary:
        yield (
            f"The processes of the run were killed, or their host was lost; {resume} resumes the"
            " run."
        )


def _failure(failure: Mapping[str, object]) -> Iterator[str]:
    places = []
    for name in ("rank", "step"):
        if failure.get(name) is not None:
            places.append(f"{name} {failure[name]}")
    where = ", ".join([*places, str(failure.get("phase"))])
    yield f"Failed ({failure.get('kind')}; {where}): {failure.get('detail')}"
    yield f"Remedy: {failure.get('remedy')}. Log: {failure.get('log')}"


def _recoveries(run: RunFiles) -> Iterator[str]:
    recoveries = run.summary.get("recoveries")
    if recoveries:
        times = counted(len(recoveries), "time")
        redone = run.summary.get("steps_redone") or 0
        cost = f"{counted(redone, 'step')} computed again" if redone else "no step is lost"
        causes = [f"rank {one.get('rank')}: {one.get('kind', 'died')}" for one in recoveries]
        if len(causes) > MOST_CAUSES:
            causes[MOST_CAUSES:] = ["..."]
        yield f"Restarted {times} ({', '.join(causes)}); {cost}."
    if run.summary.get("steps_skipped"):
        yield f"{skipped_line(run.summary)}."
    early = run.summary.get("stopped_early")
    if early:
        yield f"Stopped early: {early['reason']}."


def _phases(run: RunFiles) -> Iterator[str]:
    """Causes that show in the phases that the launcher saw."""
    ranks = [rank for rank in run.timeline.get("seconds", []) if rank]
    total = sum(sum(rank.values()) for rank in ranks)
    step = sum(_seconds(ranks, phase) for phase in STEP)
    if not step or total < LEAST_SECONDS * len(ranks):
        return
    yield from _input(run, _seconds(ranks, "data") / step)
    yield from _straggler(ranks)
    saving = _seconds(ranks, "checkpoint") / total
    if saving > MUCH:
        helps = "save less often (checkpoint.every_steps), or to a faster disk (run_dir)"
        yield f"Checkpoints took {saving:.0%} of the time: {helps}."
    evaluation = _seconds(ranks, "evaluation") / total
    if evaluation > MUCH:
        helps = (
            "evaluate less often (train.evaluate_every_epochs), or raise train.evaluate_batch_size"
        )
        if (run.config.get("train") or {}).get("evaluate_every_steps"):
            helps = (
                "evaluate less often (train.evaluate_every_steps), or raise"
                " train.evaluate_batch_size"
            )
        yield f"Evaluation took {evaluation:.0%} of the time: {helps}."
    if len(ranks) > 1 and run.config.get("strategy", {}).get("name") in ("ddp", "ordered"):
        backward = _seconds(ranks, "backward") / step
        yield (
            f"The backward pass and the exchange of gradients together took {backward:.0%} of a"
            f" step. To measure the two separately, add {SPLIT_STEPS}."
        )


def _seconds(ranks: Sequence[Phases], name: str) -> float:
    """Seconds of all ranks in the phases whose names begin so."""
    total = 0.0
    for rank in ranks:
        total += sum(seconds for phase, seconds in rank.items() if phase.startswith(name))
    return total


def _input(run: RunFiles, share: float) -> Iterator[str]:
    """Sentences on whether training waited for data.

    share: of the time of a step that was spent waiting for a batch.
    """
    utilisation = _utilisation(run)
    if share > MUCH and (utilisation is None or utilisation < IDLE_GPU):
        helps = (
            "raise tuning.num_workers, or keep the data on the device (data.placement=device) if"
            " they fit"
        )
        yield f"Input-bound: {share:.0%} of a step was spent waiting for a batch; {helps}."
    if share <= LITTLE:
        yield f"Not input-bound: {share:.1%} of a step was spent waiting for a batch."


def _straggler(ranks: Sequence[Phases]) -> Iterator[str]:
    """A rank that takes longer for what it does alone; the others wait in their backward pass."""
    if len(ranks) < 2:
        return
    alone = [rank.get("data", 0.0) + rank.get("forward", 0.0) for rank in ranks]
    slowest = alone.index(max(alone))
    others = [seconds for rank, seconds in enumerate(alone) if rank != slowest]
    step = sum(ranks[slowest].get(phase, 0.0) for phase in STEP)
    late = (alone[slowest] - statistics.median(others)) / max(step, 1e-9)
    if late <= MUCH:
        return
    if ranks[slowest].get("data", 0.0) > alone[slowest] / 2:
        why = "its batches come late"
    else:
        why = "its forward pass is slower: look for other work on that device"
    yield (f"Straggler: the other ranks wait {late:.0%} of a step for rank {slowest}; {why}.")


def _utilisation(run: RunFiles) -> float | None:
    """Per cent of the time in which the GPUs computed; None without a GPU."""
    return (run.summary.get("figures") or {}).get("gpu_utilisation")


def _gpus(run: RunFiles) -> Iterator[str]:
    utilisation = _utilisation(run)
    if utilisation is not None and utilisation < IDLE_GPU:
        helps = (
            "try tuning.cuda_graph=true, tuning.compile=true or a larger train.global_batch_size,"
            " unless the run waits for data"
        )
        yield f"The GPUs computed only {utilisation:.0f} % of the time: {helps}."


def _start(run: RunFiles) -> Iterator[str]:
    """A start and an end that took long, in a run that was neither resumed nor restarted."""
    wall = run.summary.get("wall_seconds")
    training = run.summary.get("seconds")
    is_whole = len(run.commands) == 1 and not run.earlier_failures
    if not is_whole or not wall or not training:
        return
    rest = wall - training
    if rest >= LEAST_SECONDS and rest > MUCH * wall:
        yield f"Start and end took {rest:.0f} s, {rest / wall:.0%} of the run's time."
