"""The document in a page, which its scripts draw."""

from __future__ import annotations

import json
import re
from typing import Any


def report_in(page: str) -> dict[str, Any]:
    """The report that a page holds as JSON."""
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page)
    assert found, "the page has no report"
    return json.loads(found[1])


def section_of(page: str, title: str) -> dict[str, Any]:
    """The section of a page with this title."""
    return next(part for part in report_in(page)["sections"] if part["title"] == title)
