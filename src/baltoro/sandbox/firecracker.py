"""Firecracker: a microVM per sandbox, where hardware virtualisation is real.

The operator supplies what no distribution packages: a release binary and an uncompressed guest
kernel (ELF `vmlinux`) with virtio-mmio, virtio-blk, vsock, squashfs, overlay, devtmpfs and initrd
built in, as those that Firecracker publishes for its own tests have. `/dev/kvm` must pass the
calibrated probe of `kvm.py`. The root directory of an image becomes a read-only disk, what the
guest writes stays in its memory, and the agent is the one that QEMU's machines run, on a vsock.

Firecracker is driven over its socket (`firecracker.yaml` of 1.17.0-dev and
`docs/snapshotting/snapshot-support.md`; nothing newer than 1.10 is used). What this file rests on:

* Configuration is accepted before `InstanceStart`, `PATCH /vm` and `PUT /snapshot/create` after
  it, `PUT /snapshot/load` only as the first call of a fresh process; unknown keys are refused. A
  refusal is a 400 with `fault_message`. A load that fails ends the process.
* Relative paths are those of the process, and a snapshot keeps them as they were given. Each
  process therefore runs in a folder of its own, where `disk` and `vsock` lie, so that any number
  of branches live side by side, on this host or on another. (`vsock_override` is newer than 1.15.)
* A loaded memory file is mapped privately: branches share it until they write, and it must stay
  unchanged while they live. A hard link in the sandbox's folder keeps it.
* `Full` writes all guest memory. `Diff` writes a sparse file of what was written since the
  snapshot before it, or since the load, and cannot be loaded itself: it is merged over a copy of
  its base after the machine has gone on. `track_dirty_pages`, and `enable_diff_snapshots` on a
  load (its later name is unknown to older releases), make the kernel keep count.
* Creating a snapshot cuts the guest's vsock connections, of the origin too; sockets that listen
  stay. The host therefore hangs up before and calls again after, until an answer comes: a call
  that comes before the guest has heard of the cut may be cut too (pull request 5882). Releases
  before 1.10 do not tell the guest (4796), after a load by 1.16.0 it cannot answer (5958): both
  are refused. That 1.16 hangs if it is paused amid vsock traffic (6074) is avoided: its agent is
  quiet by then.

Stops: everything that a machine of its own stops; Firecracker confines itself with seccomp
filters. There is no network device (listed hosts are reached through `egress.py`), a fixed amount
of memory and disk, and `Limits.cpus` rounded up to whole processors. Does NOT stop: faults of the
hypervisor, which runs with the caller's rights and without Firecracker's jailer, that is in the
host's namespaces; covert channels of shared pages; use of all its processors at full speed. At
least 220 processes are allowed.
"""

import asyncio
import contextlib
import errno
import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from baltoro.sandbox.channel import Channel
from baltoro.sandbox.guest_disk import (
    image_key,
    limit_parameters,
    make_disk,
    make_initramfs,
    ram_bytes,
)
from baltoro.sandbox.host import kill_named, run_output
from baltoro.sandbox.install import find_tool
from baltoro.sandbox.kvm import probe_kvm
from baltoro.sandbox.manifest import Manifest
from baltoro.sandbox.protocol import (
    MIB,
    DriverUnavailableError,
    Image,
    ImageError,
    Isolation,
    Limits,
    SandboxError,
    SnapshotError,
)
from baltoro.sandbox.store import Draft
from baltoro.sandbox.vmm import PORT, Vmm

MIN_VERSION = (1, 10, 0)
BROKEN_VERSIONS = ((1, 16, 0),)
GUEST_CID = 3  # the same in all: each process has its own socket
BOOT_TIMEOUT_S = 30.0
TEMPLATE_NEXT_ID = 100
KERNEL_PARAMETERS = "console=ttyS0 quiet reboot=k panic=-1 pci=off random.trust_cpu=on"


