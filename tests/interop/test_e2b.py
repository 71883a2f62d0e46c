"""E2B's own package, unchanged, against our server on the loopback with the process driver."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop

PYTHON = Path(__file__).parents[2] / ".venv-interop" / "bin" / "python"
CLIENT = Path(__file__).with_name("e2b_client.py")
EXPECTED = {
    "commands": {
        "run": ["12\n", "err\n", 0],
        "listed": ["/bin/bash"],
        "stdin": "a b c done\n",
        "killed": [True, False],
        "exit_raises": True,
        "killed_raises": True,
        "late": True,
        "pty": True,
    },
    "files": {
        "bytes": True,
        "stream": True,
        "gzip": True,
        "list": [["/d/e/two", "file", 2]],
        "exists": [True, False],
        "made": [True, False],
        "renamed": "/q/1",
        "removed": [None, False],
        "missing": True,
        "mode": "-rw-r--r--",
        "events": [["three", "create"], ["three", "write"]],
    },
    "left_alone": {"same": True, "last": True, "not_all": True},
    "at_once": {
        "texts": [f"{i}\n" for i in range(5)],
        "together": True,
        "seen": [["new", "create"]],
    },
    "life": {
        "listed": True,
        "metadata": {"a": "b c"},
        "paused": [True, False, False],
        "refused": True,
        "kept": True,
        "branches": ["left", "right", False],
        "from_snapshot": "left",
        "deleted": [True, False],
        "over": False,
        "same_key": True,
        "metrics": True,
        "unknown_template": True,
        "wrong_key": True,
        "killed": [True, False, False],
    },
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port, server):
    for _ in range(300):
        assert server.poll() is None, "the server ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server does not listen")


def test_their_package_does_everything_against_our_server(tmp_path):
    (tmp_path / "image").mkdir()
    (tmp_path / "keys").write_text("one\n")
    port = free_port()
    options = {"--driver": "process", "--port": str(port), "--folder": str(tmp_path / "served")}
    options |= {"--image": str(tmp_path / "image"), "--api-key-file": str(tmp_path / "keys")}
    words = [word for option in options.items() for word in option]
    command = [sys.executable, "-m", "baltoro.cli", "sandbox", "serve", *words]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(port, server)
        done = subprocess.run(
            [PYTHON, CLIENT, f"http://127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout) == EXPECTED
    finally:
        server.terminate()
        _, errors = server.communicate(timeout=30)
    assert server.returncode in (0, -15) and "Traceback" not in errors, errors
    assert list((tmp_path / "served/boxes").iterdir()) == []
