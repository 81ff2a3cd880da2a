"""Generated pages of the reference are those that the source gives."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from ddp_train.config.keys import all_keys

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs/site/reference.py"
GENERATED = ("keys.md", "python.md")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The script that writes the pages."""
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GENERATED)
def test_page_is_what_the_source_gives(name: str, reference: ModuleType) -> None:
    assert set(reference.PAGES) == set(GENERATED)
    page = (ROOT / "docs/reference" / name).read_text()
    assert page == reference.PAGES[name](), "run python docs/site/reference.py"


def test_every_key_has_a_row() -> None:
    page = (ROOT / "docs/reference/keys.md").read_text()
    custom = ("target", "arguments", "name")  # rows of `_target_` and ARGUMENT; the preset
    keys = [key for key in all_keys() if key.rpartition(".")[2] not in custom or key == "name"]
    assert [key for key in keys if f"| `{key}` |" not in page] == []


def sections_of_python_page() -> dict[str, str]:
    """The text below each heading of python.md."""
    page = (ROOT / "docs/reference/python.md").read_text()
    parts = re.split(r"^###? (.+)$", page, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def arguments_of(section: str) -> list[str]:
    """The names of the arguments in the code block of a section; [] without one."""
    call = re.search(r"^```python\n[\w.]+(.+?)^```", section, re.M | re.S)
    if call is None:
        return []
    function = ast.parse(f"def call{call[1].rstrip()}: ...")
    return [node.arg for node in ast.walk(function) if isinstance(node, ast.arg)]


@pytest.mark.parametrize(("name", "section"), sections_of_python_page().items())
def test_every_argument_has_its_line(name: str, section: str) -> None:
    missing = [one for one in arguments_of(section) if f"\n- `{one}`: " not in section]
    assert missing == []


def test_attributes_have_their_text() -> None:
    sections = sections_of_python_page()
    for name in ("better", "unit", "units_are_samples"):
        assert f"\n- `{name}`: " in sections["Task"]
    for name in ("environment", "package"):
        assert f"\n- `{name}`: " in sections["Tracker"]
    assert "\n- `classes`: " in sections["Trained"], "that `__init__` sets"
