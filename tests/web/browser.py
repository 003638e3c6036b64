"""A headless Chromium, by the DevTools protocol over a pipe: no driver and no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage", "--remote-debugging-pipe"]


class Browser:
    """One page. problems: exceptions and errors of its console; requests: the addresses that it asked for"""

    def __init__(self, to: int, out: int) -> None:
        self._to, self._out, self._text, self._number = to, out, b"", 0
        self._session = ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._text:
            chunk = os.read(self._out, 1 << 16)
            assert chunk, "Chromium ended"
            self._text += chunk
        line, _, self._text = self._text.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return message

    def open(self, url: str) -> None:
        self.problems.clear()
        self.requests.clear()
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        self.value("window.isOld = true")
        self.send("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, of a promise when it is kept."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition}; the page shows: {self.value('document.body.innerText')[:2000]}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def choose(self, name: str, value: str) -> None:
        """Give a control a value as a user does."""
        self.value(
            f"{{const e = document.getElementById({json.dumps(name)}); e.focus(); e.value = {json.dumps(value)};"
            " e.dispatchEvent(new Event('input', {bubbles: true})); e.dispatchEvent(new Event('change', {bubbles: true})); e.blur(); }"
        )

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def key(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def prefer(self, scheme: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a profile in this folder."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    command = f'exec "$@" 3<&{in_read} 4>&{out_write}'
    process = subprocess.Popen(
        ["bash", "-c", command, "chromium", CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(in_read, out_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Browser(in_write, out_read)
    finally:
        process.terminate()
        process.wait(20)
        os.close(in_write)
        os.close(out_read)
