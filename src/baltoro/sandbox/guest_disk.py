"""What a guest machine boots from: the image as a read-only disk, an initramfs with the agent.

And what its kernel is told of the sandbox's limits, which `guest/vminit.c` reads.
"""

import gzip
import hashlib
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

from baltoro.sandbox.install import find_kernel, find_tool, guest_digest
from baltoro.sandbox.protocol import MIB, DriverUnavailableError, Image, ImageError, Limits

MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "squashfs", "overlay")
CONSOLE = os.makedev(5, 1)
MIN_RAM_BYTES = 96 * MIB  # what a Debian kernel needs to boot
KERNEL_PIDS = 80  # of the guest kernel's own threads
SETUP_SECTORS_AT = 0x1F1  # in a kernel's file: the boot protocol's `setup_sects`
MIN_PIDS = 301  # Linux refuses a lower pid_max


def ram_bytes(limits: Limits) -> int:
    """Memory of a machine, in whole megabytes."""
    size = limits.memory_bytes // MIB * MIB
    if size < MIN_RAM_BYTES:
        raise ValueError(
            f"limits.memory_bytes={limits.memory_bytes}: a machine needs {MIN_RAM_BYTES} to boot"
        )
    return size


def limit_parameters(limits: Limits) -> str:
    """Kernel parameters that bound the writable layer and the processes."""
    disk_bytes = min(limits.disk_bytes, ram_bytes(limits) // 2)
    max_pids = max(MIN_PIDS, limits.max_processes + KERNEL_PIDS)
    return f"disk_bytes={disk_bytes} max_pids={max_pids}"


def image_key(image: Image) -> str:
    """Changes when the image's folder is replaced or its top is touched."""
    st = image.root.stat()
    text = f"{image.root} {st.st_ino} {st.st_mtime_ns} {guest_digest()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_disk(prefix: Path, image: Image, cache: Path) -> Path:
    """The image as squashfs, uncompressed since an emulated processor would unpack it."""
    target = cache / f"{image_key(image)}.squashfs"
    if not target.exists():
        work = target.with_suffix(".work")
        work.unlink(missing_ok=True)
        command = [*find_tool(prefix, "squashfs"), str(image.root), str(work)]
        command += ["-noI", "-noD", "-noF", "-noX", "-quiet", "-no-progress", "-processors", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ImageError(f"image {image.root}: mksquashfs failed: {done.stderr[-300:]}")
        work.rename(target)
    return target


def kernel_head(kernel: Path, cache: Path) -> Path:
    """As much of a Linux kernel as a loader reads to place it.

    For machines that continue, and so never boot it: each would hold 8 MB of it.
    """
    target = cache / f"{kernel.name}.head"
    if not target.exists():
        data = kernel.read_bytes()
        num_sectors = (data[SETUP_SECTORS_AT] or 4) + 1
        work = target.with_suffix(".work")
        work.write_bytes(data[: 512 * num_sectors + 4096])
        work.rename(target)
    return target


def make_initramfs(prefix: Path, cache: Path, *, has_modules: bool = True) -> Path:
    """An initramfs whose init is `vminit`, with the modules of the installed kernel.

    Without `has_modules` it is for a kernel that has every driver built in.
    """
    kernel, modules = find_kernel(prefix) if has_modules else (Path("built-in"), None)
    target = cache / f"{kernel.name}-{guest_digest()[:16]}.cpio.gz"
    if not target.exists():
        entries: list[tuple[str, int, bytes, int]] = []
        for folder in ("dev", "proc", "lower", "upper", "root", "modules"):
            entries.append((folder, stat.S_IFDIR | 0o755, b"", 0))
        entries.append(("dev/console", stat.S_IFCHR | 0o600, b"", CONSOLE))
        for name, tool in (("init", "vminit"), ("agent", "agent")):
            program = Path(find_tool(prefix, tool)[0]).read_bytes()
            entries.append((name, stat.S_IFREG | 0o755, program, 0))
        ordered = [] if modules is None else _with_dependencies(modules)
        for path in ordered:
            entries.append((f"modules/{path.name}", stat.S_IFREG | 0o644, path.read_bytes(), 0))
        listing = "".join(f"{path.name}\n" for path in ordered).encode()
        entries.append(("modules/list", stat.S_IFREG | 0o644, listing, 0))
        work = target.with_suffix(".work")
        with gzip.open(work, "wb", compresslevel=1) as out:
            out.write(b"".join(_cpio(*entry) for entry in entries))
            out.write(_cpio("TRAILER!!!", 0, b"", 0))
        shutil.move(work, target)
    return target


def _with_dependencies(modules: Path) -> list[Path]:
    """The needed modules in an order in which they load."""
    found = {path.stem.replace("-", "_"): path for path in modules.rglob("*.ko")}
    ordered: list[Path] = []

    def visit(name: str) -> None:
        path = found.get(name)
        if path is None:
            raise DriverUnavailableError(
                f"kernel: no module {name} under {modules}; it may be built in or compressed, use"
                " the kernel that `baltoro sandbox install` unpacks"
            )
        match = re.search(rb"\0depends=([^\0]*)\0", path.read_bytes())
        for other in filter(None, (match[1].decode() if match else "").split(",")):
            visit(other)
        if path not in ordered:
            ordered.append(path)

    for name in MODULES:
        visit(name)
    return ordered


def _cpio(name: str, mode: int, data: bytes, device: int) -> bytes:
    """One entry of the `newc` format."""
    fields = [0, mode, 0, 0, 1, 0, len(data), 0, 0]
    fields += [os.major(device), os.minor(device), len(name) + 1, 0]
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
