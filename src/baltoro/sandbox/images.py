"""Root directories for sandboxes, and sandboxes that are warm when they begin.

An image is a base root with packages of its own distribution and folders of the caller laid over
it, in that order; nothing is installed on the host, nothing of a package is run. A template is a
snapshot of a sandbox in which some commands have run: what is restored from it has their files,
and their processes where the driver keeps memory.
"""

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from baltoro.sandbox.install import make_mount_folders, unpack_packages
from baltoro.sandbox.protocol import Command, Driver, Image, ImageError, Limits, Net
from baltoro.sandbox.tree import open_inside

PACKAGE_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
SHELL = "/bin/sh"


def build_image(
    target: Path, base: Path, packages: Sequence[str] = (), layers: Sequence[Path] = ()
) -> Image:
    """Make a root directory at `target`, which must not be there; it appears when it is whole.

    `packages` come with all they depend on, from the suite that the base is of. A later layer wins.
    Raises `ImageError` if what comes out has no shell, `DriverUnavailableError` if this machine
    cannot fetch packages, and `SandboxError` with apt's words if there is no such package.
    """
    if target.exists():
        raise ImageError(f"target={str(target)!r}: is there already; remove it, or choose another")
    for folder in (base, *layers):
        if not folder.is_dir():
            raise ImageError(f"layer {str(folder)!r}: no such folder")
    for name in packages:
        if not PACKAGE_NAME.fullmatch(name):
            raise ValueError(f"packages={name!r}: must be the name of a Debian package")
    work = target.with_name(f".{target.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    root = work / "root"
    root.mkdir(parents=True)
    try:
        _lay_over(base, root)
        if packages:
            unpack_packages(packages, _suite(root), work / "packages", root)
        for layer in layers:
            _lay_over(layer, root)
        make_mount_folders(root)
        check_shell(root)
        root.rename(target)
    finally:
        shutil.rmtree(work)
    return Image(root=target.resolve())


def check_shell(root: Path) -> None:
    """Raise `ImageError` unless the image has a shell, by which harnesses run commands."""
    try:
        fd = open_inside(root, SHELL, os.O_RDONLY)
    except OSError as error:
        problem = error.strerror
    else:
        with os.fdopen(fd, "rb") as shell:
            if os.fstat(shell.fileno()).st_mode & stat.S_IXUSR:
                return
        problem = "not executable"
    raise ImageError(
        f"image {root}: no shell, {SHELL}: {problem}; add the package dash, or a layer that has one"
    )


async def warm(
    driver: Driver,
    image: Image,
    limits: Limits,
    commands: Sequence[Command],
    net: Net | None = None,
) -> str:
    """A template: the id of a snapshot, taken after the commands have run one after another.

    Raises `ImageError` with a command's last words if it fails; nothing is kept then.
    """
    sandbox = await driver.create(image, limits, net or Net())
    try:
        for command in commands:
            result = await sandbox.exec(command)
            if result.exit_code != 0:
                words = (result.stderr or result.stdout).decode(errors="replace").strip()[-300:]
                raise ImageError(
                    f"image {image.root}: {' '.join(command.argv)!r} ended with"
                    f" {result.exit_code}: {words}; no template was made"
                )
        return await sandbox.snapshot(mode="stop")
    finally:
        await sandbox.destroy()


def _lay_over(layer: Path, root: Path) -> None:
    """Copy a folder over a root. A link to a folder stays one, as `bin` to `usr/bin`."""
    pack = ["tar", "-c", "-C", str(layer), "."]
    unpack = ["tar", "-x", "--keep-directory-symlink", "-C", str(root)]
    with subprocess.Popen(pack, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as packing:
        done = subprocess.run(
            unpack, stdin=packing.stdout, capture_output=True, text=True, check=False
        )
        assert packing.stderr is not None
        words = done.stderr + packing.stderr.read().decode(errors="replace")
    if done.returncode != 0 or packing.returncode != 0:
        raise ImageError(f"layer {layer}: cannot be laid over the image: {words.strip()[-300:]}")


def _suite(root: Path) -> str:
    """The suite of the distribution that an image is of."""
    try:
        with os.fdopen(
            open_inside(root, "/etc/os-release", os.O_RDONLY), encoding="utf-8"
        ) as lines:
            facts = dict(line.strip().split("=", 1) for line in lines if "=" in line)
    except OSError:
        facts = {}
    if facts.get("ID") != "debian" or "VERSION_CODENAME" not in facts:
        raise ImageError(
            f"image {root}: its /etc/os-release names no suite of Debian, so packages cannot be"
            " added; lay a folder over it instead"
        )
    return facts["VERSION_CODENAME"]
