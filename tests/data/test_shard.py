"""Shards: what was written comes back, and damage is named."""

import errno
from pathlib import Path

import numpy as np
import pytest
from data.small import FullDisk

from baltoro.data.dataset import Dataset, verify
from baltoro.data.files import create, npy_bytes, write_atomically
from baltoro.data.shard import EncodedDocument, Shard, ShardEntry, ShardWriter, token_dtype


def document(*tokens: int, pictures: tuple[bytes, ...] = ()) -> EncodedDocument:
    return EncodedDocument(np.array(tokens), pictures, hash=7, quality=0.5, domain=1, source=2)


def written(folder: Path, *documents: EncodedDocument, vocab_size: int = 1000) -> list[ShardEntry]:
    writer = ShardWriter(
        folder, "train/a", "train", vocab_size=vocab_size, max_tokens=6, open_file=create
    )
    for item in documents:
        writer.add(item)
    return writer.close()


def test_what_was_written_comes_back(tmp_path):
    entries = written(tmp_path, document(1, 2, 3), document(4, 5, 6, 7), document(8, 9))
    assert [entry.num_documents for entry in entries] == [2, 1]
    assert [entry.num_tokens for entry in entries] == [7, 2]
    shard = Shard(tmp_path, entries[0], 1000)
    assert shard.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert shard.start(1) == 3
    record = shard.documents[0]
    assert (record["hash"], record["domain"], record["source"]) == (7, 1, 2)


def test_pictures_belong_to_their_documents(tmp_path):
    (entry,) = written(
        tmp_path,
        document(1, 2, pictures=(b"one", b"second")),
        document(3, 4),
        document(5, 6, pictures=(b"third",)),
    )
    shard = Shard(tmp_path, entry, 1000)
    assert [shard.pictures(i) for i in range(3)] == [[b"one", b"second"], [], [b"third"]]


def test_the_type_of_tokens_follows_the_vocabulary():
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(ValueError, match="below vocab_size=1000"):
        written(tmp_path, document(1, 1000))


@pytest.mark.parametrize("name", ["tokens", "documents", "pictures", "picture_stops"])
def test_a_file_cut_short_is_named(tmp_path, name):
    (entry,) = written(tmp_path, document(1, 2, 3, pictures=(b"abc",)))
    path = tmp_path / "train" / f"a-00000.{name}.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name}.npy: has \d+ bytes, the manifest says"):
        Shard(tmp_path, entry, 1000)


def test_a_missing_file_is_named(tmp_path):
    (entry,) = written(tmp_path, document(1, 2, 3))
    (tmp_path / "train" / "a-00000.documents.npy").unlink()
    with pytest.raises(ValueError, match=r"a-00000\.documents\.npy: is missing"):
        Shard(tmp_path, entry, 1000)


def test_tokens_of_another_width_are_refused(tmp_path):
    (entry,) = written(tmp_path, document(1, 2, 3))
    with pytest.raises(ValueError, match="holds uint16, expected uint32"):
        Shard(tmp_path, entry, 70_000)


def test_another_vocabulary_is_refused(built):
    with pytest.raises(ValueError, match=r"vocab_size=512: the data in .* has 300 ids"):
        Dataset(built, "train", vocab_size=512)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no manifest"):
        Dataset(tmp_path, "train", vocab_size=300)


def copy_of(built: Path, folder: Path) -> Path:
    for path in built.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(built)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return folder


def test_a_changed_byte_is_found_by_verify(built, tmp_path):
    folder = copy_of(built, tmp_path)
    verify(folder)
    path = next((folder / "train").glob("*.tokens.npy"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not those that were built"):
        verify(folder)


def test_another_tokenizer_in_the_folder_is_refused(built, tmp_path):
    folder = copy_of(built, tmp_path)
    path = folder / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match="is not the tokenizer that made these tokens"):
        _ = Dataset(folder, "train", vocab_size=300).tokenizer


def test_bytes_per_token_are_those_of_the_text(dataset):
    sizes = dataset.bytes_per_token()
    number = int(np.flatnonzero(dataset.num_pictures == 0)[0])
    tokens = dataset.tokens(number)
    text = dataset.tokenizer.decode(tokens[:-1])
    assert sizes[tokens].sum() == len(text.encode())
    assert sizes[dataset.tokenizer.eos_id] == 0


def test_pieces_of_a_document_are_slices_of_it(dataset):
    last = dataset.num_documents - 1
    whole = dataset.tokens(last)
    assert len(whole) == dataset.num_tokens[last]
    assert dataset.tokens(last, 3, 9).tolist() == whole[3:9].tolist()
    assert dataset.tokens(last, 3, 10**9).tolist() == whole[3:].tolist()


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, [b"old"], create)
    with pytest.raises(OSError) as caught:
        write_atomically(path, [b"new, ", b"and longer"], FullDisk(8).open)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_equal_arrays_give_equal_bytes():
    assert bytes(npy_bytes(np.arange(5))) == bytes(npy_bytes(np.arange(5)))
