"""Makes the pictures of README and docs from real runs: the page of a small sweep, and a terminal
in mid-run.

    python docs/images/make.py [report] [terminal]

Needs Chromium for the page and tmux for the terminal (Debian: apt-get install chromium tmux). The
sweep lies in build/pictures/sweep and is trained once, in a minute on two cores; the terminal takes
15 s on an idle machine.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "build" / "pictures"
SWEEP = (
    "-m",
    "model=mlp",
    "optimizer.lr=0.01,0.03,0.1",
    "model.hidden=16,64",
    "seed=0,1,2",
    "launch.nproc_per_node=1",
    "train.epochs=20",
    f"run_dir={(WORK / 'sweep').relative_to(ROOT)}",
)
"""Of the digits that scikit-learn brings: no download."""
PAGE_SIZE = "1180,915"
"""Of the picture of the page, in pixels; the docs show it at about 850."""

COLUMNS, ROWS = 92, 27
WAIT_FOR = "epoch 16/30"
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 WIDTH HEIGHT">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect width="WIDTH" height="HEIGHT" rx="8" fill="#0d1117"/>
<g transform="translate(12, 10)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's own frame without its web font and its window buttons: an image on a page loads
nothing."""

THEME = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
)


def program(*names: str) -> str:
    """The first of these programs that is installed. Raises SystemExit if none is."""
    for name in names:
        if found := shutil.which(name):
            return found
    raise SystemExit(f"{names[0]} is not installed (Debian: apt-get install {names[0]})")


def report() -> None:
    """docs/images/report.png: the upper part of a sweep's report.html, as a browser shows it."""
    browser = program("chromium", "chromium-browser", "google-chrome")
    page = WORK / "sweep" / "report.html"
    if not page.exists():
        subprocess.run([sys.executable, "launch.py", *SWEEP], cwd=ROOT, check=True)
    flags = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--window-size={PAGE_SIZE}"]
    flags.append("--virtual-time-budget=4000")  # the plots are drawn
    if os.geteuid() == 0:  # Chromium refuses to start its sandbox as root
        flags.append("--no-sandbox")
    subprocess.run(
        [browser, *flags, f"--screenshot={HERE / 'report.png'}", page.as_uri()],
        check=True,
        timeout=120,
    )


def terminal() -> None:
    """docs/images/terminal.svg: what tmux has on its screen while the default job trains."""
    tmux = [program("tmux"), "-L", f"pictures-{os.getpid()}", "-f", "/dev/null"]
    command = f"echo '$ python launch.py'; {sys.executable} launch.py"
    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    subprocess.run([*tmux, "new-session", "-d", *size, command], cwd=ROOT, check=True)
    try:
        deadline = time.monotonic() + 120
        while WAIT_FOR not in (
            screen := subprocess.check_output([*tmux, "capture-pane", "-e", "-p"], text=True)
        ):
            if time.monotonic() > deadline:
                raise SystemExit(f"no {WAIT_FOR!r} on the screen:\n{screen}")
            time.sleep(0.05)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    text = Text.from_ansi(screen.rstrip("\n"))
    console.print(text, highlight=False)
    # rich draws a character in 12.2 x 24.4 units.
    frame = SVG.replace("WIDTH", f"{COLUMNS * 12.2 + 24:.0f}").replace(
        "HEIGHT", f"{len(text.split()) * 24.4 + 24:.0f}"
    )
    console.save_svg(str(HERE / "terminal.svg"), theme=THEME, code_format=frame, unique_id="t")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("report", "terminal"):
        {"report": report, "terminal": terminal}[name]()
