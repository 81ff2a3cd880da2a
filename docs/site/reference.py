"""Writes docs/reference/keys.md from the schema and docs/reference/python.md from docstrings.

    python docs/site/reference.py

The pages are kept in the repository, so that they are read without building the site.
tests/house/test_reference.py compares them with what this writes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddp_train.config.earlier_runs import CONFIG_KEY, OF_A_RUN
from ddp_train.config.keys import field_types, is_section, own_keys
from ddp_train.options.custom import CustomOption
from ddp_train.options.key import LARGEST
from ddp_train.options.registry import OPTIONS
from ddp_train.options.schema import SECTIONS, Config
from ddp_train.text import shown

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/reference"
PRESETS = ROOT / "ddp_train/conf"
NOTE = "<!-- Written by docs/site/reference.py from the source: edit that, then run the script. -->"

KEYS_INTRO = f"""\
# Every key

{NOTE}

A key is given on the command line, `optimizer.lr=0.1`, or in a [preset](../start/project.md).
`python launch.py --help` prints the same list, with the presets of your own folder; `--cfg job`
prints the values that a command gives. `null` means not set, and `auto` is replaced by a value for
the hardware, which the plan of the run shows with its reason.
"""
PYTHON_INTRO = f"""\
# Python API

{NOTE}

