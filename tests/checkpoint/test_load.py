import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.cases import (
    GOLDEN,
    copy,
    edit_config,
    edit_tensors,
    everything,
    random_model,
    shard,
    state,
    tensors,
)
from model.tiny import tiny_k3
from safetensors.torch import load_file
from torch import Tensor

import baltoro
from baltoro.checkpoint import names
from baltoro.checkpoint.names import is_fp32
from baltoro.model.config import ImplConfig, gpu_impl
from baltoro.model.model import Model
from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4
from baltoro.text.tokenizer import train

A_LOG = "language_model.model.layers.1.self_attn.A_log"


def assert_same(first: Model, second: Model) -> None:
    held = state(second)
    for name, tensor in state(first).items():
        assert tensor.dtype == held[name].dtype and torch.equal(tensor, held[name]), name


def test_every_tensor_is_as_it_was_saved(tmp_path: Path) -> None:
    model = random_model(everything())
    baltoro.save(model, tmp_path / "a")
    loaded = baltoro.load(tmp_path / "a")
    assert_same(loaded, model)
    assert loaded.config == model.config
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_a_directory_may_be_a_string(tmp_path: Path) -> None:
    assert baltoro.load(str(GOLDEN / "k3-mini")).config.num_layers == 9


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    path = copy("k3-mxfp4-mini", tmp_path / "a")
    shard(path, num_shards=5)  # codes and scales of a matrix lie in different files
    assert_same(baltoro.load(path), baltoro.load(GOLDEN / "k3-mxfp4-mini"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_is_that_of_all_but_the_tensors_the_release_keeps_in_fp32(
    dtype: torch.dtype,
) -> None:
    model = baltoro.load(GOLDEN / "k3-vision-mini", dtype=dtype)
    whole = state(baltoro.load(GOLDEN / "k3-vision-mini"))
    for name, tensor in state(model).items():
        expected = torch.float32 if is_fp32(name) else dtype
        assert tensor.dtype == expected, name
        assert torch.equal(tensor, whole[name].to(expected))
    fp32 = {name.rpartition("self_attn.")[2] for name in whole if is_fp32(name)}
    assert {"A_log", "dt_bias", "o_norm.weight", "q_conv1d.weight"} < fp32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_are_decoded_to_the_dtype(dtype: torch.dtype) -> None:
    model = baltoro.load(GOLDEN / "k3-mxfp4-mini", dtype=dtype)
    held = tensors(GOLDEN / "k3-mxfp4-mini")
    stem = "language_model.model.layers.2.block_sparse_moe.experts.3."
    weight = {
        matrix: decode_mxfp4(
            Mxfp4Tensor(
                held[f"{stem}{matrix}.weight_packed"], held[f"{stem}{matrix}.weight_scale"]
            ),
            torch.float32,
        )
        for matrix in ("w1", "w2", "w3")
    }
    experts = model.layers[2].block_sparse_moe.experts
    gate_up = torch.cat([weight["w1"], weight["w3"]])  # gate rows above up rows
    assert torch.equal(experts.gate_up_proj[3], gate_up.to(dtype))
    assert torch.equal(experts.down_proj[3], weight["w2"].to(dtype))


def test_without_a_dtype_nothing_is_rounded(tmp_path: Path) -> None:
    path = copy("kimi-linear-mini", tmp_path / "a")

    def to_bf16(held: dict[str, Tensor]) -> None:
        held |= {name: held[name].bfloat16() for name in held if not is_fp32(name)}

    edit_tensors(path, to_bf16)
    assert baltoro.load(path).lm_head.weight.dtype == torch.bfloat16
    name = "model.layers.1.block_sparse_moe.gate.weight"
    edit_tensors(path, lambda held: held.update({name: held[name].float() + 1e-5}))
    model = baltoro.load(path)
    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.layers[1].block_sparse_moe.gate.weight, tensors(path)[name])


def test_packed_experts_keep_their_bytes_and_no_weights() -> None:
    model = baltoro.load(GOLDEN / "k3-mxfp4-mini", experts="packed")
    held = tensors(GOLDEN / "k3-mxfp4-mini")
    stem = "language_model.model.layers.1.block_sparse_moe.experts.7."
    experts = dict(model.layers[1].block_sparse_moe.experts.named_buffers())
    assert torch.equal(experts["gate_up_packed"][7, :96], held[f"{stem}w1.weight_packed"])
    assert torch.equal(experts["gate_up_scale"][7, 96:], held[f"{stem}w3.weight_scale"])
    assert torch.equal(experts["down_packed"][7], held[f"{stem}w2.weight_packed"])
    assert model.config.moe is not None and model.config.moe.expert_format == "mxfp4"
    assert not any(".experts." in name for name, _ in model.named_parameters())


def test_experts_that_are_not_packed_cannot_stay_so() -> None:
    with pytest.raises(ValueError, match=r"experts='packed': .*k3-mini holds no packed experts"):
        baltoro.load(GOLDEN / "k3-mini", experts="packed")


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (16,), (128,)])
def test_any_legal_form_of_a_log_gives_one_value_per_head(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    path = copy("k3-mini", tmp_path / "a")
    values = torch.tensor([0.1, -0.2, 0.3, 0.4])
    padded = torch.zeros(shape)
    padded.view(-1)[:4] = values
    edit_tensors(path, lambda held: held.update({A_LOG: padded}))
    assert torch.equal(baltoro.load(path).layers[1].self_attn.A_log, values)


@pytest.mark.parametrize("tail", [0.1, -1e-30, float("nan")])
@pytest.mark.parametrize("length", [5, 16, 128])
def test_a_tail_of_a_log_that_is_not_zero_is_refused(
    tmp_path: Path, length: int, tail: float
) -> None:
    path = copy("k3-mini", tmp_path / "a")
    values = torch.zeros(length)
    values[-1] = tail
    edit_tensors(path, lambda held: held.update({A_LOG: values}))
    with pytest.raises(ValueError, match=f"{A_LOG}: has {length} values for 4 heads"):
        baltoro.load(path)


def test_an_mtp_layer_must_share_embedding_and_head(tmp_path: Path) -> None:
    baltoro.save(random_model(everything()), tmp_path / "a")
    name = "language_model.model.layers.6.shared_head.head.weight"
    edit_tensors(tmp_path / "a", lambda held: held[name].view(-1)[3:4].add_(1.0))
    with pytest.raises(ValueError, match=f"{name}: differs from language_model.lm_head.weight"):
        baltoro.load(tmp_path / "a")


def test_the_operators_are_those_named() -> None:
    assert baltoro.load(GOLDEN / "k3-mini").config.impl == ImplConfig()
    model = baltoro.load(GOLDEN / "k3-mini", impl="reference")
    assert model.config.impl == ImplConfig.all("reference")
    assert baltoro.load(GOLDEN / "k3-mini", impl="gpu").config.impl == gpu_impl(model.config)
    one = replace(ImplConfig(), moe="reference")
    assert baltoro.load(GOLDEN / "k3-mini", impl=one).config.impl == one


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"experts": "unpacked"}, "experts='unpacked': choose 'decoded' or 'packed'"),
        ({"dtype": torch.float64}, "dtype=torch.float64: choose"),
        ({"dtype": torch.int8}, "dtype=torch.int8: choose"),
    ],
)
def test_options_outside_the_choice_are_refused(option: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        baltoro.load(GOLDEN / "k3-mini", **option)  # type: ignore[arg-type]


def test_without_text_files_there_is_no_tokenizer() -> None:
    model = baltoro.load(GOLDEN / "k3-mini")
    assert model.tokenizer is None and model.processor is None


def with_tokenizer(path: Path) -> None:
    """Gives a golden checkpoint a vocabulary of bytes and named specials, grown to fit."""
    train([], 272, 16).save(path)
    edit_config(path, lambda raw: raw["text_config"].update(vocab_size=272))

    def grow(held: dict[str, Tensor]) -> None:
        for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
            held[name] = torch.cat([held[name], torch.zeros(16, 64)])

    edit_tensors(path, grow)


def test_pictures_can_be_processed_without_a_tokenizer() -> None:
    model = baltoro.load(GOLDEN / "k3-vision-mini")
    golden = load_file(GOLDEN / "k3-vision-mini" / "golden.safetensors")
    pictures = [golden["image_0"].numpy(), golden["image_1"].numpy()]
    pixel_values, _ = model.processor.images.process(pictures)
    assert torch.equal(torch.from_numpy(pixel_values), golden["pixel_values"][:40])
    assert model.tokenizer is None
    with pytest.raises(ValueError, match="tokenizer: this checkpoint has none"):
        model.processor.prompt([{"role": "user", "content": "Hi"}])


def test_tokenizer_and_processor_come_with_the_model(tmp_path: Path) -> None:
    path = copy("k3-vision-mini", tmp_path / "a")
    with_tokenizer(path)
    model = baltoro.load(path)
    assert model.tokenizer.vocab_size == 272
    assert model.processor.tokenizer is model.tokenizer
    assert model.processor.images.config.patch_size == 14


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    path = copy("k3-mini", tmp_path / "a")
    train([], 272, 16).save(path)
    with pytest.raises(ValueError, match=r"vocab_size=256.*272"):
        baltoro.load(path)


def test_a_preprocessor_for_another_tower_is_refused(tmp_path: Path) -> None:
    path = copy("k3-vision-mini", tmp_path / "a")
    with_tokenizer(path)
    processor = json.loads((path / "preprocessor_config.json").read_text())
    processor["media_proc_cfg"]["patch_size"] = 16
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(ValueError, match=r"preprocessor_config\.json.*\(14, 2, 2\)"):
        baltoro.load(path)


def test_kimi_linears_own_tokenizer_is_left_alone(tmp_path: Path) -> None:
    path = copy("kimi-linear-mini", tmp_path / "a")
    (path / "tiktoken.model").write_text("IQ== 0\n")
    tokens = {"258": {"content": "<|im_end|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    assert baltoro.load(path).tokenizer is None


MEASURE = """
import sys
from pathlib import Path
import torch, baltoro

def memory(line):
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(text.split()[1]) * 1024 for text in status if text.startswith(line))

baltoro.load(sys.argv[1])  # whatever is imported and allocated once
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
before = memory("VmRSS:")
model = baltoro.load(sys.argv[2], dtype=torch.float32)
print(memory("VmHWM:") - before)
"""


def test_loading_needs_no_more_than_the_model_and_one_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "SINGLE_FILE_BYTES", 0)
    config = tiny_k3(moe=None, hidden_size=256, intermediate_size=4096)
    baltoro.save(Model(config).bfloat16(), tmp_path / "a")
    shards = [path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")]
    assert len(shards) == config.num_layers + 1 and max(shards) < sum(shards) / 4
    command = [sys.executable, "-c", MEASURE, str(GOLDEN / "k3-mini"), str(tmp_path / "a")]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    held = 2 * sum(shards)  # stored in bf16, held in fp32
    assert 0.9 * held < peak < held + max(shards) + 4_000_000
