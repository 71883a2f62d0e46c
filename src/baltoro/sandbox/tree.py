"""Folders of sandboxes on the host: confined paths, sealed copies, merged overlay layers.

`open_inside` walks one component at a time on open descriptors and follows links itself, as a
chroot would: neither `..` nor a link, absolute or swapped in meanwhile, can name a file outside
the root.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from baltoro.sandbox.protocol import LimitError, SnapshotError

MAX_LINKS = 40
MAX_DEPTH = 500  # of folders in a sealed copy: half of what Python can walk
REMOVE_TRIES = 500
LOCK_TRIES = 100
OPAQUE = "trusted.overlay.opaque"


def open_inside(root: Path, path: str, flags: int, mode: int = 0o644) -> int:
    """Open `path` as if `root` were `/`; returns a descriptor the caller closes.

    With `os.O_CREAT` missing folders are made. Raises `OSError` as `open` does; a special file is
    refused with EINVAL before it is opened, since opening a FIFO would hang and a device would act.
    """
    if "\0" in path:
        raise ValueError(f"path={path!r}: holds a NUL byte")
    todo = [part for part in path.split("/") if part not in ("", ".")]
    if not todo or path.endswith("/"):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    folders = [os.open(root, os.O_RDONLY | os.O_DIRECTORY)]
    links = 0
    try:
        while todo:
            part = todo.pop(0)
            here = folders[-1]
            if part == "..":
                if len(folders) > 1:
                    os.close(folders.pop())
                continue
            kind = _kind(part, here)
            if kind == stat.S_IFLNK:
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                target = os.readlink(part, dir_fd=here)
                if target.startswith("/"):
                    while len(folders) > 1:
                        os.close(folders.pop())
                todo[:0] = [word for word in target.split("/") if word not in ("", ".")]
                continue
            if not todo:
                if kind not in (None, stat.S_IFREG, stat.S_IFDIR):
                    raise OSError(errno.EINVAL, "not a regular file", path)
                return os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=here)
            if kind is None and flags & os.O_CREAT:
                os.mkdir(part, 0o755, dir_fd=here)
            flags_dir = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            folders.append(os.open(part, flags_dir, dir_fd=here))
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        for fd in folders:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A sealed copy of a writable layer."""

    root: Path  # the copy; never written again
    seen: dict[str, tuple[int, int, int]]  # of each source file: inode, change time, size


def seal_tree(source: Path, target: Path, previous: Sealed | None = None) -> Sealed:
    """Copy a writable layer, with owners, times, links, devices and xattrs.

    Its users must be frozen meanwhile. A file unchanged since `previous` becomes a hard link to
    that copy. Unchanged means: same inode, size and change time, which programs inside cannot
    set. Raises `LimitError` if its folders lie too deep in each other.
    """
    sealed = Sealed(root=target, seen={})
    try:
        _seal_folder(source, target, "", previous, sealed.seen)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise LimitError(
            f"{source}: {error.strerror}; remove folders that lie in others"
        ) from error
    return sealed


def merge_layers(layers: list[Path], target: Path) -> None:
    """One overlay layer that shows what the stack shows, oldest first; files become hard links."""
    target.mkdir(parents=True)
    for layer in layers:
        _merge_folder(layer, target)


def tree_bytes(root: Path) -> int:
    """Bytes on disk below `root`; a hard-linked file counts once.

    Raises `RecursionError` or `OSError` if folders lie too deep in each other to be counted.
    """
    seen = set()
    total = 0
    for folder, _, names in os.walk(root, onerror=_refuse_long):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                st = os.lstat(os.path.join(folder, name))
                if st.st_ino not in seen:
                    seen.add(st.st_ino)
                    total += st.st_blocks * 512
    return total


def own_folder(root: Path) -> TextIO:
    """The folder's lock, held until it is closed or this process ends.

    A child that a dead owner was just starting holds it for another moment. Raises `SnapshotError`
    if it is not free within a second.
    """
    lock = (root / "lock").open("a")
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        time.sleep(0.01)
    lock.close()
    raise SnapshotError(f"store {root}: owned by another process; stop it or use another folder")


def remove_tree(root: Path) -> None:
    """Remove a folder, however deep, into which the dump of a dead owner may still be writing.

    Fine if it is not there.
    """
    for _ in range(REMOVE_TRIES):
        try:
            return shutil.rmtree(root)
        except RecursionError:
            _lift_folders(root)
        except OSError as error:
            if not os.path.lexists(root):
                return
            if error.errno == errno.EMFILE:  # one is open for each level
                _lift_folders(root)
            elif error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
            time.sleep(0.01)
    raise SnapshotError(f"{root}: does not become empty; another process writes into it")


