"""The snapshot store: commit by rename, recovery, sharing, quota; and death at random points."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from baltoro.sandbox.chunks import CHUNK_BYTES
from baltoro.sandbox.manifest import check_fits
from baltoro.sandbox.protocol import LimitError, Limits, SnapshotError
from baltoro.sandbox.store import Draft, Store

FIELDS = {
    "driver": "test",
    "driver_version": "1",
    "image_root": "/image",
    "limits": Limits(),
}


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "store", 1 << 30)
    yield opened
    opened.close()


def filled(store: Store, memory: bytes, files: dict[str, str] | None = None) -> Draft:
    draft = store.begin()
    (draft.memory / "pages.img").write_bytes(memory)
    if files is not None:
        draft.files.mkdir()
        for name, text in files.items():
            (draft.files / name).write_text(text)
    return draft


def pages(seed: int, num_chunks: int = 8) -> bytes:
    return random.Random(seed).randbytes(num_chunks * CHUNK_BYTES)


def test_a_committed_snapshot_is_read_back_by_the_next_owner(tmp_path):
    store = Store(tmp_path, 1 << 30)
    manifest = store.commit(filled(store, b"memory", {"a": "text"}), **FIELDS)
    store.close()
    again = Store(tmp_path, 1 << 30)
    assert again.recovered == []
    assert again.get(manifest.id) == manifest
    assert (again.memory_path(manifest.id) / "pages.img").read_bytes() == b"memory"
    (layer,) = again.layer_paths(manifest.id)
    assert (layer / "a").read_text() == "text"
    again.close()


def test_a_half_is_invisible_and_removed(tmp_path):
    store = Store(tmp_path, 1 << 30)
    filled(store, b"half")
    (tmp_path / "manifests" / "x.work").write_text("{")
    store.close()
    again = Store(tmp_path, 1 << 30)
    assert again.ids() == []
    assert len(again.recovered) == 2
    assert list((tmp_path / "payloads").iterdir()) == []
    again.close()


def test_a_running_draft_survives_a_collection(store):
    draft = filled(store, b"being written")
    other = store.commit(filled(store, b"x"), **FIELDS)
    store.delete(other.id)
    assert (draft.memory / "pages.img").exists()


def test_a_manifest_without_its_half_is_set_aside(tmp_path):
    store = Store(tmp_path, 1 << 30)
    manifest = store.commit(filled(store, b"memory"), **FIELDS)
    (tmp_path / "payloads" / manifest.id / "memory" / "pages.img").unlink()
    store.close()
    again = Store(tmp_path, 1 << 30)
    assert again.ids() == []
    assert "memory file pages.img is missing" in again.recovered[0]
    again.close()


def test_a_manifest_of_another_format_is_set_aside(tmp_path):
    store = Store(tmp_path, 1 << 30)
    manifest = store.commit(filled(store, b"memory"), **FIELDS)
    store.close()
    path = tmp_path / "manifests" / f"{manifest.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    again = Store(tmp_path, 1 << 30)
    assert "version=99" in again.recovered[0]
    again.close()


def test_packing_stores_only_what_changed(store):
    first = pages(1)
    second = pages(2, 1) + first[CHUNK_BYTES:]
    a = store.commit(filled(store, first), **FIELDS)
    b = store.commit(filled(store, second), **FIELDS)
    assert store.pack(a.id) == len(first)
    assert store.pack(b.id) == CHUNK_BYTES
    assert store.pack(b.id) == 0
    usage = store.usage()
    assert usage.num_chunks == 9
    assert usage.logical_bytes == len(first) + len(second)
    assert (store.memory_path(a.id) / "pages.img").read_bytes() == first
    assert (store.memory_path(b.id) / "pages.img").read_bytes() == second


def test_deleting_one_keeps_the_chunks_of_the_other(store):
    first = pages(1)
    a = store.commit(filled(store, first), **FIELDS)
    b = store.commit(filled(store, first + b"tail"), **FIELDS)
    store.pack(a.id)
    store.pack(b.id)
    store.delete(a.id)
    assert (store.memory_path(b.id) / "pages.img").read_bytes() == first + b"tail"
    store.delete(b.id)
    assert store.usage().num_chunks == 0
    assert store.usage().stored_bytes == 0


def test_a_damaged_chunk_is_named(store):
    a = store.commit(filled(store, pages(1, 2)), **FIELDS)
    store.pack(a.id)
    chunk = next((store.root / "chunks").glob("*/*"))
    chunk.write_bytes(b"\0" * CHUNK_BYTES)
    with pytest.raises(SnapshotError, match="damaged"):
        store.memory_path(a.id)


def test_a_layer_lives_as_long_as_a_child_needs_it(store):
    a = store.commit(filled(store, b"m", {"base": "1"}), **FIELDS)
    b = store.commit(filled(store, b"n", {"top": "2"}), base_layers=a.layers, parent=a.id, **FIELDS)
    store.delete(a.id)
    base, top = store.layer_paths(b.id)
    assert (base / "base").read_text() + (top / "top").read_text() == "12"
    assert not (base.parent / "memory").exists()
    store.delete(b.id)
    assert list((store.root / "payloads").iterdir()) == []


def test_the_quota_evicts_by_last_use_and_spares_pins(tmp_path):
    store = Store(tmp_path, 5 * 8 * CHUNK_BYTES // 2)
    a = store.commit(filled(store, pages(1)), **FIELDS)
    time.sleep(0.01)
    b = store.commit(filled(store, pages(2)), **FIELDS)
    time.sleep(0.01)
    store.get(a.id)
    c = store.commit(filled(store, pages(3)), **FIELDS)
    assert sorted(store.ids()) == sorted([a.id, c.id])
    with pytest.raises(SnapshotError, match="evicted"):
        store.get(b.id)
    store.pin(a.id)
    store.pin(c.id)
    with pytest.raises(SnapshotError, match="in use"):
        store.delete(a.id)
    with pytest.raises(LimitError, match="quota_bytes"):
        store.commit(filled(store, pages(4)), **FIELDS)
    assert sorted(store.ids()) == sorted([a.id, c.id])
    store.close()


def test_a_store_has_one_owner(store):
    with pytest.raises(SnapshotError, match="owned by another"):
        Store(store.root, 1)


def test_a_snapshot_of_another_kernel_is_refused_by_name(store):
    manifest = store.commit(filled(store, b"m"), **FIELDS)
    check_fits(manifest, "test", "1", is_same_host=True)
    other = replace(manifest, host="5.10.0 0000")
    with pytest.raises(SnapshotError, match=r"kernel and processor was '5\.10\.0 0000'"):
        check_fits(other, "test", "1", is_same_host=True)
    check_fits(other, "test", "1", is_same_host=False)
    with pytest.raises(SnapshotError, match="driver was 'test'"):
        check_fits(manifest, "qemu", "1", is_same_host=False)


WORKER = """
import random, sys
from pathlib import Path
from baltoro.sandbox.protocol import Limits
from baltoro.sandbox.store import Store
FIELDS = {"driver": "test", "driver_version": "1", "image_root": "/", "limits": Limits()}
store = Store(Path(sys.argv[1]), 1 << 30, is_durable=False)
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
for turn in range(10_000):
    seed = rng.randrange(1000)
    draft = store.begin()
    (draft.memory / "pages.img").write_bytes(random.Random(seed).randbytes(3 * 65536))
    draft.files.mkdir()
    (draft.files / "seed").write_text(str(seed))
    manifest = store.commit(draft, notes={"seed": str(seed)}, **FIELDS)
    print("commit", manifest.id, flush=True)
    ids = store.ids()
    if turn % 2:
        store.pack(rng.choice(ids))
    if turn % 3 == 0:
        store.memory_path(rng.choice(ids))
    if len(ids) > 4:
        gone = rng.choice(ids)
        print("delete", gone, flush=True)
        store.delete(gone)
