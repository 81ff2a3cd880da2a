"""Pages as a browser shows them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_train.resilience.whole_files import write_json
from ddp_train.telemetry.pages.charts import Axis, Bar, Curve, Mark, bars, curves
from ddp_train.telemetry.pages.page import HERE, as_page
from ddp_train.telemetry.pages.report import Lines, Plot, Report
from ddp_train.telemetry.pages.run_files import read_run
from ddp_train.telemetry.pages.run_page import run_page
from ddp_train.telemetry.pages.tables import Table
from tests.support.browser import Page, browser, installed
from tests.support.pages import leave_run, page_of_sweep, sweep_rows

NO_BROWSER = "no browser is installed (Debian: apt-get install chromium)"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def test_files_of_others_are_as_published() -> None:
    folder = HERE / "third_party"
    rows = re.findall(
        r"^\| (\S+) \| \S+ \| \S+ \| .* \| ([0-9a-f]{64}) \|$",
        (folder / "README.md").read_text(),
        re.M,
    )
    assert {name for name, _ in rows} | {"README.md"} == {path.name for path in folder.iterdir()}
    assert all(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in rows
    )


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if not installed():
        pytest.skip(NO_BROWSER)
    with browser() as page:
        yield page


def looked_at(tab: Page, path: Path) -> None:
    """On a dark phone and a light screen: nothing is wider than it, all plots are drawn, nothing is
    reported."""
    tab.problems.clear()
    backgrounds = set()
    for width, dark in ((390, True), (1280, False)):
        tab.open(path, width, dark=dark)
        assert tab.ask(OVERFLOW) == 0, f"{path} is wider than {width} px"
        drawn = (
            "[...document.querySelectorAll('.frame')].map(f => f.querySelectorAll('svg"
            " path').length)"
        )
        assert all(tab.ask(drawn)), "each plot has lines"
        backgrounds.add(tab.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2 and tab.problems == []


@pytest.mark.slow
def test_browser_shows_the_page_of_a_run(tab: Page, tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "r", epochs=12)
    path = folder / "report.html"
    path.write_text(as_page(run_page(read_run(folder), {"model": "mlp"})))
    looked_at(tab, path)
    first = "document.querySelector('tbody tr').cells[0].textContent"
    assert tab.ask(first) == "1"
    for expected in ("1", "12"):
        tab.click("th button")
        assert tab.ask(first) == expected
    tab.ask("window.scrollTo(0, 0)")
    middle = "const r = document.querySelector('.frame').getBoundingClientRect();"
    x, y = tab.ask(f"(() => {{ {middle} return [r.x + r.width / 2, r.y + r.height / 2] }})()")
    tab.move_to(x, y)
    assert "training:" in tab.ask("document.querySelector('.frame').textContent"), (
        "hovering names the values"
    )
    assert tab.problems == []


@pytest.mark.slow
def test_browser_shows_texts_of_others_as_text(tab: Page, tmp_path: Path) -> None:
    """Whatever a name or an error message may hold, wherever it may stand."""
    text = '<script>alert(1)</script><img src=x onerror=alert(2)> &amp; "q"'
    table = Table(text, [text, "n"], [[text, 1]], text)
    plot = Plot(text, bars([Bar(text, 1.0)], Axis(text)), text)
    lines = [Lines(text, [text], text), Lines(text, [text], text, folded=True)]
    sections = [table, plot, *lines]
    path = tmp_path / "report.html"
    report = Report(text, text, sections, {text: text}, [text], text, {text: text}, [text])
    path.write_text(as_page(report))
    looked_at(tab, path)
    assert tab.ask("document.querySelectorAll('main script, main img').length") == 0
    found = tab.ask("document.querySelector('main').textContent")
    # All but those of the axis, the bar and the name of the column, which are broken elsewhere.
    assert found.count(text) >= 17, found


@pytest.mark.slow
def test_browser_tells_ticks_and_events_apart(tab: Page, tmp_path: Path) -> None:
    """A schedule at its begin, a stop and a start at one step: no two words of a plot or a table
    lie on each other."""
    folder = leave_run(tmp_path / "r")
    lines = [
        {
            "kind": "train",
            "step": step,
            "epoch": 1,
            "time": 1.7e9 + step,
            "loss": 2 - step / 400,
            "samples_per_second": 9.0,
            "lr": 0.025 * (1 + math.cos(math.pi * step / 45_000)),
        }
        for step in range(1, 230)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    starts = [
        {"command": "python launch.py", "started": f"2023-11-14T22:{at}+00:00"}
        for at in ("13:20", "16:07")
    ]
    (folder / "commands.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    stop = {"kind": "stop", "time": 1.7e9 + 166, "step": None, "text": "stopped and saved"}
    write_json(folder / "timeline.json", {"seconds": [], "events": [stop]})
    path = folder / "report.html"
    path.write_text(as_page(run_page(read_run(folder), {})))
    looked_at(tab, path)
    for width in (390, 1280):
        tab.open(path, width)
        texts = (
            "[...document.querySelectorAll('.frame')].map(f =>"
            " [...f.querySelectorAll('text')].map(t => t.textContent))"
        )
        plots = tab.ask(texts)
        assert len(plots) == 3 and all(
            plot.count("stopped and saved, resumed") == 1 for plot in plots
        ), plots
        (ticks,) = (
            [text for text in plot if text.startswith("0.0")]
            for plot in plots
            if "learning rate" in plot
        )
        assert len(ticks) > 3 and len({*ticks}) == len(ticks), ticks
        cut = """[...document.querySelectorAll('.frame')].map(f => Math.min(...[...f.querySelectorAll('text')].map(
            t => t.getBoundingClientRect().left)) - f.getBoundingClientRect().left)"""
        assert min(tab.ask(cut)) >= 0, "labels are as wide as they were measured"
        wider = (
            "[...document.querySelectorAll('td, .wide')].filter(e => e.scrollWidth >"
            " e.clientWidth).length"
        )
        assert tab.ask(wider) == 0, "nothing is wider than its cell, or scrolls"


@pytest.mark.slow
def test_browser_shows_bars_bands_and_columns_on_demand(tab: Page, tmp_path: Path) -> None:
    """As pages of studies have them."""
    long = "a name that is far too long for the edge of a phone"
    name = "broken_with_a_rather_long_name"
    bars_of = [Bar("single", 2.0, 1.5, 2.5), Bar(long, 1.0), Bar(name, None, text="no GPU")]
    band = Curve("ddp", [1, 2, 4], [1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [1.5, 2.5, 3.5])
    names = [f"column {number}" for number in range(14)]
    table = Table("Wide", names, [[0.5 + number for number in range(14)]], first=names[:4])
    plots = [
        Plot("time", bars(bars_of[::2], Axis("s", whole=True), 2.0)),
        Plot("score", bars(bars_of, Axis("accuracy %"))),
        Plot("growth", curves([band], Axis("n", log=True, ticks=[1, 2, 4]), Axis("y", log=True))),
    ]
    path = tmp_path / "report.html"
    path.write_text(as_page(Report("Study", "", [table, *plots])))
    looked_at(tab, path)
    assert tab.ask("document.querySelector('.frame').textContent").count("no GPU") == 1
    tab.open(path, 1280)
    frame = "document.querySelector('.frame')"
    label = f"[...{frame}.querySelectorAll('text')].find(t => t.textContent == '{name}')"
    left = f"{label}.getBoundingClientRect().left - {frame}.getBoundingClientRect().left"
    assert tab.ask(left) >= 0, "the beginning of a name is there"
    shown = "[...document.querySelectorAll('th')].filter(cell => cell.offsetWidth).length"
    assert tab.ask(shown) == 4
    tab.click(".show")
    assert tab.ask(shown) == 14 and tab.ask(OVERFLOW) == 0


@pytest.mark.slow
def test_browser_keeps_an_event_at_the_axis_off_its_numbers(tab: Page, tmp_path: Path) -> None:
    loss = Curve("loss", [10, 20, 30], [0.1, 0.2, 0.3])
    chart = curves([loss], Axis("step"), Axis("loss"), [Mark(5, "died (rank 1)")])
    path = tmp_path / "report.html"
    path.write_text(as_page(Report("Run", "", [Plot("Loss", chart)])))
    tab.open(path, 1280)
    places = "[...document.querySelectorAll('.frame text')].map(t => [t.textContent, box(t)])"
    box = "const box = t => (r => [r.left, r.right])(t.getBoundingClientRect());"
    texts = dict(tab.ask(f"(() => {{ {box} return {places} }})()"))
    left, _ = texts.pop("died (rank 1)")
    _, right = min(texts.values())
    assert left > right, texts


@pytest.mark.slow
def test_browser_shows_the_page_of_a_sweep(tab: Page, tmp_path: Path) -> None:
    rows = sweep_rows(tmp_path, optimizer__lr=[0.1, 0.2, 0.3], model__hidden=[8, 16], seed=[0, 1])
    path = tmp_path / "report.html"
    path.write_text(as_page(page_of_sweep(tmp_path, rows)))
    looked_at(tab, path)
    tab.open(path, 390)
    left, right = tab.ask(
        "(() => { const r = document.querySelector('tbody tr').cells[1].getBoundingClientRect();"
        " return [r.left, r.right] })()"
    )
    assert 0 <= left < right <= 390, "the metric is in sight on a phone"
    path.write_text(
        as_page(
            page_of_sweep(tmp_path, sweep_rows(tmp_path / "rates", optimizer__lr=[0.01, 0.1, 0.3]))
        )
    )
    looked_at(tab, path)
    labels = dict(
        tab.ask(
            "[...document.querySelectorAll('.frame')[1].querySelectorAll('text')]"
            ".map(t => [t.textContent, t.getBoundingClientRect().right])"
        )
    )
    assert {"0.01", "0.1", "0.3"} <= {*labels} and "0.2" not in labels, "the axis names the tried"
    decade = labels["0.1"] - labels["0.01"]
    rest = labels["0.3"] - labels["0.1"]
    assert rest / decade == pytest.approx(math.log10(3), abs=0.05), "and is logarithmic"
    names = tab.ask(
        "[...document.querySelector('.frame').querySelectorAll('text')].map(t => t.textContent)"
        ".filter(text => text.startsWith('optimizer.lr='))"
    )
    assert names[0] == "optimizer.lr=0.3", "the legend begins with the best"


@pytest.mark.slow
def test_browser_shows_long_names_and_the_objective_in_sight(tab: Page, tmp_path: Path) -> None:
    names = (
        "model__a_rather_long_name_of_a_parameter_of_this_network",
        "model__another_long_name_that_somebody_gave",
    )
    long = {name: [1, 2] for name in (*names, "optimizer__lr", "seed")}
    path = tmp_path / "report.html"
    path.write_text(as_page(page_of_sweep(tmp_path, sweep_rows(tmp_path, **long))))
    looked_at(tab, path)
    tab.open(path, 1280)
    assert tab.ask("(w => w.scrollWidth - w.clientWidth)(document.querySelector('.wide'))") == 0
    tab.open(path, 390)
    heights = tab.ask("[...document.querySelectorAll('thead')].map(head => head.offsetHeight)")
    assert heights[1] < 60, "no empty lines above the names of the table of seeds"
    chart = "[...document.querySelectorAll('.frame')].at(-1)"
    right = tab.ask(
        f"[...{chart}.querySelectorAll('text')].find(t => t.textContent == 'test.accuracy')"
        ".getBoundingClientRect().right"
    )
    assert right < 390, "the axis of the objective is in sight"
    colour = tab.ask("getComputedStyle(document.body).backgroundColor").replace(" ", "")
    fills = tab.ask(
        f"[...{chart}.querySelectorAll('path, rect')].map(p => getComputedStyle(p).fill)"
    )
    assert colour in {fill.replace(" ", "") for fill in fills}, (
        "values stand on the colour of the page, not behind lines"
    )


@pytest.mark.slow
def test_browser_says_that_a_page_is_old(tab: Page, tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "r")
    (folder / "summary.json").unlink()
    living = dataclasses.replace(read_run(folder), is_running=True)
    text = as_page(run_page(living, {}, refresh_seconds=60))
    state = "document.querySelector('.state').textContent"
    for written, expected in (
        (time.time(), ""),
        (time.time() - 3600, "No news for 60 minutes: if it was killed"),
    ):
        path = tmp_path / "report.html"
        path.write_text(re.sub('"written":[0-9.]+', f'"written":{written:.0f}', text))
        tab.open(path, 390)
        found = tab.ask(state)
        assert (
            found.startswith("running, step 40")
            and ("No news" in found) == bool(expected)
            and expected in found
        )
    assert tab.ask(OVERFLOW) == 0 and tab.problems == []
