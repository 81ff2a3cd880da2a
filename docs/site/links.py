"""Links of pages to files outside docs/, which the site lacks. With `repo_url` they lead to the
repository, without it their text stays."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the text of a page with these links replaced. mkdocs calls it for each page."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def replacement(link: re.Match[str]) -> str:
        path = normpath(folder / link[2])
        if path.startswith("docs/"):
            return link[0]
        if not config.repo_url:
            return link[1]
        return f"[{link[1]}]({config.repo_url}/blob/main/{path}{link[3] or ''})"

    return LINK.sub(replacement, markdown)
