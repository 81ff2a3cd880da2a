"""Binds plain nested values to the schema, with every unknown key and wrong type found on the way."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from ddp_train.config.schema import OPTIONS, SECTIONS, Config, CustomConfig, schema_of
from ddp_train.config.values import is_secret
from ddp_train.text import did_you_mean, shown

_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


_LIST = "a list like [a,b]"


def bind(values: dict[str, Any]) -> tuple[Config, list[str]]:
    """Binds plain nested values to the schema: every unknown key and every wrong type is one problem."""
    problems: list[str] = []
    sections = {name: value for name, value in values.items() if name in SECTIONS or name in OPTIONS}
    scalars = {name: value for name, value in values.items() if name not in sections}
    config = bind_fields(Config, "", scalars, problems)
    for section, content in sections.items():
        if not isinstance(content, dict):
            problems.append(f"{section}={shown(content)}: holds keys of its own, for example {_example(section)}")
            continue
        content = _custom(section, content)
        schema = schema_of(section, str(content.get("name")))
        if schema is None:
            options = list(OPTIONS[section])
            guess = did_you_mean(str(content.get("name")), options)
            problems.append(f"{section}={shown(content.get('name'))}: must be one of {', '.join(options)}{guess}")
            continue
        setattr(config, section, bind_fields(schema, section + ".", content, problems))
    return config, problems


def _custom(section: str, content: dict[str, Any]) -> dict[str, Any]:
    """`_target_` and the arguments beside it, as the fields of CustomConfig."""
    if "_target_" not in content or "custom" not in OPTIONS.get(section, {}):
        return content
    beside = {name: value for name, value in content.items() if name not in ("name", "_target_")}
    return {"name": CustomConfig.name, "target": content["_target_"] or "", "arguments": beside}


def bind_fields(schema: type, prefix: str, content: dict[str, Any], problems: list[str]) -> Any:
    """Binds the values of one section, whose keys begin with `prefix`, and adds what is wrong to `problems`."""
    typed = OmegaConf.structured(schema)
    hints = typing.get_type_hints(schema)
    as_it_is: dict[str, Any] = {}
    for name, value in content.items():
        if name not in hints or (prefix == "" and (name in SECTIONS or name in OPTIONS)):
            problems.append(_unknown_key(prefix, name, value, schema))
            continue
        if isinstance(value, dict) and typing.get_origin(hints[name]) is dict:
            as_it_is[name] = value  # OmegaConf would look up the `${oc.env:...}` in it
            continue
        try:
            takes_bool = bool in (hints[name], *typing.get_args(hints[name]))
            if takes_bool and isinstance(value, int | float) and value not in (0, 1):
                raise ValidationError  # OmegaConf takes any number for true
            OmegaConf.update(typed, name, value, merge=False)
        except OmegaConfBaseException:
            problems.append(f"{prefix}{name}={shown(value)}: must be {_expected(schema, name, hints[name])}")
    bound = OmegaConf.to_object(typed)
    for name, value in as_it_is.items():
        setattr(bound, name, value)
    return bound


def _expected(schema: type, name: str, hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return _LIST
    words = next(f.metadata.get("words", ()) for f in dataclasses.fields(schema) if f.name == name)
    kinds = [kind for kind in typing.get_args(hint) if not (kind is str and words)] or [hint]
    return " or ".join([_TYPE_WORDS.get(kind, _LIST) for kind in kinds] + list(words))


def _unknown_key(prefix: str, name: str, value: Any, schema: type) -> str:
    found = f"{prefix}{name}={'(hidden)' if is_secret(name) else shown(value)}: no such key"
    section = prefix.rstrip(".")
    if name == "target" and "custom" in OPTIONS.get(section, {}):
        return f"{found}; did you mean {section}._target_?"
    owners = [option for option, other in OPTIONS.get(section, {}).items() if name in typing.get_type_hints(other)]
    if owners:
        own = [f.name for f in dataclasses.fields(schema) if f.name != "name"]
        return (
            f"{found} in {section}={schema().name}; {section}={' and '.join(owners)} "
            f"{'has' if len(owners) == 1 else 'have'} it" + (f". Here: {', '.join(own)}" if own else "")
        )
    nearby = {prefix + f.name: f.name for f in dataclasses.fields(schema) if f.name != "name"}
    everywhere = {path: path.rpartition(".")[2] for path in all_keys()}
    for names in (nearby, everywhere):
        close = difflib.get_close_matches(name, list(names.values()), n=1, cutoff=0.6)
        if close:
            return f"{found}; did you mean {next(path for path, last in names.items() if last == close[0])}?"
    return found


def all_keys() -> list[str]:
    """Every dotted key of the schema."""
    keys = [f.name for f in dataclasses.fields(Config) if f.name not in SECTIONS and f.name not in OPTIONS]
    groups = {
        **{name: [schema] for name, schema in SECTIONS.items()},
        **{n: list(o.values()) for n, o in OPTIONS.items()},
    }
    for section, schemas in groups.items():
        keys += dict.fromkeys(f"{section}.{f.name}" for schema in schemas for f in dataclasses.fields(schema))
    return keys


def _example(section: str) -> str:
    return next(key for key in all_keys() if key.startswith(section + "."))
