"""The page of a run: how it learns, how fast it is, what happened to it, what it was, and its end
in words."""

from __future__ import annotations

import bisect
import datetime
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_train.telemetry.pages.charts import Axis, Curve, Mark, curves
from ddp_train.telemetry.pages.findings import findings
from ddp_train.telemetry.pages.report import Lines, Plot, Report
from ddp_train.telemetry.pages.run_files import COMPLETED, RUNNING, TRAIN, RunFiles, as_typed, best
from ddp_train.telemetry.pages.tables import Table
from ddp_train.telemetry.score_lines import PERCENT, shown_metric
from ddp_train.text import OF_AVERAGE, shown, word

FIGURES = {
    "gpu_utilisation": "GPU utilisation, %",
    "gpu_memory_gib": "GPU memory, GiB",
    "power_watts": "GPU power, W",
    "temperature_celsius": "GPU temperature, C",
    "cpu_cores": "CPU cores in use",
    "resident_gib": "memory of a process, GiB",
}
"""What is plotted of the hardware, and its axis."""
MOST_CURVES = 16
"""Of one figure, one for each GPU or process; of more, the mean, the lowest and the highest."""
FIRST_SCORES = ("accuracy", "mean_iou", "perplexity", "bits_per_byte", "rmse")
"""What is of most interest in an evaluation, beside the loss."""
TITLES = {
    "top5": "Top-5 accuracy",
    "mean_iou": "Mean IoU",
    "rmse": "RMSE",
    "mae": "MAE",
    "mse": "MSE",
}
STEP = Axis("optimizer step")
RATES = ("tokens_per_second", "pixels_per_second", "samples_per_second")
"""What is plotted of the throughput: the first that is known."""
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
START = "start"
RESUMED = "resumed"
"""The first of all events, and each later start."""


def run_page(run: RunFiles, typed: dict[str, Any], refresh_seconds: int = 0) -> Report:
    """typed: the keys that differ from the defaults."""
    marks = events(run)
    later = [mark for mark in marks if mark["text"] != START]
    by_step = [Mark(mark["step"], mark["text"]) for mark in later if mark["step"] is not None]
    plots = [*score_plots([("", run)], by_step), *_rate_plots(run, by_step), *_course(run, marks)]
    tables = [_evaluations(run)] if run.of(run.split) else []
    happened = [[clock(mark["time"]), mark["step"], mark["text"]] for mark in marks]
    config = as_typed(run.config)
    chosen = {key: shown(value) for key, value in as_typed(typed).items() if value != "custom"}
    for key, equals, value in (one.lstrip("+").partition("=") for one in shlex.split(run.command)):
        if equals and "." in key and key not in (*chosen, "checkpoint.resume"):
            chosen[key] = value  # `auto` might have chosen the same
    differs = [f"{key}={value}" for key, value in chosen.items()]
    sections = [
        *plots,
        *tables,
        *(
            [Table("What happened", ["time", "step", "event"], happened)]
            if len(happened) > 1
            else []
        ),
        *([Lines("Settings that are not the default", differs)] if differs else []),
        *(
            [
                Lines(
                    "Config, all of it", [f"{k}={shown(v)}" for k, v in config.items()], folded=True
                )
            ]
            if config
            else []
        ),
        *(
            [Lines("Commands", [str(line.get("command")) for line in run.commands])]
            if run.commands
            else []
        ),
        *([Lines("What to do with it", uses(run))] if run.state == COMPLETED else []),
    ]
    return Report(
        f"{config.get('name', 'run')}: {run.run_dir.name}",
        "",
        sections,
        _facts(run),
        state=_state(run),
        numbers=numbers(run),
        findings=findings(run),
        refresh_seconds=refresh_seconds if run.state == RUNNING else 0,
    )


def uses(run: RunFiles) -> list[str]:
    """Commands that evaluate a completed run, predict with its model, or train it for longer."""
    program = program_of(run.command)
    trained = run.config.get("train") or {}
    run_dir = near(run.run_dir)
    if not program:
        return []
    length = next(
        (name for name in ("max_steps", "epochs") if isinstance(trained.get(name), int)), None
    )
    asked = [
        [f"mode={mode}", word("checkpoint.resume", run_dir)] for mode in ("evaluate", "predict")
    ]
    asked += [[word("run_dir", run_dir), f"train.{length}={2 * trained[length]}"]] if length else []
    return [shlex.join([*program, *words]) for words in asked]


def program_of(command: str) -> list[str]:
    """The words of a command line before its first flag or setting."""
    words = shlex.split(command)
    return words[
        : next(
            (at for at, one in enumerate(words) if "=" in one or one.startswith("-")), len(words)
        )
    ]


def near(path: Path) -> Path:
    """A path as one types it."""
    if path.is_relative_to(here := Path.cwd()):
        return path.relative_to(here)
    return path


def _state(run: RunFiles) -> str:
    steps = run.metrics[-1]["step"] if run.metrics else run.summary.get("steps")
    at = f", step {steps:,}" if isinstance(steps, int) and run.state != COMPLETED else ""
    return f"{run.state}{at}" + (f", as of {clock(time.time())}" if run.state == RUNNING else "")


