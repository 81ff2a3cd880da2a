"""Weights of pages in the search of the site: guides before measurements and generated pages."""

from __future__ import annotations

from typing import Any

WEIGHTS = {"inside/": 0.1, "reference/python.md": 0.3, "reference/keys.md": 0.5}
"""The factor on the score of a page, by the beginning of its path; 1 for all others."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set the weight of a page. mkdocs calls it for each page."""
    for beginning, weight in WEIGHTS.items():
        if page.file.src_uri.startswith(beginning):
            page.meta["search"] = {"boost": weight}
    return markdown
