"""Presets, the files under conf/: composed by Hydra, and read one by one.

Hydra is imported where it is needed: workers load a frozen config, and start without Hydra.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from ddp_train.config.keys import own_keys
from ddp_train.config.overrides import Overrides
from ddp_train.config.program import PRESETS, Program
from ddp_train.config.yaml_files import load_yaml
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.custom import CustomOption
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SCALARS, SECTIONS, Config

SCHEMA = "_schema"
"""The group in which Hydra finds the defaults of the schema.

`_schema/optimizer/adam` comes before conf/optimizer/adam.yaml.
"""
BY_OVERRIDE = "an option is chosen by `- override /GROUP: OPTION`"
"""A line of the `defaults` of a preset."""


def compose_options(program: Program, arguments: list[str]) -> tuple[DictConfig, dict[str, str]]:
    """Have Hydra compose the choices of options.

    Returns the config, with the section `hydra`, and the option of each group.
    """
    import hydra

    register_schema(program)
    arguments = [*arguments, *search_path_of(program)]
    with hydra.initialize_config_dir(str(program.presets), version_base="1.3"):
        composed = hydra.compose("config", arguments, return_hydra_config=True)
    choices = {str(group): str(option) for group, option in composed.hydra.runtime.choices.items()}
    OmegaConf.set_struct(composed, False)
    return composed, choices


def search_path_of(program: Program) -> list[str]:
    """The override by which Hydra finds the user's presets, if there are any."""
    if not program.own:
        return []
    # After ours, which nothing there can replace: `Program.problem_of`.
    folder = str(program.own.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{folder}']"]


def register_schema(program: Program) -> None:
    """Give Hydra the default of every key, so that a preset holds only what it changes.

    conf/config.yaml merges `_schema/GROUP/OPTION` before conf/GROUP/OPTION.yaml. An option that the
    schema does not know (model=resnet50) has the defaults of its `built_in_option`.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    defaults = Config()
    keys = {name: getattr(defaults, name) for name in SCALARS}
    sections = {name: dataclasses.asdict(schema()) for name, schema in SECTIONS.items()}
    store.store(name=SCHEMA, node=keys | sections)
    for group, schemas in OPTIONS.items():
        for path in program.files(group):
            schema = schemas.get(built_in_option(program, group, path))
            if schema is not None:
                node = _node_of(schema)
                store.store(group=f"{SCHEMA}/{group}", name=path.stem, node=node)


def _node_of(schema: type) -> dict[str, Any]:
    """The defaults of an option as a preset would write them."""
    node = dataclasses.asdict(schema())
    if not issubclass(schema, CustomOption):
        return node
    return {"name": CUSTOM, "_target_": None, **{name: node[name] for name in own_keys(schema)}}


def built_in_option(program: Program, group: str, path: Path) -> str:
    """The option whose defaults a file changes: of its own name, or by its `name` or `_target_`.

    A file that has neither changes that of the file which its `defaults` include. "" if there is
    none.
    """
    visited: list[Path] = []
    current: Path | None = path
    while current is not None and current not in visited:
        visited.append(current)
        if current.stem in OPTIONS[group]:
            return current.stem
        content = content_of(current)
        if "name" in content:
            return str(content["name"])
        if "_target_" in content:
            return CUSTOM
        current = _included_file(program, group, content)
    return ""


def _included_file(program: Program, group: str, content: dict[str, Any]) -> Path | None:
    """The file of the same group that the `defaults` of an option include last."""
    defaults = content.get("defaults")
    if not isinstance(defaults, list):
        return None
    files = [program.file(group, item) for item in defaults if isinstance(item, str)]
    return next((file for file in reversed(files) if file), None)


def content_of(path: Path) -> dict[str, Any]:
    """The keys and values of a file; none if it cannot be read, which Hydra reports."""
    with contextlib.suppress(yaml.YAMLError, ValueError, OSError):
        content = load_yaml(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def origin_of(key: str, program: Program, overrides: Overrides, choices: dict[str, str]) -> str:
    """The preset that gave a key its value, for a message; "" if the command line did.

    key: dotted.
    choices: the option of each group.
    """
    is_given = any(f"{given}.".startswith(f"{key}.") for given in overrides.given)
    if key in overrides.choices or is_given:
        return ""
    section, _, name = key.rpartition(".")
    of_runs = [program.file(group, choices.get(group)) for group in reversed(PRESETS)]
    for path in (*of_runs, program.presets / "config.yaml"):
        content: Any = content_of(path) if path else {}
        for part in filter(None, section.split(".")):
            content = content.get(part) if isinstance(content, dict) else None
        if path and _has(content, name):
            return f" (in {program.shown(path)})"
    path = program.file(section, choices.get(section))
    if path and _has(content_of(path), name):
        return f" (in {program.shown(path)})"
    return ""


def _has(content: Any, name: str) -> bool:
    """Tell whether a content is a mapping with a key, which YAML may have read as a number."""
    return isinstance(content, dict) and name in map(str, content)
