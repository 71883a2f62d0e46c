"""One driver for every mechanism that keeps memory: gVisor, CRIU and QEMU differ only below here.

A `Mechanism` boots and revives machines; a `Machine` is one of them with an agent inside. This
file owns what they share: commands and files through the agent's channel, the order of a snapshot
(quiet, freeze, seal files and dump memory, thaw, commit), keys, branches, and the end.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from baltoro.sandbox.channel import AgentProcess, Channel
from baltoro.sandbox.egress import PROXY_ENV, RELAY_COMMAND, AllowList, Gate
from baltoro.sandbox.host import kill_orphans
from baltoro.sandbox.keyed import Keyed
from baltoro.sandbox.manifest import Manifest, check_fits
from baltoro.sandbox.protocol import (
    MIB,
    Binding,
    Command,
    ExecResult,
    Image,
    ImageError,
    Isolation,
    Limits,
    Net,
    SandboxError,
    SnapshotMode,
    State,
    check_branches,
)
from baltoro.sandbox.store import Draft, Store
from baltoro.sandbox.tree import remove_tree

UNLIMITED_BYTES = 1 << 62  # of the relay, which carries what others were allowed


class Machine(Protocol):
    """One isolated machine with an agent inside. Its agent is quiet around `freeze` and `dump`."""

    channel: Channel
    base_layers: tuple[str, ...]  # snapshots whose files lie under its own

    async def freeze(self) -> None:
        """Stop every program of it."""

    async def thaw(self) -> None:
        """Let them go on."""

    async def dump(self, draft: Draft, *, is_frozen: bool, is_last: bool) -> Mapping[str, str]:
        """Write one moment of memory and files into the draft; returns notes for `revive`.

        Afterwards the machine is as frozen as it was; if `is_last` it stands, or runs unheard,
        until its end or a thaw. `SnapshotError` if the mechanism failed; the machine then goes on.
        """

    async def end(self) -> None:
        """Kill everything and unmount everything. Twice is fine."""


class Mechanism(Protocol):
    """A way to run machines."""

    name: str
    isolation: Isolation
    needs_root: bool
    is_bound_to_host: bool  # its memory halves fit only the same kernel and processor

    async def version(self) -> str:
        """Of the program that dumps. `DriverUnavailableError` if it cannot run here."""

    async def boot(self, sandbox_id: str, home: Path, image: Image, limits: Limits) -> Machine:
        """A machine whose agent has said hello."""

    async def revive(
        self, sandbox_id: str, home: Path, manifest: Manifest, memory: Path, layers: list[Path]
    ) -> Machine:
        """A machine that continues from a snapshot; its agent is still quiet."""

    async def sweep(self, sandbox_id: str, home: Path) -> None:
        """End what a dead driver left of one sandbox, short of its folder."""

    async def close(self) -> None:
        """End what the mechanism itself keeps running."""


class MachineSandbox:
    """A running or paused machine (`baltoro.sandbox.protocol.Sandbox`)."""

    def __init__(
        self,
        driver: "MachineDriver",
        sandbox_id: str,
        image: Image,
        limits: Limits,
        machine: Machine,
        parent: str | None = None,
    ):
        self.id = sandbox_id
        self.home = driver.root / sandbox_id
        self.state: State = "running"
        self.image = image
        self.limits = limits
        self.machine = machine
        self.parent = parent
        self.gate: Gate | None = None  # the way to the hosts it may reach, if any
        self.frozen_s = 0.0
        self._driver = driver
        self._turn = asyncio.Lock()  # pause, resume, snapshot and destroy do not overlap

    async def start(self, command: Command) -> AgentProcess:
        self._check_running()
        if self.gate is not None:
            command = replace(command, env={**PROXY_ENV, **command.env})
        return await self.machine.channel.start(command, self.limits.max_output_bytes)

    async def exec(self, command: Command) -> ExecResult:
        return await (await self.start(command)).wait()

    async def attach(self, process_id: int) -> AgentProcess:
        self._check_alive()
        return AgentProcess(self.machine.channel, process_id, None, self.limits.max_output_bytes)

    async def read(self, path: str, max_bytes: int = 64 * MIB) -> bytes:
        self._check_running()
        return await self.machine.channel.read(_inside(path), max_bytes)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        self._check_running()
        await self.machine.channel.write(_inside(path), data, mode)

    async def pause(self) -> None:
        async with self._turn:
            self._check_alive()
            if self.state == "running":
                await self._quiet()
                await self.machine.freeze()
                self.state = "paused"

    async def resume(self) -> None:
        async with self._turn:
            self._check_alive()
            if self.state == "paused":
                await self.machine.thaw()
                await self._go_on()
                self.state = "running"

    async def snapshot(
        self, mode: SnapshotMode = "live", parent: str | None = None, binding: Binding | None = None
    ) -> str:
        async with self._turn:
            self._check_alive()
            is_frozen, is_last = self.state == "paused", mode == "stop"
            store = self._driver.store
            if not is_frozen:
                await self._quiet()
            draft, start = store.begin(), time.monotonic()
            try:
                notes = await self.machine.dump(draft, is_frozen=is_frozen, is_last=is_last)
            except (SandboxError, OSError) as error:
                named = store.named(error, f"sandbox {self.id}: its machine failed")
                store.abandon(draft)
                if not is_frozen:
                    await self._go_on()
                raise named from error
            self.frozen_s = time.monotonic() - start
            if not is_frozen and not is_last:
                await self._go_on()
            try:
                manifest = await asyncio.to_thread(
                    store.commit,
                    draft,
                    driver=self._driver.name,
                    driver_version=await self._driver.mechanism.version(),
                    image_root=str(self.image.root),
                    limits=self.limits,
                    parent=parent or self.parent,
                    base_layers=self.machine.base_layers,
                    binding=binding,
                    notes={**notes, **self._own_notes()},
                )
            except SandboxError:
                if is_last and is_frozen:  # the store has no room: it goes on as it was
                    await self.machine.freeze()
                elif is_last:
                    await self.machine.thaw()
                    await self._go_on()
                raise
            if is_last:
                await self._end()
            return manifest.id

    async def fork(self, num_branches: int) -> list["MachineSandbox"]:
        check_branches(num_branches)
        return await self._driver.restore(await self.snapshot(), num_branches)

    async def destroy(self) -> None:
        async with self._turn:
            if self.state != "destroyed":
                await self._end()

    async def open_gate(self, allowed_hosts: tuple[str, ...], relay_id: int | None = None) -> None:
        """Let it reach some hosts: by a new relay, or by the one a snapshot brought along."""
        if relay_id is None:
            relay = await self.machine.channel.start(RELAY_COMMAND, UNLIMITED_BYTES)
        else:
            relay = AgentProcess(self.machine.channel, relay_id, None, UNLIMITED_BYTES)
        self.gate = Gate(relay, allowed_hosts)
        await (self.gate.hello() if relay_id is None else self.gate.cut())

    def _own_notes(self) -> dict[str, str]:
        channel = self.machine.channel
        notes = {"next_id": str(channel.next_id), "token": channel.token.hex()}
        if self.gate is not None:
            hosts = " ".join(self.gate.allowed_hosts)
            notes |= {"relay": str(self.gate.process.id), "allowed_hosts": hosts}
        return notes

    async def _quiet(self) -> None:
        if self.gate is not None:
            await self.gate.hold()
        await self.machine.channel.quiet()

    async def _go_on(self) -> None:
        await self.machine.channel.go_on()
        if self.gate is not None:
            self.gate.go_on()

    async def _end(self) -> None:
        self.state = "destroyed"
        if self.gate is not None:
            await self.gate.close()
        await self.machine.end()
        await self._driver.forget(self.id)

    def _check_alive(self) -> None:
        if self.state == "destroyed":
            raise SandboxError(f"sandbox {self.id}: destroyed")

    def _check_running(self) -> None:
        self._check_alive()
        if self.state == "paused":
            raise SandboxError(f"sandbox {self.id}: paused; resume it first")


class MachineDriver:
    """Sandboxes made by one mechanism below one folder (`baltoro.sandbox.protocol.Driver`)."""

    def __init__(self, mechanism: Mechanism, root: Path, store: Store):
        root.mkdir(parents=True, exist_ok=True)
        self.name = mechanism.name
        self.mechanism = mechanism
        self.root = root
        self.store = store
        self._sandboxes: dict[str, MachineSandbox] = {}
        self._starting: set[str] = set()
        self._keys: Keyed[MachineSandbox] = Keyed()

    async def create(
        self, image: Image, limits: Limits, net: Net, key: str | None = None
    ) -> MachineSandbox:
        if (made := self._keys.get(key)) is not None:
            return await asyncio.shield(made)
        AllowList(net.allowed_hosts)  # refuses what is no host before anything is made
        if not image.root.is_dir():
            raise ImageError(f"image.root={str(image.root)!r}: no such folder")
        if key is None:
            return await self._boot(image, limits, net)
        return await self._keys.make(key, self._boot(image, limits, net))

    async def restore(self, snapshot_id: str, num_branches: int = 1) -> list[MachineSandbox]:
        check_branches(num_branches)
        manifest = self.store.get(snapshot_id)
        version = await self.mechanism.version()
        check_fits(manifest, self.name, version, is_same_host=self.mechanism.is_bound_to_host)
        if not Path(manifest.image_root).is_dir():
            raise ImageError(
                f"image.root={manifest.image_root!r}: no such folder, and snapshot {snapshot_id!r}"
                " lies over it; put the same image there, or restore where it is"
            )
        self.store.lend(snapshot_id)
        branches: list[MachineSandbox] = []
        try:
            memory = await asyncio.to_thread(self.store.memory_path, snapshot_id)
            layers = self.store.layer_paths(snapshot_id)
            for _ in range(num_branches):
                branches.append(await self._revive(manifest, memory, layers))
        except SandboxError:
            for branch in branches:
                await branch.destroy()
            raise
        finally:
            self.store.give_back(snapshot_id)
        return branches

    async def gc(self) -> list[str]:
        lines = []
        for home in sorted(self.root.iterdir()):
            if home.is_dir() and home.name not in (*self._sandboxes, *self._starting):
                await self._sweep(home)
                lines.append(f"sandbox {home.name}: left behind by an earlier driver")
        return lines

    async def close(self) -> None:
        await self._keys.settle()
        for sandbox in list(self._sandboxes.values()):
            await sandbox.destroy()
        await self.mechanism.close()

    async def forget(self, sandbox_id: str) -> None:
        """Called by a sandbox that is gone: remove its folder and its names."""
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is not None and sandbox.machine.base_layers and sandbox.parent:
            self.store.give_back(sandbox.parent)
        self._keys.forget(sandbox_id)
        await asyncio.to_thread(remove_tree, self.root / sandbox_id)

    async def _boot(self, image: Image, limits: Limits, net: Net) -> MachineSandbox:
        async with self._making() as home:
            machine = await self.mechanism.boot(home.name, home, image, limits)
        sandbox = MachineSandbox(self, home.name, image, limits, machine)
        self._sandboxes[sandbox.id] = sandbox
        try:
            await machine.channel.secure()
            if net.allowed_hosts:
                await sandbox.open_gate(net.allowed_hosts)
        except SandboxError:
            await sandbox.destroy()
            raise
        return sandbox

    async def _revive(self, manifest: Manifest, memory: Path, layers: list[Path]) -> MachineSandbox:
        async with self._making() as home:
            machine = await self.mechanism.revive(home.name, home, manifest, memory, layers)
            machine.channel.token = bytes.fromhex(manifest.notes.get("token", ""))
        image = Image(root=Path(manifest.image_root))
        sandbox = MachineSandbox(self, home.name, image, manifest.limits, machine, manifest.id)
        self._sandboxes[sandbox.id] = sandbox
        if machine.base_layers:  # it reads them as long as it lives
            self.store.lend(manifest.id)
        try:
            await machine.channel.go_on()
            await machine.channel.reseed()
            if "relay" in manifest.notes:
                hosts = tuple(manifest.notes["allowed_hosts"].split())
                await sandbox.open_gate(hosts, int(manifest.notes["relay"]))
        except SandboxError:
            await sandbox.destroy()
            raise
        return sandbox

    def _new_home(self) -> str:
        sandbox_id = uuid.uuid4().hex[:12]
        self._starting.add(sandbox_id)
        (self.root / sandbox_id).mkdir(mode=0o755)
        return sandbox_id

    @contextlib.asynccontextmanager
    async def _making(self) -> AsyncIterator[Path]:
        """The folder, named like it, of a machine to be; nothing is left if it comes to nothing."""
        home = self.root / self._new_home()
        try:
            yield home
        except OSError as error:
            named = self.store.named(error, f"sandbox {home.name}: its machine failed")
            await self._sweep(home)
            raise named from error
        except BaseException:
            await self._sweep(home)
            raise
        finally:
            self._starting.discard(home.name)

    async def _sweep(self, home: Path) -> None:
        """End whatever there is of a sandbox that nobody owns."""
        await self.mechanism.sweep(home.name, home)
        await kill_orphans(home.name)
        await asyncio.to_thread(remove_tree, home)


def _inside(path: str) -> str:
    if "\0" in path:
        raise ValueError(f"path={path!r}: holds a NUL byte")
    return path if path.startswith("/") else f"/{path}"
