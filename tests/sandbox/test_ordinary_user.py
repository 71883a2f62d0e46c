"""Drivers that need no root, run by a user that has none: gVisor in a user namespace, and QEMU."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baltoro.sandbox.install import default_prefix

SOURCES = Path(__file__).parents[2] / "src"
SCRIPT = """
import asyncio, json, os, sys
from dataclasses import asdict
from pathlib import Path
from baltoro.sandbox.selftest import selftest
assert os.geteuid() == 1001
(result,) = asyncio.run(selftest(Path(sys.argv[1]), [sys.argv[2]]))
print(json.dumps(asdict(result)))
"""


def as_ordinary_user(command: list[str]) -> list[str]:
    """Run as uid 1001, with this interpreter visible even if it lies in root's closed home."""
    home = Path(sys.executable).resolve().parents[3]
    visible = (
        f'mount --bind "{home}" /mnt && mount -t tmpfs -o mode=755 tmpfs /root'
        f' && mkdir -p "{home}" && mount --move /mnt "{home}" &&'
        if home.is_relative_to("/root")
        else ""
    )
    drop = 'exec setpriv --reuid=1001 --regid=1001 --clear-groups "$@"'
    return ["unshare", "-m", "sh", "-c", f"{visible} {drop}", "sh", *command]


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["gvisor", "qemu"])
def test_an_ordinary_user_keeps_memory_through_snapshot_and_fork(driver):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        prefix = Path(folder, "prefix")
        prefix.mkdir()
        for tool in default_prefix().iterdir():
            if tool.name != "disks":
                (prefix / tool.name).symlink_to(tool)
        (prefix / "disks").mkdir(mode=0o777)
        (prefix / "disks").chmod(0o777)
        command = [sys.executable, "-c", SCRIPT, str(prefix), driver]
        environment = {"PYTHONPATH": str(SOURCES), "PATH": os.defpath, "HOME": folder}
        done = subprocess.run(
            as_ordinary_user(command), capture_output=True, text=True, env=environment, timeout=200
        )
        assert done.returncode == 0, done.stderr[-2000:]
        result = json.loads(done.stdout)
        assert result["reason"] == ""
        flags = ("has_memory_snapshot", "has_fork", "has_live_snapshot", "has_many_processes")
        assert [result[flag] for flag in flags] == [True] * 4
