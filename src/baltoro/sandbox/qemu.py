"""QEMU: a whole machine per sandbox, emulated in software where no hardware virtualisation is.

Needs nothing: no root, no namespaces, no KVM. Guest RAM is a file. A machine that booted maps it
shared; its first snapshot stops it, saves the devices (a few ms, 50 KiB) and declares the RAM
file frozen, at no copy (a hard link). From then on every branch, and the origin when it goes on,
is another QEMU that maps the frozen file privately: branches share it until they write, and a
later snapshot saves only pages written since (`delta.py`, `guest/private.c`).

Stops: everything the guest does stays in the guest; it has no network device (listed hosts are
reached through `egress.py`), no shared folder, and a fixed amount of memory, disk and one
processor. Does NOT stop: faults of the emulator itself, which runs with the caller's rights;
covert channels of shared host pages. Emulation costs about seven times the CPU of the host: right
for editing and small tests, not for builds. There is one processor whatever `Limits.cpus` says,
and at least 220 processes are allowed.

The machine is `pc`: `microvm` hangs at times under emulation. A watchdog restarts a boot that
hangs.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from baltoro.sandbox.channel import Channel, Stream
from baltoro.sandbox.delta import apply_delta, write_delta
from baltoro.sandbox.guest_disk import (
    image_key,
    limit_parameters,
    make_disk,
    make_initramfs,
    ram_bytes,
)
from baltoro.sandbox.host import connect_when_open, kill_named, log_tail, run_output
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
SAVE_TIMEOUT_S = 60.0
KERNEL_PARAMETERS = "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on tsc=reliable"


class QemuMachine:
    """One QEMU (`baltoro.sandbox.machine.Machine`).

    Its RAM file is `ram` in its own folder; frozen, it is a hard link to the one of its origin.
    """

    base_layers: tuple[str, ...] = ()

    def __init__(
        self,
        mechanism: "Qemu",
        sandbox_id: str,
        home: Path,
        image: Image,
        limits: Limits,
    ):
        self._mechanism = mechanism
        self._id = sandbox_id
        self._home = home
        self._image = image
        self._limits = limits
        self._ram = home / "ram"
        self._is_private = False
        self._runtime = tempfile.mkdtemp(prefix="bq-")  # socket paths must be short
        (home / "runtime").write_text(self._runtime)
        self._process: asyncio.subprocess.Process | None = None
        self._qmp: Qmp | None = None
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel:
        if self._channel is None:
            raise SandboxError(f"sandbox {self._id}: not started")
        return self._channel

    @channel.setter
    def channel(self, value: Channel) -> None:
        self._channel = value

    async def freeze(self) -> None:
        await self._control().run("stop")

    async def thaw(self) -> None:
        await self._control().run("cont")

    async def dump(self, draft: Draft, *, is_frozen: bool, is_last: bool) -> Mapping[str, str]:
        if not is_frozen:
            await self.freeze()
        try:
            await self.save_devices(draft.memory / "device")
            if self._is_private:
                assert self._process is not None
                delta = draft.memory / "delta"
                await asyncio.to_thread(write_delta, self._process.pid, self._ram, delta)
            elif not is_last:
                await self._go_on_privately(draft.memory / "device")
            draft.files.mkdir()
            os.link(self._ram, draft.files / "ram")
        except (SandboxError, OSError) as error:
            if not is_frozen:
                try:
                    await self.thaw()
                except SandboxError:
                    await self.channel.close()  # between two QEMUs nobody else tells who waits
            raise SnapshotError(f"sandbox {self._id}: {error}") from error
        if not is_frozen and not is_last:
            await self.thaw()
        return {}

    async def end(self) -> None:
        await self.stop()
        if self._channel is not None:
            await self._channel.close()
        shutil.rmtree(self._runtime, ignore_errors=True)

    async def stop(self) -> None:
        """End this QEMU; the machine may be continued by another one."""
        if self._qmp is not None:
            await self._qmp.close()
            self._qmp = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None

    async def launch(
        self, first_id: int, device: Path | None = None, delta: Path | None = None
    ) -> None:
        """Start a QEMU: booting, or continuing from saved devices, then stopped."""
        socket, control = (Path(self._runtime, name) for name in ("port", "qmp"))
        for path in (socket, control):
            path.unlink(missing_ok=True)
        command = self._mechanism.command_line(
            self._id, self._image, self._limits, self._ram, socket, control, self._home / "console"
        )
        self._is_private = device is not None
        if device is not None:
            command[1:1] = ["--preload", self._mechanism.private]  # to the loader, the first word
            command += ["-incoming", "defer"]
        with (self._home / "qemu.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                env=self._mechanism.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        (self._home / "pid").write_text(str(self._process.pid))
        self._qmp = Qmp(*await self._connect(control))
        await self._qmp.negotiate()
        reader, writer = await self._connect(socket)
        stream = Stream(reader, writer, (writer.transport,))
        if self._channel is None:
            self._channel = Channel(stream, first_id)
        else:
            self._channel.reattach(stream)
        if device is not None:
            await self._load(device, delta)

    async def _load(self, device: Path, delta: Path | None) -> None:
        qmp = self._control()
        await _ignore_shared(qmp)
        if delta is not None:
            assert self._process is not None
            await asyncio.to_thread(apply_delta, self._process.pid, self._ram, delta)
        await qmp.run("migrate-incoming", uri=f"exec:cat {device}")
        await self._await_status("migrate-incoming", "query-migrate", "completed")

    async def save_devices(self, target: Path) -> None:
        """Write the state of a stopped machine without its memory."""
        qmp = self._control()
        await _ignore_shared(qmp)
        await qmp.run("migrate", uri=f"exec:cat > {target}")
        await self._await_status("migrate", "query-migrate", "completed")

    async def _go_on_privately(self, device: Path) -> None:
        """From here on the RAM file is frozen; another QEMU maps it copy-on-write."""
        first_id = self.channel.next_id
        await self.channel.detach()
        await self.stop()
        await self.launch(first_id, device)

    async def _await_status(self, what: str, query: str, wanted: str) -> None:
        deadline = asyncio.get_running_loop().time() + SAVE_TIMEOUT_S
        while True:
            status = (await self._control().run(query)).get("status")
            if status == wanted:
                return
            if status == "failed" or asyncio.get_running_loop().time() > deadline:
                raise SnapshotError(f"qemu {what}: {status}; {log_tail(self._home / 'qemu.log')}")
            await asyncio.sleep(0.001)

    async def _connect(self, path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._process is not None
        return await connect_when_open(
            path, self._process, lambda: log_tail(self._home / "qemu.log")
        )

    def _control(self) -> Qmp:
        if self._qmp is None:
            raise SandboxError(f"sandbox {self._id}: its QEMU is gone")
        return self._qmp


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
        self.environment = {"PATH": os.defpath, "QEMU_MODULE_DIR": str(modules)}
        self.private = find_tool(prefix, "private")[0]
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
        if self._templates is None:
            return await self._boot(sandbox_id, home, image, limits)
        async with self._template_turn:
            template = await self._template(self._templates, home, image, limits)
        os.link(template / "ram", home / "ram")
        machine = QemuMachine(self, sandbox_id, home, image, limits)
        await self._continue(machine, TEMPLATE_NEXT_ID, template / "device", None)
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
            work = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder))
            machine = await self._boot(home.name, home, image, limits)
            try:
                await machine.channel.quiet()
                await machine.freeze()
                await machine.save_devices(work / "device")
            finally:
                await machine.end()
            (home / "ram").rename(work / "ram")
            work.rename(template)
        return template

    async def _boot(self, sandbox_id: str, home: Path, image: Image, limits: Limits) -> QemuMachine:
        await asyncio.to_thread(make_disk, self._prefix, image, self._cache)
        await asyncio.to_thread(make_initramfs, self._prefix, self._cache)
        for attempt in range(BOOT_TRIES):
            with (home / "ram").open("wb") as ram:
                ram.truncate(ram_bytes(limits))
            machine = QemuMachine(self, sandbox_id, home, image, limits)
            try:
                await machine.launch(first_id=1)
                await machine.channel.hello(BOOT_TIMEOUT_S)
                return machine
            except SandboxError as error:
                await machine.end()
                if attempt == BOOT_TRIES - 1:
                    raise ImageError(
                        f"the machine did not boot: {error}; {log_tail(home / 'console')}"
                    ) from error
        raise AssertionError("unreachable")

    async def _continue(
        self, machine: QemuMachine, first_id: int, device: Path, delta: Path | None
    ) -> None:
        try:
            await machine.launch(first_id, device, delta)
            await machine.thaw()
        except (SandboxError, OSError):
            await machine.end()
            raise

    async def revive(
        self, sandbox_id: str, home: Path, manifest: Manifest, memory: Path, layers: list[Path]
    ) -> QemuMachine:
        image = Image(root=Path(manifest.image_root))
        await asyncio.to_thread(make_disk, self._prefix, image, self._cache)
        delta = memory / "delta"
        os.link(layers[-1] / "ram", home / "ram")
        machine = QemuMachine(self, sandbox_id, home, image, manifest.limits)
        first_id = int(manifest.notes["next_id"])
        await self._continue(
            machine, first_id, memory / "device", delta if delta.exists() else None
        )
        return machine

    async def sweep(self, sandbox_id: str, home: Path) -> None:
        await kill_named(home / "pid", sandbox_id)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree((home / "runtime").read_text())

    async def close(self) -> None:
        return

    def command_line(
        self,
        sandbox_id: str,
        image: Image,
        limits: Limits,
        ram: Path,
        socket: Path,
        control: Path,
        console: Path,
    ) -> list[str]:
        """QEMU's words."""
        size = ram_bytes(limits)
        accel = "tcg,thread=multi,tb-size=64" if self._accel == "tcg" else "kvm"
        disk = make_disk(self._prefix, image, self._cache)
        initramfs = make_initramfs(self._prefix, self._cache)
        data = Path(self._prefix, "qemu/usr/share")
        words = {
            "-name": sandbox_id,
            "-L": str(data / "qemu"),
            "-machine": "pc,memory-backend=ram,usb=off,vmport=off",
            "-accel": accel,
            "-cpu": "qemu64" if self._accel == "tcg" else "host",
            "-m": f"{size // MIB}M",
            "-object": f"memory-backend-file,id=ram,size={size},mem-path={ram},share=on",
            "-display": "none",
            "-serial": f"file:{console}",
            "-qmp": f"unix:{control},server=on,wait=off",
            "-chardev": f"socket,id=port,path={socket},server=on,wait=off",
            "-blockdev": f"driver=file,node-name=disk,filename={disk},read-only=on",
            "-kernel": str(self._kernel),
            "-initrd": str(initramfs),
            "-append": f"{KERNEL_PARAMETERS} {limit_parameters(limits)}",
        }
        command = [*self._qemu, "-nodefaults", "-no-user-config", "-no-reboot"]
        command += ["-L", str(data / "seabios")]
        command += ["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=port,nr=1"]
        command += ["-device", "virtio-blk-pci,drive=disk"]
        return [*command, *(word for pair in words.items() for word in pair)]


async def _ignore_shared(qmp: Qmp) -> None:
    state = [{"capability": "x-ignore-shared", "state": True}]
    await qmp.run("migrate-set-capabilities", capabilities=state)
