"""The code blocks of the docs run as they are pasted, page by page, in a fresh folder.

A block whose first line is a comment with the name of a file is saved under that name; blocks
of `bash` and other blocks of `python` run in the order of the page. `<!-- not run: REASON -->` before
a block says why it does not run here, `<!-- part of a script -->` that it is a part of one, and
`<!-- needs: PACKAGE ... -->` which packages it needs: without them it does not run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import ROOT, environment

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/start").glob("*.md")),
    *sorted((ROOT / "docs/guides").glob("*.md")),
    *sorted(
        page
        for page in (ROOT / "docs/operate").glob("*.md")
        if page.name not in ("failures.md", "hosts.md")  # their commands need a fault, or hosts
    ),
]
IN_THE_GATE = {"first_steps.md"}
"""Pages whose blocks run in the gate; the others take minutes."""
NEEDS_A_CLONE = {"README.md", "examples.md"}
BLOCK = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"(?:# @package _global_\n)?# ([\w./]+\.(?:py|yaml))$", re.M)
LANGUAGES = {"bash", "python", "yaml", "diff", "text"}
NEEDS = "needs: "
LIMIT_SECONDS = 300


@dataclass(frozen=True)
class Block:
    """A code block of a page; mark is the comment before it, "" if there is none."""

    mark: str
    language: str
    code: str

    @property
    def file(self) -> str:
        """The file that it is saved as, "" if none."""
        found = FILE.match(self.code)
        return found[1] if found else ""


def blocks_of(page: Path) -> Iterator[Block]:
    """The code blocks of a page."""
    for mark, language, code in BLOCK.findall(page.read_text()):
        yield Block(mark, language, code)


def can_run(block: Block) -> bool:
    """Tell whether the mark of a block lets it run here."""
    if block.mark.startswith(NEEDS):
        return all(map(importlib.util.find_spec, block.mark.removeprefix(NEEDS).split()))
    return not block.mark


def command_of(block: Block) -> list[str]:
    """The command that runs a block; empty if it is saved only, or not run."""
    if block.file or not can_run(block):
        return []
    if block.language == "bash":
        return ["bash", "-e", "-c", block.code]
    if block.language == "python":
        return [sys.executable, "-c", block.code]
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_of_known_kinds_and_compile(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, block.code
        assert not block.mark or block.mark.startswith(("not run: ", "part of a script", NEEDS))
        assert all(len(line) <= 100 for line in block.code.splitlines()), block.code
        if block.language == "python":
            compile(block.code, str(page), "exec")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=page.stem,
            marks=pytest.mark.slow if page.name in IN_THE_GATE else pytest.mark.nightly,
        )
        for page in PAGES
    ],
)
def test_blocks_run_as_pasted(page: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment({"PATH": path})
    if page.name in NEEDS_A_CLONE:
        shutil.copy(ROOT / "launch.py", tmp_path)
        for name in ("conf", "examples"):
            shutil.copytree(ROOT / name, tmp_path / name)
        env["PYTHONPATH"] = str(tmp_path)
    for block in blocks_of(page):
        if block.file:
            file = tmp_path / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.code)
        if command := command_of(block):
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
            assert done.returncode == 0, block.code + done.stdout[-1000:] + done.stderr[-3000:]
