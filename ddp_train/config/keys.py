"""The keys of the schema: their names and types, and which one was probably meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterator
from typing import Any, TypeGuard

from ddp_train.config.program import CLOSE
from ddp_train.config.values import unless_secret
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.custom import CustomOption
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SCALARS, SECTIONS, Config
from ddp_train.text import dotted

_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
OBJECTS = list[dict[str, Any]]
"""Objects of your own, each with its `_target_`."""


def own_keys(custom: type) -> list[str]:
    """The keys beside `_target_` that are not arguments of your own code: `data.validation`."""
    of_code = [f.name for f in dataclasses.fields(CustomOption)]
    return [f.name for f in dataclasses.fields(custom) if f.name not in of_code]


def is_section(hint: Any) -> TypeGuard[type]:
    """Tell whether a key is a section with keys of its own: train.early_stopping."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """The type of each key of a section, those of sections within it (train.early_stopping) too."""
    hints = typing.get_type_hints(schema)
    names = [f.name for f in dataclasses.fields(schema)]
    if schema is Config:
        names = SCALARS
    return {name: hints[name] for name in names}


def all_keys() -> list[str]:
    """Every dotted key of the schema."""
    keys: dict[str, None] = {}
    for section in ("", *SECTIONS, *OPTIONS):
        prefix = f"{section}.".lstrip(".")
        for schema in schemas_of(section):
            keys |= dict.fromkeys(_keys_of(schema, prefix))
    return list(keys)


def schemas_of(section: str) -> list[type]:
    """The schemas of a section, one for each option of a group; that of Config for ""."""
    if not section:
        return [Config]
    if section in SECTIONS:
        return [SECTIONS[section]]
    return list(OPTIONS.get(section, {}).values())


def _keys_of(schema: type, prefix: str) -> Iterator[str]:
    for name, hint in field_types(schema).items():
        if is_section(hint):
            yield from _keys_of(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def key_named_like(name: str) -> str:
    """The key, group or section whose last part resembles a name; "" if there is none."""
    return _closest(name, _by_last_part([*OPTIONS, *SECTIONS, *all_keys()]), CLOSE)


def _by_last_part(keys: list[str]) -> dict[str, str]:
    return {key: key.rpartition(".")[2] for key in keys}


def _ending_with(name: str) -> str:
    """The key that ends with a dotted name; "" if there is none, and for a name without a dot."""
    if "." not in name:
        return ""
    return next((key for key in all_keys() if key.endswith(f".{name}")), "")


def _closest(name: str, candidates: dict[str, str], cutoff: float = 0.6) -> str:
    """The key whose last part, the value of `candidates`, is the most like a name."""
    close = difflib.get_close_matches(name, list(candidates.values()), n=1, cutoff=cutoff)
    return next((key for key, last in candidates.items() if close and last == close[0]), "")


def unknown_key(prefix: str, name: str, value: Any, schema: type) -> str:
    """The message about a key that the schema does not have, with the one that was meant."""
    section = prefix.rstrip(".")
    found = f"{prefix}{name}={unless_secret(name, value)}: no such key"
    if name == "target" and CUSTOM in OPTIONS.get(section, {}):
        return f"{found}; did you mean {section}._target_?"
    keys = [key for key in field_types(schema) if key != "name"]
    owners = _owners(section, name)
    if owners:
        message = f"{found} in {section}={schema().name}; {owners}"
        return f"{message}. Keys here: {', '.join(keys)}" if keys else message
    nearby = {f"{prefix}{key}": key for key in keys}
    if not prefix:  # not keys of a run, but typed as such
        nearby |= {"experiment": "experiment", "config": "config"}
    meant = _ending_with(prefix + next(iter(dotted({name: value})))) or _closest(name, nearby)
    if not meant and section:
        of_options = [key for key in all_keys() if key.rpartition(".")[0] == section]
        meant = _closest(name, _by_last_part(of_options))
        owners = _owners(section, meant.rpartition(".")[2])
    meant = meant or key_named_like(name)
    if not meant:
        return found
    return f"{found}; did you mean {meant}? {owners}".rstrip()


def _owners(section: str, name: str) -> str:
    """The options of a section that have a key, for a message; "" if there are none."""
    options = OPTIONS.get(section, {})
    owners = [option for option, schema in options.items() if name in field_types(schema)]
    if not owners:
        return ""
    own = f"a class of your own ({section}._target_=package.Name)"
    named = [owner for owner in owners if owner != CUSTOM]
    if not named:
        return f"only {own} has it"
    has = "has" if len(named) == 1 else "have"
    listed = f"{section}={' and '.join(named)} {has} it"
    if CUSTOM in owners:
        listed += f", and so has {own}"
    return listed


def list_rule(key: str) -> str:
    """The rule of a key that is a list in all options of its section that have it; else ""."""
    section, _, name = key.rpartition(".")
    owners = [schema for schema in schemas_of(section) if name in field_types(schema)]
    types = {expected(schema, name) for schema in owners}
    if len(types) == 1:
        (only_type,) = types
        if only_type.startswith("a list"):
            return f"must be {only_type}"
    return ""


def kinds_of(key: str) -> set[Any]:
    """The types that a dotted key has, in any option of its section; none of an unknown key."""
    section, _, name = key.rpartition(".")
    outer, _, inner = section.partition(".")
    kinds: set[Any] = set()
    for schema in schemas_of(outer):
        hint = field_types(schema).get(inner or name)
        if inner and is_section(hint):  # train.early_stopping.patience
            hint = field_types(hint).get(name)
        elif inner:
            hint = None
        if hint is not None:
            kinds |= {*(typing.get_args(hint) or (hint,))}
    return kinds


def rules_of(schema: type, name: str) -> typing.Mapping[str, Any]:
    """The rules and the meaning of a key, as `options.key.key` declares them."""
    return schema.__dataclass_fields__[name].metadata


def expected(schema: type, name: str) -> str:
    """The type of a key, for a message."""
    hint = field_types(schema)[name]
    rules = rules_of(schema, name)
    if typing.get_origin(hint) is dict:
        return "a mapping like {a:1}"
    if typing.get_origin(hint) is list:
        example = "[a,b]"
        if hint == OBJECTS:
            example = "[{_target_: package.Name, argument: 1}]"
        return f"a list like {rules.get('example', example)}"
    literals = rules.get("literals", ())
    kinds = [kind for kind in typing.get_args(hint) if not (kind is str and literals)] or [hint]
    names = [_TYPE_NAMES.get(kind, "a list like [a,b]") for kind in kinds]
    return " or ".join([*names, *literals])
