"""Presets, the files under conf/: composed by Hydra, and read one by one.

Hydra is imported where it is needed: workers load a frozen config, and start without Hydra.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
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

    Returns the config, with the section `hydra`, and the option of each group. A process that asks
    for the same choices again, as a sweep does twice for each trial, waits for Hydra once: it takes
    0.2 s.
    """
    files = tuple(_states_of_files(program))
    return copy.deepcopy(_composed_once(program, tuple(arguments), Path.cwd(), files))


@functools.lru_cache(maxsize=256)
def _composed_once(
    program: Program, arguments: tuple[str, ...], _folder: Path, _files: tuple[Any, ...]
) -> tuple[DictConfig, dict[str, str]]:
    """The result of `compose_options`, which hands out copies: its caller may change one."""
    with composed(program, list(arguments)) as config:
        choices = {str(group): str(name) for group, name in config.hydra.runtime.choices.items()}
    OmegaConf.set_struct(config, False)
    return config, choices


def _states_of_files(program: Program) -> Iterator[tuple[Path, int, int]]:
    """Each preset with its time and size: a file that is written anew is composed anew."""
    for group in program.groups():
        for path in program.files(group):
            with contextlib.suppress(OSError):  # Hydra reports it
                found = path.stat()
                yield path, found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def composed(
    program: Program, arguments: list[str], is_sweep: bool = False
) -> Iterator[DictConfig]:
    """The config that Hydra composes, with its section `hydra`. Hydra is initialized inside.

    Raises what Hydra and OmegaConf raise.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    register_schema(program)
    with hydra.initialize_config_dir(str(program.presets), version_base="1.3"):
        application = GlobalHydra.instance().hydra
        assert application is not None
        yield application.compose_config(
            "config",
            [*arguments, *search_path_of(program)],
            run_mode=RunMode.MULTIRUN if is_sweep else RunMode.RUN,
            from_shell=False,
            with_log_configuration=False,
        )


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
    if not _registered:
        defaults = Config()
        keys = {name: getattr(defaults, name) for name in SCALARS}
        sections = {name: dataclasses.asdict(schema()) for name, schema in SECTIONS.items()}
        store.store(name=SCHEMA, node=keys | sections)
    for group, schemas in OPTIONS.items():
        for path in program.files(group):
            schema = schemas.get(built_in_option(program, group, path))
            if schema is not None and _registered.get((group, path.stem)) is not schema:
                node = _node_of(schema)
                store.store(group=f"{SCHEMA}/{group}", name=path.stem, node=node)
                _registered[group, path.stem] = schema


_registered: dict[tuple[str, str], type] = {}
"""The schema that Hydra has of each option. It takes a millisecond to give it one."""


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
        names = [name for of_group, name in included_options(current) if not of_group]
        files = [program.file(group, name) for name in reversed(names)]
        current = next(filter(None, files), None)
    return ""


def defaults_of(path: Path) -> list[Any]:
    """The `defaults` of a file: what it includes."""
    defaults = content_of(path).get("defaults")
    return defaults if isinstance(defaults, list) else []


def included_options(path: Path) -> Iterator[tuple[str, str]]:
    """The options that a file includes: the group, "" for that of the file, and the name."""
    for item in defaults_of(path):
        choices = item if isinstance(item, dict) else {"": item}
        for place, option in choices.items():
            group = str(place).split(" ")[-1].partition("@")[0]
            for name in option if isinstance(option, list) else [option]:
                yield group, str(name).partition("@")[0].removesuffix(".yaml")


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
