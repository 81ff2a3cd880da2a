"""The config of an earlier run: read once, for all who need something of it."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddp_train.checkpoints.layout import MANIFEST, places, read_manifest
from ddp_train.config.bind import custom_fields
from ddp_train.config.freeze import FILE, bind_frozen
from ddp_train.config.keys import kinds_of
from ddp_train.config.program import FOLDER, PRESETS, sets_a_run
from ddp_train.config.yaml_files import ambiguous, error_text, is_duplicate, load_yaml
from ddp_train.errors import ConfigError
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SECTIONS, Config
from ddp_train.text import shell_word

CONFIG_KEY = "config"
OF_A_RUN = "start from an earlier run's config, its folder or config.yaml; overrides apply on top"
OF_THE_HOST = (
    "device",
    "deterministic",
    "launch.nproc_per_node",
    "launch.threads_per_process",
    "launch.backend",
    "data.placement",
)
"""Keys, beside the switches, that are `auto` again in a later run if `auto` chose their values."""
WHOLE = {"model", "data", "optimizer", "train"}
"""Sections by which the config of a run is told from other files."""
OF_THE_RUN = ("mode", "run_dir", "trusted_modules")
"""Keys that are not taken over. The person who types decides whether code may be loaded:
SECURITY.md."""


@dataclass(frozen=True)
class EarlierRun:
    """A run that is being continued, used or repeated, by its frozen config."""

    values: dict[str, Any]
    """The frozen config, plain."""

    @classmethod
    def of(cls, path: Path) -> EarlierRun | None:
        """The run of a checkpoint, or of the newest checkpoint in a run directory.

        None if there is none whose manifest can be trusted.
        """
        for checkpoint in checkpoints_in(path):
            # A corrupt one is skipped here, and by the worker with a warning.
            with contextlib.suppress(OSError, ValueError):
                config = read_manifest(checkpoint).get("config")
                if config:
                    return cls(_without_spoilt_sections(config))
        return None

    @classmethod
    def of_file(cls, path: Path) -> EarlierRun:
        """The run whose folder or config.yaml `config=PATH` names. Raises ConfigError."""
        file = path
        if path.is_dir():
            file = path / FILE
        found = f"{CONFIG_KEY}={path}"
        try:
            text = file.read_text()
            values = load_yaml(text)
            # What `freeze` writes has its texts in quotes, but for inf and nan
            numbers = [one for one in ambiguous(text) if not isinstance(one.by_yaml, str)]
        except OSError as error:
            rule = f"{file} cannot be read ({error.strerror})"
            raise ConfigError([f"{found}: {rule}; name the {FILE} of a run"]) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            rule = f"{found}: is not plain YAML; name the {FILE} of a run"
            if isinstance(error, yaml.MarkedYAMLError) and is_duplicate(error):
                rule = f"{CONFIG_KEY}={error_text(error, str(file))}"
            raise ConfigError([rule]) from None
        ambiguities = [one for one in numbers if not one.is_settled(kinds_of(one.key))]
        if ambiguities:
            raise ConfigError([f"{CONFIG_KEY}={one.message(str(file))}" for one in ambiguities])
        if not isinstance(values, dict):
            values = {}
        _check_run(found, file, text, values.keys())
        return cls(values)

    def config(self) -> Config:
        """Its config, with the default of each key that cannot be read."""
        return bind_frozen(self.values)[0]

    def adopted(self) -> dict[str, Any]:
        """The model, task, data and further metrics, which an evaluation takes over."""
        names = ("model", "task", "data", "metrics")
        adopted = {name: copy.deepcopy(self.values[name]) for name in names if name in self.values}
        # Where samples are held and decoded depends on this hardware.
        for name in ("placement", "decode"):
            adopted.get("data", {}).pop(name, None)
        return adopted

    def ground(self) -> dict[str, Any]:
        """Its config as the ground of another run, which further overrides change.

        What belongs to the run itself is left out; what `auto` chose for its hardware is `auto`
        again.
        """
        values = copy.deepcopy(self.values)
        for name in OF_THE_RUN:
            values.pop(name, None)
        _restore_auto(values)
        _restore_ranges(values)
        for name, value in values.items():
            if isinstance(value, dict):
                values[name] = custom_fields(name, value)
        return values

    def ground_to_resume(self) -> dict[str, Any]:
        """The same for a run that continues from its own checkpoint, wherever it once began."""
        ground = self.ground()
        if isinstance(ground.get("checkpoint"), dict):
            ground["checkpoint"].pop("resume", None)
        return ground


def _check_run(found: str, file: Path, text: str, keys: Collection[str]) -> None:
    """Raise ConfigError for a file that is not the config of a run."""
    is_whole = WHOLE.issubset(keys)
    is_in_group = file.parent.name in {*OPTIONS, *PRESETS}
    is_option = is_in_group and not is_whole
    if sets_a_run(text) or "defaults" in keys or is_option:
        remedy = f"move it to {FOLDER}/{PRESETS[0]}/, and choose it by {PRESETS[0]}={file.stem}"
        if is_in_group:
            remedy = f"choose it by {file.parent.name}={file.stem}"
        raise ConfigError([f"{found}: is a preset; {remedy}"])
    if not is_whole:
        remedy = f"name the {FILE} of a run, or for a preset use experiment=NAME"
        raise ConfigError([f"{found}: is not the config of a whole run; {remedy}"])


def checkpoints_in(path: Path) -> list[Path]:
    """A checkpoint, or all checkpoints of a run, the newest first."""
    with contextlib.suppress(OSError):  # a name that is too long, which `check_rules` refuses later
        return [place for place in (path, *places(path)) if (place / MANIFEST).is_file()]
    return []


def ground_in(run_dir: Path) -> dict[str, Any]:
    """The config of the run in a run directory, as the ground of a command that names no job.

    It is that of the newest checkpoint; before the first one, that of config.yaml. Empty for a
    folder with neither. Raises ConfigError for a config.yaml that cannot be trained.
    """
    earlier = EarlierRun.of(run_dir)
    if earlier is not None:
        return earlier.ground_to_resume()
    if not os.path.isfile(run_dir / FILE):  # noqa: PTH113  Path.is_file raises for a name that is too long
        return {}
    try:
        earlier = EarlierRun.of_file(run_dir)
    except ConfigError:
        rule = f"its {FILE} is not the config of a run, and the command does not say what to train"
        remedy = (
            "to resume a run, give that run's folder as run_dir; to train here, add model=NAME"
            " or experiment=NAME"
        )
        raise ConfigError([f"run_dir={run_dir}: {rule}; {remedy}"]) from None
    before = earlier.config()
    if before.uses_trained:
        rule = f"its {FILE} has mode={before.mode}, which does not train"
        elsewhere = shell_word("run_dir", f"{run_dir}_new")
        raise ConfigError([f"run_dir={run_dir}: {rule}; to train, use {elsewhere}"])
    ground = earlier.ground()
    checkpoint = ground.get("checkpoint")
    # It was said of the files that were there then.
    if isinstance(checkpoint, dict) and checkpoint.get("resume") == "never":
        checkpoint.pop("resume")
    return ground


def run_to_resume(config: Config) -> Config | None:
    """The config of the run in the run directory, if this one will resume it.

    It is that of its newest checkpoint: config.yaml is what was asked for last, and may have been
    changed since.
    """
    if config.mode != "train" or config.checkpoint.resume == "never":
        return None
    earlier = EarlierRun.of(Path(str(config.run_dir)))
    if earlier is None:
        return None
    return earlier.config()


def _without_spoilt_sections(values: dict[str, Any]) -> dict[str, Any]:
    sections = {*OPTIONS, *SECTIONS}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, dict) or name not in sections
    }


def _restore_auto(values: dict[str, Any]) -> None:
    chosen_keys = values.pop("chosen_keys", None)
    reasons = values.pop("reasons", None)
    tuning = values.get("tuning")
    if isinstance(reasons, dict) and isinstance(tuning, dict):
        tuning.update((name, "auto") for name in reasons if name in tuning)
    if not isinstance(chosen_keys, list):
        return
    for key in OF_THE_HOST:
        section, _, name = key.rpartition(".")
        holder = values
        if section:
            holder = values.get(section)
        if key in chosen_keys and isinstance(holder, dict) and name in holder:
            holder[name] = "auto"


def _restore_ranges(values: dict[str, Any]) -> None:
    values.pop("process_counts", None)
    processes = values.pop("process_range", None)
    hosts = values.pop("host_range", None)
    launch = values.get("launch")
    if not isinstance(launch, dict):
        return
    if processes:
        launch["nproc_per_node"] = processes
    if hosts:
        launch["nnodes"] = hosts
