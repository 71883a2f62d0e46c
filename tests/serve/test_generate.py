from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from baltoro.checkpoint.load import load
from baltoro.cli import main
from baltoro.model.model import Model
from baltoro.serve import generate
from baltoro.serve.generate import completion_prompt, generate_tokens, image_features
from baltoro.serve.sampler import Sampling

GREEDY = Sampling(temperature=0.0)


def greedy(model: Model, ids: list[int], count: int, **options: object) -> list[int]:
    tokens = generate_tokens(model, ids, max_new_tokens=count, sampling=GREEDY, **options)  # type: ignore[arg-type]
    return [token.id for token in tokens]


def test_greedy_text_is_what_whole_forward_passes_choose(nano: Model) -> None:
    ids = [5, 80, 33, 7]
    written = greedy(nano, ids, 6)
    for _ in range(6):
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        with torch.no_grad():
            hidden = nano(torch.tensor(ids), bounds).hidden
            ids = [*ids, int(nano.lm_head(hidden[-1]).argmax())]
    assert written == ids[4:]


def test_the_slice_size_of_the_prefill_does_not_matter(nano: Model) -> None:
    ids = list(range(40))
    assert greedy(nano, ids, 5, max_prefill_tokens=7) == greedy(nano, ids, 5)


def test_log_probabilities_add_up_to_the_model_s_own(nano: Model) -> None:
    tokens = list(generate_tokens(nano, [5, 80], max_new_tokens=3, sampling=GREEDY))
    ids = torch.tensor([5, 80, *[t.id for t in tokens]])
    with torch.no_grad():
        hidden = nano(ids, torch.tensor([0, 5], dtype=torch.int32)).hidden
        logprobs = nano.lm_head(hidden).log_softmax(-1)
    for place, token in enumerate(tokens):
        assert token.logprob == pytest.approx(logprobs[1 + place, token.id].item(), abs=1e-4)


def test_a_stop_token_ends_the_text_and_is_given(nano: Model) -> None:
    free = greedy(nano, [5, 80, 33], 6)
    stop = free[2]
    stopped = greedy(nano, [5, 80, 33], 6, stop_ids=(stop,))
    assert stopped == free[: free.index(stop) + 1]


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [
        ([], 4, "prompt: it has no tokens"),
        ([1, 10**6], 4, "token id 1000000 is outside the vocabulary"),
        ([1, -1], 4, "token id -1"),
        ([1], 0, "max_new_tokens=0"),
        ([1], 10**9, "exceed the context"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    nano: Model, ids: list[int], count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate_tokens(nano, ids, max_new_tokens=count, sampling=GREEDY)


def test_a_picture_changes_the_text_and_a_split_prefill_places_it_the_same(
    nano: Model, tmp_path: Path
) -> None:
    path = tmp_path / "p.png"
    Image.effect_noise((90, 60), 80).convert("RGB").save(path)
    prompt = completion_prompt(nano.processor, "what is this", [path])
    features = image_features(nano, prompt)
    assert features is not None
    assert prompt.ids.count(nano.tokenizer.media_pad_id) == features.shape[0] == 12
    seen = greedy(nano, prompt.ids, 8, image_features=features)
    assert seen == greedy(nano, prompt.ids, 8, image_features=features, max_prefill_tokens=9)
    assert seen != greedy(nano, prompt.ids, 8, image_features=-features)


def test_equal_seeds_write_equal_text(nano_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", str(nano_dir), "--prompt", "Hi", "--max-new-tokens", "8", "--seed"]
    texts = []
    for seed in ("3", "3", "4"):
        assert main([*args, seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "prompt: it has no tokens"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "x", "--device", "tpu9"], "device='tpu9'"),
        (["--prompt", "x", "--image", "nowhere.png"], "nowhere.png"),
        (["--prompt", "x", "--image", "README.md"], "README.md"),
        (["--prompt", "x", "--max-new-tokens", "999999999"], "exceed the context"),
    ],
)
def test_bad_input_is_one_clear_line(
    nano_dir: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["generate", str(nano_dir), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_checkpoint_without_a_tokenizer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tests/golden/k3-mini", "--prompt", "x"]) == 2
    assert "no K3 tokenizer beside the weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "dtype", "chosen", "impl"),
    [
        ("cuda", None, torch.bfloat16, "gpu"),
        ("cuda", "bfloat16", torch.bfloat16, "gpu"),
        ("cuda", "float32", torch.float32, "torch"),
        ("cpu", None, None, "torch"),
        ("cpu", "bfloat16", torch.bfloat16, "torch"),
    ],
)
def test_a_gpu_gets_bfloat16_and_kernels_unless_told_otherwise(
    nano: Model, monkeypatch: pytest.MonkeyPatch, device: str, dtype: Any, chosen: Any, impl: str
) -> None:
    asked: dict[str, Any] = {}

    def loaded(_: str, **options: Any) -> Model:
        asked.update(options)
        return nano

    monkeypatch.setattr(generate, "load", loaded)
    monkeypatch.setattr(generate, "checked_device", torch.device)
    generate.load_for_text("x", dtype=dtype, device=device, experts="decoded")
    assert (asked["dtype"], asked["impl"]) == (chosen, impl)


@pytest.mark.parametrize(
    ("device", "current"), [("cuda:1", [torch.device("cuda:1")]), ("cuda", []), ("cpu", [])]
)
def test_a_gpu_named_by_its_index_is_where_kernels_go(
    nano: Model, monkeypatch: pytest.MonkeyPatch, device: str, current: list[torch.device]
) -> None:
    chosen: list[torch.device] = []

    def loaded(_: str, **options: Any) -> Model:
        assert chosen == current
        return nano

    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(generate, "load", loaded)
    generate.load_for_text("x", dtype=None, device=device, experts="decoded")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_is_used_alone(nano_dir: Path) -> None:
    texts = []
    for device in ("cuda:0", "cuda:1"):
        others = torch.cuda.memory_allocated(0)
        with torch.cuda.device(0):  # which is current again in the end
            model = generate.load_for_text(
                str(nano_dir), dtype=None, device=device, experts="decoded"
            )
            texts.append(greedy(model, [5, 80, 33, 7], 20))
            assert str(model.lm_head.weight.device) == device
            torch.cuda.synchronize(device)
        assert device == "cuda:0" or torch.cuda.memory_allocated(0) <= others
    assert texts[0] == texts[1]


def test_a_model_is_described_by_what_runs_it(
    nano_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(nano_dir, dtype=torch.bfloat16)
    assert generate.described(plain) == "bfloat16 weights on cpu, torch's operators"
    kernels = load(nano_dir, impl="gpu")
    assert generate.described(kernels) == "float32 weights on cpu, kernels"
    monkeypatch.setattr(generate, "gpu_refusals", lambda _: {"situ": "activation is silu"})
    line = generate.described(kernels)
    assert line == "float32 weights on cpu, kernels, torch for situ (activation is silu)"
