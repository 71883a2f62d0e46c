"""Where the stand-in of Firecracker is driven: prefix, store, driver, and what was asked."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from baltoro.sandbox.channel import AgentProcess
from baltoro.sandbox.firecracker import Firecracker
from baltoro.sandbox.install import install
from baltoro.sandbox.machine import MachineDriver, MachineSandbox
from baltoro.sandbox.protocol import Command, Image, Limits, Net
from baltoro.sandbox.store import Store

LIMITS = Limits(memory_bytes=96 << 20, disk_bytes=32 << 20, cpus=1.5)
Body = Callable[["Site"], Awaitable[None]]


def make_tools(prefix: Path) -> None:
    """The guest's programs and a stand-in for mksquashfs."""
    install(prefix, ["guest"])
    squash = prefix / "squashfs/usr/bin/mksquashfs"
    squash.parent.mkdir(parents=True)
    squash.write_text('#!/bin/sh\necho disk > "$2"\n')
    squash.chmod(0o755)


class Site:
    """A prefix with the fake in the binary's place, a store, and a driver over both."""

    def __init__(self, tools: Path, folder: Path):
        self.folder = folder
        self.prefix = folder / "prefix"
        self.binary = self.prefix / "firecracker/firecracker"
        self.binary.parent.mkdir(parents=True)
        for name in ("guest", "squashfs"):
            (self.prefix / name).symlink_to(tools / name)
        fake = Path(__file__).with_name("fake_firecracker.py")
        self.binary.write_text(f"#!{sys.executable} -IS\n{fake.read_text()}")
        self.binary.chmod(0o755)
        (self.binary.parent / "vmlinux").write_bytes(b"\x7fELF")
        self.behave()
        self.image = Image(root=folder / "image")
        self.image.root.mkdir()

    def behave(self, **behaviour: object) -> None:
        text = json.dumps({"version": "1.10.1", **behaviour})
        (self.binary.parent / "behaviour").write_text(text)

    def mechanism(self, templates: Path | None = None) -> Firecracker:
        return Firecracker(
            self.prefix, self.folder / "disks", templates=templates, probe=lambda: (True, "real")
        )

    def open(self) -> None:
        self.store = Store(self.folder / "store", 4 << 30, is_durable=False)
        self.driver = MachineDriver(self.mechanism(), self.folder / "boxes", self.store)

    async def create(self) -> MachineSandbox:
        return await self.driver.create(self.image, LIMITS, Net())

    def calls(self, sandbox: MachineSandbox | None = None) -> list[dict]:
        """What the fake was asked, in order; of one machine if given."""
        lines = (self.binary.parent / "calls").read_text().splitlines()
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if sandbox is None or call["id"] == sandbox.id]

    def names(self, sandbox: MachineSandbox) -> list[str]:
        return [call["call"] for call in self.calls(sandbox)]


def run(tools: Path, folder: Path, body: Body) -> None:
    """`body(site)`; afterwards no process, folder or socket of a sandbox may be left."""
    site = Site(tools, folder)

    async def main() -> None:
        site.open()
        try:
            await body(site)
        finally:
            await site.driver.close()
            site.store.close()
        assert os.listdir(site.driver.root) == []

    asyncio.run(asyncio.wait_for(main(), 60))
    assert str(site.binary) not in running_programs()


def running_programs() -> str:
    words = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words.append(Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(words)


async def counter(sandbox: MachineSandbox) -> AgentProcess:
    return await sandbox.start(Command(argv=("COUNT",), stdin=None, timeout_s=None))


async def add(process: AgentProcess, number: int) -> int:
    """A program inside adds a number to what it has in memory and says the sum."""
    await process.write_stdin(str(number).encode())
    return int((await anext(process.output())).data)
