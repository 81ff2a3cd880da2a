"""Each question that users ask has a page and a heading that answer it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (.+) \| ([\w/.]+\.md)(?:#([\w-]+))? \|$", re.M)
QUESTIONS = ROW.findall((ROOT / "tests/house/questions.md").read_text())


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {
        re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_there_are_a_hundred_questions() -> None:
    assert len({question for question, _, _ in QUESTIONS}) == len(QUESTIONS) >= 100


@pytest.mark.parametrize("page", sorted({page for _, page, _ in QUESTIONS}))
def test_page_and_heading_of_each_answer_exist(page: str) -> None:
    wanted = {anchor for _, name, anchor in QUESTIONS if name == page and anchor}
    assert wanted <= anchors(ROOT / "docs" / page)
