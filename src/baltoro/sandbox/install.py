"""Fetch the programs that the drivers drive, and unpack them into a prefix.

Nothing is installed into the system: packages of the distribution's suites are downloaded by apt
into a folder of their own (private lists, empty status, so the whole closure comes), unpacked
with `dpkg-deb`, and run through the prefix's own loader. That is how a CRIU of a newer suite runs
on an older system.

Which build comes from which suite, and why (measured on kernel 6.18):

* `criu` 4.2 from sid: 3.17 of bookworm cannot parse this kernel's vDSO, 4.1 of trixie cannot dump
  TCP.
* `runsc` 2024 from trixie (systrap). The rebuild in sid panics on ordinary reads; bookworm's 2022
  build knows only ptrace and is kept as `runsc-ptrace` for kernels that refuse systrap.
* `qemu` and the guest `kernel` from bookworm.
* `image`: a root directory with a shell, Python and git, used by self-tests and as a first
  template.

The agent and the cell launcher are compiled here from the C beside this file, statically.
Needs: apt and dpkg-deb of a Debian or a derivative, gcc with a static libc. Does not need root.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from baltoro.sandbox.protocol import DriverUnavailableError

GUEST_SOURCES = Path(__file__).with_name("guest")
LIBRARY_DIRS = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")
IMAGE_PACKAGES = (
    "base-files",
    "base-passwd",
    "bash",
    "coreutils",
    "dash",
    "diffutils",
    "findutils",
    "git",
    "grep",
    "gzip",
    "libpython3-stdlib",
    "mawk",
    "patch",
    "procps",
    "python3-minimal",
    "sed",
    "tar",
    "util-linux",
)
# Documentation and translations are half of the image and nothing runs them.
IMAGE_LEFT_OUT = ("./usr/share/doc", "./usr/share/man", "./usr/share/locale", "./usr/share/info")
SEARCHED_SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """What one tool is unpacked from."""

    suite: str  # of the distribution
    names: tuple[str, ...]  # packages asked for
    has_closure: bool = True  # with everything they depend on
    program: str = ""  # path inside the prefix, for `find_tool`


PACKAGES = {
    "criu": Package(suite="sid", names=("criu",), program="usr/sbin/criu"),
    "runsc": Package(suite="trixie", names=("runsc",), has_closure=False, program="usr/bin/runsc"),
    "runsc-ptrace": Package(
        suite="bookworm", names=("runsc",), has_closure=False, program="usr/bin/runsc"
    ),
    "qemu": Package(
        suite="bookworm",
        names=("qemu-system-x86", "qemu-utils"),
        program="usr/bin/qemu-system-x86_64",
    ),
    "squashfs": Package(suite="bookworm", names=("squashfs-tools",), program="usr/bin/mksquashfs"),
    "kernel": Package(suite="bookworm", names=("linux-image-cloud-amd64",), has_closure=True),
    "image": Package(suite="bookworm", names=IMAGE_PACKAGES),
}
GUEST_PROGRAMS = ("agent", "cell", "vminit")
GUEST_LIBRARIES = ("private",)


def default_prefix() -> Path:
    """Where tools are unpacked unless a prefix is given: system-wide for root, else per user."""
    if os.geteuid() == 0:
        return Path("/var/lib/baltoro/tools")
    return Path.home() / ".local/share/baltoro/tools"


def find_tool(prefix: Path, name: str) -> tuple[str, ...]:
    """The first words of a command line that run `name` from the prefix.

    Raises `DriverUnavailableError` saying how to install it.
    """
    home = prefix / name
    program = home / (PACKAGES[name].program if name in PACKAGES else name)
    if name in GUEST_PROGRAMS + GUEST_LIBRARIES:
        program = prefix / "guest" / name
    if not program.exists():
        raise DriverUnavailableError(
            f"{name}: no {program}; run `baltoro sandbox install --prefix {prefix}`"
        )
    loader = next(home.glob("**/ld-linux-x86-64.so.2"), None)
    if loader is None:
        return (str(program),)
    libraries = ":".join(str(home / path) for path in LIBRARY_DIRS)
    return (str(loader), "--library-path", libraries, str(program))


def find_kernel(prefix: Path) -> tuple[Path, Path]:
    """The guest kernel and the folder of its modules."""
    kernels = sorted((prefix / "kernel/boot").glob("vmlinuz-*"))
    if not kernels:
        raise DriverUnavailableError(
            f"kernel: none under {prefix}/kernel; run `baltoro sandbox install --prefix {prefix}`"
        )
    version = kernels[-1].name.removeprefix("vmlinuz-")
    return kernels[-1], prefix / "kernel/lib/modules" / version / "kernel"


def install(prefix: Path, tools: Iterable[str] | None = None) -> dict[str, str]:
    """Unpack what is missing; returns a line of outcome per tool.

    `tools` are keys of `PACKAGES` or `guest`; None means all. A finished tool is left alone, a half
    unpacked one is replaced. Raises `ValueError` for an unknown name and `DriverUnavailableError`
    with the last lines of the failing program.
    """
    known = (*PACKAGES, "guest")
    wanted = list(known if tools is None else tools)
    for name in wanted:
        if name not in known:
            raise ValueError(f"tools={name!r}: unknown; choose from {', '.join(known)}")
    prefix.mkdir(parents=True, exist_ok=True)
    outcome = {}
    for name in wanted:
        if name == "guest":
            outcome[name] = _compile_guest(prefix)
        elif (prefix / name / ".complete").exists():
            outcome[name] = "present"
        else:
            outcome[name] = _unpack(prefix, name, PACKAGES[name])
    return outcome


def _run(command: list[str], **kwargs: str | bytes | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)  # type: ignore[call-overload]
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise DriverUnavailableError(f"{command[0]} failed with {done.returncode}: {tail}")
    return str(done.stdout)


def _archive_address() -> str:
    for path in SEARCHED_SOURCES:
        if not Path(path).exists():
            continue
        for line in Path(path).read_text().splitlines():
            words = line.split()
            if line.startswith("URIs:") or line.startswith("deb "):
                return next(word for word in words if "://" in word)
    raise DriverUnavailableError(
        f"no package archive named in {' or '.join(SEARCHED_SOURCES)}; tools can also be unpacked"
        " into the prefix by hand"
    )


def _apt(folder: Path, suite: str) -> list[str]:
    """An apt-get that knows one suite, no installed package, and no folder but its own."""
    for part in ("lists/partial", "archives/partial", "empty"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources.list").write_text(
        f"deb [signed-by={keyring}] {_archive_address()} {suite} main\n"
    )
    options = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": folder / "empty",
        "Dir::Etc::preferencesparts": folder / "empty",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "true",
    }
    command = ["apt-get", "-qq", "-y"]
    for key, value in options.items():
        command += ["-o", f"{key}={value}"]
    return command


def _unpack(prefix: Path, name: str, package: Package) -> str:
    work = prefix / f".{name}.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    apt = _apt(work, package.suite)
    _run([*apt, "update"])
    if package.has_closure:
        _run([*apt, "--download-only", "install", *package.names])
        archives = work / "archives"
    else:
        _run([*apt, "download", *package.names], cwd=work / "archives")
        archives = work / "archives"
    debs = sorted(archives.glob("*.deb"))
    if name == "kernel":
        debs = [deb for deb in debs if deb.name.startswith("linux-image-")]
    root = work / "root"
    root.mkdir()
    if name == "image":
        for folder in ("bin", "sbin", "lib", "lib64"):
            (root / "usr" / folder).mkdir(parents=True, exist_ok=True)
            (root / folder).symlink_to(f"usr/{folder}")
    for deb in debs:
        _unpack_deb(deb, root, IMAGE_LEFT_OUT if name == "image" else ())
    if name == "image":
        _finish_image(root)
    marker = root / (".complete" if name != "image" else "etc/.baltoro-image")
    marker.write_text("\n".join(deb.name for deb in debs) + "\n")
    target = prefix / name
    shutil.rmtree(target, ignore_errors=True)
    if name == "image":
        target.mkdir()
        root.rename(target / "root")
        (target / ".complete").touch()
    else:
        root.rename(target)
    shutil.rmtree(work)
    return f"unpacked {len(debs)} packages of {package.suite}"


def _unpack_deb(deb: Path, root: Path, left_out: tuple[str, ...]) -> None:
    tar = ["tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", str(root)]
    tar += [f"--exclude={path}" for path in left_out]
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE
    ) as deb_tar:
        done = subprocess.run(
            tar, stdin=deb_tar.stdout, capture_output=True, text=True, check=False
        )
    if done.returncode != 0 or deb_tar.returncode not in (0, None):
        raise DriverUnavailableError(f"{deb.name}: cannot unpack: {done.stderr.strip()[-300:]}")


def _finish_image(root: Path) -> None:
    """What the packages' own scripts would have done, as far as programs miss it."""
    for link, target in (("usr/bin/sh", "dash"), ("usr/bin/awk", "mawk")):
        if not (root / link).is_symlink() and not (root / link).exists():
            (root / link).symlink_to(target)
    for name in ("passwd", "group"):
        if not (root / "etc" / name).exists():
            master = root / f"usr/share/base-passwd/{name}.master"
            (root / "etc" / name).write_text(master.read_text().replace(":*:", ":x:"))
    (root / "etc/hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
    (root / "etc/hostname").write_text("sandbox\n")
    (root / "etc/resolv.conf").touch()
    # Else every sandbox compiles Python's own modules again; `unshare` serves root and others.
    _run(["unshare", "-r", "chroot", str(root), "python3", "-m", "compileall", "-q", "/usr/lib"])
    for folder in ("dev", "proc", "sys", "run", "tmp", "work", ".agent"):
        (root / folder).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "root").chmod(0o755)


def guest_digest() -> str:
    """Fingerprint of the guest programs' sources."""
    digest = hashlib.sha256()
    for name in GUEST_PROGRAMS + GUEST_LIBRARIES:
        digest.update((GUEST_SOURCES / f"{name}.c").read_bytes())
    return digest.hexdigest()


def _compile_guest(prefix: Path) -> str:
    home = prefix / "guest"
    home.mkdir(exist_ok=True)
    marker = home / ".complete"
    if marker.exists() and marker.read_text() == guest_digest():
        return "present"
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise DriverUnavailableError("guest: no gcc on PATH; install gcc and libc6-dev")
    for name in GUEST_PROGRAMS + GUEST_LIBRARIES:
        source, target = GUEST_SOURCES / f"{name}.c", home / name
        form = ["-static"] if name in GUEST_PROGRAMS else ["-shared", "-fPIC"]
        flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-s", *form]
        _run([compiler, *flags, "-o", f"{target}.new", str(source)])
        Path(f"{target}.new").replace(target)
    marker.write_text(guest_digest())
    return f"compiled {', '.join(GUEST_PROGRAMS)}"