def numbers(run: RunFiles) -> dict[str, str]:
    """What a reader looks for first: the metrics now and at their best, the loss, the speed, the
    time."""
    found = {}
    scores = run.of(run.split)
    for name in [name for name in FIRST_SCORES if name in run.scores][:1] + ["loss"] * (
        "loss" in run.scores
    ):
        top = best(scores, name, run.better(name))
        if top:
            found[f"{run.split} {name}, last"] = shown_metric(name, scores[-1].get(name, top[name]))
            found[f"best, step {top['step']:,}"] = shown_metric(name, top[name])
            break
    test = run.summary.get("test") or {}
    if run.split != "test" and "accuracy" in test:
        found["test accuracy"] = shown_metric("accuracy", test["accuracy"])
    lines = run.of(TRAIN)
    if lines and lines[-1].get("loss") is not None:
        found["training loss"] = f"{lines[-1]['loss']:.4f}"
    if run.summary.get("samples_per_second"):
        rates = run.summary
    else:
        rates = lines[-1] if lines else {}
    if rates.get("samples_per_second"):
        found["samples/s"] = f"{rates['samples_per_second']:,.0f}"
    if run.summary.get("seconds"):
        found["training time"] = duration(run.summary["seconds"])
    if run.config.get("launch"):
        found["processes"] = (
            f"{run.config['launch'].get('nproc_per_node')} x {run.config.get('device')}"
        )
    return found


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return str(datetime.timedelta(seconds=round(seconds)))


def score_plots(runs: Sequence[tuple[str, RunFiles]], marks: Sequence[Mark] = ()) -> list[Plot]:
    """The loss of training and evaluation, and each other metric, of one run or of several by their
    names."""
    plots = []
    alone = len(runs) == 1
    losses = []
    for number, (name, run) in enumerate(runs):
        colour = None if alone else number
        losses.append(_curve(f"{name} training".strip(), run.of(TRAIN), "loss", not alone, colour))
        losses.append(
            _curve(f"{name} {run.split}".strip(), run.of(run.split), "loss", colour=colour)
        )
    values = [value for curve in losses for value in curve.y if value is not None]
    is_log = bool(values) and min(values) > 0 and max(values) > 20 * min(values)
    plots.append(Plot("Loss", curves(losses, STEP, Axis("loss", log=is_log), marks)))
    metrics = list(dict.fromkeys(name for _, run in runs for name in run.scores if name != "loss"))
    averages = {OF_AVERAGE + name for name in metrics}
    for metric in [name for name in metrics if name not in averages][:6]:
        drawn = []
        for number, (name, run) in enumerate(runs):
            for of, more in ((metric, ""), (OF_AVERAGE + metric, " (ema)")):
                colour = None if alone else number
                drawn.append(
                    _curve(
                        f"{name} {run.split}{more}".strip(),
                        run.of(run.split),
                        of,
                        bool(more),
                        colour,
                    )
                )
        axis = Axis(metric, percent=metric in PERCENT)
        plots.append(Plot(title(metric), curves(drawn, STEP, axis, marks)))
    return [plot for plot in plots if plot.chart]


def title(metric: str) -> str:
    """The name of a metric as a heading."""
    text = TITLES.get(metric, metric.replace("_", " "))
    return text[:1].upper() + text[1:]


def _curve(
    name: str,
    lines: Sequence[dict[str, Any]],
    key: str,
    dashed: bool = False,
    colour: int | None = None,
) -> Curve:
    steps = [line["step"] for line in lines]
    return Curve(name, steps, [line.get(key) for line in lines], dashed=dashed, colour=colour)


def _rate_plots(run: RunFiles, marks: Sequence[Mark]) -> list[Plot]:
    lines = run.of(TRAIN)
    plots = [Plot("Learning rate", curves(_rates(lines), STEP, Axis("learning rate"), marks))]
    norm = _curve("gradient norm", lines, "grad_norm")
    plots.append(Plot("Gradient norm", curves([norm], STEP, Axis("norm before clipping"), marks)))
    return [plot for plot in plots if plot.chart]


