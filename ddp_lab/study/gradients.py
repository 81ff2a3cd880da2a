"""`study=gradients`: compares the gradients of N processes with those of one, for any model and
options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import numpy as np

from ddp_lab.study.provenance import provenance
from ddp_lab.study.request import Request, bind_settings, key_of, resolve_run, this_hardware
from ddp_lab.study.trials import Outcome, Trial, run_or_load, trial_session
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.options.key import AUTO, key
from ddp_train.options.schema import Config
from ddp_train.resilience.preemption import UNSAVED
from ddp_train.telemetry.pages.report import Plot, Report
from ddp_train.telemetry.pages.tables import Table
from ddp_train.text import counted

GRADIENT_PROBE = "ddp_lab.study.gradient_probe.GradientProbe"
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "tf32": 1e-2, "fp16": 5e-2, "bf16": 1e-1}
"""Largest relative difference attributed to rounding when sums have another order: a dozen times
the precision of 16-bit numbers, thousands of times that of others. fp64 is decisive: a missing
exchange, or samples that are counted twice, change gradients by 1 / (number of processes) or
more."""
LEAST_SCALE = 1e-3
"""Fraction of the largest gradient of all. Smaller gradients are compared with this: they are
themselves rounding."""
TINY_BATCH = 16
"""Samples below which batch norm loses accuracy (arXiv:1803.08494, figure 1)."""
SHOWN = 8
"""Most parameter names in a table."""


@dataclass
class GradientsConfig:
    """conf/study/gradients.yaml."""

    kind: str = key("gradients", "the kind of study", choices=("gradients",))
    processes: Union[int, str] = key(
        "auto",
        "number of processes to compare with one; auto: one per GPU, or 3 without GPUs",
        at_least=2,
        **AUTO,
    )


@dataclass(frozen=True)
class Difference:
    """Largest difference in the gradient of one parameter; relative: to the scale that `compare`
    chooses."""

    name: str
    absolute: float
    relative: float


def compare(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[Difference]:
    """Differences of the parameters that both have, the largest relative one first.

    Relative to the largest element of the parameter's gradient in `one`, or to LEAST_SCALE of the
    largest of all.
    """
    least = LEAST_SCALE * max((float(abs(values).max()) for values in one.values()), default=0.0)
    found = []
    for name in one.keys() & other.keys():
        before = one[name].astype(np.float64)
        after = other[name].astype(np.float64)
        absolute = float(abs(before - after).max())
        scale = max(float(abs(before).max()), least)
        found.append(Difference(name, absolute, absolute / scale if scale else absolute))
    # Differences that are not finite come first.
    return sorted(found, key=lambda d: (-np.nan_to_num(d.relative, nan=np.inf), d.name))


@dataclass(frozen=True)
class Comparison:
    """The runs of one and of several processes in one precision."""

    precision: str
    tolerance: float
    one: Outcome | None
    many: Outcome | None

    @property
    def failed(self) -> str:
        """Why the gradients cannot be compared; empty if they can."""
        for name, outcome in (("one process", self.one), ("several processes", self.many)):
            if outcome is None or not outcome.completed:
                return f"{name}: {outcome.reason if outcome else 'not run'}"
        return ""


def study(request: Request) -> tuple[Report, int]:
    """Runs the comparisons. Returns the report and the exit code. Raises ConfigError before
    anything runs."""
    config: GradientsConfig = bind_settings(GradientsConfig, request.settings)
    machine = this_hardware()
    processes = int(config.processes) if config.processes != "auto" else machine.gpus or 3
    run = resolve_run(
        request.program, [*request.overrides, f"launch.nproc_per_node={processes}"], machine
    )
    base = run.config
    problems = run.problems
    if not base.strategy.has_process_group:
        problems.append(
            f"strategy={base.strategy.name}: runs in one process; study=gradients needs"
            " strategy=ddp"
        )
    wanted = list(dict.fromkeys(["fp64", str(base.tuning.precision)]))
    if not problems:
        trials = {(p, n): _trial(request, base, p, n) for p in wanted for n in (1, processes)}
    else:
        trials = {}
    for trial in trials.values():
        problems += resolve_run(request.program, trial.overrides, machine).problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    with trial_session(request):
        outcomes = {
            (p, n): run_or_load(
                request,
                trial,
                f"{p}, {counted(n, 'process')}",
                lambda outcome: f"took {outcome.seconds:.0f} s",
            )
            for (p, n), trial in trials.items()
        }
    found = [
        Comparison(p, _tolerance(base, p), outcomes[p, 1], outcomes[p, processes]) for p in wanted
    ]
    report, agree = _report(request, base, processes, found)
    return report, (
        request.stop.exit_code(UNSAVED)
        if request.stop.received
        else 0
        if agree
        else LaunchError.exit_code
    )


def _trial(request: Request, base: Config, precision: str, processes: int) -> Trial:
    """One step on one sample less than a global batch, so that micro-batches have different
    sizes."""
    alone = processes == 1
    ours = ["schedule", *(["strategy", "train.accumulation_steps"] * alone)]
    overrides = [override for override in request.overrides if not _is_of(override, ours)]
    overrides += [
        f"hooks=[{GRADIENT_PROBE}]",
        "train.max_steps=1",
        "schedule=constant",
        f"launch.nproc_per_node={processes}",
    ]
    overrides += ["strategy=single"] if alone else []
    if hasattr(base.data, "limit") and base.data.limit is None:
        overrides.append(f"data.limit={max(base.train.global_batch_size - 1, 1)}")
    if precision == "fp64":
        overrides.append("tuning.precision=fp64")
        if not alone and base.strategy.comm_hook != "none":
            overrides.append("strategy.comm_hook=none")
    return Trial(overrides, request.run_dir / "trials" / precision / f"{processes}_processes")


def _is_of(override: str, keys: Sequence[str]) -> bool:
    return any(key_of(override) == name or key_of(override).startswith(name + ".") for name in keys)


def _tolerance(base: Config, precision: str) -> float:
    if precision == "fp32" and base.tuning.tf32 and base.device == "cuda":
        own = "tf32"
    else:
        own = precision
    hook = getattr(base.strategy, "comm_hook", "none") if precision != "fp64" else "none"
    return max(TOLERANCES[own], TOLERANCES.get(hook, 0.0))


# --- the report -----------------------------------------------------------------------------------


def _report(
    request: Request, base: Config, processes: int, found: Sequence[Comparison]
) -> tuple[Report, bool]:
    """The report, and whether all gradients agree."""
    summary: list[list[Any]] = []
    details: list[list[Any]] = []
    agree = True
    pitfalls: dict[str, list[str]] = {}
    for comparison in found:
        allowed = f"{comparison.tolerance:.0e}"
        for outcome in (comparison.one, comparison.many):
            if outcome and outcome.completed:
                for what, names in _pitfalls(
                    outcome.run_dir, processes if outcome is comparison.many else 1
                ).items():
                    pitfalls[what] = list(dict.fromkeys([*pitfalls.get(what, []), *names]))
        if comparison.failed:
            agree = False
            summary.append([comparison.precision, None, None, None, allowed, comparison.failed])
            continue
        assert comparison.one and comparison.many
        differences = compare(
            _gradients(comparison.one.run_dir), _gradients(comparison.many.run_dir)
        )
        ranks_differ = _facts(comparison.many.run_dir)["ranks_differ"]
        worst = differences[0] if differences else Difference("", 0.0, 0.0)
        fits = worst.relative <= comparison.tolerance and not ranks_differ
        agree = agree and fits
        result = "agree" if fits else _explain(base, ranks_differ, pitfalls)
        summary.append(
            [comparison.precision, len(differences), worst.name, worst.relative, allowed, result]
        )
        details += [
            [comparison.precision, d.name, d.absolute, d.relative] for d in differences[:SHOWN]
        ]
    columns = ["precision", "parameters", "largest difference in", "relative", "allowed", "verdict"]
    sections: list[Table | Plot] = [
        Table(f"Gradients of {processes} processes compared with one", columns, summary),
        Table(
            "Largest differences",
            ["precision", "parameter", "absolute", "relative"],
            details,
            "Relative to the largest gradient of the parameter, or to a thousandth of the largest"
            " gradient of all.",
        ),
    ]
    if pitfalls:
        rows = [
            [what, len(names), ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")]
            for what, names in pitfalls.items()
        ]
        sections.append(
            Table("Possible problems of this model", ["problem", "count", "names"], rows)
        )
    return (
        Report(
            "Self-test of gradients",
            "The gradients that the optimizer gets in the first step, of one process without DDP"
            f" and of {processes} processes with the options of this command: same weights, same"
            " samples (one less than a global batch, so that micro-batches have different sizes),"
            " dropout off.",
            sections,
            provenance(),
            [request.command],
        ),
        agree,
    )


def _explain(base: Config, ranks_differ: Sequence[str], pitfalls: dict[str, list[str]]) -> str:
    if ranks_differ:
        verdict = (
            f"differ: the ranks have different gradients for {ranks_differ[0]} and"
            f" {len(ranks_differ) - 1} more"
        )
        if any(what.startswith("no gradient") for what in pitfalls):
            return f"{verdict}; {_UNUSED}"
        return verdict
    if any(what.startswith("batch norm") for what in pitfalls) and not getattr(
        base.strategy, "sync_bn", False
    ):
        return (
            "differ: batch norm uses each process's own samples; set strategy.sync_bn=true, or use"
            " another norm"
        )
    return (
        "differ by more than rounding: see the parameters below; look for state that differs"
        " between processes"
    )


_UNUSED = "DDP needs strategy.find_unused_parameters=true for such parameters"


def _pitfalls(run_dir: Path, processes: int) -> dict[str, list[str]]:
    known = _facts(run_dir)
    found = {}
    if known["unused"]:
        found[f"no gradient in this step; {_UNUSED}"] = known["unused"]
    small = [name for name, samples in known["batch_norm"].items() if samples < TINY_BATCH]
    if known["batch_norm"] and processes > 1:
        found["batch norm: uses only the samples of its process unless strategy.sync_bn=true"] = (
            list(known["batch_norm"])
        )
    if small:
        least = min(known["batch_norm"].values())
        found[
            f"batch norm over small batches, {least} samples: use larger ones,"
            " strategy.sync_bn=true or group norm"
        ] = small
    if known["bias_before_norm"]:
        found["bias without effect before a norm layer: use bias=False"] = known["bias_before_norm"]
    if known["dropout"]:
        found["dropout, off in this test: its random numbers depend on the process"] = known[
            "dropout"
        ]
    if known["unseen"]:
        found["not checked"] = known["unseen"]
    return found


def _facts(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "probe" / "model.json").read_text())


def _gradients(run_dir: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(run_dir / "probe" / "gradients.safetensors")
