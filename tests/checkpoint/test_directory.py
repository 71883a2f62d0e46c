import json
import os
from pathlib import Path

import pytest
from checkpoint.cases import copy, edit_config, shard

from baltoro.checkpoint.directory import CheckpointDirectory, read_header, whole_directory


def refuse(path: Path, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        CheckpointDirectory(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return copy("k3-vision-mini", tmp_path / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    shard(copy("kimi-linear-mini", tmp_path / "sharded"))
    return tmp_path / "sharded"


def test_a_directory_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        CheckpointDirectory(tmp_path / "nowhere")


def test_a_directory_without_configuration_is_no_checkpoint(tmp_path: Path) -> None:
    refuse(tmp_path, "no config.json", "not a checkpoint directory")


def test_a_configuration_without_tensors_is_no_checkpoint(single: Path) -> None:
    (single / "model.safetensors").unlink()
    refuse(single, "neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("text", ["{", "[1]", '"k3"'])
def test_a_broken_configuration_is_named(single: Path, text: str) -> None:
    (single / "config.json").write_text(text)
    refuse(single, "config.json", "JSON")


def test_a_configuration_in_another_encoding_is_named(single: Path) -> None:
    (single / "config.json").write_bytes(b"\xff\xfe{\x00}\x00")
    refuse(single, "config.json", "UTF-8")


def test_shards_without_an_index_are_half_a_download(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    refuse(sharded, "3 shards but no model.safetensors.index.json", "download is incomplete")


def test_an_absent_shard_is_half_a_download(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refuse(sharded, "1 of 3 shards are absent", "model-00002-of-00003", "incomplete")


@pytest.mark.parametrize("missing", [1, 1000])
def test_a_truncated_file_is_half_a_download(single: Path, missing: int) -> None:
    path = single / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - missing)
    refuse(single, "model.safetensors", f"{size - missing} of {size} bytes", "incomplete")


@pytest.mark.parametrize("size", [0, 7, 100])
def test_a_file_cut_inside_its_header_is_said_so(single: Path, size: int) -> None:
    os.truncate(single / "model.safetensors", size)
    refuse(single, "model.safetensors", f"cut off inside its header ({size} bytes)")


def test_bytes_after_the_tensors_are_refused(single: Path) -> None:
    with (single / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    refuse(single, "model.safetensors", "bytes")


def test_a_large_file_pointer_is_recognised(single: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (single / "model.safetensors").write_text(pointer)
    refuse(single, "Git LFS pointer")


def test_a_file_of_another_kind_is_refused(single: Path) -> None:
    (single / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"????")
    refuse(single, "not a safetensors file")


def test_an_index_that_disagrees_with_the_shards_is_refused(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    index["weight_map"]["made.up"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    refuse(sharded, "disagree about 2 tensors", "made.up")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_may_only_name_files_of_its_directory(sharded: Path, file: object) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    refuse(sharded, repr(file), "is not a file name")


def test_an_index_without_a_map_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")
    refuse(sharded, "has no weight_map")


def test_what_travels_with_a_checkpoint_is_listed(single: Path) -> None:
    for name in ("tokenizer.json", "encoding_k3.py", "notes.txt", "golden.safetensors"):
        (single / name).write_text(name)
    names = CheckpointDirectory(single).companions()
    assert set(names) == {"preprocessor_config.json", "tokenizer.json", "encoding_k3.py"}
    assert names["encoding_k3.py"] == b"encoding_k3.py"


def test_a_header_gives_dtype_and_shape_without_the_data(single: Path) -> None:
    stored, metadata = read_header(single / "model.safetensors")
    found = stored["vision_tower.patch_embed.proj.weight"]
    assert (found.file, found.dtype, found.shape) == ("model.safetensors", "F32", (40, 3, 14, 14))
    assert metadata == {}


def write(path: Path, name: str = "config.json", *, overwrite: bool = False) -> None:
    with whole_directory(path, overwrite=overwrite) as directory:
        (directory / name).write_text("new")


def test_a_directory_appears_when_it_is_whole(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "a" / "b", overwrite=False) as directory:
        (directory / "config.json").write_text("new")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "config.json").read_text() == "new"
    assert os.listdir(tmp_path / "a") == ["b"]


def test_an_interrupt_leaves_the_old_directory_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with (
        pytest.raises(KeyboardInterrupt),
        whole_directory(tmp_path / "a", overwrite=False) as directory,
    ):
        (directory / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a" / "config.json").read_text() == "new"


def test_a_checkpoint_is_replaced_whole(single: Path) -> None:
    write(single)
    assert os.listdir(single) == ["config.json"]
    assert os.listdir(single.parent) == ["single"]


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a")
    assert os.listdir(tmp_path / "a") == ["config.json"]


@pytest.mark.parametrize("name", ["notes.txt", "config.jsonl"])
def test_a_directory_of_something_else_is_kept_unless_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text("mine")
    with pytest.raises(ValueError, match="not empty and not a checkpoint"):
        write(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]
    write(tmp_path / "a", overwrite=True)
    assert os.listdir(tmp_path / "a") == ["config.json"]


def test_work_beside_a_checkpoint_is_kept_unless_told(single: Path) -> None:
    (single / "optimizer.pt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'optimizer\.pt' beside a checkpoint"):
        write(single)
    assert (single / "optimizer.pt").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        write(tmp_path / "a")


def test_an_edited_configuration_is_read_as_it_stands(single: Path) -> None:
    edit_config(single, lambda raw: raw.update(ignore_index=-7))
    assert CheckpointDirectory(single).raw_config["ignore_index"] == -7
