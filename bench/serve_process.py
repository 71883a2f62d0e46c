"""A server in a process of its own, and what the system says of that process."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

PAGE_BYTES = 4096
START_S, STOP_S = 120, 60


class Usage(NamedTuple):
    """What a process holds."""

    threads: int
    descriptors: int
    rss_mb: float


class ServerProcess:
    """`baltoro serve` as a client sees it."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address  # without a slash at the end

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def usage(self) -> Usage:
        """Threads, open files and resident memory, from `/proc`."""
        home = Path("/proc") / str(self.process.pid)
        pages = int((home / "statm").read_text().split()[1])
        threads, descriptors = (len(list((home / name).iterdir())) for name in ("task", "fd"))
        return Usage(threads, descriptors, pages * PAGE_BYTES / 2**20)

    def metrics(self) -> dict[str, float]:
        """Every number of `/metrics` by its name with labels."""
        text = httpx.get(f"{self.address}/metrics", timeout=60).raise_for_status().text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}


@contextmanager
def served(checkpoint: Path, *options: str, log: Path) -> Iterator[ServerProcess]:
    """A server of a checkpoint on a free port of the loopback, once it answers; ended after it.

    What it writes goes to `log`. Raises `RuntimeError` if it does not come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "baltoro.cli", "serve", str(checkpoint), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen([*words, *options], stdout=output, stderr=output)
    server = ServerProcess(process, f"http://127.0.0.1:{port}")
    try:
        _wait_for(server, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(server: ServerProcess, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.is_running:
        try:
            if httpx.get(f"{server.address}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"the server did not come up: {log.read_text()[-2000:]}")
