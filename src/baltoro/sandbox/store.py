"""Snapshots on disk: two halves and one manifest, whose rename is the commit.

    lock                      held by the one process that owns the store
    payloads/<id>/memory/     what the driver dumped (absent once packed)
    payloads/<id>/files/      the sealed writable layer, a plain tree, shared read-only by branches
    chunks/<aa>/<sha256>      64 KiB pieces of packed memory files, each stored once
    manifests/<id>.json       exists <=> the snapshot exists

`begin` makes a payload, the driver fills it, `commit` writes the manifest beside its place, syncs
and renames it. Whatever has no manifest after a crash is a half and is deleted by `recover`,
which every opening runs. `pack` moves the memory half into chunks in the background: the dump
stays as fast as the driver, the second snapshot of a branch stores only what changed. Reference
counts are derived from the manifests, never stored, so they cannot drift. Snapshots nobody pinned
leave in order of last use when the quota is reached.
"""

import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from baltoro.sandbox.chunks import Chunks, sync_path
from baltoro.sandbox.manifest import Manifest, MemoryFile, host_fingerprint, parse_manifest
from baltoro.sandbox.protocol import Binding, LimitError, Limits, SnapshotError
from baltoro.sandbox.tree import tree_bytes

REMOVE_TRIES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A snapshot being written; without `commit` it never existed."""

    id: str
    memory: Path
    files: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Bytes held by the store."""

    logical_bytes: int  # all memory halves as the drivers dumped them
    stored_bytes: int  # on disk, both halves
    num_snapshots: int
    num_chunks: int