"""


def kill_at_random_points(folder: Path, num_points: int) -> None:
    rng = random.Random(7)
    committed: set[str] = set()
    for point in range(num_points):
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), str(point)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.06))
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().splitlines()
        process.stdout.close()
        process.wait()
        maybe_gone = set()
        for line in lines:
            verb, snapshot_id = line.split()
            if verb == "commit":
                committed.add(snapshot_id)
            else:
                maybe_gone.add(snapshot_id)
                committed.discard(snapshot_id)
        store = Store(folder, 1 << 30, is_durable=False)
        present = set(store.ids())
        assert committed <= present, f"point {point}: a committed snapshot was lost"
        for snapshot_id in present:
            seed = store.get(snapshot_id).notes["seed"]
            data = (store.memory_path(snapshot_id) / "pages.img").read_bytes()
            assert hashlib.sha256(data).digest() == hashlib.sha256(pages(int(seed), 3)).digest()
            assert (store.layer_paths(snapshot_id)[-1] / "seed").read_text() == seed
        payloads = {path.name for path in (folder / "payloads").iterdir()}
        assert payloads == present, f"point {point}: a half was left"
        committed = present
        store.close()


def test_death_at_20_random_points_loses_nothing_committed(tmp_path):
    kill_at_random_points(tmp_path / "store", 20)


@pytest.mark.slow
def test_death_at_200_random_points_loses_nothing_committed(tmp_path):
    kill_at_random_points(tmp_path / "store", 200)
