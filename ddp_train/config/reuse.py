"""The config of an earlier run as the ground of another one: `config=RUN/config.yaml`, or
`run_dir=RUN` alone."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from ddp_train.config.bind import custom_fields
from ddp_train.config.external_checks import manifest_config
from ddp_train.config.migrate import migrated
from ddp_train.config.program import FOLDER, PRESETS, sets_a_run
from ddp_train.options.registry import OPTIONS

KEY = "config"
OF_A_RUN = "the config of an earlier run, its folder or its config.yaml, which further words change"
FILE = "config.yaml"
COMMANDS = "commands.jsonl"
OF_THE_HOST = (
    "device",
    "deterministic",
    "launch.nproc_per_node",
    "launch.threads_per_process",
    "launch.backend",
)
"""What the hardware decides with `auto`, unless a command of the run has named the key."""
OF_THE_RUN = ("mode", "run_dir", "trusted_modules")
"""Not taken over. Whether code may be loaded, the person decides who types: SECURITY.md."""


def named_config(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The ground that a file, or the run in a folder, gives; and what is wrong with it."""
    file = path / FILE if path.is_dir() else path
    found = f"{KEY}={path}"
    try:
        values = yaml.safe_load(text := file.read_text())
    except OSError as error:
        return {}, [f"{found}: {file} cannot be read ({error.strerror}); name the {FILE} of a run"]
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}, [f"{found}: is not plain YAML; name the {FILE} of a run"]
    group = file.parent.name if file.parent.name in {*OPTIONS, *PRESETS} else ""
    is_whole = isinstance(values, dict) and {"model", "data", "optimizer", "train"} <= values.keys()
    if (
        sets_a_run(text)
        or (isinstance(values, dict) and "defaults" in values)
        or (group and not is_whole)
    ):
        remedy = f"choose it by {group or PRESETS[0]}={file.stem}"
        where = "" if group else f", from {FOLDER}/{PRESETS[0]}/"
        return {}, [f"{found}: is a preset; {remedy}{where}"]
    if not is_whole or not isinstance(values, dict):
        return {}, [
            f"{found}: is no whole config; name the {FILE} of a run, or for a preset use"
            " experiment=NAME"
        ]
    return _ground(values, file.parent), []


def held_config(run_dir: Path) -> dict[str, Any]:
    """The ground that the run in a directory gives, which has a checkpoint to resume from; {} if
    there is none."""
    ground = _ground(manifest_config(run_dir), run_dir)
    if isinstance(checkpoint := ground.get("checkpoint"), dict):
        checkpoint.pop("resume", None)  # from its own checkpoint, wherever it once began
    return ground


def _ground(frozen: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A frozen config without what belongs to its run; what `auto` chose for its hardware is `auto`
    again."""
    values = migrated({name: value for name, value in frozen.items() if name not in OF_THE_RUN})
    reasons = values.pop("reasons", None)
    data = values.get("data")
    tuning = values.get("tuning")
    if isinstance(reasons, dict) and isinstance(tuning, dict):
        tuning.update((name, "auto") for name in reasons if name in tuning)
    if isinstance(data, dict) and data.get("name") != "custom" and "placement" in data:
        data["placement"] = "auto"
    values.pop("process_counts", None)
    if (asked := values.pop("process_range", None)) and isinstance(values.get("launch"), dict):
        values["launch"]["nproc_per_node"] = asked
    if (hosts := values.pop("host_range", None)) and isinstance(values.get("launch"), dict):
        values["launch"]["nnodes"] = hosts
    typed = _typed_keys(run_dir)
    for key in OF_THE_HOST:
        section, _, name = key.rpartition(".")
        holder = values.get(section) if section else values
        if typed is not None and key not in typed and isinstance(holder, dict) and name in holder:
            holder[name] = "auto"
    return {
        name: custom_fields(name, value) if isinstance(value, dict) else value
        for name, value in values.items()
    }


def _typed_keys(run_dir: Path) -> set[str] | None:
    """The keys that the commands of a run have named; None if they cannot be read."""
    try:
        commands = [
            json.loads(line)["command"] for line in (run_dir / COMMANDS).read_text().splitlines()
        ]
        return {word.partition("=")[0] for command in commands for word in shlex.split(command)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
