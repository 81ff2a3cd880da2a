"""Arguments that Hydra's grammar cannot read, and what to type in their place.

A remedy is given only if Hydra reads it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_train.config.keys import kinds_of
from ddp_train.config.program import Program
from ddp_train.config.values import CLOSING, quote, quotes_remedy, unclosed_bracket
from ddp_train.text import did_you_mean, in_double_quotes

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

COMMANDS = ["init", "resize"]
"""First arguments that are not overrides."""
LONGEST = 500
"""Letters of an argument that is looked at in detail."""


def parsed(argument: str) -> Override | None:
    """An override; None if Hydra cannot read it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(quote(argument))
    except (HydraException, RecursionError, ValueError):
        # ValueError: Python reads no integers of 4,300 digits.
        return None
    return override if override.key_or_group else None


def why_unreadable(program: Program, argument: str, is_first: bool) -> str:
    """The problem of an argument that Hydra cannot read, with what to type instead.

    is_first: of the command line, where a command may stand.
    """
    if len(argument) <= LONGEST:
        for rule, word in _repairs(argument):
            if parsed(word):
                return f"{rule}; use {shlex.quote(word)}"
    key, equals, value = argument.partition("=")
    if not equals:
        guess = did_you_mean(argument, COMMANDS) if is_first else ""
        return f"not of the form key=value, '=' is missing{guess}"
    if key and program.is_group(key):
        options = program.options(key)
        return f"must be one of {', '.join(options)}{did_you_mean(value, options)}"
    return _with_quotes(argument) or f"not of the form key=value{unclosed_bracket(argument)}"


def _repairs(argument: str) -> Iterator[tuple[str, str]]:
    """Rules that an argument may break, and the word that would keep each."""
    typed = re.sub(r"^[-\s]*(override\s+)?", "", argument)
    key, separator, value = re.split(r"(=|:\s)", f"{typed}: ", maxsplit=1)[:3]
    value = value.removesuffix(": ")
    if separator != "=":
        value = value.strip()
    if not key.strip("+/ ") or not value:
        return
    plain_key = re.sub(r"^(\+*)/", r"\1", key.strip()).rstrip("/")
    if plain_key != key or separator != "=" or typed != argument:
        rule = "write key=value, without dashes, spaces or a leading /"
        yield rule, f"{plain_key}={value.strip()}"
    without_end = value.strip("=,;")
    if without_end and without_end != value and not may_be_text(key):
        yield "the value begins or ends with a stray =, comma or semicolon", f"{key}={without_end}"
    if value[0] in CLOSING and not unclosed_bracket(argument):
        yield "the value needs quotes", f"{key}={_in_quotes_inside(value)}"


def may_be_text(key: str) -> bool:
    """Tell whether a key takes a text, or is not known."""
    kinds = kinds_of(key.lstrip("+"))
    return not kinds or str in kinds


def _with_quotes(argument: str) -> str:
    """The remedy with quotes around the whole value; "" if Hydra would not read it either."""
    remedy = quotes_remedy(argument)
    _, _, typed = remedy.partition("; use ")
    if typed.startswith(("'", '"')) and not parsed(shlex.split(typed)[0]):
        return ""
    return remedy


def _in_quotes_inside(text: str) -> str:
    """A list or a mapping with quotes around the items that need them; any other text in quotes."""
    if parsed(f"key={text}"):
        return text
    closing = CLOSING.get(text[:1])
    if closing in ("]", "}") and text.endswith(closing):
        items = _items(text[1:-1])
        if closing == "]":
            return f"[{','.join(map(_in_quotes_inside, items))}]"
        pairs = [item.partition(":") for item in items]
        if all(colon for _, colon, _ in pairs):
            inside = [f"{name}:{_in_quotes_inside(value)}" for name, _, value in pairs]
            return "{" + ",".join(inside) + "}"
    return in_double_quotes(text)


def _items(text: str) -> list[str]:
    """The parts of a text between commas that stand in no bracket."""
    items = [""]
    depth = 0
    for letter in text:
        if letter in CLOSING:
            depth += 1
        elif letter in CLOSING.values():
            depth -= 1
        if letter == "," and not depth:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items]
