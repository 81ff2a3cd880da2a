"""Plots of a run's page: scores and rates over steps, throughput and hardware over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_train.telemetry.metrics_log import Line
from ddp_train.telemetry.pages.charts import Axis, Curve, Mark, curves
from ddp_train.telemetry.pages.report import Plot
from ddp_train.telemetry.pages.run_events import RESUMED, START, Event
from ddp_train.telemetry.pages.run_files import OwnNumber, RunFiles
from ddp_train.telemetry.score_lines import is_percent
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
MOST_METRICS = 24
MOST_OWN_PLOTS = 24
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
UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}


def run_plots(run: RunFiles, events: Sequence[Event]) -> list[Plot]:
    """All plots of one run."""
    marks = []
    for event in events:
        if event.text != START and event.step is not None:
            marks.append(Mark(event.step, event.text))
    norm = [_curve("gradient norm", run.intervals, "grad_norm")]
    return [
        *score_plots({"": run}, marks),
        Plot("Learning rate", curves(_learning_rates(run), STEP, Axis("learning rate"), marks)),
        Plot("Gradient norm", curves(norm, STEP, Axis("norm before clipping"), marks)),
        *own_plots({"": run}, marks),
        *_plots_over_time(run, events),
    ]


def score_plots(runs: dict[str, RunFiles], marks: Sequence[Mark] = ()) -> list[Plot]:
    """The loss and each other metric, of one run or of several.

    runs: by their names; the name of a single run is empty.
    """
    names: dict[str, None] = {}
    for run in runs.values():
        names |= dict.fromkeys(run.scores)
    averages = {OF_AVERAGE + name for name in names}
    metrics = [name for name in names if name != "loss" and name not in averages]
    plots = [Plot("Loss", curves(_loss_curves(runs), STEP, Axis("loss", log=True), marks))]
    for metric in metrics[:MOST_METRICS]:
        axis = Axis(metric, percent=is_percent(metric))
        heading = title(metric)
        if metric in _own_groups(runs):
            sets = dict.fromkeys(name for run in runs.values() for name in run.scored_sets)
            heading += f" ({', '.join(sets)})"
        plots.append(Plot(heading, curves(_score_curves(metric, runs), STEP, axis, marks)))
    return plots


def own_plots(runs: dict[str, RunFiles], marks: Sequence[Mark] = ()) -> list[Plot]:
    """Plot the numbers that the user's code logged: a plot for each group of names, as `vae` of
    vae/kl.

    At most MOST_OWN_PLOTS plots with MOST_CURVES numbers each; further ones are left out.

    runs: by their names; the name of a single run is empty.
    marks: steps to mark in each plot: restarts, failures, resumes.
    """
    scores = {name for run in runs.values() for name in run.scores}
    plots = []
    for group, numbers in [*_own_groups(runs).items()][:MOST_OWN_PLOTS]:
        drawn = []
        for number in [*numbers][:MOST_CURVES]:
            for place, (run_name, run) in enumerate(runs.items()):
                label = f"{run_name} {number.name}".strip()
                colour = place if run_name and len(numbers) == 1 else None
                drawn.append(_curve(label, run.lines(number.kind), number.name, colour=colour))
        heading = f"{title(group)} (training)" if group in scores else group
        plots.append(Plot(heading, curves(drawn, STEP, Axis(group), marks)))
    return plots


def _own_groups(runs: dict[str, RunFiles]) -> dict[str, dict[OwnNumber, None]]:
    """The numbers that code of the user's logged, by the first parts of their names."""
    groups: dict[str, dict[OwnNumber, None]] = {}
    for run in runs.values():
        for number in run.own_numbers:
            groups.setdefault(number.name.partition("/")[0], {})[number] = None
    return groups


def _loss_curves(runs: dict[str, RunFiles]) -> list[Curve]:
    """The losses of training and of evaluations: in two colours, of several runs in one each."""
    drawn = []
    for number, (name, run) in enumerate(runs.items()):
        colour = number if name else None
        training = f"{name} training".strip()
        drawn.append(_curve(training, run.intervals, "loss", bool(name), colour))
        for split in run.scored_sets:
            scored = f"{name} {split}".strip()
            drawn.append(_curve(scored, run.lines(split), "loss", colour=colour))
    return drawn


def _score_curves(metric: str, runs: dict[str, RunFiles]) -> list[Curve]:
    """A metric of the weights, and that of their average."""
    drawn = []
    for number, (name, run) in enumerate(runs.items()):
        colour = number if name else None
        average = OF_AVERAGE + metric
        for split in run.scored_sets:
            scored = f"{name} {split}".strip()
            lines = run.lines(split)
            drawn.append(_curve(scored, lines, metric, colour=colour))
            drawn.append(_curve(f"{scored} (ema)", lines, average, True, colour))
    return drawn


def title(name: str) -> str:
    """A metric or a figure as a heading."""
    text = TITLES.get(name, name.replace("_", " "))
    return text[:1].upper() + text[1:]


def _curve(
    name: str, lines: Sequence[Line], key: str, dashed: bool = False, colour: int | None = None
) -> Curve:
    """A value of lines of metrics.jsonl over steps."""
    steps = [line["step"] for line in lines]
    return Curve(name, steps, [line.get(key) for line in lines], dashed=dashed, colour=colour)


def _learning_rates(run: RunFiles) -> list[Curve]:
    """A curve for each group of parameters, if there are several."""
    lines = run.intervals
    rates = [line.get("lrs") or () for line in lines]
    groups = max(map(len, rates), default=0)
    if groups < 2 or groups > MOST_CURVES:
        return [_curve("learning rate", lines, "lr")]
    steps = [line["step"] for line in lines]
    return [Curve(f"group {at}", steps, _values_at(rates, at)) for at in range(groups)]


def _values_at(lists: Sequence[Sequence[Any]], place: int) -> list[Any]:
    """One value of each list; None where it is shorter."""
    return [values[place] if place < len(values) else None for values in lists]


def _plots_over_time(run: RunFiles, events: Sequence[Event]) -> list[Plot]:
    """Throughput and hardware over time, pauses between two starts included.

    Time begins with the first line: before it lies the start-up, of which there are no numbers.
    """
    lines = run.intervals
    if not lines:
        return []
    start = lines[0]["time"]
    span = lines[-1]["time"] - start
    unit = next((unit for unit, seconds in UNITS.items() if span >= 2 * seconds), "seconds")
    seconds = UNITS[unit]
    x = [(line["time"] - start) / seconds for line in lines]
    marks = []
    for event in events:
        if event.text != START and event.time >= start:
            marks.append(Mark((event.time - start) / seconds, event.text))
    gaps = [mark.x for mark in marks if mark.text == RESUMED]
    clock = Axis(f"{unit} since the first line of metrics.jsonl", whole=True)
    speed = next((name for name in SPEEDS if name in lines[-1]), SPEEDS[-1])
    label = speed.replace("_per_second", "/s")
    throughput = Curve(label, x, [line.get(speed) for line in lines])
    drawn = {"Throughput": (Axis(label, whole=True), [throughput])}
    for name, label in FIGURES.items():
        values = [(line.get("figures") or {}).get(name) or () for line in lines]
        heading = title(label.partition(",")[0])
        drawn[heading] = (Axis(label, whole=True), _figure_curves(name, x, values))
    plots = []
    for heading, (axis, its_curves) in drawn.items():
        plots.append(Plot(heading, curves(its_curves, clock, axis, marks, gaps)))
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