All names of `ddp_train`, as `help()` shows them, with the objects that `session` and `load` return.
`import ddp_train` does not import torch; a name is imported when it is first used. [Your own
loop](../guides/own_loop.md) and [from Python](../start/project.md#from-python) show them at work.
"""


def keys_page() -> str:
    """The text of docs/reference/keys.md."""
    lines = [KEYS_INTRO, "## Groups", *_group_lines(), "## The run", ""]
    row_of_config = f"| `{CONFIG_KEY}` | path | | {_prose(OF_A_RUN)} |"
    lines += [*HEAD, row_of_config, *_rows("", Config), ""]
    for section, schema in SECTIONS.items():
        lines += [f"## {section}", "", *_table(f"{section}.", schema)]
    for section in OPTIONS:
        lines += _option_lines(section)
    return "\n".join(lines).rstrip() + "\n"


def _group_lines() -> Iterator[str]:
    """A table of the groups and the presets that the package has of each."""
    yield ""
    yield "`group=preset` chooses a file of `ddp_train/conf/`, or of `conf/` where you stand."
    yield ""
    yield from ("| group | presets |", "|---|---|")
    for folder in sorted(path for path in PRESETS.iterdir() if path.is_dir()):
        names = [path.stem for path in sorted(folder.rglob("*.yaml"))]
        group = folder.name if folder.name != "hydra" else "hydra/launcher"
        default = ""
        if group in OPTIONS:
            default = f"; default: `{getattr(Config(), group).name}`"
        yield f"| `{group}` | {', '.join(f'`{name}`' for name in names)}{default} |"
    yield ""


def _option_lines(section: str) -> Iterator[str]:
    """The keys of each option of a group: those that all of them have stand once."""
    options = OPTIONS[section]
    first = next(iter(options.values()))
    common = first.__bases__[0]
    common_rows = list(_rows(f"{section}.", common)) if is_section(common) else []
    yield from (f"## {section}", "")
    if common_rows:
        yield from ("Keys of every option, unless it says otherwise:", "", *HEAD, *common_rows, "")
    for name, schema in options.items():
        rows = list(_rows(f"{section}.", schema))
        own = [row for row in rows if row not in common_rows]
        yield from (f"### {section}={name}", "")
        summary = _summary(schema)
        if summary:
            yield from (_prose(summary), "")
        keys = {_key_of(row) for row in rows}
        missing = [_key_of(row) for row in common_rows if _key_of(row) not in keys]
        if missing:
            yield from (f"Not among its keys: {', '.join(missing)}.", "")
        if own:
            yield from (*HEAD, *own, "")


def _key_of(row: str) -> str:
    """The key in the first column of a row, with its backticks."""
    return row.split(" | ")[0].removeprefix("| ")


HEAD = ("| key | type | default | meaning |", "|---|---|---|---|")


def _table(prefix: str, schema: type) -> Iterator[str]:
    summary = _summary(schema)
    if summary:
        yield from (_prose(summary), "")
    yield from (*HEAD, *_rows(prefix, schema), "")


def _rows(prefix: str, schema: type) -> Iterator[str]:
    """A row for each key of a section."""
    fields = list(dataclasses.fields(schema))
    if issubclass(schema, CustomOption):
        meanings = {field.name: field.metadata.get("meaning", "") for field in fields}
        yield f"| `{prefix}_target_` | path of code | | {_prose(meanings['target'])} |"
        yield f"| `{prefix}ARGUMENT` | any | | {_prose(meanings['arguments'])} |"
        fields = [field for field in fields if field.name in own_keys(schema)]
    hints = field_types(schema)
    defaults = schema()
    for field in fields:
        default = getattr(defaults, field.name, None)
        if dataclasses.is_dataclass(default) and prefix:
            yield from _rows(f"{prefix}{field.name}.", type(default))
        if "meaning" in field.metadata:
            kind = _kind(hints[field.name], field.metadata)
            meaning = _prose(field.metadata["meaning"])
            yield f"| `{prefix}{field.name}` | {kind} | `{shown(default)}` | {meaning} |"


def _kind(hint: Any, rules: Any) -> str:
    """The type of a key in words, with its rules: `int, at least 1`, or `auto`."""
    if "choices" in rules:
        choices = ", ".join(f"`{choice}`" for choice in rules["choices"])
        return f"list of {choices}" if typing.get_origin(hint) is list else choices
    names = [name for name in _type_names(hint) if not (name == "str" and _has_words(rules))]
    for word in rules.get("literals", ()):
        names.append(f"`{word}`")
    if rules.get("may_be_range"):
        names.append("LOW:HIGH")
    if rules.get("is_span"):
        names = ["FIRST:LAST"]
    if rules.get("is_path"):
        names = ["path" if name == "str" else name for name in names]
    bounds = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
    limits = [
        f"{words} {_number(rules[rule])}"
        for rule, words in bounds.items()
        if rule in rules and rules[rule] < LARGEST
    ]
    return ", ".join([" or ".join(names), *limits])


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else str(value)


def _has_words(rules: Any) -> bool:
    return "literals" in rules or bool(rules.get("may_be_range"))


def _type_names(hint: Any) -> list[str]:
    """The names of the types that a hint allows, `null` left out: the default tells."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [name for part in typing.get_args(hint) for name in _type_names(part)]
    if hint is type(None):
        return []
    return [getattr(origin or hint, "__name__", str(hint))]


def _summary(schema: type) -> str:
    """The first paragraph of a docstring, "" if the dataclass has only that of Python."""
    text = schema.__doc__ or ""
    if not text or text.startswith(f"{schema.__name__}("):
        return ""
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


PAGE_PATH = re.compile(r"docs/([\w/]+\.md)")
SIGN = re.compile(r"[*|<]|\b_|_\b|(?<=\W)_")
"""What Markdown would take for an emphasis, a column or HTML; `_` within a word is none."""
PART = re.compile(r"(`[^`]*`)")


def _prose(text: str) -> str:
    """A text of the source as Markdown: its signs stay signs, and paths of pages are links."""
    parts = []
    for part in PART.split(text):
        if part.startswith("`"):
            parts.append(part.replace("|", "\\|"))
            continue
        escaped = SIGN.sub(r"\\\g<0>", part)
        parts.append(PAGE_PATH.sub(_link, escaped))
    return "".join(parts)


def _link(found: re.Match[str]) -> str:
    page = found[1]
    return f"[{page.rpartition('/')[2]}](../{page})"


def python_page() -> str:
    """The text of docs/reference/python.md. It imports torch."""
    import ddp_train
    from ddp_train.inference.trained_model import Trained
    from ddp_train.sessions.run import Run

    after = {"session": ("Run", Run, "run"), "load": ("Trained", Trained, "trained")}
    lines = [PYTHON_INTRO]
    for name in ddp_train.__all__:
        lines += _entry(name, getattr(ddp_train, name), f"ddp_train.{name}")
        if name in after:
            lines += _entry(*after[name])
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, thing: Any, called: str) -> Iterator[str]:
    """A class or a function, with its public methods."""
    yield from (f"## {name}", "")
    is_type = inspect.isclass(thing)
    if not is_type or name not in ("Run", "Trained", "Task", "Tracker"):
        yield from _code(called, thing)
    yield from _docstring(thing)
    if is_type:
        yield from _attributes(thing)
        for method, value in _methods(thing).items():
            yield from (f"### {name}.{method}", "")
            function = getattr(value, "func", None) or getattr(value, "fget", None)
            if function is None:
                yield from _code(f"{called.lower() if name in LOWER else name}.{method}", value)
            yield from _docstring(function or value)


