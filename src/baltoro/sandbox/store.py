"""Snapshots on disk: two halves and one manifest, whose rename is the commit.

    lock                      held by the one process that owns the store
    payloads/<id>/memory/     what the driver dumped (absent once packed)
    payloads/<id>/files/      the sealed writable layer, a plain tree, shared read-only by branches
    chunks/<aa>/<sha256>      pieces of packed memory files, each stored once
    manifests/<id>.json       exists <=> the snapshot exists

`begin` makes a payload, the driver fills it, `commit` writes the manifest beside its place, syncs
and renames it. Whatever has no manifest after a crash is a half and is deleted by `recover`,
which every opening runs. In the background `pack` moves the memory half into chunks, so that the
dump stays as fast as the driver and the second snapshot of a branch stores only what changed, and
`flatten` makes one layer of many. Reference counts are derived from the manifests, never stored, so
they cannot drift. Snapshots nobody pinned leave in order of last use when the quota is reached.
Threads may share a store; long work is done outside its lock.
"""

import errno
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from baltoro.sandbox.chunks import Chunks
from baltoro.sandbox.manifest import Manifest, Manifests, MemoryFile, host_fingerprint
from baltoro.sandbox.protocol import Binding, Limits, SandboxError, SnapshotError
from baltoro.sandbox.tree import (
    merge_layers,
    own_folder,
    remove_tree,
    remove_whole,
    sync_tree,
    tree_bytes,
)

