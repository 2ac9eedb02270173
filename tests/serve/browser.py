"""A headless Chromium, driven by its DevTools protocol over a pipe."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell", "headless_shell")
LAUNCH = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Program that starts the browser with the pipe's ends at the file descriptors that its flag means."""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage")


def installed() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser; use it as a context manager.

    Args:
        path: the browser's program.
        folder: an empty folder for its profile.
    """

    def __init__(self, path: str, folder):
        theirs_in, ours_out = (self._high(end) for end in os.pipe())
        ours_in, theirs_out = (self._high(end) for end in os.pipe())
        command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), path, *FLAGS]
        command += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb", buffering=0)
        self._ids, self._session, self._rest = itertools.count(1), None, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()

    def call(self, method: str, **params):
        """Call a method of the protocol and return its result."""
        message = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while (found := self._read()).get("id") != message["id"]:
            pass  # an event
        assert "error" not in found, found["error"]
        return found["result"]

    def open(self, url: str) -> None:
        """Open an address and wait until the page is loaded."""
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'")

    def run(self, script: str):
        """Evaluate an expression in the page and return its value."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, limit_s: float = 120.0):
        """Evaluate an expression until its value is true; return the value."""
        end = time.monotonic() + limit_s
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"{script} stayed {found}"
            time.sleep(0.05)
        return found

    def type(self, selector: str, text: str) -> None:
        """Type a text into an element, then Enter."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def picture(self) -> bytes:
        """Return a PNG of the page."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            piece = os.read(self._in.fileno(), 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    @staticmethod
    def _high(end: int) -> int:
        """Move a file descriptor away from 3 and 4."""
        moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(end)
        return moved