class Store:
    """The snapshots under one folder, owned by one process at a time."""

    def __init__(self, root: Path, quota_bytes: int, *, is_durable: bool = True):
        """Open or make a store and `recover` it.

        `is_durable` syncs both halves before the commit, so that a power loss keeps them; without
        it only the death of processes is survived. Raises `SnapshotError` if another process owns
        it.
        """
        if quota_bytes <= 0:
            raise ValueError(f"quota_bytes={quota_bytes!r}: must be positive")
        self.root = root
        self.quota_bytes = quota_bytes
        self.is_durable = is_durable
        for name in ("payloads", "manifests"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._chunks = Chunks(root / "chunks", is_durable=is_durable)
        self._lock = (root / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise SnapshotError(
                f"store {root}: owned by another process; stop it or use another folder"
            ) from None
        self._manifests: dict[str, Manifest] = {}
        self._pins: Counter[str] = Counter()
        self._drafts: set[str] = set()
        self.recovered = self.recover()

    def close(self) -> None:
        """Give the store to the next owner."""
        self._lock.close()

    def ids(self) -> list[str]:
        """All snapshots, least recently used first."""
        return sorted(self._manifests, key=lambda i: self._manifest_path(i).stat().st_mtime_ns)

    def get(self, snapshot_id: str) -> Manifest:
        """A manifest, marked as used now. `SnapshotError` if there is none."""
        manifest = self._manifests.get(snapshot_id)
        if manifest is None:
            raise SnapshotError(
                f"snapshot {snapshot_id!r}: not in {self.root}; it was deleted, evicted by the"
                " quota or never committed"
            )
        os.utime(self._manifest_path(snapshot_id))
        return manifest

    def begin(self) -> Draft:
        """Room for a new snapshot's halves."""
        snapshot_id = uuid.uuid4().hex[:20]
        payload = self._payload(snapshot_id)
        draft = Draft(id=snapshot_id, memory=payload / "memory", files=payload / "files")
        self._drafts.add(snapshot_id)
        draft.memory.mkdir(parents=True)
        return draft

    def abandon(self, draft: Draft) -> None:
        """Remove a draft that will not be committed."""
        self._drafts.discard(draft.id)
        shutil.rmtree(self._payload(draft.id), ignore_errors=True)

    def commit(
        self,
        draft: Draft,
        *,
        driver: str,
        driver_version: str,
        image_root: str,
        limits: Limits,
        parent: str | None = None,
        base_layers: tuple[str, ...] = (),
        binding: Binding | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Make a draft a snapshot. Its files half becomes a layer on top of `base_layers`.

        Raises `LimitError` (and removes the draft) if the quota cannot be met by evicting.
        """
        memory = tuple(
            MemoryFile(name=str(path.relative_to(draft.memory)), size=path.stat().st_size)
            for path in sorted(draft.memory.rglob("*"))
            if path.is_file()
        )
        layers = (*base_layers, draft.id) if draft.files.exists() else base_layers
        manifest = Manifest(
            id=draft.id,
            driver=driver,
            driver_version=driver_version,
            host=host_fingerprint(),
            image_root=image_root,
            limits=limits,
            created_ns=time.time_ns(),
            parent=parent,
            layers=layers,
            memory=memory,
            binding=binding,
            notes=dict(notes or {}),
        )
        for layer in base_layers:
            if not (self._payload(layer) / "files").is_dir():
                self.abandon(draft)
                raise SnapshotError(f"layer {layer!r}: its files are gone; the parent was deleted")
        if self.is_durable:
            _sync_tree(self._payload(draft.id))
        self._write_manifest(manifest)
        self._drafts.discard(draft.id)
        self._manifests[draft.id] = manifest
        self._enforce_quota(keep=draft.id)
        return manifest

    def memory_path(self, snapshot_id: str) -> Path:
        """The memory half as a folder, put together from chunks if it was packed."""
        manifest = self.get(snapshot_id)
        folder = self._payload(snapshot_id) / "memory"
        if not folder.exists():
            work = folder.with_name("memory.work")
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            for item in manifest.memory:
                self._chunks.assemble(item.chunks or (), work / item.name)
            work.rename(folder)
        return folder

    def layer_paths(self, snapshot_id: str) -> list[Path]:
        """The writable layers of a snapshot as read-only folders, oldest first."""
        return [self._payload(layer) / "files" for layer in self.get(snapshot_id).layers]

    def pack(self, snapshot_id: str) -> int:
        """Move the memory half into chunks; returns the bytes that were not yet stored."""
        manifest = self.get(snapshot_id)
        if all(item.chunks is not None for item in manifest.memory):
            return 0
        folder = self._payload(snapshot_id) / "memory"
        new_bytes = 0
        packed = []
        for item in manifest.memory:
            names, added = self._chunks.put(folder / item.name)
            new_bytes += added
            packed.append(replace(item, chunks=names))
        manifest = replace(manifest, memory=tuple(packed))
        self._write_manifest(manifest)
        self._manifests[snapshot_id] = manifest
        if not self._pins[snapshot_id]:
            self._drop_memory(snapshot_id)
        return new_bytes

    def pin(self, snapshot_id: str) -> None:
        """Keep a snapshot whatever the quota says, until `unpin` as often."""
        self.get(snapshot_id)
        self._pins[snapshot_id] += 1

    def unpin(self, snapshot_id: str) -> None:
        """Undo one `pin`."""
        if self._pins[snapshot_id] > 0:
            self._pins[snapshot_id] -= 1

    def delete(self, snapshot_id: str) -> None:
        """Forget a snapshot; layers and chunks that others use stay. `SnapshotError` if pinned."""
        self.get(snapshot_id)
        if self._pins[snapshot_id]:
            raise SnapshotError(
                f"snapshot {snapshot_id!r}: in use by a sandbox; destroy that first"
            )
        self._manifest_path(snapshot_id).unlink()
        del self._manifests[snapshot_id]
        self._collect()

    def usage(self) -> Usage:
        """Bytes now held."""
        num_chunks, stored = self._chunks.usage()
        stored += tree_bytes(self.root / "payloads")
        return Usage(
            logical_bytes=sum(f.size for m in self._manifests.values() for f in m.memory),
            stored_bytes=stored,
            num_snapshots=len(self._manifests),
            num_chunks=num_chunks,
        )

    def recover(self) -> list[str]:
        """Read all manifests, delete halves without one; returns a line per thing deleted.

        A manifest whose halves are missing is moved aside with the reason in the line.
        """
        lines = []
        self._manifests = {}
        for path in sorted((self.root / "manifests").iterdir()):
            if path.suffix != ".json":
                path.unlink()
                lines.append(f"manifest {path.name}: was not renamed")
                continue
            problem = self._load(path)
            if problem:
                path.rename(path.with_suffix(".broken"))
                lines.append(f"manifest {path.name}: {problem}")
        return lines + self._collect()

    def _load(self, path: Path) -> str | None:
        try:
            manifest = parse_manifest(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            return f"unreadable ({error})"
        for layer in manifest.layers:
            if not (self._payload(layer) / "files").is_dir():
                return f"layer {layer} is missing"
        folder = self._payload(manifest.id) / "memory"
        for item in manifest.memory:
            if item.chunks is None:
                if not (folder / item.name).is_file():
                    return f"memory file {item.name} is missing"
            elif not self._chunks.has(item.chunks):
                return f"a chunk of {item.name} is missing"
        self._manifests[manifest.id] = manifest
        return None

    def _collect(self) -> list[str]:
        """Delete payloads, memory halves and chunks that no manifest names."""
        lines = []
        layers = {layer for m in self._manifests.values() for layer in m.layers}
        for path in sorted((self.root / "payloads").iterdir()):
            if path.name in self._drafts:
                continue
            if path.name not in self._manifests and path.name not in layers:
                _remove_tree(path)
                lines.append(f"payload {path.name}: no manifest")
                continue
            for half in ("memory", "memory.work"):
                if half == "memory" and path.name in self._manifests:
                    continue
                if (path / half).exists():
                    shutil.rmtree(path / half)
                    lines.append(f"payload {path.name}: {half} no longer named")
        used = {
            name
            for manifest in self._manifests.values()
            for item in manifest.memory
            for name in item.chunks or ()
        }
        if num_unused := self._chunks.keep_only(used):
            lines.append(f"chunks: {num_unused} unreferenced")
        return lines

    def _drop_memory(self, snapshot_id: str) -> None:
        """Delete the folder form of a packed memory half, never leaving half of it in place."""
        folder = self._payload(snapshot_id) / "memory"
        work = folder.with_name("memory.work")
        shutil.rmtree(work, ignore_errors=True)
        folder.rename(work)
        shutil.rmtree(work)

    def _enforce_quota(self, keep: str) -> None:
        if self.usage().stored_bytes <= self.quota_bytes:
            return
        for snapshot_id in self.ids():
            if snapshot_id == keep or self._pins[snapshot_id]:
                continue
            self.delete(snapshot_id)
            if self.usage().stored_bytes <= self.quota_bytes:
                return
        stored = self.usage().stored_bytes
        self.delete(keep)
        raise LimitError(
            f"store {self.root}: {stored} bytes with all others pinned, quota_bytes="
            f"{self.quota_bytes}; destroy sandboxes or raise the quota"
        )

    def _write_manifest(self, manifest: Manifest) -> None:
        path = self._manifest_path(manifest.id)
        work = path.with_suffix(".work")
        with work.open("w") as out:
            json.dump(asdict(manifest), out)
            out.flush()
            if self.is_durable:
                os.fsync(out.fileno())
        work.rename(path)
        if self.is_durable:
            sync_path(path.parent)

    def _payload(self, snapshot_id: str) -> Path:
        return self.root / "payloads" / snapshot_id

    def _manifest_path(self, snapshot_id: str) -> Path:
        return self.root / "manifests" / f"{snapshot_id}.json"


def _remove_tree(root: Path) -> None:
    """Remove a folder into which the dump of a dead owner may still be writing."""
    for _ in range(REMOVE_TRIES):
        try:
            return shutil.rmtree(root)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
            time.sleep(0.01)
    raise SnapshotError(f"{root}: does not become empty; another process writes into it")


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                sync_path(path)
        sync_path(Path(folder))
