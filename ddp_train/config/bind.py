"""Plain nested values, bound to the schema with a problem for each wrong key and value."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from types import UnionType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train.config.keys import (
    OBJECTS,
    all_keys,
    expected,
    field_types,
    is_section,
    own_keys,
    rules_of,
    unknown_key,
)
from ddp_train.config.values import from_environment
from ddp_train.options.custom import NAME as CUSTOM
from ddp_train.options.custom import CustomOption
from ddp_train.options.key import broken_rule
from ddp_train.options.registry import OPTIONS, TRACKERS
from ddp_train.options.schema import SECTIONS, Config, schema_of
from ddp_train.text import did_you_mean, shown

ENVIRONMENT_STAYS = ("metrics", "tracker.classes")
"""Keys whose references to the environment are kept: the config is written to files."""


def bind(values: dict[str, Any]) -> tuple[Config, list[str]]:
    """Bind a whole run. Returns the config and a message for each problem.

    A key whose value is wrong has its default.
    """
    problems: list[str] = []
    sections = {
        name: value for name, value in values.items() if name in SECTIONS or name in OPTIONS
    }
    scalars = {name: value for name, value in values.items() if name not in sections}
    config = bind_fields(Config, "", scalars, problems)
    for section, content in sections.items():
        bound = _bind_section(section, content, problems)
        if bound is not None:
            setattr(config, section, bound)
    config.tracker.classes = _with_tracker_classes(config.tracker.classes)
    return config, problems


def _with_tracker_classes(trackers: dict[str, Any]) -> dict[str, Any]:
    """The trackers of `tracker.classes`, with the class of the registry for those that name none.

    A frozen config names all classes.
    """
    named = dict(trackers)
    for name, arguments in trackers.items():
        if name in TRACKERS and isinstance(arguments, dict) and "_target_" not in arguments:
            tracker = TRACKERS[name]
            target = f"{tracker.__module__}.{tracker.__qualname__}"
            named[name] = {"_target_": target, **arguments}
    return named


def _bind_section(section: str, content: Any, problems: list[str]) -> Any:
    """A section; None if its option is not known."""
    options = OPTIONS.get(section, {})
    if isinstance(content, str) and content in options:
        problems.append(
            f"{section}={content}: a preset chooses an option under `defaults`; write `- override"
            f" /{section}: {content}` there"
        )
        return None
    if not isinstance(content, dict):
        problems.append(_not_a_section(section, content))
        return None
    target = content.get("_target_")
    if CUSTOM in options and target and content.get("name", CUSTOM) != CUSTOM:
        problems.append(
            f"{section}._target_={shown(target)}: contradicts {section}={content['name']}; give"
            f" one of them (a preset with _target_ needs `- override /{section}: {CUSTOM}` under"
            " `defaults`)"
        )
        return None
    content = custom_fields(section, content)
    name = content.get("name")
    schema = schema_of(section, str(name))
    if schema is None:
        known = list(options)
        rule = f"must be one of {', '.join(known)}{did_you_mean(shown(name), known)}"
        problems.append(f"{section}={shown(name)}: {rule}")
        return None
    return bind_fields(schema, f"{section}.", content, problems)


def custom_fields(section: str, content: dict[str, Any]) -> dict[str, Any]:
    """`_target_` and the arguments beside it, as the fields of a CustomOption."""
    options = OPTIONS.get(section, {})
    if "_target_" not in content or CUSTOM not in options:
        return content
    fields: dict[str, Any] = {"name": CUSTOM, "target": content["_target_"] or "", "arguments": {}}
    keys = own_keys(options[CUSTOM])
    for name, value in content.items():
        if name in keys:
            fields[name] = value
        elif name not in ("name", "_target_"):
            fields["arguments"][name] = value
    return fields


def bind_fields(schema: type, prefix: str, content: dict[str, Any], problems: list[str]) -> Any:
    """Bind the values of one section.

    prefix: the beginning of its keys. problems: what is wrong is added to it.
    """
    bound: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        hint = field_types(schema).get(name)
        if hint is None:
            problems.append(unknown_key(prefix, str(name), value, schema))
        elif is_section(hint) and isinstance(value, dict):
            bound[name] = bind_fields(hint, f"{key}.", value, problems)
        elif is_section(hint):
            problems.append(_not_a_section(key, value))
        else:
            try:
                bound[name] = _converted(schema, name, value, key)
            except ValueError as error:
                problems.append(f"{key}={shown(value)}: {error}")
    return schema(**bound)


def _not_a_section(key: str, value: Any) -> str:
    example = next(known for known in all_keys() if known.startswith(f"{key}."))
    return f"{key}={shown(value)}: is a section; set one of its keys, {example}=..."


def _converted(schema: type, name: str, value: Any, key: str) -> Any:
    """A value as the type of its field. Raises ValueError with the rule that it breaks."""
    hint = field_types(schema)[name]
    if _takes_anything(hint, value):
        # The user's code looks up its `${oc.env:...}` itself.
        if issubclass(schema, CustomOption) or key in ENVIRONMENT_STAYS:
            return value
        return from_environment(value, key)
    rules = rules_of(schema, name)
    if rules.get("may_be_range") and not isinstance(value, str):
        rule = broken_rule(value, rules, key)  # which says more than the type that is expected
        if rule:
            raise ValueError(rule)
    kinds = typing.get_args(hint) or (hint,)
    is_number = isinstance(value, int | float)
    if bool in kinds and is_number and value not in (0, 1):  # OmegaConf takes any number for true
        raise ValueError(f"must be {expected(schema, name)}")
    typed = _typed(schema)
    try:
        OmegaConf.update(typed, name, value, merge=False)
        converted = typed[name]
    except OmegaConfBaseException:
        raise ValueError(f"must be {expected(schema, name)}") from None
    if OmegaConf.is_config(converted):
        converted = OmegaConf.to_object(converted)
    if "${oc.env:" in str(value):
        # Where `auto` may stand too, a number stayed a text.
        if int in kinds and re.fullmatch(r"-?[0-9]{1,18}", str(converted)):
            converted = int(str(converted))
        rule = broken_rule(converted, rules, key)
        if rule:  # `check_rules` would show what was found
            raise ValueError(rule)
    return converted


@functools.cache
def _typed(schema: type) -> Any:
    """An object that converts a value that is set by its name.

    Making one takes 3 ms, of Config 30: its sections are bound one by one.
    """
    if schema is Config:
        schema = dataclasses.make_dataclass("Scalars", field_types(schema).items())
    return OmegaConf.structured(schema)


def _takes_anything(hint: Any, value: Any) -> bool:
    """Tell whether a key takes any dict, or any list, and the value is one."""
    if hint == OBJECTS:
        return isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if not isinstance(value, dict | list):
        return False
    alternatives = (hint,)
    if typing.get_origin(hint) in (typing.Union, UnionType):
        alternatives = typing.get_args(hint)
    return any(
        typing.get_origin(kind) is type(value) and Any in typing.get_args(kind)
        for kind in alternatives
    )
