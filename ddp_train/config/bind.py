"""Binds plain nested values to the schema. Every unknown key and every value of a wrong type is one
problem."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from types import UnionType
from typing import Any, TypeGuard

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from ddp_train.config.program import CLOSE
from ddp_train.config.values import from_environment, is_secret
from ddp_train.options.custom import NAME, CustomOption
from ddp_train.options.key import broken_rule
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SCALARS, SECTIONS, Config, schema_of
from ddp_train.text import did_you_mean, shown

_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}
_LIST = "a list like [a,b]"
ENVIRONMENT_STAYS = ("metrics", "tracker.classes")
"""Keys whose references to the environment are kept: the config is written to files."""
_OBJECTS = list[dict[str, Any]]
"""Objects of the user's own, each with its `_target_`."""


def bind(values: dict[str, Any]) -> tuple[Config, list[str]]:
    """Returns the config, with the default of every key whose value is wrong, and all problems."""
    problems: list[str] = []
    sections = {
        name: value for name, value in values.items() if name in SECTIONS or name in OPTIONS
    }
    scalars = {name: value for name, value in values.items() if name not in sections}
    config = bind_fields(Config, "", scalars, problems)
    for section, content in sections.items():
        if not isinstance(content, dict):
            problems.append(
                f"{section}={shown(content)}: is a section; set one of its keys,"
                f" {_example(section)}=..."
            )
            continue
        has_custom = "custom" in OPTIONS.get(section, {})
        if has_custom and content.get("_target_") and content.get("name", NAME) != NAME:
            problems.append(
                f"{section}._target_={shown(content['_target_'])}: stands in a file beside"
                f" {section}={content['name']}; add `- override /{section}: custom` to the defaults"
                " of that file"
            )
            continue
        content = custom_fields(section, content)
        schema = schema_of(section, str(content.get("name")))
        if schema is None:
            options = list(OPTIONS[section])
            guess = did_you_mean(shown(content.get("name")), options)
            problems.append(
                f"{section}={shown(content.get('name'))}: must be one of"
                f" {', '.join(options)}{guess}"
            )
            continue
        setattr(config, section, bind_fields(schema, section + ".", content, problems))
    return config, problems


def custom_fields(section: str, content: dict[str, Any]) -> dict[str, Any]:
    """`_target_` and the arguments beside it, as the fields of a CustomOption."""
    if "_target_" not in content or "custom" not in OPTIONS.get(section, {}):
        return content
    keys = own_keys(OPTIONS[section]["custom"])
    arguments = {
        name: value for name, value in content.items() if name not in ("name", "_target_", *keys)
    }
    kept = {name: value for name, value in content.items() if name in keys}
    return {
        "name": NAME,
        "target": content["_target_"] or "",
        "arguments": arguments,
        **kept,
    }


