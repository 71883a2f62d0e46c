"""Headless Chromium over its debugging pipe, where messages are JSON and end in NUL."""

import base64
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--remote-debugging-pipe", "--window-size=1000,800"),
)
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


def find() -> str | None:
    """Path of an installed browser."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab of a browser of its own."""

    def __init__(self, program: str) -> None:
        self.problems: list[str] = []  # exceptions and errors of the console
        self.requested: list[str] = []  # addresses
        self._profile = tempfile.mkdtemp(prefix="baltoro-page-")
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        devnull = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (0, 1, 2)]
        # by way of high numbers, since 3 and 4 may be among the ends themselves
        high = [os.dup2(end, 200 + n) for n, end in enumerate((read_end, write_end))]
        self._pid = os.posix_spawn(
            program,
            [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            os.environ,
            file_actions=[
                *devnull,
                *((os.POSIX_SPAWN_DUP2, end, 3 + n) for n, end in enumerate(high)),
            ],
            setpgroup=0,
        )
        for end in (read_end, write_end, *high):
            os.close(end)
        self._buffer = b""
        self._num_sent = 0
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        for end in (self._read, self._write):
            os.close(end)
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; what happened meanwhile is noted."""
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._num_sent:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def get(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        got = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in got, f"{expression}: {got['exceptionDetails']}"
        return got["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.get(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"not true in {seconds} s: {expression}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2,
            mobile=width < 600,
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert select.select([self._read], [], [], max(0.0, left))[0], "the browser is silent"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