def remove_whole(folder: Path) -> None:
    """Remove a folder of which half must never be seen, not even after a death in between."""
    work = folder.with_name(f"{folder.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    folder.rename(work)
    shutil.rmtree(work)


def sync_path(path: Path) -> None:
    """Force a file or a folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """Force all files and folders below `root` to the disk."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                sync_path(path)
        sync_path(Path(folder))


def stack_bytes(layers: list[Path]) -> int:
    """Bytes on disk of the files that a stack of layers shows, oldest first; raises as above."""
    sizes: dict[tuple[int, int], int] = {}  # by inode
    names_above: set[str] = set()  # of files and whiteouts: they hide what is called so below
    closed: set[str] = set()  # opaque folders, which hide all below
    for layer in reversed(layers):
        opaque = set()
        for folder, folders, names in os.walk(layer, onerror=_refuse_long):
            place = os.path.relpath(folder, layer)
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if OPAQUE in os.listxattr(folder):
                    opaque.add(place)
                for name in names:
                    inner = os.path.normpath(f"{place}/{name}")
                    if inner not in names_above:
                        names_above.add(inner)
                        st = os.lstat(f"{folder}/{name}")
                        sizes[st.st_dev, st.st_ino] = st.st_blocks * 512
            inners = {name: os.path.normpath(f"{place}/{name}") for name in folders}
            folders[:] = [n for n, i in inners.items() if i not in names_above and i not in closed]
        closed |= opaque
    return sum(sizes.values())


def _refuse_long(error: OSError) -> None:
    if error.errno == errno.ENAMETOOLONG:
        raise error


def _lift_folders(root: Path) -> None:
    """Bring all folders below `root` to its first level, so that none is too deep to be removed."""
    todo = [root]
    while todo:
        folder = todo.pop()
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                lifted = root / uuid.uuid4().hex
                os.rename(entry.path, lifted)
                todo.append(lifted)


def _kind(name: str, dir_fd: int) -> int | None:
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _seal_folder(
    source: Path,
    target: Path,
    place: str,
    previous: Sealed | None,
    seen: dict[str, tuple[int, int, int]],
) -> None:
    if place.count("/") > MAX_DEPTH:
        raise LimitError(f"more than {MAX_DEPTH} folders lie in each other: ...{place[-40:]}")
    target.mkdir(parents=True)
    for name in os.listdir(source):
        inner = f"{place}/{name}"
        st = os.lstat(source / name)
        if stat.S_ISDIR(st.st_mode):
            _seal_folder(source / name, target / name, inner, previous, seen)
            continue
        if stat.S_ISREG(st.st_mode):
            seen[inner] = (st.st_ino, st.st_ctime_ns, st.st_size)
            is_unchanged = previous is not None and previous.seen.get(inner) == seen[inner]
            if is_unchanged and _link_previous(previous, inner, target / name):
                continue
        _copy_entry(source / name, target / name, st)
    _copy_metadata(source, target, os.lstat(source))


def _link_previous(previous: Sealed | None, inner: str, target: Path) -> bool:
    """Whether the earlier copy still exists; the store may have evicted it."""
    assert previous is not None
    try:
        os.link(f"{previous.root}{inner}", target)
    except FileNotFoundError:
        return False
    return True


def _copy_entry(source: Path, target: Path, st: os.stat_result) -> None:
    if stat.S_ISSOCK(st.st_mode):
        return  # a socket file means nothing without its process
    if stat.S_ISLNK(st.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(st.st_mode):
        shutil.copyfile(source, target)
    else:
        os.mknod(target, st.st_mode, st.st_rdev)
    _copy_metadata(source, target, st)


def _copy_metadata(source: Path, target: Path, st: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(target, st.st_uid, st.st_gid, follow_symlinks=False)
    if stat.S_ISLNK(st.st_mode):
        return
    os.chmod(target, stat.S_IMODE(st.st_mode))
    if stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode):
        for name in os.listxattr(source):
            if not name.startswith("trusted.overlay.") or name == OPAQUE:
                os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))


def _merge_folder(layer: Path, target: Path) -> None:
    for name in os.listdir(layer):
        source, goal = layer / name, target / name
        st = os.lstat(source)
        is_folder = stat.S_ISDIR(st.st_mode)
        has_old = os.path.lexists(goal)
        was_folder = goal.is_dir() and not goal.is_symlink()
        is_opaque = is_folder and OPAQUE in os.listxattr(source)
        if was_folder and (not is_folder or is_opaque):
            shutil.rmtree(goal)
        elif has_old and not was_folder:
            goal.unlink()
        if is_folder:
            goal.mkdir(exist_ok=True)
            _merge_folder(source, goal)
            _copy_metadata(source, goal, st)
            if has_old and not was_folder:  # it went on hiding what the image has there
                os.setxattr(goal, OPAQUE, b"y")
        else:
            os.link(source, goal, follow_symlinks=False)
