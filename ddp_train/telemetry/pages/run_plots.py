"""Plots of a run's page: scores and rates over steps, throughput and hardware over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddp_train.telemetry.metrics_log import Line
from ddp_train.telemetry.pages.charts import Axis, Curve, Mark, curves
from ddp_train.telemetry.pages.report import Plot
from ddp_train.telemetry.pages.run_events import RESUMED, START, Event
from ddp_train.telemetry.pages.run_files import TRAIN, RunFiles
from ddp_train.telemetry.score_lines import PERCENT
from ddp_train.text import OF_AVERAGE

FIGURES = {
    "gpu_utilisation": "GPU utilisation, %",
    "gpu_memory_gib": "GPU memory, GiB",
    "power_watts": "GPU power, W",
    "temperature_celsius": "GPU temperature, C",
    "cpu_cores": "CPU cores in use",
    "resident_gib": "memory of a process, GiB",
}
"""Plotted figures of the hardware, and their axes."""
PROCESS_FIGURES = ("cpu_cores", "resident_gib")
MOST_CURVES = 16
"""Most curves of one figure, one for each GPU or process. Of more, mean, lowest and highest."""
MOST_METRICS = 6
LOG_RATIO = 20.0
"""Of the largest to the smallest loss, from which its axis is logarithmic."""
TITLES = {
    "top5": "Top-5 accuracy",
    "mean_iou": "Mean IoU",
    "rmse": "RMSE",
    "mae": "MAE",
    "mse": "MSE",
}
STEP = Axis("optimizer step")
SPEEDS = ("tokens_per_second", "pixels_per_second", "samples_per_second")
"""The plotted throughput: the first that is known."""
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))


def run_plots(run: RunFiles, events: Sequence[Event]) -> list[Plot]:
    """All plots of one run."""
    marks = []
    for event in events:
        if event.text != START and event.step is not None:
            marks.append(Mark(event.step, event.text))
    return [
        *score_plots([("", run)], marks),
        *_rate_plots(run, marks),
        *_plots_over_time(run, events),
    ]


def score_plots(runs: Sequence[tuple[str, RunFiles]], marks: Sequence[Mark] = ()) -> list[Plot]:
    """The loss and each other metric, of one run or of several.

    runs: by their names; the name of a single run is empty.
    """
    plots = [_loss_plot(runs, marks)]
    metrics: dict[str, None] = {}
    for _, run in runs:
        metrics |= dict.fromkeys(run.scores)
    averages = {OF_AVERAGE + name for name in metrics}
    names = [name for name in metrics if name != "loss" and name not in averages]
    for metric in names[:MOST_METRICS]:
        plots.append(_metric_plot(metric, runs, marks))
    return _drawable(plots)


def _loss_plot(runs: Sequence[tuple[str, RunFiles]], marks: Sequence[Mark]) -> Plot:
    is_single = len(runs) == 1
    losses = []
    for number, (name, run) in enumerate(runs):
        colour = None if is_single else number
        training = f"{name} training".strip()
        scored = f"{name} {run.split}".strip()
        losses.append(_curve(training, run.of(TRAIN), "loss", not is_single, colour))
        losses.append(_curve(scored, run.of(run.split), "loss", colour=colour))
    axis = Axis("loss", log=spans_decades(losses))
    return Plot("Loss", curves(losses, STEP, axis, marks))


def _metric_plot(metric: str, runs: Sequence[tuple[str, RunFiles]], marks: Sequence[Mark]) -> Plot:
    drawn = []
    for number, (name, run) in enumerate(runs):
        colour = None if len(runs) == 1 else number
        scored = f"{name} {run.split}".strip()
        lines = run.of(run.split)
        drawn.append(_curve(scored, lines, metric, colour=colour))
        drawn.append(_curve(f"{scored} (ema)", lines, OF_AVERAGE + metric, True, colour))
    axis = Axis(metric, percent=metric in PERCENT)
    return Plot(title(metric), curves(drawn, STEP, axis, marks))


def spans_decades(drawn: Sequence[Curve]) -> bool:
    """Whether the values of curves need a logarithmic axis."""
    values = [value for curve in drawn for value in curve.y if value is not None]
    return bool(values) and min(values) > 0 and max(values) > LOG_RATIO * min(values)


def title(metric: str) -> str:
    """The name of a metric as a heading."""
    text = TITLES.get(metric, metric.replace("_", " "))
    return text[:1].upper() + text[1:]


def _drawable(plots: Sequence[Plot]) -> list[Plot]:
    return [plot for plot in plots if plot.chart]


def _curve(
    name: str,
    lines: Sequence[Line],
    key: str,
    dashed: bool = False,
    colour: int | None = None,
) -> Curve:
    """A value of lines of metrics.jsonl over steps."""
    steps = [line["step"] for line in lines]
    values = [line.get(key) for line in lines]
    return Curve(name, steps, values, dashed=dashed, colour=colour)


def _rate_plots(run: RunFiles, marks: Sequence[Mark]) -> list[Plot]:
    lines = run.of(TRAIN)
    rates = curves(_learning_rates(lines), STEP, Axis("learning rate"), marks)
    norm = _curve("gradient norm", lines, "grad_norm")
    norms = curves([norm], STEP, Axis("norm before clipping"), marks)
    return _drawable([Plot("Learning rate", rates), Plot("Gradient norm", norms)])


def _learning_rates(lines: Sequence[Line]) -> list[Curve]:
    """A curve for each group of parameters, if there are several."""
    groups = max((len(line.get("lrs") or ()) for line in lines), default=0)
    if groups < 2 or groups > MOST_CURVES:
        return [_curve("learning rate", lines, "lr")]
    steps = [line["step"] for line in lines]
    rates = [line.get("lrs") or () for line in lines]
    return [Curve(f"group {at}", steps, _values_at(rates, at)) for at in range(groups)]


def _values_at(lists: Sequence[Sequence[Any]], place: int) -> list[Any]:
    """One value of each list; None where it is shorter."""
    return [values[place] if place < len(values) else None for values in lists]


def _plots_over_time(run: RunFiles, events: Sequence[Event]) -> list[Plot]:
    """Throughput and hardware over time, pauses between two starts included."""
    lines = [line for line in run.of(TRAIN) if "time" in line]
    if not lines:
        return []
    start = min([lines[0]["time"], *(event.time for event in events)])
    span = lines[-1]["time"] - start
    seconds, unit = next(one for one in UNITS if span >= 2 * one[0] or one[0] == 1)
    x = [(line["time"] - start) / seconds for line in lines]
    marks = []
    for event in events:
        if event.text != START:
            marks.append(Mark((event.time - start) / seconds, event.text))
    gaps = [mark.x for mark in marks if mark.text == RESUMED]
    clock = Axis(f"{unit} since the start", whole=True)

    def plot(heading: str, label: str, drawn: list[Curve]) -> Plot:
        axis = Axis(label, whole=True)
        return Plot(heading, curves(drawn, clock, axis, marks, gaps))

    return _drawable([_throughput(lines, x, plot), *_figure_plots(lines, x, plot)])


PlotMaker = Callable[[str, str, list[Curve]], Plot]
"""Heading, label of the vertical axis and curves -> a plot over time."""


def _throughput(lines: Sequence[Line], x: Sequence[float], plot: PlotMaker) -> Plot:
    speed = next((name for name in SPEEDS if name in lines[-1]), SPEEDS[-1])
    label = speed.replace("_per_second", "/s")
    curve = Curve(label, x, [line.get(speed) for line in lines])
    return plot("Throughput", label, [curve])


def _figure_plots(lines: Sequence[Line], x: Sequence[float], plot: PlotMaker) -> list[Plot]:
    plots = []
    for name, label in FIGURES.items():
        values = [(line.get("figures") or {}).get(name) or () for line in lines]
        heading = title(label.partition(",")[0])
        plots.append(plot(heading, label, _figure_curves(name, x, values)))
    return plots


def _figure_curves(
    name: str, x: Sequence[float], values: Sequence[Sequence[float | None]]
) -> list[Curve]:
    """A curve for each GPU or process; of many, the mean with a band.

    values: for each x a number of each GPU or process.
    """
    count = max(map(len, values), default=0)
    if count <= MOST_CURVES:
        owner = "rank" if name in PROCESS_FIGURES else "GPU"
        return [Curve(f"{owner} {at}", x, _values_at(values, at)) for at in range(count)]
    means: list[float | None] = []
    low = []
    high = []
    for numbers in values:
        known = [number for number in numbers if number is not None]
        means.append(sum(known) / len(known) if known else None)
        low.append(min(known, default=0.0))
        high.append(max(known, default=0.0))
    return [Curve(f"mean of {count}", x, means, low, high)]
