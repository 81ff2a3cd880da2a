"""The site of docs/ as a browser shows it from the file system, without a network."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Page, browser, installed
from tests.support.commands import ROOT

WANTED_SECONDS = 20

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(installed() is None, reason="no browser is installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed"
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built anew."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def tab() -> Iterator[Page]:
    """A tab of a new browser."""
    with browser() as page:
        yield page


def wait_for(tab: Page, expression: str) -> None:
    """Wait until an expression of JavaScript is true."""
    deadline = time.monotonic() + WANTED_SECONDS
    while not tab.ask(expression):
        assert time.monotonic() < deadline, expression
        time.sleep(0.1)


def test_search_finds_a_heading_from_the_file_system(site: Path, tab: Page) -> None:
    tab.open(site / "index.html")
    wait_for(tab, "document.querySelector('.md-search__input')?.offsetWidth > 100")
    tab.click(".md-search__input")
    tab.do("Input.insertText", text="early stopping")
    tab.do("Input.dispatchKeyEvent", type="keyUp", key="g")
    found = "document.querySelector('.md-search-result__list').innerText"
    wait_for(tab, f"{found}.includes('Early stopping')")
    assert tab.problems == []


@pytest.mark.parametrize("dark", [False, True])
def test_site_is_light_or_dark_as_the_system_is(site: Path, tab: Page, dark: bool) -> None:
    tab.open(site / "index.html", dark=dark)
    scheme = "slate" if dark else "default"
    wait_for(tab, f"document.body.dataset.mdColorScheme === '{scheme}'")


@pytest.mark.parametrize("page", ["index.html", "guides/model.html", "reference/keys.html"])
def test_pages_fit_into_a_phone(site: Path, tab: Page, page: str) -> None:
    tab.open(site / page, width=390)
    assert tab.ask("document.documentElement.scrollWidth") <= 390
