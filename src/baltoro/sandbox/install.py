"""Fetch the programs that the drivers drive, and unpack them into a prefix.

Nothing is installed into the system: packages of the distribution's suites are downloaded by apt
into a folder of their own (private lists, empty status, so the whole closure comes), unpacked
with `dpkg-deb`, and run through the prefix's own loader. That is how a CRIU of a newer suite runs
on an older system. Each suite's lists are fetched once, tools are unpacked side by side.

Two things are told apart. A machine that lacks what it takes (apt, a compiler, an archive that
answers) refuses a tool: the others are installed all the same and the outcome names the reason.
Anything else, such as a package that its suite no longer has, is a fault of this file and raises.

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

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from baltoro.sandbox.protocol import DriverUnavailableError, SandboxError

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
NUM_JOBS = 4
# Documentation and translations are half of the image and nothing runs them.
IMAGE_LEFT_OUT = ("./usr/share/doc", "./usr/share/man", "./usr/share/locale", "./usr/share/info")
SEARCHED_SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """What one tool is unpacked from."""

    suite: str  # of the distribution
    names: tuple[str, ...]  # packages asked for
    kept: str = ""  # of all they depend on, what begins so is unpacked
    program: str = ""  # path inside the prefix, for `find_tool`


# Those that take longest come first: they are unpacked side by side.
PACKAGES = {
    "image": Package(suite="bookworm", names=IMAGE_PACKAGES),
    "qemu": Package(
        suite="bookworm",
        names=("qemu-system-x86", "qemu-utils"),
        program="usr/bin/qemu-system-x86_64",
    ),
    "kernel": Package(suite="bookworm", names=("linux-image-cloud-amd64",), kept="linux-image-"),
    "criu": Package(suite="sid", names=("criu",), program="usr/sbin/criu"),
    "squashfs": Package(suite="bookworm", names=("squashfs-tools",), program="usr/bin/mksquashfs"),
    "runsc": Package(suite="trixie", names=("runsc",), kept="runsc", program="usr/bin/runsc"),
    "runsc-ptrace": Package(
        suite="bookworm", names=("runsc",), kept="runsc", program="usr/bin/runsc"
    ),
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
    is_old = False
    if name in GUEST_PROGRAMS + GUEST_LIBRARIES:
        program = prefix / "guest" / name
        marker = prefix / "guest/.complete"
        is_old = marker.exists() and marker.read_text() != guest_digest()
    if is_old or not program.exists():
        problem = f"{program} is of other sources" if is_old else f"no {program}"
        raise DriverUnavailableError(
            f"{name}: {problem}; run `baltoro sandbox --prefix {prefix} install`"
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
            f"kernel: none under {prefix}/kernel; run `baltoro sandbox --prefix {prefix} install`"
        )
    version = kernels[-1].name.removeprefix("vmlinuz-")
    return kernels[-1], prefix / "kernel/lib/modules" / version / "kernel"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one tool."""

    is_there: bool
    text: str  # what was done, or why this machine refuses


