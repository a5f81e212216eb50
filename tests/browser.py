"""A headless Chromium for tests that look at pages: screenshots of any width, light or dark, and what is cut off.

It is driven over a pipe by the DevTools protocol, so that nothing but the browser is needed. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chromium-headless-shell")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--hide-scrollbars", "--no-first-run",
)  # fmt: skip

# What a reader cannot reach: content wider than an element that does not scroll, or beyond the edge of the window
# with nothing around it that scrolls. Elements of no width are inline, and their parents tell.
CLIPPED = """(() => {
  const found = [], width = document.documentElement.clientWidth;
  const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const reachable = e => { for (; e; e = e.parentElement) if (scrolls(e)) return true; return false; };
  const name = e => e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") +
    (typeof e.className === "string" && e.className ? "." + e.className : "") + ": " +
    (e.textContent || "").trim().slice(0, 60);
  if (document.documentElement.scrollWidth > width) found.push("the page is " +
    document.documentElement.scrollWidth + " px wide");
  for (const e of document.body.querySelectorAll("*")) {
    if (e.closest("svg") && e.tagName !== "svg") continue;
    if (e.checkVisibility && !e.checkVisibility()) continue;
    const box = e.getBoundingClientRect();
    if (box.width === 0 || box.height === 0) continue;
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !scrolls(e) && e.tagName !== "svg" && !reachable(e))
      found.push("wider than its box: " + name(e));
    if ((box.right > width + 1 || box.left < -1) && !reachable(e) && getComputedStyle(e).position !== "fixed")
      found.push("beyond the edge: " + name(e));
  }
  for (const text of document.querySelectorAll("svg text")) {
    const box = text.getBoundingClientRect(), around = text.closest("svg").getBoundingClientRect();
    if (box.width && (box.left < around.left - 2 || box.right > around.right + 2 || box.bottom > around.bottom + 2))
      found.push("outside its figure: " + text.textContent);
  }
  return found;
})()"""


def installed() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Browser:
    """>>> with Browser(path) as browser: browser.open(url, 390); browser.evaluate("document.title")"""

    def __init__(self, path: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gdpa-browser-", ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (theirs_in, theirs_out)]  # out of the way of 3 and 4
        nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        # It reads from descriptor 3 and writes to 4.
        actions = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4), *nothing]
        command = [path, *OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = os.posix_spawn(path, command, os.environ, file_actions=actions)
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._in, self._out = os.fdopen(ours_in, "rb", buffering=0), os.fdopen(ours_out, "wb", buffering=0)
        self._held, self._count, self._session = b"", 0, ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.close()  # it ends when nobody can talk to it
        for _ in range(200):
            if os.waitpid(self._process, os.WNOHANG)[0]:
                break
            time.sleep(0.1)
        else:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        self._in.close()
        self._folder.cleanup()

    def resize(self, width: int) -> None:
        """Make the window that wide; the page that is open is laid out anew."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, url: str, width: int, dark: bool = False) -> None:
        """Load a page in a window of that width."""
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def wait_for(self, condition: str) -> None:
        for _ in range(1000):
            if self.evaluate(condition):
                return
            self.evaluate("new Promise(done => setTimeout(done, 20))")
        raise AssertionError(f"never came true: {condition}")

    def evaluate(self, expression: str) -> Any:
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def clipped(self) -> list[str]:
        return self.evaluate(CLIPPED)

    def screenshot(self, path: Path, most: int = 8000) -> None:
        """Of the whole page, down to ``most`` pixels."""
        height = min(int(self.evaluate("document.documentElement.scrollHeight")), most)
        width = int(self.evaluate("document.documentElement.clientWidth"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:  # events that nobody asked for come in between
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            got = self._in.read(65536)
            if not got:
                raise AssertionError("the browser has ended")
            self._held += got
        one, _, self._held = self._held.partition(b"\0")
        return json.loads(one)


WIDTHS = (1280, 390)  # a laptop, a phone


def check_widths(browser: Browser, page: Path) -> None:
    """Nothing may be cut off at either width; a page without scripts that look at the width is loaded once."""
    browser.open(page.as_uri(), WIDTHS[0])
    for width in WIDTHS:
        browser.resize(width)
        found = browser.clipped()
        assert not found, f"{page.name} at {width} px: {found[:5]}"


def check(browser: Browser, page: Path, screenshots: Path, name: str, dark: bool = True, most: int = 8000) -> None:
    """Screenshots of ``page`` at both widths, ``most`` pixels high, and one in the dark; nothing may be cut off."""
    screenshots.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        browser.open(page.as_uri(), width)
        browser.screenshot(screenshots / f"{name}-{width}.png", most)
        found = browser.clipped()
        assert not found, f"{name} at {width} px: {found[:5]}"
    if dark:
        browser.open(page.as_uri(), WIDTHS[0], dark=True)
        browser.screenshot(screenshots / f"{name}-dark.png", most)
