"""Lines that a run prints: an epoch, a checkpoint, the summary. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_train.scored_sets import sets_of
from ddp_train.telemetry.figures import summary_line
from ddp_train.telemetry.rates import in_words
from ddp_train.telemetry.score_lines import headline, score_line, shown_metric
from ddp_train.text import counted

Summary = Mapping[str, Any]
"""The content of summary.json."""
Scores = Mapping[str, Mapping[str, Any]]
"""`Score.as_dict` by the name of the set that was evaluated."""
WHICH = {"best": ", the best of its run by {metric}", "last": ", the last of its run"}


def epoch_title(epoch: int, epochs: int | None) -> str:
    """`epoch  3/20`; `epoch 3` in a run that counts steps."""
    if epochs is None:
        return f"epoch {epoch}"
    return f"epoch {epoch:>{len(str(epochs))}}/{epochs}"


def step_title(step: int, steps: int) -> str:
    """`step   500/10,000`."""
    last = f"{steps:,}"
    return f"step {step:>{len(last)},}/{last}"


def epoch_line(title: str, loss: float | None, scores: Scores, seconds: float, samples: int) -> str:
    """`epoch  3/20  loss 0.1234  test 97.50 %  1.2 s  1,234 samples/s`.

    title: see `epoch_title`.
    loss: mean over the epoch.
    seconds: of training.
    samples: number that was trained in these seconds.
    """
    line = evaluation_line(title, loss, scores)
    return f"{line}  {seconds:.1f} s  {samples / seconds:,.0f} samples/s"


def evaluation_line(title: str, loss: float | None, scores: Scores, speeds: str = "") -> str:
    """`step   500/10,000  loss 0.1234  test 97.50 %  1,234 samples/s`.

    title: see `step_title`.
    loss: mean over the last logging interval.
    """
    parts = [title]
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    for split, metrics in scores.items():
        parts.append(f"{split} {headline(metrics)}")
    return "  ".join(filter(None, [*parts, speeds]))


def checkpoint_line(checkpoint: Mapping[str, Any]) -> str:
    """A line that names the checkpoint that is evaluated, and the metric by which it is the best.

    checkpoint: see `checkpoints.reader.described`.
    """
    which = WHICH.get(checkpoint["which"], "").format_map(checkpoint)
    line = f"checkpoint {checkpoint['path']}: step {checkpoint['step']:,}{which}"
    if checkpoint["metric"]:
        line += f", {_selected(checkpoint)}"
    return line


def _selected(selection: Mapping[str, Any]) -> str:
    """The value of the metric that a checkpoint was selected by."""
    return shown_metric(selection["metric"].partition(".")[2], selection["value"])


def summary_lines(summary: Summary, run_dir: Path, to_resume: str) -> list[str]:
    """The end of a run, or of its part until it was stopped.

    to_resume: the command-line words that resume it.
    """
    if summary.get("predictions"):
        return [_prediction_line(summary["predictions"])]
    if summary.get("export"):
        return [
            f"{model['file']}: differs from the model by {model['largest_difference']:.1g} at most,"
            f" takes {model['takes']}"
            for model in summary["export"].values()
        ]
    if summary["status"] == "preempted":
        return [f"stopped after step {summary['steps']:,} and saved; resume with {to_resume}"]
    lines = [*_score_lines(summary), *_speed_lines(summary)]
    figures = summary_line(summary.get("figures", {}))
    if figures:
        lines.append(figures)
    return [*lines, f"run directory {run_dir}"]


def _prediction_line(predictions: Mapping[str, Any]) -> str:
    columns = []
    for name, shape in predictions["columns"].items():
        columns.append(f"{name} {shape}" if shape else name)
    samples = counted(predictions["samples"], "sample")
    where = f"{predictions['split']} in {predictions['file']}"
    return f"predictions for {samples} of {where}: {', '.join(columns)}"


def _score_lines(summary: Summary) -> list[str]:
    lines = []
    early = summary.get("stopped_early")
    if early:
        lines.append(f"stopped early after step {early['step']:,}: {early['reason']}")
    if summary.get("steps_skipped"):
        lines.append(skipped_line(summary))
    lines += [f"{name} {score_line(summary[name])}" for name in sets_of(summary)]
    best = summary.get("best") or {}
    for name in sets_of(best):
        what = f"best {best['metric']} {_selected(best)} after step {best['step']:,}"
        lines.append(f"{what}: {name} {score_line(best[name])}")
    return lines


def skipped_line(summary: Summary) -> str:
    """How many steps `train.on_non_finite=skip` has left out."""
    steps = counted(summary["steps"], "step")
    return (
        f"{summary['steps_skipped']:,} of {steps} skipped: their loss or gradients were not finite"
    )


def _speed_lines(summary: Summary) -> list[str]:
    if not summary.get("samples_per_second"):
        return []
    overall = f"({summary['samples_per_second_with_evaluation']:,.0f} samples/s with evaluation)"
    steps = counted(summary["steps"], "step")
    return [f"{in_words(summary)} {overall}, {steps}, {summary['seconds']:.1f} s"]
