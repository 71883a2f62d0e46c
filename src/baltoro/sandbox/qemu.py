"""QEMU: a whole machine per sandbox, emulated in software where no hardware virtualisation is.

Needs nothing: no root, no namespaces, no KVM. Guest RAM is a file. A machine that booted maps it
shared; its first snapshot stops it, saves the devices (a few ms, 50 KiB) and declares the RAM
file frozen, at no copy (a hard link). From then on the origin, in place, and every branch, in
another QEMU, map the frozen file privately: they share it until they write, and a later snapshot
saves only pages written since (`delta.py`, `guest/private.c`).

Stops: everything the guest does stays in the guest; it has no network device (listed hosts are
reached through `egress.py`), no shared folder, and a fixed amount of memory, disk and one
processor. Does NOT stop: faults of the emulator itself, which runs with the caller's rights;
covert channels of shared host pages; a full host disk, on which the kernel ends a machine that
touches new memory, since that is a file. Emulation costs about seven times the CPU of the host:
right for editing and small tests, not for builds. There is one processor whatever `Limits.cpus`
says, and at least 220 processes are allowed.

The machine is `pc`: `microvm` hangs at times under emulation. A watchdog restarts a boot that
hangs.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from baltoro.sandbox.channel import Channel, Stream
from baltoro.sandbox.delta import apply_delta, is_shared, write_delta
from baltoro.sandbox.guest_disk import (
    image_key,
    kernel_head,
    limit_parameters,
    make_disk,
    make_initramfs,
    ram_bytes,
)
from baltoro.sandbox.host import STREAM_BYTES, kill_named, log_tail, run_output
from baltoro.sandbox.install import find_kernel, find_tool
from baltoro.sandbox.manifest import Manifest
from baltoro.sandbox.protocol import (
    MIB,
    Image,
    ImageError,
    Isolation,
    Limits,
    SandboxError,
    SnapshotError,
)
from baltoro.sandbox.qmp import Qmp
from baltoro.sandbox.store import Draft

BOOT_TIMEOUT_S = 60.0
BOOT_TRIES = 2
TEMPLATE_NEXT_ID = 100
FRESH, FROZEN = "fresh", "ram"  # names of RAM files, which `guest/private.c` tells apart
FREEZE_SIGNAL = signal.SIGRTMIN + 1
KERNEL_PARAMETERS = "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on tsc=reliable"


class QemuMachine:
    """One QEMU (`baltoro.sandbox.machine.Machine`).

    Its RAM file lies in its own folder: `fresh` while it is written, `ram` once it is frozen,
    in a branch a hard link to the one of its origin.
    """

    base_layers: tuple[str, ...] = ()

    def __init__(
        self,
        sandbox_id: str,
        home: Path,
        process: asyncio.subprocess.Process,
        qmp: Qmp,
        channel: Channel,
        ram: Path,
    ):
        self.channel = channel
        self._id = sandbox_id
        self._process = process
        self._qmp = qmp
        self._home = home
        self._ram = ram

    async def freeze(self) -> None:
        await self._qmp.run("stop")

    async def thaw(self) -> None:
        await self._qmp.run("cont")

    async def dump(self, draft: Draft, *, is_frozen: bool, is_last: bool) -> Mapping[str, str]:
        if not is_frozen:
            await self.freeze()
        try:
            await self.save_devices(draft.memory / "device")
            if self._ram.name == FROZEN:
                delta = draft.memory / "delta"
                await asyncio.to_thread(write_delta, self._process.pid, self._ram, delta)
            elif not is_last:
                await self._go_on_privately()
            draft.files.mkdir()
            os.link(self._ram, draft.files / FROZEN)
        except (SandboxError, OSError) as error:
            if not is_frozen:
                with contextlib.suppress(SandboxError):  # gone: its channel tells who waits
                    await self.thaw()
            raise SnapshotError(f"sandbox {self._id}: {error}") from error
        if not is_frozen and not is_last:
            await self.thaw()
        return {}

    async def end(self) -> None:
        await self._qmp.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self.channel.close()

    async def load(self, device: Path, delta: Path | None) -> None:
        """Become what was saved; stopped."""
        if delta is not None:
            await asyncio.to_thread(apply_delta, self._process.pid, self._ram, delta)
        await self._qmp.migrate("migrate-incoming", os.open(device, os.O_RDONLY))

    async def save_devices(self, target: Path) -> None:
        """Write the state of a stopped machine without its memory."""
        await self._qmp.migrate("migrate", os.open(target, os.O_WRONLY | os.O_CREAT, 0o600))
        await self._qmp.settle()

    async def _go_on_privately(self) -> None:
        """From here on the RAM file is frozen, and this QEMU maps it copy-on-write."""
        os.kill(self._process.pid, FREEZE_SIGNAL)
        await self._qmp.settle()  # by the thread that takes the signal
        if is_shared(self._process.pid, self._ram):
            raise SnapshotError("its QEMU still writes to its RAM file")
        self._ram = self._ram.rename(self._home / FROZEN)


class Qemu:
    """Machines emulated by QEMU (`baltoro.sandbox.machine.Mechanism`)."""

    name = "qemu"
    isolation: Isolation = "virtual machine"
    needs_root = False
    is_bound_to_host = False

    def __init__(
        self, prefix: Path, cache: Path, accel: str = "tcg", *, templates: Path | None = None
    ):
        """`accel` is `tcg`, or `kvm` where it is real.

        `cache` keeps disks made of images. `templates`, on the filesystem of the driver's folder,
        keeps machines that have booted once: new sandboxes branch from them instead of booting,
        None boots every sandbox.
        """
        if accel not in ("tcg", "kvm"):
            raise ValueError(f"accel={accel!r}: must be 'tcg' or 'kvm'")
        self._prefix = prefix
        self._cache = cache
        self._accel = accel
        self._templates = templates
        self._template_turn = asyncio.Lock()
        self._qemu = find_tool(prefix, "qemu")
        self._kernel, _ = find_kernel(prefix)
        modules = prefix / "qemu/usr/lib/x86_64-linux-gnu/qemu"
        self._environment = {"PATH": os.defpath, "QEMU_MODULE_DIR": str(modules)}
        self._private = find_tool(prefix, "private")[0]
        find_tool(prefix, "squashfs")
        find_tool(prefix, "vminit")
        cache.mkdir(parents=True, exist_ok=True)
        self._version: str | None = None

    async def version(self) -> str:
        if self._version is None:
            out = await run_output([*self._qemu, "--version"])
            self._version = out.split("version ")[1].split()[0]
        return self._version

    async def boot(self, sandbox_id: str, home: Path, image: Image, limits: Limits) -> QemuMachine:
        await self.version()  # which a snapshot would wait for
        if self._templates is None:
            return await self._boot(sandbox_id, home, image, limits)
        async with self._template_turn:
            template = await self._template(self._templates, home, image, limits)
        os.link(template / FROZEN, home / FROZEN)
        machine = await self._continue(
            sandbox_id, home, image, limits, TEMPLATE_NEXT_ID, template / "device"
        )
        await machine.channel.go_on()
        await machine.channel.reseed()
        return machine

    async def _template(self, folder: Path, home: Path, image: Image, limits: Limits) -> Path:
        """A machine of this image that has just booted: its frozen RAM and its devices."""
        version = await self.version()
        text = (
            f"{image_key(image)} {limits.memory_bytes} {limits.disk_bytes} {version} {self._accel}"
        )
        name = hashlib.sha256(f"{text} {self._kernel.name}".encode()).hexdigest()[:16]
        template = folder / name
        if not template.exists():
            folder.mkdir(parents=True, exist_ok=True)
            work = home / "template"  # swept with the sandbox if this process dies
            work.mkdir()
            machine = await self._boot(home.name, home, image, limits)
            try:
                await machine.channel.quiet()
                await machine.freeze()
                await machine.save_devices(work / "device")
            finally:
                await machine.end()
            (home / FRESH).rename(work / FROZEN)
            work.rename(template)
        return template

    async def _boot(self, sandbox_id: str, home: Path, image: Image, limits: Limits) -> QemuMachine:
        await asyncio.to_thread(make_disk, self._prefix, image, self._cache)
        await asyncio.to_thread(make_initramfs, self._prefix, self._cache)
        for attempt in range(BOOT_TRIES):
            with (home / FRESH).open("wb") as ram:
                ram.truncate(ram_bytes(limits))
            machine = await self._launch(sandbox_id, home, image, limits, 1, is_booting=True)
            try:
                await machine.channel.hello(BOOT_TIMEOUT_S)
                return machine
            except SandboxError as error:
                await machine.end()
                if attempt == BOOT_TRIES - 1:
                    raise ImageError(
                        f"the machine did not boot: {error}; {log_tail(home / 'console')}"
                    ) from error
        raise AssertionError("unreachable")

    async def revive(
        self, sandbox_id: str, home: Path, manifest: Manifest, memory: Path, layers: list[Path]
    ) -> QemuMachine:
        image = Image(root=Path(manifest.image_root))
        await asyncio.to_thread(make_disk, self._prefix, image, self._cache)
        os.link(layers[-1] / FROZEN, home / FROZEN)
        first_id = int(manifest.notes["next_id"])
        return await self._continue(
            sandbox_id, home, image, manifest.limits, first_id, memory / "device"
        )

    async def _continue(
        self,
        sandbox_id: str,
        home: Path,
        image: Image,
        limits: Limits,
        first_id: int,
        device: Path,
    ) -> QemuMachine:
        """A QEMU that goes on from saved devices and the pages beside them, if any."""
        machine = await self._launch(sandbox_id, home, image, limits, first_id, is_booting=False)
        delta = device.with_name("delta")
        try:
            await machine.load(device, delta if delta.exists() else None)
            await machine.thaw()
        except (SandboxError, OSError) as error:
            await machine.end()
            raise SandboxError(f"{error}; {log_tail(home / 'qemu.log')}") from error
        return machine

    async def _launch(
        self,
        sandbox_id: str,
        home: Path,
        image: Image,
        limits: Limits,
        first_id: int,
        *,
        is_booting: bool,
    ) -> QemuMachine:
        """Start a QEMU: booting, or waiting to be given the state of another."""
        ram = home / (FRESH if is_booting else FROZEN)
        control, its_control = socket.socketpair()
        port, its_port = socket.socketpair()
        with contextlib.ExitStack() as ours, its_control, its_port:
            for each in (control, port):
                ours.enter_context(each)
            log = ours.enter_context((home / "qemu.log").open("ab"))
            command = self._command_line(
                sandbox_id, image, limits, ram, its_control.fileno(), its_port.fileno()
            )
            kernel = self._kernel if is_booting else kernel_head(self._kernel, self._cache)
            command += ["-kernel", str(kernel), *([] if is_booting else ["-incoming", "defer"])]
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._environment,
                pass_fds=(its_control.fileno(), its_port.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            (home / "pid").write_text(str(process.pid))  # the sweep of what fails here ends it
            log.close()
            ours.pop_all()
        qmp = Qmp(*await asyncio.open_unix_connection(sock=control))
        reader, writer = await asyncio.open_unix_connection(sock=port, limit=STREAM_BYTES)
        channel = Channel(Stream(reader, writer, (writer.transport,)), first_id)
        machine = QemuMachine(sandbox_id, home, process, qmp, channel, ram)
        try:
            await qmp.negotiate()
        except SandboxError as error:
            await machine.end()
            raise SandboxError(f"{error}; {log_tail(home / 'qemu.log')}") from error
        return machine

    async def sweep(self, sandbox_id: str, home: Path) -> None:
        await kill_named(home / "pid", sandbox_id)

    async def close(self) -> None:
        return

    def _command_line(
        self,
        sandbox_id: str,
        image: Image,
        limits: Limits,
        ram: Path,
        control_fd: int,
        port_fd: int,
    ) -> list[str]:
        """QEMU's words but for its kernel; it is reached through descriptors it inherits."""
        size = ram_bytes(limits)
        disk = make_disk(self._prefix, image, self._cache)
        data = Path(self._prefix, "qemu/usr/share")
        words = {
            "-name": sandbox_id,
            "-L": str(data / "qemu"),
            "-machine": "pc,memory-backend=ram,usb=off,vmport=off",
            "-accel": "tcg,thread=multi,tb-size=64" if self._accel == "tcg" else "kvm",
            "-cpu": "qemu64" if self._accel == "tcg" else "host",
            "-m": f"{size // MIB}M",
            "-object": f"memory-backend-file,id=ram,size={size},mem-path={ram},share=on,align=2M",
            "-display": "none",
            "-serial": f"file:{ram.with_name('console')}",
            "-mon": "chardev=control,mode=control",
            "-blockdev": f"driver=file,node-name=disk,filename={disk},read-only=on",
            "-initrd": str(make_initramfs(self._prefix, self._cache)),
            "-append": f"{KERNEL_PARAMETERS} {limit_parameters(limits)}",
        }
        loader, *program = self._qemu
        command = [loader, "--preload", self._private, *program]
        command += ["-nodefaults", "-no-user-config", "-no-reboot", "-L", str(data / "seabios")]
        for name, fd in (("control", control_fd), ("port", port_fd)):
            command += ["-chardev", f"socket,id={name},fd={fd}"]
        command += ["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,nr=1"]
        command += ["-device", "virtio-blk-pci,drive=disk"]
        return [*command, *(word for pair in words.items() for word in pair)]
