"""The variants of a study: expands its file into the overrides of every run, and checks them before
the first run."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Union

from ddp_lab.study.request import Request, bind_settings, key_of, raise_problems
from ddp_lab.study.results import METRICS
from ddp_train.config.metrics import study_problems
from ddp_train.options.key import AUTO, key
from ddp_train.options.schema import Config
from ddp_train.text import did_you_mean, did_you_mean_glob

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
        "epoch_seconds",
        "the metric that variants are compared by: " + ", ".join(METRICS) + "; any SET.NAME of a"
        " score (validation.f1), or the name of a number that your code logs (vae/kl)",
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
    """One variant."""

    name: str
    overrides: list[str]
    """Overrides of its runs, without seed and run_dir."""
    against: str = ""
    """The variant it is compared with."""
    part: str = "variants"
    """variants, ladder or leave_one_out."""
    reason: str = ""
    """Why it is not run; empty if it is."""
    adds: list[str] = field(default_factory=list)
    """The overrides by which it differs from the others in its part."""
    group: str = ""
    """Its name without the grid."""
    values: dict[str, str] = field(default_factory=dict)
    """Its keys and values from the grid."""

    @property
    def folder(self) -> str:
        """Its name without characters that have a meaning for Hydra or a shell."""
        return re.sub(r"[^\w.-]+", "_", self.name)


@dataclass(frozen=True)
class Study:
    """A checked study."""

    config: VariantsConfig
    variants: list[Variant]
    baseline: str
    first: Config
    """The resolved config of the baseline."""
    data: str = ""
    """Name of the chosen entry of `either`."""

    def named(self, name: str) -> Variant:
        """The variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)


def plan(request: Request) -> Study:
    """Expand and check a study. Raises ConfigError with every problem, before anything runs."""
    config: VariantsConfig = bind_settings(VariantsConfig, request.settings)
    raise_problems(_check_shape(config))
    no_gpu = not request.hardware.gpus or "device=cpu" in request.overrides
    expanded = expand(config, no_gpu)
    chosen = [variant for variant in expanded if _is_chosen(variant, config.only)]
    raise_problems(_check_names(config, expanded, chosen) + _check_overrides(request, chosen))
    runnable = [variant for variant in chosen if not variant.reason]
    baseline = config.baseline or (runnable or chosen)[0].name
    return _checked_study(request, config, chosen, baseline)


def _is_chosen(variant: Variant, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(variant.name, one) for one in patterns)


def _check_overrides(request: Request, variants: list[Variant]) -> list[str]:
    """Problems with overrides of the command line that the study sets for each variant."""
    varied = {key_of(override) for variant in variants for override in variant.overrides}
    return [
        f"{override}: study={request.name} sets {key_of(override)} for each variant; leave out"
        f" {key_of(override)}, or change study.variants"
        for override in request.overrides
        if key_of(override) in varied
    ]


def _checked_study(
    request: Request, config: VariantsConfig, variants: list[Variant], baseline: str
) -> Study:
    """Resolve every variant. Raises ConfigError if one is invalid, or the baseline cannot run."""
    first_variant = next(variant for variant in variants if variant.name == baseline)
    data, shared = _choose_either(request, config, first_variant)
    rung = first_variant.overrides
    below = baseline
    first = Config()
    problems: list[str] = []
    checked = []
    for variant in variants:
        own = variant.overrides
        against = variant.against or baseline
        is_rung = variant.part == "ladder"
        if is_rung:
            own = merged(rung, own)
            against = below
        overrides = merged(config.common, shared, own, request.overrides)
        run = request.resolve(overrides)
        invalid = run.invalid
        reason = variant.reason
        alone = merged(config.common, shared, own)
        if invalid and variant.name != baseline and not request.resolve(alone).invalid:
            reason = reason or f"cannot run with the command: {'; '.join(invalid)}"
            invalid = []
        if not invalid and not reason:
            unsuited = run.unsuited + _single_host_only(run.config)
            if variant.name == baseline:
                first = run.config
                invalid = unsuited
            if unsuited:
                reason = f"cannot run here: {'; '.join(unsuited)}"
        problems += [f"{problem} (study.variants: {variant.name})" for problem in invalid]
        checked.append(replace(variant, overrides=overrides, reason=reason, against=against))
        if is_rung and not reason:
            below = variant.name
            rung = own
    problems += [str(problem) for problem in study_problems(first, config.metric)]
    raise_problems(problems)
    return Study(config, checked, baseline, first, data)


def expand(config: VariantsConfig, no_gpu: bool) -> list[Variant]:
    """The variants of the grid, of the ladder and of leave_one_out, in this order.

    One that is not run has the reason.

    no_gpu: this host has none.
    """
    variants = _grid_variants(config)
    reference = next((one.overrides for one in variants if one.name == config.reference), [])
    for name, overrides in config.ladder.items():
        variants.append(Variant(name, overrides, part="ladder", adds=overrides))
    for name, overrides in config.leave_one_out.items():
        remaining = merged(reference, overrides)
        variants.append(Variant(name, remaining, config.reference, "leave_one_out", adds=overrides))
    return [replace(variant, reason=_why_not_run(config, variant, no_gpu)) for variant in variants]