def is_section(hint: Any) -> TypeGuard[type]:
    """Whether a key is a section with keys of its own: train.early_stopping."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def own_keys(custom: type) -> list[str]:
    """The keys of a section for the user's own code that are not arguments of that code:
    `data.validation`."""
    known = [f.name for f in dataclasses.fields(CustomOption)]
    return [f.name for f in dataclasses.fields(custom) if f.name not in known]


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """The type of each key of a section, by its name. A section within it (train.early_stopping) is
    one of them."""
    hints = typing.get_type_hints(schema)
    names = SCALARS if schema is Config else [f.name for f in dataclasses.fields(schema)]
    return {name: hints[name] for name in names}


def bind_fields(schema: type, prefix: str, content: dict[str, Any], problems: list[str]) -> Any:
    """Binds the values of one section, whose keys begin with `prefix`, and adds what is wrong to
    `problems`."""
    typed = _typed(schema)
    types = field_types(schema)
    bound: dict[str, Any] = {}
    for name, value in content.items():
        if name not in types:
            problems.append(_unknown_key(prefix, name, value, schema))
            continue
        is_objects = (
            types[name] == _OBJECTS
            and isinstance(value, list)
            and all(isinstance(i, dict) for i in value)
        )
        if is_objects or _takes_anything(types[name], value):
            # Code of the user looks up its `${oc.env:...}` itself.
            own_code = issubclass(schema, CustomOption) or prefix + name in ENVIRONMENT_STAYS
            bound[name] = value if own_code else from_environment(value, prefix + name)
            continue
        if is_section(types[name]):
            inner = f"{prefix}{name}"
            if isinstance(value, dict):
                bound[name] = bind_fields(types[name], f"{inner}.", value, problems)
            else:
                problems.append(
                    f"{inner}={shown(value)}: is a section; set one of its keys,"
                    f" {_example(inner)}=..."
                )
            continue
        try:
            takes_bool = bool in (types[name], *typing.get_args(types[name]))
            if takes_bool and isinstance(value, int | float) and value not in (0, 1):
                raise ValidationError  # OmegaConf takes any number for true
            OmegaConf.update(typed, name, value, merge=False)
            converted = typed[name]
            bound[name] = (
                OmegaConf.to_object(converted) if OmegaConf.is_config(converted) else converted
            )
            if (
                "${oc.env:" in str(value)
                and int in typing.get_args(types[name])
                and _is_whole(converted)
            ):
                bound[name] = int(converted)  # `auto` may stand there too, so that it stayed a text
            if "${oc.env:" in str(value) and (rule := _rule_broken_by(schema, name, bound[name])):
                del bound[name]  # `check_rules` would show what was found
                problems.append(f"{prefix}{name}={shown(value)}: {rule}")
        except OmegaConfBaseException:
            problems.append(
                f"{prefix}{name}={shown(value)}: must be {_expected(schema, name, types[name])}"
            )
    return schema(**bound)


def _is_whole(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"-?[0-9]{1,18}", value))


def _rule_broken_by(schema: type, name: str, value: Any) -> str:
    rules = next(f.metadata for f in dataclasses.fields(schema) if f.name == name)
    return next(
        filter(
            None,
            (broken_rule(item, rules) for item in (value if isinstance(value, list) else [value])),
        ),
        "",
    )


@functools.cache
def _typed(schema: type) -> Any:
    """Takes a value by the name of its key and gives it back converted. Making one takes 3 ms, of
    Config 30."""
    if schema is Config:  # its sections are bound one by one
        types = field_types(schema)
        keys = [f for f in dataclasses.fields(schema) if f.name in types]
        fields = [(f.name, types[f.name], dataclasses.field(**_default(f))) for f in keys]
        schema = dataclasses.make_dataclass("Scalars", fields)
    return OmegaConf.structured(schema)


def _default(f: dataclasses.Field[Any]) -> dict[str, Any]:
    return {
        name: value
        for name in ("default", "default_factory")
        if (value := getattr(f, name)) is not dataclasses.MISSING
    }


def _takes_anything(hint: Any, value: Any) -> bool:
    """Whether a key takes any dict, or any list, and the value is one."""
    either = typing.get_origin(hint) in (typing.Union, UnionType)
    return any(
        isinstance(value, dict | list)
        and typing.get_origin(one) is type(value)
        and Any in typing.get_args(one)
        for one in (typing.get_args(hint) if either else (hint,))
    )


def no_list(dotted: str, value: Any, of_any: bool = False) -> str:
    """What is wrong with a mapping, or with keys, in place of a list; "" if nothing. of_any: the
    key need be a list in one option of its section only: elsewhere your own class may have another
    argument of that name."""
    parts = dotted.split(".")
    for count in range(1, len(parts) + isinstance(value, dict)):
        key = ".".join(parts[:count])
        inner = parts[count:]
        section, _, name = key.rpartition(".")
        if section in SECTIONS:
            schemas = [SECTIONS[section]]
        else:
            schemas = [*OPTIONS.get(section, {}).values()]
        schemas = schemas if section else [Config]
        hints = [
            (schema, types[name]) for schema in schemas if name in (types := field_types(schema))
        ]
        if (
            not hints
            or (len(hints) < len(schemas) and not of_any)
            or (inner and inner[0].isdigit())
        ):
            continue
        if all(
            list in {typing.get_origin(one) for one in (hint, *typing.get_args(hint))}
            for _, hint in hints
        ):
            what = f"{key} must be" if inner else "must be"
            return f"{dotted}={shown(value)}: {what} {_expected(hints[0][0], name, hints[0][1])}"
    return ""


def _expected(schema: type, name: str, hint: Any) -> str:
    """The type of a key, for a message."""
    rules = next(f.metadata for f in dataclasses.fields(schema) if f.name == name)
    if typing.get_origin(hint) is dict:
        return "a mapping like {a:1}"
    if typing.get_origin(hint) is list:
        example = rules.get(
            "example", "[{_target_: package.Name, argument: 1}]" if hint == _OBJECTS else "[a,b]"
        )
        return f"a list like {example}"
    literals = rules.get("literals", ())
    kinds = [kind for kind in typing.get_args(hint) if not (kind is str and literals)] or [hint]
    return " or ".join([_TYPE_NAMES.get(kind, _LIST) for kind in kinds] + list(literals))


def _unknown_key(prefix: str, name: str, value: Any, schema: type) -> str:
    """The message about a key that the schema does not have, with the key that was probably
    meant."""
    key = prefix + name
    section = prefix.rstrip(".")
    found = f"{key}={'(hidden)' if is_secret(name) else shown(value)}: no such key"
    if name == "target" and "custom" in OPTIONS.get(section, {}):
        return f"{found}; did you mean {section}._target_?"
    owners = [
        option for option, other in OPTIONS.get(section, {}).items() if name in field_types(other)
    ]
    if owners:
        own = [f.name for f in dataclasses.fields(schema) if f.name != "name"]
        return (
            f"{found} in {section}={schema().name}; {section}={' and '.join(owners)} "
            f"{'has' if len(owners) == 1 else 'have'} it"
            + (f". Keys here: {', '.join(own)}" if own else "")
        )
    nearby = {prefix + other: other for other in field_types(schema) if other != "name"}
    nearby |= (
        {} if prefix else {name: name for name in ("experiment", "config")}
    )  # not keys of a run, but typed as such
    elsewhere = {
        key: key.rpartition(".")[2]
        for key in all_keys()
        if prefix and key.rpartition(".")[0] == section
    }
    guess = _closest(name, nearby) or _closest(name, elsewhere) or key_named_like(name)
    known = elsewhere.get(guess, "") if guess not in nearby else ""
    having = [
        option for option, other in OPTIONS.get(section, {}).items() if known in field_types(other)
    ]
    if having:
        of = f" {section}={' and '.join(having)} {'has' if len(having) == 1 else 'have'} it"
    else:
        of = ""
    return f"{found}; did you mean {guess}?{of}" if guess else found


def key_named_like(name: str) -> str:
    """The key, group or section whose last part resembles a name; "" if there is none."""
    return _closest(
        name, {path: path.rpartition(".")[2] for path in [*OPTIONS, *SECTIONS, *all_keys()]}, CLOSE
    )


def _closest(name: str, candidates: dict[str, str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(name, list(candidates.values()), n=1, cutoff=cutoff)
    return next((path for path, last in candidates.items() if close and last == close[0]), "")


def all_keys() -> list[str]:
    """Every dotted key of the schema."""
    schemas = {
        **{name: [schema] for name, schema in SECTIONS.items()},
        **{n: [*o.values()] for n, o in OPTIONS.items()},
    }
    in_sections = [
        key
        for section, found in schemas.items()
        for one in found
        for key in _keys_of(one, f"{section}.")
    ]
    return list(dict.fromkeys([*SCALARS, *in_sections]))


def _keys_of(schema: type, prefix: str) -> list[str]:
    keys = []
    for name, hint in field_types(schema).items():
        keys += _keys_of(hint, f"{prefix}{name}.") if is_section(hint) else [prefix + name]
    return keys


def _example(section: str) -> str:
    return next(key for key in all_keys() if key.startswith(section + "."))
