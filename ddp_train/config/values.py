"""Plain nested values: leaves, secrets, references to the environment, quotes."""

from __future__ import annotations

import re
import shlex
import typing
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_train.errors import ConfigError
from ddp_train.text import in_double_quotes, shown


def from_environment(value: Any, key: str) -> Any:
    """A plain value, with each `${oc.env:NAME}` replaced by that variable of the environment.

    Raises ConfigError for a variable that is not set.

    key: the name of the value, for that message.
    """
    if isinstance(value, dict):
        return {name: from_environment(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [from_environment(item, key) for item in value]
    if isinstance(value, str) and "${oc.env:" in value:
        try:
            return OmegaConf.create({"value": value}).value
        except OmegaConfBaseException:
            raise ConfigError(
                [f"{key}={value}: the environment has no such variable; set it before the start"]
            ) from None
    return value


def plain_values(composed: DictConfig) -> dict[str, Any]:
    """The composed configuration as plain data, references resolved.

    `${oc.env:NAME}` stays as it is in the arguments of the user's own code, whatever refers to it:
    the value may be a secret, and this is written to files. It is looked up where the argument is
    used. `bind` looks up all others, and shows what was typed where it is wrong.
    """

    def reference(name: str, *default: str) -> str:
        return "${oc.env:" + ",".join([name, *map(str, default)]) + "}"

    OmegaConf.register_new_resolver("oc.env", reference, replace=True)
    try:
        values = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    for section, content in values.items():
        # Raises for a variable that is not set, before any worker starts.
        from_environment(content, section)
    return values


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values inside a nested value, with their dotted paths."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        yield path, value
        return
    for name, item in items:
        yield from leaves(item, f"{path}.{name}".lstrip("."))


def in_grammar(value: Any) -> str:
    """A value in Hydra's grammar, with its texts in quotes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_grammar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_grammar(item) for item in value) + "]"
    if isinstance(value, str):
        return in_double_quotes(value)
    return shown(value)


def quote(argument: str) -> str:
    """An override, its value in quotes if it has letters outside of ASCII.

    Hydra's grammar knows them there alone.
    """
    key, equals, value = argument.partition("=")
    if value.isascii() or not key.isascii() or re.search(r"['\"\[\]{}(),\\$]", value):
        return argument
    return f"{key}{equals}'{value}'"


def quotes_remedy(argument: str) -> str:
    """The remedy where Hydra reads a value in quotes alone, for a message.

    "" for a list, or what is not an override at all.
    """
    parts = re.fullmatch(r"(\+{0,2}[\w./@-]+)=([^\s'\"\[\]{}(),].{0,200})", argument)
    if not parts:
        return ""
    key, value = parts.groups()
    if value == "~" or value.startswith("~/"):
        return f"~ is not expanded here; use {key}=$HOME{value[1:]}"
    if re.search(r"['$`\"\\!]", value):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        typed = shlex.quote(f'{key}="{escaped}"')
    else:
        typed = f"\"{key}='{value}'\""
    return f"the value needs quotes; use {typed}"


CLOSING = {"[": "]", "{": "}", "(": ")"}


def unclosed_bracket(argument: str) -> str:
    """The bracket or quote of an argument that lacks its other half, for a message; "" if none."""
    expected: list[str] = []
    quote = ""
    for letter in re.sub(r"\\.", "", argument):
        if quote:
            if letter == quote:
                quote = ""
        elif letter in ("'", '"'):
            quote = letter
        elif letter in CLOSING:
            expected.append(CLOSING[letter])
        elif letter in CLOSING.values():
            if not expected:
                return f", '{letter}' closes nothing"
            missing = expected.pop()
            if letter != missing:
                return f", '{missing}' is missing before '{letter}'"
    if quote:
        return ", a quote is never closed"
    if not expected:
        return ""
    remedy = ""
    if argument.endswith(","):
        remedy = "; put quotes around a word with spaces, for the shell"
    return f", '{expected[-1]}' is missing at its end{remedy}"


_SECRET = re.compile(
    r"((^|_)(password|passwd|passphrase|secret|secret_key|api_?key|access_key|private_key|credentials?))$"
    r"|^((auth|access|api|hf|hub|bearer|refresh|session|github|wandb)_)?token$"
)
"""Names of secrets. Not `pad_token` and the like, which are tokens of a vocabulary."""


def is_secret(dotted: str) -> bool:
    """Tell whether the name of a key suggests that its value is a secret."""
    return any(_SECRET.search(part.lower()) for part in dotted.split("."))


def unless_secret(key: str, value: Any) -> str:
    """A value for a message."""
    return "(hidden)" if is_secret(key) else shown(value)


def as_typed(problem: str, given: dict[str, Any]) -> str:
    """A message about an unknown section, with the keys as they were typed.

    `tain.epochs=3` has become tain={epochs:3}.
    """
    section, is_section, _ = problem.partition("={")
    _, is_unknown, rest = problem.partition(": no such key")
    typed = [
        f"{key}={unless_secret(key, value)}"
        for key, value in given.items()
        if key.startswith(f"{section}.")
    ]
    if is_section and is_unknown and typed:
        return " ".join(typed) + is_unknown + rest
    return problem
