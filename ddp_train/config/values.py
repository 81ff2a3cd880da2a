"""Plain nested values: their leaves, the secrets among them, their references to the environment,
their quotes."""

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

    Raises ConfigError for a variable that is not set. key: the name of the value, for that message.
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


def plain(composed: DictConfig) -> dict[str, Any]:
    """The composed configuration as plain data, references resolved.

    `${oc.env:NAME}` stays as it is in the arguments of the user's own code, whatever refers to it:
    the value may be a secret, and this is written to files. It is looked up where the argument is
    used. `bind` looks up all others, and shows what was typed where it is wrong.
    """

    def kept(name: str, *default: str) -> str:
        return "${oc.env:" + ",".join([name, *map(str, default)]) + "}"

    OmegaConf.register_new_resolver("oc.env", kept, replace=True)
    try:
        values = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    for section, content in values.items():
        from_environment(
            content, section
        )  # raises for a variable that is not set, before any worker starts
    return values


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values inside a nested value, with their dotted paths."""
    if isinstance(value, dict):
        items = value.items()
    else:
        items = enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for name, item in items:
        yield from leaves(item, f"{path}.{name}".lstrip("."))


def grammatical(value: Any) -> str:
    """A value in Hydra's grammar, with its texts in quotes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{grammatical(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(grammatical(item) for item in value) + "]"
    if isinstance(value, str):
        return in_double_quotes(value)
    return shown(value)


def quoted(argument: str) -> str:
    """An override whose value has letters outside of ASCII, in quotes: Hydra's grammar knows them
    there alone."""
    key, equals, value = argument.partition("=")
    plain = not value.isascii() and key.isascii() and re.fullmatch(r"[^'\"\[\]{}(),\\$]*", value)
    return f"{key}{equals}'{value}'" if plain else argument


def in_quotes(argument: str) -> str:
    """What to type where Hydra reads a value in quotes alone; "" for a list, or what is no override
    at all."""
    parts = re.fullmatch(r"(\+{0,2}[\w./@-]+)=([^\s'\"\[\]{}(),].{0,200})", argument)
    if not parts:
        return ""
    key, value = parts.groups()
    if value.startswith("~/"):
        return f"no shell expands ~ there; use {key}=$HOME{value[1:]}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    plain = not re.search(r"['$`\"\\!]", value)
    return "the value needs quotes; use " + (
        f"\"{key}='{value}'\"" if plain else shlex.quote(f'{key}="{escaped}"')
    )


def unclosed(argument: str) -> str:
    """Which bracket or quote of a word, that Hydra cannot read, lacks its other half, for a
    message; "" if none."""
    closing = [""]
    quote = ""
    for letter in re.sub(r"\\.", "", argument):
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif letter in "[{(":
            closing.append("]})"["[{(".index(letter)])
        elif letter in "]})" and letter != (due := closing.pop()):
            if due:
                return f", '{due}' is missing before '{letter}'"
            return f", '{letter}' closes nothing"
    if quote:
        return ", a quote is never closed"
    missing = f"'{closing[-1]}'" if closing[-1] else ""
    if argument.endswith(","):
        spaces = "; put quotes around a word with spaces, for the shell"
    else:
        spaces = ""
    if missing:
        return f", {missing} is missing at its end{spaces}"
    return ""


_SECRET = re.compile(
    r"((^|_)(password|passwd|passphrase|secret|secret_key|api_?key|access_key|private_key|credentials?))$"
    r"|^((auth|access|api|hf|hub|bearer|refresh|session|github|wandb)_)?token$"
)
"""Names of secrets. Not `pad_token` and the like, which are tokens of a vocabulary."""


def is_secret(dotted: str) -> bool:
    """Whether the name of a key suggests that its value is a secret."""
    return any(_SECRET.search(part.lower()) for part in dotted.split("."))


def as_typed(problem: str, given: dict[str, Any]) -> str:
    """A message about a section that there is not: of `tain.epochs=3` as it was typed, which became
    tain={epochs:3}."""
    section, is_section, _ = problem.partition("={")
    _, unknown, rest = problem.partition(": no such key")
    below = [key for key in given if key.startswith(f"{section}.")]
    words = " ".join(
        f"{key}={'(hidden)' if is_secret(key) else shown(given[key])}" for key in below
    )
    if is_section and unknown and below:
        return words + unknown + rest
    return problem
