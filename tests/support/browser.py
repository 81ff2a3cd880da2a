"""A real browser for tests: Chromium by its debugging pipe. Debian: apt-get install chromium."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
ANSWER_SECONDS = 30.0


def installed() -> str | None:
    """The first browser on the PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab. Commands are those of the DevTools protocol."""

    def __init__(self, to: int, read: int) -> None:
        self.to = to
        self.read = read
        self.left = b""
        self.number = 0
        self.session: str | None = None
        self.problems: list[str] = []
        """Exceptions, lines of the console, resources that were refused."""
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **arguments: Any) -> dict[str, Any]:
        self.number += 1
        asked = {"id": self.number, "method": method, "params": arguments}
        os.write(
            self.to,
            json.dumps(asked | ({"sessionId": self.session} if self.session else {})).encode()
            + b"\0",
        )
        return self._until(lambda message: message.get("id") == self.number)["result"]

    def _until(self, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            while b"\0" not in self.left:
                self.left += os.read(self.read, 2**20) or sys.exit("the browser has ended")
            line, _, self.left = self.left.partition(b"\0")
            message = json.loads(line)
            if "error" in message:
                raise RuntimeError(message["error"])
            if message.get("method") in (
                "Runtime.exceptionThrown",
                "Runtime.consoleAPICalled",
                "Log.entryAdded",
            ):
                self.problems.append(json.dumps(message["params"]))
            if wanted(message):
                return message
        raise TimeoutError("the browser does not answer")

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        phone = width < 600
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])
        assert "errorText" not in self.do("Page.navigate", url=path.absolute().as_uri()), path
        self._until(lambda message: message.get("method") == "Page.loadEventFired")

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move_to(self, x: float, y: float) -> None:
        self.do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """In the middle of the first element that is found, which is scrolled to."""
        found = (
            f"const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block:"
            " 'center'});"
        )
        found += (
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2];"
        )
        x, y = self.ask(f"(() => {{ {found} }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, whole: bool = True) -> None:
        """whole: all of the page, however long."""
        data = self.do("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A new browser with one tab, in a folder of its own."""
    name = installed()
    assert name, f"none of {', '.join(NAMES)} is installed"
    there_read, to = os.pipe()
    read, there_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = [
            "--headless",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-pipe",
            "--disable-dev-shm-usage",
        ]
        flags += [f"--user-data-dir={folder}", *["--no-sandbox"] * (os.geteuid() == 0)]
        # The browser reads descriptor 3 and writes 4.
        shell = f'exec "$@" 3<&{there_read} 4>&{there_write}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", name, *flags],
            pass_fds=(there_read, there_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (there_read, there_write):
            os.close(end)
        try:
            yield Page(to, read)
        finally:
            process.kill()
            process.wait()
            os.close(to)
            os.close(read)


if (
    __name__ == "__main__"
):  # python -m tests.support.browser PAGE.html FOLDER: pictures of a page as people see it
    with browser() as tab:
        for px in (1280, 390):
            for is_dark in (False, True):
                tab.open(Path(sys.argv[1]), px, 900, is_dark)
                tab.picture(Path(sys.argv[2]) / f"{px}_{'dark' if is_dark else 'light'}.png")
        print("\n".join(tab.problems) or "no problem")