class FirecrackerMachine:
    """One microVM (`baltoro.sandbox.machine.Machine`)."""

    base_layers: tuple[str, ...] = ()

    def __init__(self, sandbox_id: str, home: Path, vmm: Vmm, channel: Channel, base: Path | None):
        """`base` is the memory file that the next diff goes over; None: the next is a full one."""
        self.channel = channel
        self._id = sandbox_id
        self._home = home
        self._vmm = vmm
        self._base = base
        self._is_cut = False

    async def freeze(self) -> None:
        await self._vmm.call("PATCH", "/vm", {"state": "Paused"})

    async def thaw(self) -> None:
        await self._vmm.call("PATCH", "/vm", {"state": "Resumed"})
        if self._is_cut:
            self.channel.reattach(await self._vmm.dial_again(self.channel.token))
            self._is_cut = False

    async def dump(self, draft: Draft, *, is_frozen: bool, is_last: bool) -> Mapping[str, str]:
        base, self._base = self._base, None  # one that fails leaves none to go over
        whole = draft.memory / "ram"
        target = whole if base is None else draft.memory / "diff"
        if not is_frozen:
            await self.freeze()
        try:
            await self.save(draft.memory / "device", target, is_whole=base is None)
            if not is_frozen and not is_last:
                await self.thaw()
            if base is not None:
                await asyncio.to_thread(merge_diff, base, target, whole)
                target.unlink()
            self._base = self._keep(whole)
        except (SandboxError, OSError) as error:
            if not is_frozen:
                try:
                    await self.thaw()
                except SandboxError:
                    await self.channel.close()  # nobody else tells who waits
            raise SnapshotError(f"sandbox {self._id}: {error}") from error
        return {}

    async def save(self, device: Path, memory: Path, *, is_whole: bool) -> None:
        """Write state and memory of a quiet machine that stands still; hangs up on its agent."""
        if not self._is_cut:
            await self.channel.detach()
            self._is_cut = True
        body = {"snapshot_path": str(device), "mem_file_path": str(memory)}
        body["snapshot_type"] = "Full" if is_whole else "Diff"
        await self._vmm.call("PUT", "/snapshot/create", body)

    async def end(self) -> None:
        await self._vmm.end()
        await self.channel.close()

    def _keep(self, whole: Path) -> Path:
        """A hard link to a memory file, which the store may pack or evict."""
        work = self._home / "ram.work"
        os.link(whole, work)
        return work.rename(self._home / "ram")


class Firecracker:
    """MicroVMs of the operator's Firecracker (`baltoro.sandbox.machine.Mechanism`)."""

    name = "firecracker"
    isolation: Isolation = "virtual machine"
    needs_root = False
    is_bound_to_host = True

    def __init__(
        self,
        prefix: Path,
        cache: Path,
        *,
        templates: Path | None = None,
        probe: Callable[[], tuple[bool, str]] = probe_kvm,
    ):
        """`firecracker/firecracker` and `firecracker/vmlinux` of `prefix` are the operator's.

        `cache` keeps disks made of images. `templates`, on the filesystem of the driver's folder,
        keeps machines that have booted once: new sandboxes branch from them, None boots each.
        Raises `DriverUnavailableError` with all that is missing here, KVM included.
        """
        self.binary = prefix / "firecracker/firecracker"
        self.kernel = prefix / "firecracker/vmlinux"
        reasons = []
        if not os.access(self.binary, os.X_OK):
            reasons.append(
                f"no program {self.binary}; put a release binary of at least"
                f" {_dotted(MIN_VERSION)} there, it is not packaged"
            )
        if not self.kernel.is_file():
            reasons.append(f"no guest kernel {self.kernel}; put an uncompressed vmlinux there")
        is_real, verdict = probe()
        if not is_real:
            reasons.append(verdict)
        if reasons:
            raise DriverUnavailableError(f"firecracker: {'; '.join(reasons)}")
        for tool in ("squashfs", "vminit", "agent"):
            find_tool(prefix, tool)
        cache.mkdir(parents=True, exist_ok=True)
        self._prefix = prefix
        self._cache = cache
        self._templates = templates
        self._template_turn = asyncio.Lock()
        self._version: str | None = None

    async def version(self) -> str:
        if self._version is None:
            out = await run_output([str(self.binary), "--version"])
            found = re.search(r"v((\d+)\.(\d+)\.(\d+)\S*)", out)
            version = (0, 0, 0) if found is None else (int(found[2]), int(found[3]), int(found[4]))
            if found is None or version < MIN_VERSION or version in BROKEN_VERSIONS:
                raise DriverUnavailableError(
                    f"firecracker: {self.binary} is {out.splitlines()[:1]}; put one of at least"
                    f" {_dotted(MIN_VERSION)} there, not {', '.join(map(_dotted, BROKEN_VERSIONS))}"
                )
            self._version = found[1]
        return self._version

    async def boot(
        self, sandbox_id: str, home: Path, image: Image, limits: Limits
    ) -> FirecrackerMachine:
        if self._templates is None:
            return await self._boot(sandbox_id, home, image, limits)
        async with self._template_turn:
            template = await self._template(self._templates, home, image, limits)
        machine = await self._load(sandbox_id, home, image, template, TEMPLATE_NEXT_ID, b"")
        await machine.channel.go_on()
        await machine.channel.reseed()
        return machine

    async def _template(self, folder: Path, home: Path, image: Image, limits: Limits) -> Path:
        """State and memory of a machine of this image that has just booted."""
        words = (self.name, await self.version(), self.kernel.stat().st_mtime_ns, image_key(image))
        facts = f"{words} {_machine(limits)} {limit_parameters(limits)}"
        template = folder / hashlib.sha256(facts.encode()).hexdigest()[:16]
        if not template.exists():
            folder.mkdir(parents=True, exist_ok=True)
            work = home / "template"  # swept with the sandbox if this process dies
            work.mkdir()
            machine = await self._boot(home.name, home, image, limits)
            try:
                await machine.channel.quiet()
                await machine.freeze()
                await machine.save(work / "device", work / "ram", is_whole=True)
            finally:
                await machine.end()
            work.rename(template)
        return template

    async def _boot(
        self, sandbox_id: str, home: Path, image: Image, limits: Limits
    ) -> FirecrackerMachine:
        await self.version()
        vmm = await self._start(sandbox_id, home, image)
        try:
            await self._configure(vmm, limits)
            await vmm.call("PUT", "/actions", {"action_type": "InstanceStart"})
            channel = await _meet(vmm)
        except BaseException:
            await vmm.end()
            raise
        return FirecrackerMachine(sandbox_id, home, vmm, channel, None)

    async def revive(
        self, sandbox_id: str, home: Path, manifest: Manifest, memory: Path, layers: list[Path]
    ) -> FirecrackerMachine:
        image = Image(root=Path(manifest.image_root))
        first_id = int(manifest.notes["next_id"])
        token = bytes.fromhex(manifest.notes["token"])
        return await self._load(sandbox_id, home, image, memory, first_id, token)

    async def _load(
        self,
        sandbox_id: str,
        home: Path,
        image: Image,
        saved: Path,
        first_id: int,
        token: bytes,
    ) -> FirecrackerMachine:
        base = home / "ram"
        os.link(saved / "ram", base)
        vmm = await self._start(sandbox_id, home, image)
        try:
            body = {
                "snapshot_path": str(saved / "device"),
                "mem_backend": {"backend_type": "File", "backend_path": str(base)},
                "enable_diff_snapshots": True,
                "resume_vm": False,
            }
            await vmm.call("PUT", "/snapshot/load", body)
            await vmm.call("PATCH", "/vm", {"state": "Resumed"})
            channel = Channel(await vmm.dial_again(token), first_id)
        except BaseException:
            await vmm.end()
            raise
        return FirecrackerMachine(sandbox_id, home, vmm, channel, base)

    async def sweep(self, sandbox_id: str, home: Path) -> None:
        await kill_named(home / "pid", sandbox_id)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree((home / "runtime").read_text())

    async def close(self) -> None:
        return

    async def _start(self, sandbox_id: str, home: Path, image: Image) -> Vmm:
        disk = await asyncio.to_thread(make_disk, self._prefix, image, self._cache)
        return await Vmm.start(self.binary, sandbox_id, home, disk.resolve())

    async def _configure(self, vmm: Vmm, limits: Limits) -> None:
        initramfs = await asyncio.to_thread(
            make_initramfs, self._prefix, self._cache, has_modules=False
        )
        source = {
            "kernel_image_path": str(self.kernel.resolve()),
            "initrd_path": str(initramfs.resolve()),
            "boot_args": f"{KERNEL_PARAMETERS} {limit_parameters(limits)} vsock_port={PORT}",
        }
        disk = {"drive_id": "image", "path_on_host": "disk"}
        await vmm.call("PUT", "/machine-config", _machine(limits))
        await vmm.call("PUT", "/boot-source", source)
        await vmm.call(
            "PUT", "/drives/image", {**disk, "is_root_device": False, "is_read_only": True}
        )
        await vmm.call("PUT", "/vsock", {"guest_cid": GUEST_CID, "uds_path": "vsock"})


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _machine(limits: Limits) -> dict[str, object]:
    return {
        "vcpu_count": math.ceil(limits.cpus),
        "mem_size_mib": ram_bytes(limits) // MIB,
        "track_dirty_pages": True,
    }