def _grid_variants(config: VariantsConfig) -> list[Variant]:
    """Every entry of `variants` with every combination of the values of the grid."""
    keys = [line.partition("=")[0] for line in config.grid]
    choices = [line.partition("=")[2].split(",") for line in config.grid]
    variants = []
    for group, overrides in (config.variants or {"": []}).items():
        for combination in itertools.product(*choices):
            values = dict(zip(keys, combination, strict=True))
            names = [group] if group else []
            names += [f"{key.rpartition('.')[2]}={value}" for key, value in values.items()]
            name = ", ".join(names)
            own = [*overrides, *(f"{key}={value}" for key, value in values.items())]
            against = str(config.against.get(name, ""))
            variants.append(Variant(name, own, against, adds=own, group=group, values=values))
    return variants


def merged(*parts: list[str]) -> list[str]:
    """Overrides where a later one of the same key replaces the earlier."""
    return list({key_of(override): override for part in parts for override in part}.values())


def _check_shape(config: VariantsConfig) -> list[str]:
    """Problems with the types of the values in the file."""
    problems = []
    for name in ("either", "variants", "ladder", "leave_one_out"):
        for variant, overrides in getattr(config, name).items():
            if not _is_list_of_overrides(overrides):
                problems.append(
                    f"study.{name}.{variant}={overrides}: must be a list of overrides,"
                    " [key=value,...]"
                )
    for line in config.grid:
        if not re.match(r"[\w.]+=.", line):
            problems.append(f"study.grid: {line}: must be key=a,b,...")
    if not problems and not config.variants and not config.grid:
        problems.append(
            "study.variants={}: needs at least one variant; add 'study.variants.NAME=[key=value]'"
        )
    return problems


def _is_list_of_overrides(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and "=" in one for one in value)


def _check_names(
    config: VariantsConfig, expanded: list[Variant], chosen: list[Variant]
) -> list[str]:
    """Problems with names of variants: unknown, left out by study.only, or used twice."""
    names = [variant.name for variant in expanded]
    kept = [variant.name for variant in chosen]
    problems = []
    mentioned = {
        "baseline": [config.baseline] if config.baseline else [],
        "reference": [config.reference] if config.reference else [],
        "needs_gpu": config.needs_gpu,
        "not_run": list(config.not_run),
        "against": [*config.against, *config.against.values()],
        "agreement": [*config.agreement, *config.agreement.values()],
    }
    for key_name, mentions in mentioned.items():
        for name in mentions:
            if name not in names:
                listed = f"{', '.join(map(repr, names))}{did_you_mean(str(name), names)}"
                problems.append(
                    f"study.{key_name}={name}: no variant of that name; there are {listed}"
                )
    for pattern in config.only:
        if not fnmatch.filter(names, pattern):
            guess = did_you_mean_glob(pattern, names)
            problems.append(f"study.only=[{pattern}]: no variant of that name{guess}")
    if config.baseline in names and config.baseline not in kept:
        problems.append(f"study.only: leaves out the baseline; add {config.baseline}")
    left_out = {
        variant.against: variant.name
        for variant in chosen
        if variant.part == "variants" and variant.against in names and variant.against not in kept
    }
    for base, name in left_out.items():
        problems.append(f"study.only: leaves out {base!r}, the baseline of {name!r}; add {base!r}")
    for folder, count in sorted(Counter(variant.folder for variant in expanded).items()):
        if count > 1:
            problems.append(f"study.variants: {folder}: two variants have this name; rename one")
    return problems


def _choose_either(
    request: Request, config: VariantsConfig, variant: Variant
) -> tuple[str, list[str]]:
    """The first entry of `either` with which this variant can run here, else the last: its name and
    overrides."""
    name = ""
    overrides = []
    for name, overrides in config.either.items():  # noqa: B007  the last one stays
        all_overrides = merged(config.common, overrides, variant.overrides, request.overrides)
        if not request.resolve(all_overrides).problems:
            break
    return name, overrides


def _why_not_run(config: VariantsConfig, variant: Variant, no_gpu: bool) -> str:
    """Why a variant is not run whatever its config; empty if it is."""
    if variant.name in config.not_run:
        return str(config.not_run[variant.name])
    if no_gpu and (variant.name in config.needs_gpu or "device=cuda" in variant.overrides):
        return NEEDS_GPU
    return ""


def _single_host_only(config: Config) -> list[str]:
    """Problems of a config that only a study has: it runs on one host."""
    if config.launch.nnodes == 1:
        return []
    return [
        f"launch.nnodes={config.launch.nnodes}: a study runs on one host; leave out launch.nnodes"
    ]