def install(prefix: Path, tools: Iterable[str] | None = None) -> dict[str, Outcome]:
    """Unpack what is missing; returns the outcome per tool.

    `tools` are keys of `PACKAGES` or `guest`; None means all. A finished tool is left alone, a half
    unpacked one is replaced. Raises `ValueError` for an unknown name and `SandboxError` with the
    last words of a program that failed although the machine had what it takes.
    """
    known = (*PACKAGES, "guest")
    wanted = list(known if tools is None else tools)
    for name in wanted:
        if name not in known:
            raise ValueError(f"tools={name!r}: unknown; choose from {', '.join(known)}")
    prefix.mkdir(parents=True, exist_ok=True)
    with (prefix / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another may be at it: wait, then find its work done
        return _install(prefix, wanted)


def _install(prefix: Path, wanted: list[str]) -> dict[str, Outcome]:
    missing = [name for name in wanted if not (prefix / name / ".complete").exists()]
    suites = sorted({PACKAGES[name].suite for name in missing if name != "guest"})
    lists = prefix / ".lists.work"
    shutil.rmtree(lists, ignore_errors=True)

    def one(name: str) -> Outcome:
        try:
            if name == "guest":
                text = _compile_guest(prefix)
            elif name not in missing:
                text = "present"
            else:
                apt = archives[PACKAGES[name].suite]
                if isinstance(apt, DriverUnavailableError):
                    raise apt
                text = _unpack(prefix, name, PACKAGES[name], apt)
        except DriverUnavailableError as error:
            return Outcome(is_there=False, text=f"refused by this machine: {error}")
        return Outcome(is_there=True, text=text)

    with ThreadPoolExecutor(NUM_JOBS) as pool:
        fetched = pool.map(lambda suite: _fetch_lists(lists / suite, suite), suites)
        archives = dict(zip(suites, fetched, strict=True))
        outcomes = dict(zip(wanted, pool.map(one, wanted), strict=True))
    shutil.rmtree(lists, ignore_errors=True)
    return outcomes


def unpack_packages(names: Sequence[str], suite: str, work: Path, root: Path) -> None:
    """Unpack packages and what they depend on over an image's root; `work` is taken for downloads.

    Raises `DriverUnavailableError` if the archive cannot be read, `SandboxError` with apt's words.
    """
    apt = _fetch_lists(work / "lists", suite)
    if isinstance(apt, DriverUnavailableError):
        raise apt
    (work / "archives").mkdir()
    for deb in _download(apt, Package(suite=suite, names=tuple(names)), work / "archives"):
        _unpack_deb(deb, root, IMAGE_LEFT_OUT)


def _run(command: list[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    except FileNotFoundError as error:
        raise DriverUnavailableError(f"no {command[0]} on PATH") from error
    if done.returncode != 0:
        tail = " ".join((done.stdout + done.stderr).splitlines()[-5:])
        raise SandboxError(f"{command[0]} failed with {done.returncode}: {tail}")
    return done.stdout


def _archive_address() -> str:
    for path in SEARCHED_SOURCES:
        if not Path(path).exists():
            continue
        for line in Path(path).read_text().splitlines():
            found = [word for word in line.split() if "://" in word]
            if line.startswith(("URIs:", "deb ")) and found:
                return found[0]
    raise DriverUnavailableError(
        f"no package archive named in {' or '.join(SEARCHED_SOURCES)}; tools can also be unpacked"
        " into the prefix by hand"
    )


def _apt(folder: Path, suite: str) -> list[str]:
    """An apt-get that knows one suite, no installed package, and no folder but its own."""
    for part in ("lists/partial", "archives/partial", "empty"):
        (folder / part).mkdir(parents=True)
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
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",
        "APT::Update::Error-Mode": "any",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "true",
    }
    command = ["apt-get", "-qq", "-y"]
    for key, value in options.items():
        command += ["-o", f"{key}={value}"]
    return command


def _fetch_lists(folder: Path, suite: str) -> list[str] | DriverUnavailableError:
    """An apt-get that knows what the suite has, or why this machine cannot have one."""
    try:
        apt = _apt(folder, suite)
        _run([*apt, "update"])
    except DriverUnavailableError as error:
        return error
    except SandboxError as error:
        return DriverUnavailableError(f"no package list of {suite}: {error}")
    return apt


def _download(apt: list[str], package: Package, folder: Path) -> list[Path]:
    """Fetch the packages and what they depend on."""
    # Each line: 'address' file size hash
    lines = _run([*apt, "install", "--print-uris", *package.names]).splitlines()
    names = [line.split()[1].split("_")[0] for line in lines if line.startswith("'")]
    try:
        _run([*apt, "download", *(n for n in names if n.startswith(package.kept))], cwd=folder)
    except SandboxError as error:
        raise DriverUnavailableError(f"the archive broke off: {error}") from error
    return sorted(folder.glob("*.deb"))


def _unpack(prefix: Path, name: str, package: Package, apt: list[str]) -> str:
    work = prefix / f".{name}.work"
    shutil.rmtree(work, ignore_errors=True)
    for folder in ("archives", "root"):
        (work / folder).mkdir(parents=True)
    debs = _download(apt, package, work / "archives")
    outcome = f"unpacked {len(debs)} packages of {package.suite}"
    root = work / "root"
    if name == "image":
        for folder in ("bin", "sbin", "lib", "lib64"):
            (root / "usr" / folder).mkdir(parents=True, exist_ok=True)
            (root / folder).symlink_to(f"usr/{folder}")
    for deb in debs:
        _unpack_deb(deb, root, IMAGE_LEFT_OUT if name == "image" else ())
    if name == "image":
        outcome += _finish_image(root)
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
    return outcome


def _unpack_deb(deb: Path, root: Path, left_out: tuple[str, ...]) -> None:
    tar = ["tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", str(root)]
    tar += [f"--exclude={path}" for path in left_out]
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE
    ) as deb_tar:
        done = subprocess.run(
            tar, stdin=deb_tar.stdout, capture_output=True, text=True, check=False
        )
    if done.returncode != 0 or deb_tar.returncode != 0:
        raise SandboxError(f"{deb.name}: cannot unpack: {done.stderr.strip()[-300:]}")


def _finish_image(root: Path) -> str:
    """What the packages' own scripts would have done, as far as programs miss it.

    Returns what could not be done, in words that follow the outcome.
    """
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
    make_mount_folders(root)
    (root / "root").chmod(0o755)
    words = ["chroot", str(root), "python3", "-m", "compileall", "-q", "/usr/lib"]
    try:
        _run(words if os.geteuid() == 0 else ["unshare", "-r", *words])
    except SandboxError as error:
        return f"; each sandbox will compile Python's own modules again: {error}"
    return ""


def make_mount_folders(root: Path) -> None:
    """The folders of an image over which drivers mount their own."""
    for folder in ("dev", "proc", "sys", "run", "tmp", "work", ".agent"):
        (root / folder).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)


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
