"""YAML files whose values mean what they mean on a command line.

YAML 1.1 has readings of its own: 010 is 8, 1:30 is 90, `on` is true, and 1e-3 is a text. Hydra's
loader and its grammar agree on all numbers but the ones that `ambiguous` finds. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddp_train.errors import ConfigError
from ddp_train.text import shown

PLAIN = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*)?|true|false|null|~|", re.IGNORECASE)
"""Values that YAML and Hydra read alike, or Hydra refuses."""
NOT_FINITE = re.compile(r"[-+]?(inf|nan)", re.IGNORECASE)
"""A number on a command line, and a text in YAML."""

FLOAT_TAG = "tag:yaml.org,2002:float"
FIRST_LETTERS = list("-+0123456789.")
FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?$
        |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)$
        |[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?$
        |[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*$
        |[-+]?\.(?:inf|Inf|INF)$
        |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
"""A number with a point or an exponent, as Hydra's loader reads it."""

DUPLICATE = "found duplicate key "
"""The beginning of an error, as OmegaConf's loader has it."""


class _Loader(yaml.SafeLoader):
    """Reads as Hydra's loader does: 1e-3 is a number, a date is a text, no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    problem = f"{DUPLICATE}{key_node.value}"
                    raise yaml.constructor.ConstructorError(
                        None, None, problem, key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    letter: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:timestamp", FLOAT_TAG)
    ]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Writes in quotes what a YAML 1.1 loader or `_Loader` would not read as a text."""


_Loader.add_implicit_resolver(FLOAT_TAG, FLOAT, FIRST_LETTERS)
_Dumper.add_implicit_resolver(FLOAT_TAG, FLOAT, FIRST_LETTERS)


def load_yaml(text: str) -> Any:
    """The content of a file. Raises yaml.YAMLError, for a duplicate key too."""
    return yaml.load(text, Loader=_Loader)


def dump_yaml(values: dict[str, Any]) -> str:
    """Plain nested values as a file that `load_yaml` and other loaders read alike."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def is_duplicate(error: yaml.YAMLError) -> bool:
    """Tell whether a key stands twice in a file."""
    return str(getattr(error, "problem", "")).startswith(DUPLICATE)


def error_text(error: yaml.YAMLError, place: str) -> str:
    """The message about a file that is not YAML, or has a key twice. place: the file."""
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", "") or " ".join(str(error).split()))
    if mark:
        place = f"{place}: line {mark.line + 1}"
    if is_duplicate(error):
        key = problem.removeprefix(DUPLICATE)
        return f"{place}: {key} is there twice; keep one of them"
    return f"{place}: is not valid YAML: {problem}; correct the file"


@dataclass(frozen=True)
class Ambiguity:
    """A plain value, or the name of a key, that a command line would read otherwise."""

    line: int
    key: str
    """Dotted."""
    text: str
    """As it stands in the file."""
    by_yaml: Any
    by_hydra: Any

    def is_settled(self, kinds: Collection[Any]) -> bool:
        """Tell whether a key takes both readings for the same value. kinds: its types."""
        if bool in kinds and isinstance(self.by_yaml, bool):
            return True
        if str in kinds or not {int, float} & {*kinds}:
            return False
        try:
            numbers = float(self.text), float(self.by_yaml)
        except ValueError:
            return False
        return numbers[0] == numbers[1] or all(map(math.isnan, numbers))

    def message(self, place: str) -> str:
        """The message about it. place: the file; or, of one value, the override."""
        meant = _as_yaml(self.by_yaml, self.text)
        here = "a text" if isinstance(self.by_yaml, str) else meant
        there = "a text" if isinstance(self.by_hydra, str) else shown(self.by_hydra)
        if re.fullmatch(r"[-+]?[0-9]+", self.text):
            there = f"{int(self.text)} or a text"
        rule = f"{self.text} is {here} in YAML, and {there} on a command line"
        remedy = f"write {meant}, or '{self.text}' in quotes"
        if self.key:
            place = f"{place}: line {self.line}: {self.key}"
        return f"{place}: {rule}; {remedy}"


def _as_yaml(value: Any, text: str) -> str:
    """A value as YAML alone reads it."""
    if not isinstance(value, str):
        return shown(value)
    sign = "-" if text.startswith("-i") else ""
    return f"{sign}.{text.lstrip('+-').lower()}"


def ambiguous(text: str) -> Iterator[Ambiguity]:
    """The plain values, and names of keys, that a command line would read otherwise.

    Raises yaml.YAMLError.
    """
    for key, node in _scalars(yaml.compose(text, Loader=_Loader), ""):
        if node.style is not None or PLAIN.fullmatch(node.value):
            continue
        is_text = node.tag == "tag:yaml.org,2002:str"
        if is_text and not NOT_FINITE.fullmatch(node.value):
            continue
        by_yaml = load_yaml(node.value)
        by_hydra = _by_hydra(node.value)
        is_spelt_for_yaml = isinstance(by_yaml, float) and not math.isfinite(by_yaml)
        if by_hydra is None or is_spelt_for_yaml or repr(by_yaml) == repr(by_hydra):
            continue
        yield Ambiguity(node.start_mark.line + 1, key, node.value, by_yaml, by_hydra)


def _scalars(node: yaml.Node | None, path: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """The values and the names of keys of a file, each with its dotted key."""
    if isinstance(node, yaml.ScalarNode):
        yield path, node
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(item, path)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.tag != "tag:yaml.org,2002:merge":
                yield from _scalars(name, path)
                yield from _scalars(value, f"{path}.{name.value}".lstrip("."))


def _by_hydra(text: str) -> Any:
    """The value on a command line; None: Hydra cannot read it there."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return None


def read_file(path: Path, place: str) -> Any:
    """The content of a file. place: its name in messages.

    Raises ConfigError for what is not YAML, a duplicate key, and a value that a
    command line would read otherwise. Raises OSError and UnicodeDecodeError.
    """
    text = path.read_text(encoding="utf-8")
    try:
        content = load_yaml(text)
        found = [one.message(place) for one in ambiguous(text)]
    except yaml.YAMLError as error:
        raise ConfigError([error_text(error, place)]) from None
    if found:
        raise ConfigError(found)
    return content
