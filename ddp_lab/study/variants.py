"""The variants of a study: expands its file into the overrides of every run, and checks them before
the first run."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from ddp_lab.study.request import Request, bind_settings, key_of, resolve_run, this_hardware
from ddp_lab.study.results import METRICS
from ddp_train.errors import ConfigError
from ddp_train.hardware import Hardware
from ddp_train.options.key import AUTO, key
from ddp_train.options.schema import Config
from ddp_train.text import did_you_mean

LAYOUTS = ("comparison", "runs", "growth")
NEEDS_GPU = "needs a GPU"


@dataclass
class VariantsConfig:
    """The keys of a study of named variants, in conf/study/*.yaml."""

    kind: str = key("variants", "the kind of study", choices=("variants",))
    title: str = key("", "title of the report", may_be_empty=True)
    about: str = key("", "text above the tables: what is compared", may_be_empty=True)
    repeats: int = key(3, "runs of each variant", at_least=1)
    processes: Union[int, str] = key(
        "auto",
        "processes of variants with several; auto: one per GPU, or 2 without GPUs",
        at_least=1,
        **AUTO,
    )
    vary_seed: bool = key(False, "use another seed in each repeat, the same ones for all variants")
    metric: str = key(
        "epoch_seconds", "the metric that variants are compared by", choices=tuple(METRICS)
    )
    layout: str = key("comparison", "layout of the report", choices=LAYOUTS)
    common: list[str] = key([], "overrides for all runs")
    either: dict[str, Any] = key(
        {}, "name: overrides; the first set that can run here applies to all runs"
    )
    variants: dict[str, Any] = key({}, "name: its overrides")
    grid: list[str] = key(
        [], "key=a,b,...: run every variant with every combination of these values"
    )
    baseline: str = key("", "the variant that the others are compared with", may_be_empty=True)
    against: dict[str, Any] = key(
        {}, "variant: another variant to compare it with instead of the baseline"
    )
    ladder: dict[str, Any] = key(
        {}, "name: overrides added to the baseline and to the entries above"
    )
    leave_one_out: dict[str, Any] = key(
        {}, "name: overrides that remove one tip from the reference"
    )
    reference: str = key("", "the variant that leave_one_out starts from", may_be_empty=True)
    needs_gpu: list[str] = key(
        [], "variants that are not run without a GPU; the report keeps their rows"
    )
    not_run: dict[str, Any] = key({}, "name: why it is not run; the report keeps its row")
    only: list[str] = key([], "names or patterns (with *) of the variants to run; empty: all")
    agreement: dict[str, Any] = key(
        {}, "variant: another variant that must have the same losses and weights"
    )
    published: dict[str, Any] = key(
        {}, "a published table to show in the report: title, note, columns, rows"
    )


@dataclass(frozen=True)
class Variant:
    """One variant. overrides: of its runs, without seed and run_dir. against: the variant it is
    compared with.

    part: variants, ladder or leave_one_out. adds: the overrides by which it differs in that part.
    reason: why it is not run, "" if it is. group: its name without the grid. values: its keys and
    values from the grid.
    """

    name: str
    overrides: list[str]
    against: str
    part: str = "variants"
    reason: str = ""
    adds: list[str] = field(default_factory=list)
    group: str = ""
    values: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Its name without characters that have a meaning for Hydra or a shell."""
        return re.sub(r"[^\w.-]+", "_", self.name)


@dataclass(frozen=True)
class Study:
    """A checked study. first: the resolved config of the baseline. data: the chosen entry of
    `either`."""

    config: VariantsConfig
    variants: list[Variant]
    baseline: str
    machine: Hardware
    first: Config
    data: str = ""

    def named(self, name: str) -> Variant:
        """The variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)


def plan(request: Request) -> Study:
    """Expand and check a study. Raises ConfigError with every problem, before anything runs."""
    config: VariantsConfig = bind_settings(VariantsConfig, request.settings)
    problems = _check_shape(config)
    if problems:
        raise ConfigError(problems)
    machine = this_hardware()
    no_gpu = not machine.gpus or "device=cpu" in request.overrides
    given = expand(config, no_gpu)
    kept = [variant for variant in given if _is_chosen(variant, config.only)]
    problems = _check_names(config, given, kept) + _check_overrides(request, kept)
    if problems:
        raise ConfigError(problems)
    runnable = [variant for variant in kept if not variant.reason]
    baseline = config.baseline or (runnable or kept)[0].name
    return _checked_study(request, config, kept, baseline, machine)


def _is_chosen(variant: Variant, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(variant.name, one) for one in patterns)


def _check_overrides(request: Request, variants: list[Variant]) -> list[str]:
    """Problems with overrides of the command line that the study sets for each variant."""
    varied = {key_of(override) for variant in variants for override in variant.overrides}
    return [
        f"{override}: study={request.name} sets {key_of(override)} for each variant; leave it out,"
        " or change study.variants"
        for override in request.overrides
        if key_of(override) in varied
    ]


def _checked_study(
    request: Request,
    config: VariantsConfig,
    variants: list[Variant],
    baseline: str,
    machine: Hardware,
) -> Study:
    """Resolve every variant. Raises ConfigError if one is invalid, or the baseline cannot run."""
    first_variant = next(variant for variant in variants if variant.name == baseline)
    data, shared = _choose_either(request, config, first_variant, machine)
    rung = first_variant.overrides
    below = baseline
    first = Config()
    problems: list[str] = []
    checked = []
    for variant in variants:
        is_rung = variant.part == "ladder"
        own = merged(rung, variant.overrides) if is_rung else variant.overrides
        against = below if is_rung else variant.against or baseline
        overrides = merged(config.common, shared, own, request.overrides)
        run = resolve_run(request.program, overrides, machine)
        invalid = run.invalid
        reason = variant.reason
        if not invalid and not reason:
            unsuited = run.unsuited + _single_host_only(run.config)
            if variant.name == baseline:
                first = run.config
                invalid = unsuited
            if unsuited:
                reason = f"cannot run here: {'; '.join(unsuited)}"
        problems += [f"{problem} (study.variants: {variant.name})" for problem in invalid]
        checked.append(
            dataclasses.replace(variant, overrides=overrides, reason=reason, against=against)
        )
        if is_rung and not reason:
            below = variant.name
            rung = own
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return Study(config, checked, baseline, machine, first, data)


def expand(config: VariantsConfig, no_gpu: bool) -> list[Variant]:
    """All variants of the three parts, with the overrides that each adds to all runs, the ladder or
    the reference."""
    grid = [(line.partition("=")[0], line.partition("=")[2].split(",")) for line in config.grid]
    found: list[Variant] = []
    for name, overrides in (config.variants or {"": []}).items():
        for values in itertools.product(*(values for _, values in grid)):
            chosen = dict(zip((key for key, _ in grid), values, strict=True))
            full = ", ".join(
                filter(
                    None, [name, *(f"{key.rpartition('.')[2]}={v}" for key, v in chosen.items())]
                )
            )
            own = [*overrides, *(f"{key}={value}" for key, value in chosen.items())]
            found.append(
                Variant(
                    full,
                    own,
                    str(config.against.get(full, "")),
                    adds=own,
                    group=name,
                    values=chosen,
                )
            )
    start = next((variant.overrides for variant in found if variant.name == config.reference), [])
    for part, entries, base in (
        ("ladder", config.ladder, []),
        ("leave_one_out", config.leave_one_out, start),
    ):
        for name, overrides in entries.items():
            against = config.reference if part == "leave_one_out" else ""
            found.append(Variant(name, merged(base, overrides), against, part, adds=overrides))
    return [
        dataclasses.replace(variant, reason=_why_not_run(config, variant, no_gpu))
        for variant in found
    ]


def merged(*parts: list[str]) -> list[str]:
    """Overrides where a later one of the same key replaces the earlier."""
    return list({key_of(override): override for part in parts for override in part}.values())


def _check_shape(config: VariantsConfig) -> list[str]:
    """Problems with the types of the values in the file."""
    problems = []
    for name in ("either", "variants", "ladder", "leave_one_out"):
        for variant, overrides in getattr(config, name).items():
            if not isinstance(overrides, list) or not all(
                isinstance(override, str) and "=" in override for override in overrides
            ):
                problems.append(
                    f"study.{name}.{variant}={overrides}: must be a list of overrides,"
                    " [key=value,...]"
                )
    problems += [
        f"study.grid: {line}: must be key=a,b,..."
        for line in config.grid
        if not re.match(r"[\w.]+=.", line)
    ]
    return problems or (
        []
        if config.variants or config.grid
        else [
            "study.variants={}: needs at least one variant; add study.variants.NAME=[key=value,...]"
        ]
    )


def _check_names(config: VariantsConfig, given: list[Variant], kept: list[Variant]) -> list[str]:
    """Problems with names of variants: unknown, left out by study.only, or used twice."""
    names = [variant.name for variant in given]
    problems = []
    mentioned = {
        "baseline": [config.baseline] if config.baseline else [],
        "reference": [config.reference] if config.reference else [],
        "needs_gpu": config.needs_gpu,
        "not_run": list(config.not_run),
        "against": [*config.against, *config.against.values()],
        "agreement": [*config.agreement, *config.agreement.values()],
    }
    for name, mentions in mentioned.items():
        unknown = [one for one in mentions if one not in names]
        problems += [
            f"study.{name}={one}: no variant of that name{did_you_mean(str(one), names)}"
            for one in unknown
        ]
    for pattern in config.only:
        if not fnmatch.filter(names, pattern):
            problems.append(
                f"study.only=[{pattern}]: no variant of that name{did_you_mean(pattern, names)}"
            )
    if config.baseline in names and not any(variant.name == config.baseline for variant in kept):
        problems.append(f"study.only: leaves out the baseline; add {config.baseline}")
    there = {variant.name for variant in kept}
    lost = {
        v.against: v.name
        for v in kept
        if v.part == "variants" and v.against in names and v.against not in there
    }
    problems += [
        f"study.only: leaves out {one}, the baseline of {name}; add it"
        for one, name in lost.items()
    ]
    folders = [variant.folder for variant in given]
    doubled = sorted({name for name in folders if folders.count(name) > 1})
    return problems + [
        f"study.variants: {name}: two variants have this name; rename one" for name in doubled
    ]


def _choose_either(
    request: Request, config: VariantsConfig, variant: Variant, machine: Hardware
) -> tuple[str, list[str]]:
    """The first entry of `either` with which this variant can run here, else the last: its name and
    overrides."""
    name = ""
    overrides = []
    for name, overrides in config.either.items():  # noqa: B007  the last one stays
        merged_overrides = merged(config.common, overrides, variant.overrides, request.overrides)
        if not resolve_run(request.program, merged_overrides, machine).problems:
            break
    return name, overrides


def _why_not_run(config: VariantsConfig, variant: Variant, no_gpu: bool) -> str:
    """Why a variant is not run whatever its config, or ""."""
    wants_gpu = variant.name in config.needs_gpu or "device=cuda" in variant.overrides
    return str(config.not_run.get(variant.name, NEEDS_GPU if wants_gpu and no_gpu else ""))


def _single_host_only(config: Config) -> list[str]:
    """Problems of a config that only a study has: it runs on one host."""
    if config.launch.nnodes == 1:
        return []
    return [
        f"launch.nnodes={config.launch.nnodes}: a study runs on one host, and not on several; leave"
        " it out"
    ]


def trials_folder(run_dir: Path, variant: Variant) -> Path:
    """The folder with the runs of a variant, numbered."""
    return run_dir / "trials" / variant.folder