FULL_BYTES = 1 << 20  # a disk with less room than this is full


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
        (root / "payloads").mkdir(parents=True, exist_ok=True)
        self._files = Manifests(root / "manifests", is_durable=is_durable)
        self._chunks = Chunks(root / "chunks", is_durable=is_durable)
        self._lock = own_folder(root)
        self._manifests: dict[str, Manifest] = {}
        self._pins: Counter[str] = Counter()
        self._loans: Counter[str] = Counter()
        self._turn = threading.RLock()
        self._assembly = threading.Lock()
        self._drafts: set[str] = set()
        self.recovered = self.recover()

    def close(self) -> None:
        """Give the store to the next owner."""
        self._lock.close()

    def ids(self) -> list[str]:
        """All snapshots, least recently used first."""
        with self._turn:
            return sorted(self._manifests, key=self._files.used_ns)

    def get(self, snapshot_id: str) -> Manifest:
        """A manifest, marked as used now. `SnapshotError` if there is none."""
        with self._turn:
            manifest = self._find(snapshot_id)
            self._files.touch(snapshot_id)
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

        Raises `SnapshotError` (and removes the draft) if the quota cannot be met by evicting, and
        `SandboxError` if the disk is full.
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
        try:
            if self.is_durable:
                sync_tree(self._payload(draft.id))
            self._write(manifest)
        except OSError as error:
            named = self.named(error, f"snapshot {draft.id}: commit")
            self.abandon(draft)
            raise named from error
        with self._turn:
            self._drafts.discard(draft.id)
            self._enforce_quota(keep=draft.id)
        return manifest

    def memory_path(self, snapshot_id: str) -> Path:
        """The memory half as a folder, put together from chunks if it was packed."""
        manifest = self.get(snapshot_id)
        folder = self._payload(snapshot_id) / "memory"
        with self._assembly:  # who waited finds it done
            if folder.exists():
                return folder
            work = folder.with_name("memory.work")
            shutil.rmtree(work, ignore_errors=True)
            try:
                work.mkdir(parents=True)
                for item in manifest.memory:
                    self._chunks.assemble(item.chunks or (), work / item.name)
            except OSError as error:
                named = self.named(error, f"snapshot {snapshot_id}: reading it from chunks")
                shutil.rmtree(work, ignore_errors=True)
                raise named from error
            return work.rename(folder)

    def layer_paths(self, snapshot_id: str) -> list[Path]:
        """The writable layers of a snapshot as read-only folders, oldest first."""
        return [self._payload(layer) / "files" for layer in self.get(snapshot_id).layers]

    def pack(self, snapshot_id: str) -> int:
        """Move the memory half into chunks; returns the bytes that were not yet stored.

        One at a time. `SandboxError` if the disk is full; the snapshot is then as it was.
        """
        self.lend(snapshot_id)
        manifest = self._manifests[snapshot_id]
        folder = self._payload(snapshot_id) / "memory"
        new_bytes = 0
        try:
            packed = []
            for item in manifest.memory:
                if item.chunks is None:
                    names, added = self._chunks.put(folder / item.name)
                    item = replace(item, chunks=names)
                    new_bytes += added
                packed.append(item)
            if tuple(packed) != manifest.memory:
                self._write(replace(manifest, memory=tuple(packed)))
        except OSError as error:
            raise self.named(error, f"snapshot {snapshot_id}: packing") from error
        finally:
            self._chunks.settle()
            self.give_back(snapshot_id)
        with self._turn:
            if folder.exists() and not self._loans[snapshot_id]:
                remove_whole(folder)
        return new_bytes

    def flatten(self, snapshot_id: str) -> None:
        """Make one layer of its layers, unless it is lent or deleted meanwhile; unused ones go."""
        manifest = self._find(snapshot_id)
        draft = self.begin()
        try:
            merge_layers([self._payload(layer) / "files" for layer in manifest.layers], draft.files)
            draft.memory.rmdir()
            if self.is_durable:
                sync_tree(self._payload(draft.id))
            with self._turn:
                is_gone = snapshot_id not in self._manifests
                if is_gone or self._loans[snapshot_id]:  # lent: its layers are mounted by now
                    return self.abandon(draft)
                self._write(replace(manifest, layers=(draft.id,)))
        except OSError as error:
            named = self.named(error, f"snapshot {snapshot_id}: flattening")
            self.abandon(draft)
            raise named from error
        with self._turn:
            self._drafts.discard(draft.id)
            self._collect()

    def untidy(self, unused_s: float, max_layers: int) -> tuple[list[str], list[str]]:
        """What to `pack` and what to `flatten`: not lent, and not used for that long."""
        before_ns = time.time_ns() - int(unused_s * 1e9)
        with self._turn:
            idle = [
                self._manifests[i]
                for i in self.ids()
                if self._files.used_ns(i) < before_ns and not self._loans[i]
            ]
        to_pack = [m.id for m in idle if m.memory and (self._payload(m.id) / "memory").exists()]
        return to_pack, [m.id for m in idle if len(m.layers) > max_layers]

    def pin(self, snapshot_id: str) -> None:
        """Keep a snapshot whatever the quota says, until `unpin` as often."""
        with self._turn:
            self._find(snapshot_id)
            self._pins[snapshot_id] += 1

    def unpin(self, snapshot_id: str) -> None:
        """Undo one `pin`."""
        with self._turn:
            self._pins[snapshot_id] = max(0, self._pins[snapshot_id] - 1)

    def lend(self, snapshot_id: str) -> None:
        """Pin a snapshot whose halves are read as they lie here, until `give_back` as often."""
        with self._turn:
            self.pin(snapshot_id)
            self._loans[snapshot_id] += 1

    def give_back(self, snapshot_id: str) -> None:
        """Undo one `lend`."""
        with self._turn:
            self.unpin(snapshot_id)
            self._loans[snapshot_id] -= 1

    def delete(self, snapshot_id: str) -> None:
        """Forget a snapshot; layers and chunks that others use stay. `SnapshotError` if pinned."""
        with self._turn:
            self._find(snapshot_id)
            if self._pins[snapshot_id]:
                raise SnapshotError(
                    f"snapshot {snapshot_id!r}: in use by a sandbox; destroy that first"
                )
            self._files.remove(snapshot_id)
            del self._manifests[snapshot_id]
            self._collect()

    def usage(self) -> Usage:
        """Bytes now held."""
        with self._turn:
            num_chunks, stored = self._chunks.usage()
            manifests = list(self._manifests.values())
            stored += tree_bytes(self.root / "payloads")
        return Usage(
            logical_bytes=sum(f.size for m in manifests for f in m.memory),
            stored_bytes=stored,
            num_snapshots=len(manifests),
            num_chunks=num_chunks,
        )

    def named(self, error: OSError | SandboxError, what: str) -> SandboxError:
        """The error to raise when `what` failed, which may be for a full disk. Before `abandon`."""
        disk = os.statvfs(self.root)
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or disk.f_bavail * disk.f_frsize < FULL_BYTES:
            return SandboxError(
                f"{what}: the disk is full ({error}); delete snapshots, or give the store"
                f" {self.root} a bigger disk or a smaller quota than {self.quota_bytes} bytes"
            )
        return error if isinstance(error, SandboxError) else SandboxError(f"{what}: {error}")

    def recover(self) -> list[str]:
        """Read all manifests, delete halves without one; returns a line per thing deleted.

        A manifest whose halves are missing is moved aside with the reason in the line.
        """
        found, lines = self._files.read()
        problems = {manifest.id: self._problem(manifest) for manifest in found}
        self._manifests = {m.id: m for m in found if problems[m.id] is None}
        lines += [self._files.set_aside(i, problem) for i, problem in problems.items() if problem]
        return lines + self._collect()

    def _find(self, snapshot_id: str) -> Manifest:
        manifest = self._manifests.get(snapshot_id)
        if manifest is None:
            raise SnapshotError(
                f"snapshot {snapshot_id!r}: not in {self.root}; it was deleted, evicted by the"
                " quota or never committed"
            )
        return manifest

    def _problem(self, manifest: Manifest) -> str | None:
        """Which part of a snapshot is missing, if any."""
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
        return None

    def _collect(self) -> list[str]:
        """Delete payloads, halves and chunks that no manifest names."""
        lines = []
        layers = {layer for m in self._manifests.values() for layer in m.layers}
        for path in sorted((self.root / "payloads").iterdir()):
            if path.name in self._drafts or self._loans[path.name]:
                continue
            named = {"memory": path.name in self._manifests, "files": path.name in layers}
            if not any(named.values()):
                remove_tree(path)
                lines.append(f"payload {path.name}: no manifest")
                continue
            for half in path.iterdir():
                if not named.get(half.name):
                    shutil.rmtree(half)
                    lines.append(f"payload {path.name}: {half.name} no longer named")
        used = {
            name
            for manifest in self._manifests.values()
            for item in manifest.memory
            for name in item.chunks or ()
        }
        if num_unused := self._chunks.keep_only(used):
            lines.append(f"chunks: {num_unused} unreferenced")
        return lines

    def _enforce_quota(self, keep: str) -> None:
        if self.usage().stored_bytes <= self.quota_bytes:
            return
        for snapshot_id in [i for i in self.ids() if i != keep and not self._pins[i]]:
            self.delete(snapshot_id)
            if self.usage().stored_bytes <= self.quota_bytes:
                return
        stored = self.usage().stored_bytes
        self.delete(keep)
        raise SnapshotError(
            f"store {self.root}: {stored} bytes with all others pinned, quota_bytes="
            f"{self.quota_bytes}; destroy sandboxes or raise the quota"
        )

    def _write(self, manifest: Manifest) -> None:
        with self._turn:
            self._files.write(manifest)
            self._manifests[manifest.id] = manifest

    def _payload(self, snapshot_id: str) -> Path:
        return self.root / "payloads" / snapshot_id