def _course(run: RunFiles, happened: Sequence[dict[str, Any]]) -> list[Plot]:
    """Throughput and hardware over time, pauses between two starts included."""
    timed = [line for line in run.of(TRAIN) if "time" in line]
    if not timed:
        return []
    plots: list[Plot] = []
    began = min([timed[0]["time"], *(event["time"] for event in happened)])
    span = timed[-1]["time"] - began
    unit, word = next((unit, word) for unit, word in UNITS if span >= 2 * unit or unit == 1)
    clock = Axis(f"{word} since the start", whole=True)

    def at(moment: float) -> float:
        return (moment - began) / unit

    by_time = [
        Mark(at(event["time"]), event["text"]) for event in happened if event["text"] != START
    ]
    gaps = [mark.x for mark in by_time if mark.text == RESUMED]
    speed = next((name for name in RATES if name in timed[-1]), RATES[-1])
    x = [at(line["time"]) for line in timed]
    label = speed.replace("_per_second", "/s")
    plots.append(
        Plot(
            "Throughput",
            curves(
                [Curve(label, x, [line.get(speed) for line in timed])],
                clock,
                Axis(label, whole=True),
                by_time,
                gaps,
            ),
        )
    )
    for name, label in FIGURES.items():
        of = [(line.get("figures") or {}).get(name) for line in timed]
        width = max((len(values) for values in of if values), default=0)
        who = "GPU" if name not in ("cpu_cores", "resident_gib") else "rank"
        if width > MOST_CURVES:
            means = [
                sum(known) / len(known) if (known := _known(values)) else None for values in of
            ]
            low, high = (
                [pick(_known(values), default=0.0) for values in of] for pick in (min, max)
            )
            drawn = [Curve(f"mean of {width}", x, means, low, high)]
        else:
            drawn = [
                Curve(
                    f"{who} {one}",
                    x,
                    [values[one] if values and one < len(values) else None for values in of],
                )
                for one in range(width)
            ]
        plots.append(
            Plot(
                title(label.partition(",")[0]),
                curves(drawn, clock, Axis(label, whole=True), by_time, gaps),
            )
        )
    return [plot for plot in plots if plot.chart]


def _known(values: Sequence[float | None] | None) -> list[float]:
    return [value for value in values or () if value is not None]


def _rates(lines: Sequence[dict[str, Any]]) -> list[Curve]:
    """One for each group of parameters, if their rates differ."""
    steps = [line["step"] for line in lines]
    groups = max((len(line.get("lrs") or ()) for line in lines), default=0)
    if groups < 2 or groups > MOST_CURVES:
        return [_curve("learning rate", lines, "lr")]
    return [
        Curve(
            f"group {at}",
            steps,
            [line["lrs"][at] if at < len(line.get("lrs") or ()) else None for line in lines],
        )
        for at in range(groups)
    ]


def _evaluations(run: RunFiles) -> Table:
    lines = run.of(run.split)
    names = [name for name in run.scores if name not in ("loss",)]
    columns = [
        "epoch",
        "step",
        *(f"{name} %" if name in PERCENT else name for name in names),
        "loss",
    ]
    rows = [
        [
            line.get("epoch"),
            line["step"],
            *(_percent(name, line.get(name)) for name in names),
            line.get("loss"),
        ]
        for line in lines
    ]
    metric = next((name for name in FIRST_SCORES if name in names), "loss")
    top = best(lines, metric, run.better(metric))
    note = f"The best by {metric} stands out; by another metric it may be another line."
    return Table(
        f"Evaluations of the {run.split} set",
        columns,
        rows,
        note,
        best=lines.index(top) if top else None,
    )


def _percent(name: str, value: Any) -> Any:
    if name in PERCENT and isinstance(value, int | float):
        return 100 * value
    return value


def events(run: RunFiles) -> list[dict[str, Any]]:
    """What happened, in order: each start, failure, change of the number of processes, stop. With
    step and time."""
    timed = [line for line in run.metrics if isinstance(line.get("time"), int | float)]
    times = [line["time"] for line in timed]
    steps = [line["step"] for line in timed]

    def step_at(moment: float) -> int | None:
        at = bisect.bisect(times, moment)
        return steps[at - 1] if at else None

    found = []
    for number, line in enumerate(run.commands):
        try:
            moment = datetime.datetime.fromisoformat(str(line.get("started"))).timestamp()
        except ValueError:
            continue
        step, text = (step_at(moment), RESUMED) if number else (0, START)
        found.append({"time": moment, "step": step, "text": text})
    for event in run.timeline.get("events", []):
        known = event.get("step")
        found.append(
            {
                "time": event["time"],
                "step": step_at(event["time"]) if known is None else known,
                "text": event["text"],
            }
        )
    for line in run.of("resize"):
        text = f"{line.get('from', '?')} to {line.get('to', '?')} processes"
        found.append({"time": line.get("time", 0.0), "step": line["step"], "text": text})
    return sorted(found, key=lambda event: event["time"])


def clock(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _facts(run: RunFiles) -> dict[str, str]:
    summary = run.summary
    parameters = run.summary.get("parameters") or {}
    last = (run.commands or [summary])[-1]
    known = {
        "Run directory": str(run.run_dir),
        "Hardware": re.sub(
            r"\b1 cores\b", "1 core", str(last.get("hardware") or summary.get("device_name") or "")
        ),
        "Host": last.get("host"),
        "Versions": ", ".join(
            f"{name} {version}" for name, version in (last.get("versions") or {}).items()
        ),
        "Parameters": parameters
        and f"{parameters['all']:,}, of which {parameters.get('trained', 0):,} trained",
        "Checkpoint": summary.get("checkpoint"),
        "Code": last.get("git_revision"),
        "Started": last.get("started"),
    }
    return {name: str(value) for name, value in known.items() if value}
