from pathlib import Path

import pytest
import torch
from checkpoint.cases import copy, shard, tensors
from safetensors.torch import save_file

from baltoro.checkpoint.directory import CheckpointDirectory
from baltoro.checkpoint.shards import DTYPE_CODES, Entry, TensorReader, write_safetensors

MIXED = {
    "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "a": torch.arange(5, dtype=torch.uint8),
    "c.weight": torch.randn(3, 1, 4),
    "ä": torch.randn(2, 2).half(),
    "d": torch.zeros(0, 4),
}


def entries(tensors: dict[str, torch.Tensor]) -> list[Entry]:
    return [
        Entry(name, DTYPE_CODES[tensor.dtype], tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    ]


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}])
def test_the_bytes_are_those_of_the_safetensors_library(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    save_file(MIXED, tmp_path / "theirs", metadata=metadata or None)
    write_safetensors(tmp_path / "ours", entries(MIXED), metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_view_is_written_as_what_it_shows(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    write_safetensors(tmp_path / "ours", entries({"x": whole[1:3, ::2]}), metadata={})
    save_file({"x": whole[1:3, ::2].contiguous()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float16)])
def test_a_tensor_that_is_not_what_its_entry_says_is_refused(
    tmp_path: Path, wrong: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=r"x: is .* expected F32 \[2\]"):
        write_safetensors(tmp_path / "x", [Entry("x", "F32", (2,), lambda: wrong)], metadata={})


def test_tensors_are_read_from_whatever_shard_they_lie_in(tmp_path: Path) -> None:
    whole = tensors(copy("kimi-linear-mini", tmp_path / "single"))
    shard(tmp_path / "single", num_shards=4)
    reader = TensorReader(CheckpointDirectory(tmp_path / "single"))
    for name, tensor in whole.items():
        assert torch.equal(reader.tensor(name), tensor)
