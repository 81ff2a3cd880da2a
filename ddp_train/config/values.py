"""Plain nested values: their leaves, the secrets among them, their references to the environment, their quotes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_train.errors import ConfigError


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


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain values inside a nested value, with their dotted paths."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for name, item in items:
        yield from leaves(item, f"{path}.{name}".lstrip("."))


def quoted(argument: str) -> str:
    """An override whose value has letters outside of ASCII, in quotes: Hydra's grammar knows them there alone."""
    key, equals, value = argument.partition("=")
    plain = not value.isascii() and key.isascii() and re.fullmatch(r"[^'\"\[\]{}(),\\$]*", value)
    return f"{key}{equals}'{value}'" if plain else argument


def in_quotes(argument: str) -> str:
    """What to type where Hydra reads a value in quotes alone; "" for a list, or what is no override at all."""
    parts = re.fullmatch(r"(\+{0,2}[\w./@-]+)=([^\s'\"\[\]{}(),].{0,200})", argument)
    if not parts:
        return ""
    key, value = parts.groups()
    if value.startswith("~/"):
        return f"no shell expands ~ there; use {key}=$HOME{value[1:]}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    plain = not re.search(r"['$`\"\\!]", value)
    return "the value needs quotes; use " + (f"\"{key}='{value}'\"" if plain else shlex.quote(f'{key}="{escaped}"'))


_SECRET = re.compile(
    r"((^|_)(password|passwd|passphrase|secret|secret_key|api_?key|access_key|private_key|credentials?))$"
    r"|^((auth|access|api|hf|hub|bearer|refresh|session|github|wandb)_)?token$"
)
"""Names of secrets. Not `pad_token` and the like, which are tokens of a vocabulary."""


def is_secret(dotted: str) -> bool:
    """Whether the name of a key suggests that its value is a secret."""
    return any(_SECRET.search(part.lower()) for part in dotted.split("."))
