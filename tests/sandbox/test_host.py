"""Programs of the host that a dead owner left."""

import asyncio
import subprocess

from baltoro.sandbox.host import kill_orphans


def test_what_carries_the_name_as_a_word_ends_and_nothing_else(tmp_path):
    command = ("sh", "-c", "while :; do sleep 0.05; done", "sh")
    named = subprocess.Popen([*command, "-name", "0123456789ab"], cwd=tmp_path)
    other = subprocess.Popen([*command, "boxes/0123456789ab/console"], cwd=tmp_path)
    asyncio.run(kill_orphans("0123456789ab"))
    assert named.wait(5) == -9
    assert other.poll() is None
    other.kill()
    other.wait()