async def _meet(vmm: Vmm) -> Channel:
    """The agent's first words. `ImageError` from the watchdog if they do not come."""
    try:
        async with asyncio.timeout(BOOT_TIMEOUT_S):
            channel = Channel(await vmm.dial())
    except (TimeoutError, DriverUnavailableError):  # it hangs, or it ended
        raise ImageError(
            f"the machine did not boot within {BOOT_TIMEOUT_S} s: {vmm.last_words()}"
        ) from None
    try:
        await channel.hello(BOOT_TIMEOUT_S)
    except BaseException:
        await channel.close()
        raise
    return channel


def merge_diff(base: Path, diff: Path, target: Path) -> None:
    """A whole memory file: `base` with the pages that the sparse `diff` holds over it.

    Holes stay holes, and extents are shared where the filesystem can. `SnapshotError` if the two
    are not of the same machine.
    """
    size = base.stat().st_size
    if diff.stat().st_size != size:
        raise SnapshotError(f"a diff of {diff.stat().st_size} bytes over a memory of {size}")
    with target.open("wb") as out:
        out.truncate(size)
        for path in (base, diff):
            with path.open("rb") as source:
                _copy_extents(source.fileno(), out.fileno())


def _copy_extents(source: int, target: int) -> None:
    end = 0
    while True:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(source, start, os.SEEK_HOLE)
        while start < end:
            done = os.copy_file_range(source, target, end - start, start, start)
            if done == 0:
                raise SnapshotError(f"a memory file ended at {start}, before its extent")
            start += done
