"""Folders of a sandbox as envd shows them: list, look, make, move, remove, watch.

All of it is done inside the sandbox by its own `find`, `mkdir`, `mv` and `rm` (an image needs them;
Debian's has them), with the path as an argument, never as shell text. Every path here is absolute
and has gone through `inside`, which looks at no links: `..` cannot climb above the root. The
process driver has no root of its own; there a link in the folder may lead to the host, as the
commands themselves do.
"""

import datetime
import posixpath
import stat
from typing import Any

from baltoro.sandbox.protocol import Command, Sandbox, SandboxError

MISSING, NO_FOLDER, TAKEN = 44, 45, 46
KINDS = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY"}
MODES = {"f": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK}
# type, type of a link's target, bytes, mode, owner, group, changed, target, path
FORMAT = "".join(f"%{letter}\\0" for letter in ("y", "Y", "s", "m", "u", "g", "T@", "l", "p"))
NUM_FIELDS = 9
EXISTS = f'[ -e "$1" ] || [ -L "$1" ] || exit {MISSING}; '
LOOK = EXISTS + 'exec find "$1" -maxdepth 0 -printf "$2"'
LIST = (
    EXISTS + f'[ -d "$1" ] || exit {NO_FOLDER};' + ' exec find -H "$1" -mindepth 1 $3 -printf "$2"'
)
MAKE = f'[ -d "$1" ] && exit {TAKEN}; [ -e "$1" ] && exit {NO_FOLDER}; exec mkdir -p "$1"'
MOVE = EXISTS + 'mkdir -p "${2%/*}" && exec mv -T "$1" "$2"'
REMOVE = 'exec rm -rf "$1"'
Entry = dict[str, Any]  # filesystem.EntryInfo as JSON


def inside(path: str, home: str) -> str:
    """An absolute path without `..`; a relative one, and `~`, start at the home folder."""
    if "\0" in path:
        raise ValueError(f"path={path!r}: holds a NUL byte")
    if path == "~" or path.startswith("~/"):
        path = f".{path[1:]}"
    return "/" + posixpath.normpath(posixpath.join(home, path)).lstrip("/")


async def look(sandbox: Sandbox, path: str) -> Entry:
    """One entry. `FileNotFoundError` if there is none."""
    return _entries(await _run(sandbox, LOOK, path, _here(path), FORMAT))[0]


async def list_folder(sandbox: Sandbox, path: str, depth: int | None) -> list[Entry]:
    """What is in a folder, `depth` levels deep (None: all), by path."""
    levels = "" if depth is None else f"-maxdepth {depth}"
    script = LIST.replace("$3", levels)
    entries = _entries(await _run(sandbox, script, path, _here(path), FORMAT))
    return sorted(entries, key=lambda entry: entry["path"])


async def make_folder(sandbox: Sandbox, path: str) -> Entry:
    """A new folder, with those above it. `FileExistsError` if it is there."""
    await _run(sandbox, MAKE, path, _here(path))
    return await look(sandbox, path)


async def move(sandbox: Sandbox, source: str, target: str) -> Entry:
    """Rename, over an existing file, making folders on the way."""
    await _run(sandbox, MOVE, source, _here(source), _here(target))
    return await look(sandbox, target)


async def remove(sandbox: Sandbox, path: str) -> None:
    """Remove a file or a folder with all in it; one that is not there is fine."""
    if path == "/":
        raise ValueError("path='/': the root stays; destroy the sandbox instead")
    await _run(sandbox, REMOVE, path, _here(path))


class Watcher:
    """What changed in a folder, by comparing listings; a rename is a removal and a creation."""

    def __init__(self, path: str, is_recursive: bool, entries: list[Entry]):
        self.path = path
        self.depth = None if is_recursive else 1
        self._seen = {entry["path"]: entry for entry in entries}

    @classmethod
    async def open(cls, sandbox: Sandbox, path: str, is_recursive: bool) -> "Watcher":
        """Start from what is there now."""
        return cls(
            path, is_recursive, await list_folder(sandbox, path, None if is_recursive else 1)
        )

    async def events(self, sandbox: Sandbox) -> list[dict[str, str]]:
        """filesystem.FilesystemEvent as JSON, since the last call."""
        now = {each["path"]: each for each in await list_folder(sandbox, self.path, self.depth)}
        events = []
        for path, entry in now.items():
            old = self._seen.get(path)
            is_file = entry["type"] == "FILE_TYPE_FILE"
            if old is None:
                events.append(self._event(path, "CREATE"))
            if old is None and is_file and entry["size"] != "0":
                events.append(self._event(path, "WRITE"))
            if old is None:
                continue
            changed = ("size", "modifiedTime")
            if is_file and any(old[name] != entry[name] for name in changed):
                events.append(self._event(path, "WRITE"))
            if old["mode"] != entry["mode"]:
                events.append(self._event(path, "CHMOD"))
        events += [self._event(path, "REMOVE") for path in self._seen if path not in now]
        self._seen = now
        return events

    def _event(self, path: str, kind: str) -> dict[str, str]:
        return {"name": posixpath.relpath(path, self.path), "type": f"EVENT_TYPE_{kind}"}


async def _run(sandbox: Sandbox, script: str, path: str, *words: str) -> bytes:
    result = await sandbox.exec(Command(argv=("sh", "-c", script, "sh", *words)))
    if result.exit_code == MISSING:
        raise FileNotFoundError(2, "No such file or directory", path)
    if result.exit_code == NO_FOLDER:
        raise NotADirectoryError(20, "Not a directory", path)
    if result.exit_code == TAKEN:
        raise FileExistsError(17, "File exists", path)
    if result.exit_code != 0:
        words_of_it = result.stderr.decode(errors="replace").strip()
        raise SandboxError(f"{path!r}: {words_of_it or f'exit code {result.exit_code}'}")
    return result.stdout


def _here(path: str) -> str:
    """Relative to the sandbox's root, where commands start."""
    return f".{path}"


def _entries(output: bytes) -> list[Entry]:
    words = output.decode(errors="replace").split("\0")[:-1]
    rows = [words[start : start + NUM_FIELDS] for start in range(0, len(words), NUM_FIELDS)]
    return [_entry(*row) for row in rows]


def _entry(
    kind: str,
    target_kind: str,
    size: str,
    mode: str,
    owner: str,
    group: str,
    changed: str,
    target: str,
    path: str,
) -> Entry:
    path = path.removeprefix(".") or "/"
    bits = int(mode, 8)
    seconds, _, fraction = changed.partition(".")
    moment = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    entry = {
        "name": posixpath.basename(path),
        "type": KINDS.get(target_kind if kind == "l" else kind, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": size,
        "mode": bits,
        "permissions": stat.filemode(MODES.get(kind, 0) | bits),
        "owner": owner,
        "group": group,
        "modifiedTime": f"{moment:%Y-%m-%dT%H:%M:%S}.{fraction[:9] or '0'}Z",
    }
    if kind == "l":
        entry |= {"symlinkTarget": target, "isSymlink": True}
    return entry
