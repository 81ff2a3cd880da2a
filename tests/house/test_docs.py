"""Pages for those in trouble speak of messages that exist, and of every kind of failure."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_train.errors import LaunchError
from ddp_train.options.problem import Problem
from ddp_train.resilience import failure_report
from tests.house.test_questions import anchors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/troubleshooting.md").read_text()
MESSAGES = [found[1] or found[2] for found in re.finditer(r"^### (?:``(.+)``|`(.+)`)$", PAGE, re.M)]
HOLE = "\0"
"""Where a message takes a value."""


def text_of(node: ast.expr) -> str:
    """A text of the source, with a hole for each value that an f-string takes."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    return HOLE


def texts_of_variables(tree: ast.AST) -> dict[str, list[str]]:
    """The texts that each variable is assigned."""
    variables: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            variables.setdefault(node.targets[0].id, []).append(text_of(node.value))
    return variables


def problems_of(tree: ast.Module) -> Iterator[str]:
    """The messages of each `Problem(key, rule, remedy)`, with the texts that its variables have."""
    variables = texts_of_variables(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
            parts = [
                variables.get(part.id, [HOLE]) if isinstance(part, ast.Name) else [text_of(part)]
                for part in node.args
            ]
            yield from (str(Problem(*texts)) for texts in itertools.product(*parts))


def texts_of_function(function: ast.FunctionDef) -> Iterator[str]:
    """The f-strings of a function, with the texts that its variables have."""
    variables = texts_of_variables(function)
    for node in ast.walk(function):
        if isinstance(node, ast.JoinedStr):
            parts = []
            for part in node.values:
                if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
                    parts.append(variables.get(part.value.id, [HOLE]))
                else:
                    parts.append([text_of(part)])
            yield from ("".join(texts) for texts in itertools.product(*parts))


@pytest.fixture(scope="module")
def said_by_the_code() -> list[str]:
    """Every text in the source, and every problem."""
    found = []
    packages = [ROOT / name for name in ("ddp_train", "ddp_lab", "hydra_plugins")]
    for path in (path for package in packages for path in package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        found += problems_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found += texts_of_function(node)
            elif isinstance(node, ast.JoinedStr):
                found.append(text_of(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_said(message: str, texts: list[str]) -> bool:
    """Tell whether a text has all parts of a message in their order; `...` stands for anything."""
    parts = message.split("...")
    longest = max(parts, key=len)
    pattern = re.compile(".*".join(map(re.escape, parts)), re.S)
    return any(longest in text and pattern.search(text) for text in texts)  # `in` is the faster one


def test_the_page_has_messages(said_by_the_code: list[str]) -> None:
    assert MESSAGES and len(set(MESSAGES)) == len(MESSAGES)
    nobodys = "no progress for ... s (launch.patience=...)"
    assert not is_said(nobodys, said_by_the_code), "what nobody says is found out"


@pytest.mark.parametrize("message", MESSAGES)
def test_each_message_is_one_that_the_code_can_say(
    message: str, said_by_the_code: list[str]
) -> None:
    assert any(len(part.strip()) > 4 for part in message.split("...")), "too little to be found by"
    assert is_said(message, said_by_the_code)


def test_every_kind_of_failure_is_explained() -> None:
    kinds = {cls.kind for cls in errors_below(LaunchError)} | kinds_in(
        ROOT / "ddp_train/resilience/failure.py"
    )
    assert {"hang", "oom", "died", "data_worker", "exception"} <= kinds
    page = (ROOT / "docs/operate/failures.md").read_text()
    table = re.search(r"^\| kind \|.*?\n\n", page, re.M | re.S)
    assert table is not None
    rows = re.findall(r"^\| ([`\w, ]+) \|", table[0], re.M)
    assert kinds == set(re.findall(r"`(\w+)`", " ".join(rows)))


def errors_below(error: type[LaunchError]) -> Iterator[type[LaunchError]]:
    """The classes that derive from an error, at any depth."""
    for cls in error.__subclasses__():
        yield cls
        yield from errors_below(cls)


def kinds_in(path: Path) -> set[str]:
    """The kinds of failure that a module names: `_Cause("...", ...)`."""
    return set(re.findall(r'_Cause\("(\w+)"', path.read_text()))


def test_the_page_names_files_that_a_run_leaves() -> None:
    assert failure_report.FILE in PAGE and failure_report.SUMMARY in PAGE


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600


PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*\.md)?#([^)]+)\)", page.read_text())
    missing = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in anchors(page.parent / target if target else page)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_tables_are_whole(page: Path) -> None:
    """A blank line between two rows would begin a table without a head."""
    assert re.findall(r"^\|.*\n\n\|.*\n(?!\| ?:?-)", page.read_text(), re.M) == []


NAMED_TESTS = re.findall(
    r"`(tests/\w+\.py)::(\w+)`", "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
)


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED_TESTS)))
def test_each_test_that_a_page_names_is_there(file: str, name: str) -> None:
    names = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert name in names


def test_messages_name_pages_by_their_titles() -> None:
    """An installed package has no docs/: a message names a page that the site has."""
    titles = {page.read_text().partition("\n")[0] for page in (ROOT / "docs").rglob("*.md")}
    named = []
    for path in (path for name in ("ddp_train", "ddp_lab") for path in (ROOT / name).rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "see_page":
                named += [ast.literal_eval(argument) for argument in node.args]
            if isinstance(node, ast.Constant) and id(node) not in docstrings:
                assert not re.search(r"docs/.*\.md", str(node.value)), f"{path}:{node.lineno}"
    assert named and {f"# {title}" for title in named} <= titles
