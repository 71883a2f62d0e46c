"""The snapshot store: commit by rename, recovery, sharing, quota; and death at random points."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

from baltoro.sandbox.chunks import MAX_PAGES, PAGE_BYTES, cut
from baltoro.sandbox.manifest import check_fits
from baltoro.sandbox.protocol import Limits, SandboxError, SnapshotError
from baltoro.sandbox.store import Draft, Store
from baltoro.sandbox.tree import merge_layers

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


def pages(seed: int, num_pages: int = 128) -> bytes:
    return random.Random(seed).randbytes(num_pages * PAGE_BYTES)


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


def test_packing_stores_only_what_changed_wherever_it_lies(store):
    """Pages written, and pages that came in between: those after them are found again."""
    first = pages(1)
    written = pages(2, 1) + first[PAGE_BYTES:]
    inserted = first[: 40 * PAGE_BYTES] + pages(3, 3) + first[40 * PAGE_BYTES :]
    packed = {}
    for memory in (first, written, inserted):
        snapshot = store.commit(filled(store, memory), **FIELDS).id
        packed[snapshot] = memory
        assert store.pack(snapshot) <= (len(first) if memory is first else MAX_PAGES * PAGE_BYTES)
        assert store.pack(snapshot) == 0
    assert store.usage().logical_bytes == sum(len(memory) for memory in packed.values())
    assert store.usage().stored_bytes < 1.8 * len(first)
    for snapshot, memory in packed.items():
        assert (store.memory_path(snapshot) / "pages.img").read_bytes() == memory


def test_a_file_is_cut_where_its_pages_say_so(tmp_path):
    empty = bytes(1000 * PAGE_BYTES)
    data = pages(5, 5000) + empty + b"half a page"
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as source:
        pieces = list(cut(source))
    assert b"".join(pieces) == data
    sizes = [len(piece) / PAGE_BYTES for piece in pieces]
    assert max(sizes) <= MAX_PAGES and all(size.is_integer() for size in sizes[:-1])
    assert 6 < 5000 / (len(pieces) - len(empty) / PAGE_BYTES / MAX_PAGES) < 10
    assert len(set(pieces)) < len(pieces)  # of empty pages, one piece serves for all


def test_a_half_that_was_put_together_again_is_packed_again(store):
    a = store.commit(filled(store, pages(1)), **FIELDS)
    store.pack(a.id)
    store.lend(a.id)
    folder = store.memory_path(a.id)
    store.pack(a.id)
    assert folder.exists()  # somebody reads it
    assert store.untidy(0.0, 1) == ([], [])
    store.give_back(a.id)
    assert store.untidy(3600.0, 1) == ([], [])
    assert store.untidy(0.0, 1) == ([a.id], [])
    store.pack(a.id)
    assert not folder.exists()


def test_two_who_wake_a_packed_snapshot_at_once_get_one_whole_half(store):
    kept = store.commit(filled(store, pages(1)), **FIELDS)
    store.pack(kept.id)
    store.lend(kept.id)
    assemble, begun, others = store._chunks.assemble, [], []

    def assemble_while_another_asks(names, target):
        begun.append(target)
        if len(begun) == 1:
            others.append(pool.submit(store.memory_path, kept.id))
            wait(others, timeout=0.1)
        assemble(names, target)

    store._chunks.assemble = assemble_while_another_asks
    with ThreadPoolExecutor(1) as pool:
        folder = store.memory_path(kept.id)
    assert others[0].result() == folder
    assert (folder / "pages.img").read_bytes() == pages(1)
    assert len(begun) == 1


def test_chunks_being_packed_outlive_what_is_deleted_meanwhile(store):
    """A collection runs between the two files of a memory half, before any manifest names them."""
    other = store.commit(filled(store, b"other"), **FIELDS)
    draft = filled(store, pages(1))
    (draft.memory / "second.img").write_bytes(pages(2))
    kept = store.commit(draft, **FIELDS)
    put = store._chunks.put

    def put_while_another_goes(path):
        done = put(path)
        if path.name == "pages.img":
            store.delete(other.id)
        return done

    store._chunks.put = put_while_another_goes
    store.pack(kept.id)
    assert (store.memory_path(kept.id) / "pages.img").read_bytes() == pages(1)
    assert store.recover() == []


def test_bytes_are_counted_while_a_piece_gets_its_name(store):
    kept = store.commit(filled(store, pages(1)), **FIELDS)
    store.pack(kept.id)
    before = store.usage()
    files = store._chunks._files
    store._chunks._files = lambda: [store.root / "chunks/ab/abcd.work", *files()]  # just renamed
    assert store.usage() == before


def test_many_layers_become_one_and_branches_keep_theirs(store):
    first = store.commit(filled(store, b"m", {"a": "1", "b": "1"}), **FIELDS)
    second = store.commit(filled(store, b"m", {"b": "2"}), base_layers=first.layers, **FIELDS)
    third = store.commit(filled(store, b"m", {"c": "3"}), base_layers=second.layers, **FIELDS)
    store.delete(first.id)
    assert store.untidy(0.0, 2) == ([second.id, third.id], [third.id])
    store.lend(third.id)
    store.flatten(third.id)
    assert len(store.layer_paths(third.id)) == 3  # mounted by somebody
    store.give_back(third.id)
    store.flatten(third.id)
    (layer,) = store.layer_paths(third.id)
    assert {path.name: path.read_text() for path in layer.iterdir()} == {
        "a": "1",
        "b": "2",
        "c": "3",
    }
    assert [path.is_dir() for path in store.layer_paths(second.id)] == [True, True]
    store.close()
    again = Store(store.root, 1 << 30)
    assert again.recovered == []
    assert again.layer_paths(third.id) == [layer]
    again.delete(second.id)
    assert len(list((store.root / "payloads").iterdir())) == 2  # of memory, and of the layer
    again.delete(third.id)
    assert list((store.root / "payloads").iterdir()) == []
    again.close()


def test_a_snapshot_deleted_while_it_is_flattened_stays_deleted(store, monkeypatch):
    first = store.commit(filled(store, b"m", {"a": "1"}), **FIELDS)
    second = store.commit(filled(store, b"m", {"b": "2"}), base_layers=first.layers, **FIELDS)

    def merge_while_it_is_evicted(layers, target):
        merge_layers(layers, target)
        store.delete(second.id)

    monkeypatch.setattr("baltoro.sandbox.store.merge_layers", merge_while_it_is_evicted)
    store.flatten(second.id)
    assert store.ids() == [first.id]
    assert [path.name for path in (store.root / "payloads").iterdir()] == [first.id]


@pytest.fixture
def small_store(tmp_path):
    """On a disk of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=True)
    opened = Store(tmp_path / "store", 1 << 30)
    yield opened
    opened.close()
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_named_and_what_was_committed_stays(small_store):
    store = small_store
    kept = store.commit(filled(store, pages(1)), **FIELDS)
    draft = filled(store, b"small")
    filler = store.root / "filler"
    with pytest.raises(OSError, match="No space") as caught, filler.open("wb") as out:
        out.write(bytes(8 << 20))
    assert "delete snapshots" in str(store.named(caught.value, "a draft"))
    with pytest.raises(SandboxError, match="disk is full"):
        store.commit(draft, **FIELDS)
    with pytest.raises(SandboxError, match="disk is full"):
        store.pack(kept.id)
    assert store.ids() == [kept.id]
    filler.unlink()
    other = SandboxError("of another kind")
    assert store.named(other, "a draft") is other
    assert store.pack(kept.id) == 128 * PAGE_BYTES
    assert (store.memory_path(kept.id) / "pages.img").read_bytes() == pages(1)
    assert store.recover() == []


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
    a = store.commit(filled(store, pages(1)), **FIELDS)
    store.pack(a.id)
    chunk = next((store.root / "chunks").glob("*/*"))
    chunk.write_bytes(b"\0" * PAGE_BYTES)
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
    store = Store(tmp_path, 5 * 128 * PAGE_BYTES // 2)
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
    with pytest.raises(SnapshotError, match="quota_bytes"):
        store.commit(filled(store, pages(4)), **FIELDS)
    assert sorted(store.ids()) == sorted([a.id, c.id])
    store.close()


def test_a_store_whose_owner_is_just_ending_is_waited_for(tmp_path):
    hold = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(flush=True)"
    )
    command = [sys.executable, "-c", f"{hold}; time.sleep(0.2)", str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        Store(tmp_path, 1 << 30, is_durable=False).close()


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
        # of a line that the kill cut short the act has not begun, or is not yet promised
        lines = process.stdout.read().rpartition("\n")[0].splitlines()
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
            assert hashlib.sha256(data).digest() == hashlib.sha256(pages(int(seed), 48)).digest()
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