def _attributes(cls: type) -> Iterator[str]:
    """A list of the public attributes of a class that have a text, in its body or `__init__`."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(definition, ast.ClassDef)
    statements = list(definition.body)
    for part in definition.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            statements += part.body
    items = []
    for statement, text in itertools.pairwise(statements):
        name = _assigned_name(statement)
        if not name or name.startswith("_"):
            continue
        match text:
            case ast.Expr(value=ast.Constant(value=str(meaning))):
                items.append(f"- `{name}`: {_prose(' '.join(meaning.split()))}")
    if items:
        yield from ("Attributes:", "", *items, "")


def _assigned_name(statement: ast.stmt) -> str:
    """The name that a statement assigns, without `self.`; "" for another statement."""
    if isinstance(statement, ast.AnnAssign):
        target = statement.target
    elif isinstance(statement, ast.Assign):
        target = statement.targets[0]
    else:
        return ""
    return ast.unparse(target).removeprefix("self.")


LOWER = ("Run", "Trained")
"""Classes whose objects are shown by the name that guides give them."""


def _methods(cls: type) -> dict[str, Any]:
    """The public methods and properties of a class and its bases in this package."""
    import torch

    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if not base.__module__.startswith("ddp_train."):
            continue
        for name, value in vars(base).items():
            is_method = callable(value) or isinstance(value, property | functools.cached_property)
            if is_method and not name.startswith("_") and inspect.getdoc(value):
                found.setdefault(name, value)
    if issubclass(cls, torch.optim.Optimizer):
        return {"step": found["step"]}  # the others are for its base class
    return {name: value for name, value in found.items() if name != "forward"}


def _code(called: str, thing: Any) -> Iterator[str]:
    """The call in a code block, arguments one a line where they do not fit in one."""
    arguments = [_argument(argument) for argument in _arguments(thing)]
    separator = inspect.Parameter.KEYWORD_ONLY
    for place, argument in enumerate(_arguments(thing)):
        if argument.kind is separator and not _follows_star(_arguments(thing), place):
            arguments.insert(place, "*")
            break
    call = f"{called}({', '.join(arguments)})"
    yield "```python"
    if len(call) <= 100:
        yield call
    else:
        yield f"{called}("
        yield from (f"    {argument}," for argument in arguments)
        yield ")"
    yield from ("```", "")


def _follows_star(arguments: list[inspect.Parameter], place: int) -> bool:
    """Tell whether `*name` stands before the keyword-only argument at a place."""
    return any(other.kind is inspect.Parameter.VAR_POSITIONAL for other in arguments[:place])


def _arguments(thing: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(thing).parameters.values()
    return [parameter for parameter in parameters if parameter.name != "self"]


def _argument(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.default is inspect.Parameter.empty:
        return text
    return f"{text}={_default(parameter.default)}"


def _default(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value) if isinstance(value, int | float | tuple | type(None)) else "..."


ARGUMENT = re.compile(r"^(\w+): ", re.M)


def _docstring(thing: Any) -> Iterator[str]:
    """A docstring as paragraphs, its lines on arguments as a list."""
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        if not ARGUMENT.match(paragraph):
            yield from (_prose(" ".join(paragraph.split())), "")
            continue
        for item in re.split(r"\n(?=\w+: )", paragraph):
            name, _, meaning = item.partition(": ")
            yield f"- `{name}`: {_prose(' '.join(meaning.split()))}"
        yield ""


PAGES: dict[str, Callable[[], str]] = {"keys.md": keys_page, "python.md": python_page}
"""The text of each page of docs/reference/ that is generated."""


if __name__ == "__main__":
    for page, text_of in PAGES.items():
        (FOLDER / page).write_text(text_of())
