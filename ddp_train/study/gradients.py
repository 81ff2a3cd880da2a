"""`study=gradients`: are the gradients of N processes those of one? The self-test for one's own model and options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import numpy as np

from ddp_train.config.hardware import detect_hardware
from ddp_train.config.schema import Config, key
from ddp_train.distributed.environment import visible_devices
from ddp_train.errors import ConfigError, LaunchError
from ddp_train.resilience.preemption import UNSAVED
from ddp_train.study.provenance import provenance
from ddp_train.study.report import Plot, Report, Table
from ddp_train.study.request import Request, bind_settings, key_of
from ddp_train.study.scaling import resolved
from ddp_train.study.trials import Outcome, Trial, run_or_load, trial_session
from ddp_train.text import counted

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "tf32": 1e-2, "fp16": 5e-2, "bf16": 1e-1}
"""Largest difference, relative, that rounding explains where sums have another order: a dozen times the precision of
16-bit numbers, thousands of times that of others. fp64 is the judge: an exchange left out, or samples that are counted
twice, change gradients by one part in the number of processes or more."""
LEAST_SCALE = 1e-3
"""Of the largest gradient of all: smaller gradients are measured against this, for their own size is rounding."""
TINY_BATCH = 16
"""Samples: batch norm is known to lose accuracy below (arXiv:1803.08494, figure 1)."""
SHOWN = 8
"""Parameters by name in a table."""


@dataclass
class GradientsConfig:
    """conf/study/gradients.yaml."""

    kind: str = key("gradients", "what makes this study", choices=("gradients",))
    processes: Union[int, str] = key(
        "auto", "that are compared with one; auto: one per GPU, 3 without", at_least=2, overrides=("auto",)
    )


@dataclass(frozen=True)
class Difference:
    """Of the gradient of one parameter, largest element: absolute, and relative to what `compare` says."""

    name: str
    absolute: float
    relative: float


def compare(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[Difference]:
    """The parameters that both have, the largest relative difference first.

    Relative to the largest element of the parameter's gradient in `one`, or to LEAST_SCALE of the largest of all.
    """
    least = LEAST_SCALE * max((float(abs(values).max()) for values in one.values()), default=0.0)
    found = []
    for name in one.keys() & other.keys():
        before, after = one[name].astype(np.float64), other[name].astype(np.float64)
        absolute = float(abs(before - after).max())
        scale = max(float(abs(before).max()), least)
        found.append(Difference(name, absolute, absolute / scale if scale else absolute))
    # A number that is not finite is the largest difference of all.
    return sorted(found, key=lambda d: (-np.nan_to_num(d.relative, nan=np.inf), d.name))


@dataclass(frozen=True)
class Comparison:
    """One precision: a single process, and several."""

    precision: str
    tolerance: float
    one: Outcome | None
    many: Outcome | None

    @property
    def failed(self) -> str:
        """Why there is nothing to compare."""
        for who, outcome in (("one process", self.one), ("several", self.many)):
            if outcome is None or not outcome.completed:
                return f"{who}: {outcome.reason if outcome else 'not run'}"
        return ""


def study(request: Request) -> tuple[Report, int]:
    """Raises ConfigError before anything runs."""
    config: GradientsConfig = bind_settings(GradientsConfig, request.settings)
    machine = detect_hardware(visible_devices())
    processes = int(config.processes) if config.processes != "auto" else machine.gpus or 3
    asked, problems = resolved(request, [*request.overrides, f"launch.nproc_per_node={processes}"], machine)
    if asked.strategy.name != "ddp":
        problems.append(f"strategy={asked.strategy.name}: runs in one process; study=gradients needs strategy=ddp")
    wanted = list(dict.fromkeys(["fp64", str(asked.tuning.precision)]))
    trials = {(p, n): _trial(request, asked, p, n) for p in wanted for n in (1, processes)} if not problems else {}
    for trial in trials.values():
        problems += resolved(request, trial.overrides, machine)[1]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    with trial_session(request):
        outcomes = {
            (p, n): run_or_load(
                request, trial, f"{p}, {counted(n, 'process')}", lambda outcome: f"took {outcome.seconds:.0f} s"
            )
            for (p, n), trial in trials.items()
        }
    found = [Comparison(p, _tolerance(asked, p), outcomes[p, 1], outcomes[p, processes]) for p in wanted]
    report, agree = _report(request, asked, processes, found)
    return report, request.stop.exit_code(UNSAVED) if request.stop.received else 0 if agree else LaunchError.exit_code


def _trial(request: Request, asked: Config, precision: str, processes: int) -> Trial:
    """One step, on all but one of the samples of a global batch, so that processes have shares of different sizes."""
    alone = processes == 1
    ours = ["schedule", *(["strategy", "train.accumulation_steps", "train.reduction", "train.virtual_shards"] * alone)]
    overrides = [word for word in request.overrides if not _is_of(word, ours)]
    overrides += ["probe=gradients", "train.max_steps=1", "schedule=constant", f"launch.nproc_per_node={processes}"]
    overrides += ["strategy=single"] if alone else []
    if hasattr(asked.data, "limit") and asked.data.limit is None:
        overrides.append(f"data.limit={max(asked.train.global_batch_size - 1, 1)}")
    if precision == "fp64":
        overrides.append("tuning.precision=fp64")
        if not alone and asked.strategy.comm_hook != "none":
            overrides.append("strategy.comm_hook=none")
    return Trial(overrides, request.run_dir / "trials" / precision / f"{processes}_processes")


def _is_of(word: str, keys: Sequence[str]) -> bool:
    return any(key_of(word) == name or key_of(word).startswith(name + ".") for name in keys)


def _tolerance(asked: Config, precision: str) -> float:
    own = "tf32" if precision == "fp32" and asked.tuning.tf32 and asked.device == "cuda" else precision
    hook = getattr(asked.strategy, "comm_hook", "none") if precision != "fp64" else "none"
    return max(TOLERANCES[own], TOLERANCES.get(hook, 0.0))


# --- the report -------------------------------------------------------------------------------------------------------


def _report(request: Request, asked: Config, processes: int, found: Sequence[Comparison]) -> tuple[Report, bool]:
    """And whether all agree."""
    summary: list[list[Any]] = []
    details: list[list[Any]] = []
    agree = True
    pitfalls: dict[str, list[str]] = {}
    for comparison in found:
        allowed = f"{comparison.tolerance:.0e}"
        for outcome in (comparison.one, comparison.many):
            if outcome and outcome.completed:
                for what, names in _pitfalls(outcome.run_dir, processes if outcome is comparison.many else 1).items():
                    pitfalls[what] = list(dict.fromkeys([*pitfalls.get(what, []), *names]))
        if comparison.failed:
            agree = False
            summary.append([comparison.precision, None, None, None, allowed, comparison.failed])
            continue
        assert comparison.one and comparison.many
        differences = compare(_gradients(comparison.one.run_dir), _gradients(comparison.many.run_dir))
        ranks_differ = _facts(comparison.many.run_dir)["ranks_differ"]
        worst = differences[0] if differences else Difference("", 0.0, 0.0)
        fits = worst.relative <= comparison.tolerance and not ranks_differ
        agree = agree and fits
        said = "agree" if fits else _explain(asked, ranks_differ, pitfalls)
        summary.append([comparison.precision, len(differences), worst.name, worst.relative, allowed, said])
        details += [[comparison.precision, d.name, d.absolute, d.relative] for d in differences[:SHOWN]]
    columns = ["precision", "parameters", "largest difference in", "relative", "allowed", "verdict"]
    sections: list[Table | Plot] = [
        Table(f"Gradients of {processes} processes against those of one", columns, summary),
        Table("Largest differences", ["precision", "parameter", "absolute", "relative"], details,
              "Relative to the parameter's largest gradient, or to a thousandth of the largest of all."),
    ]  # fmt: skip
    if pitfalls:
        rows = [[what, len(names), ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")]
                for what, names in pitfalls.items()]  # fmt: skip
        sections.append(Table("What this model may stumble over", ["what", "how many", "names"], rows))
    return Report(
        "Self-test of gradients",
        "The gradients that the optimizer sees in the first step, of one process without DDP and of "
        f"{processes} with the options asked for: the same weights, the same samples, all but one of a global batch so "
        "that shares are uneven, dropout off.",
        sections,
        provenance(),
        [request.command],
    ), agree


def _explain(asked: Config, ranks_differ: Sequence[str], pitfalls: dict[str, list[str]]) -> str:
    if ranks_differ:
        verdict = f"differ: the ranks have different gradients for {ranks_differ[0]} and {len(ranks_differ) - 1} more"
        return f"{verdict}; {_UNUSED}" if any(what.startswith("no gradient") for what in pitfalls) else verdict
    if any(what.startswith("batch norm") for what in pitfalls) and not getattr(asked.strategy, "sync_bn", False):
        return "differ: batch norm sees each process's samples alone; strategy.sync_bn=true, or a norm without batches"
    return "differ by more than rounding: look at the parameters below, and for state that a process keeps by itself"


_UNUSED = "strategy.find_unused_parameters=true waits for parameters without a gradient"


def _pitfalls(run_dir: Path, processes: int) -> dict[str, list[str]]:
    known, found = _facts(run_dir), {}
    if known["unused"]:
        found[f"no gradient in this step: never used, or not this time; {_UNUSED}"] = known["unused"]
    small = [name for name, samples in known["batch_norm"].items() if samples < TINY_BATCH]
    if known["batch_norm"] and processes > 1:
        found["batch norm: its statistics are those of a process's own samples without strategy.sync_bn=true"] = list(
            known["batch_norm"]
        )
    if small:
        least = min(known["batch_norm"].values())
        found[f"batch norm over tiny batches, {least} samples: larger ones, strategy.sync_bn=true or group norm"] = (
            small
        )
    if known["bias_before_norm"]:
        found["bias that the normalisation after it subtracts again: bias=False"] = known["bias_before_norm"]
    if known["dropout"]:
        found["dropout, off in this test: its draws are keyed by process"] = known["dropout"]
    if known["unseen"]:
        found["not looked at"] = known["unseen"]
    return found


def _facts(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "probe" / "model.json").read_text())


def _gradients(run_dir: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(run_dir / "probe" / "gradients.safetensors")
