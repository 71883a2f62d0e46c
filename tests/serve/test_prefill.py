"""Prompts in packs of fixed rows, against separate eager calls and whole forward passes."""

import asyncio
import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serve.test_runner import LINEAR, TINY, alone, engine, ids, request, written

from baltoro.model.config import ModelConfig, gpu_impl
from baltoro.model.model import Model
from baltoro.model.presets import preset
from baltoro.serve import prefill
from baltoro.serve.background import BackgroundEngine
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.metrics import Metrics
from baltoro.serve.scheduler import SchedulerConfig


@pytest.mark.parametrize("model", [TINY, LINEAR], ids=["k3", "kimi-linear"])
def test_prompts_in_fixed_rows_are_read_as_by_separate_calls(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "LONG", 128)
    monkeypatch.setattr(prefill, "FEW_SEQUENCES", 2)
    served = engine("resident", model, max_step_tokens=200)
    packs = served.runner.packs
    assert packs is not None
    assert [shape.num_rows for shape in packs.shapes] == [64, 128, 256, 224, 192]
    sizes = []
    run = packs.run

    def watched(spans, tokens_of):  # type: ignore[no-untyped-def]
        shape = packs.shape_of(spans)
        assert shape is not None
        sizes.append((shape.num_rows, [span.cut is not None for span in spans]))
        return run(spans, tokens_of)

    packs.run = watched  # type: ignore[method-assign]
    prefix = ids(40, 9)
    wanted = [request(prefix + ids(count, count), 3) for count in (30, 13, 14, 90)]
    wanted += [request(ids(count, count), 3) for count in (1, 70, 5)]
    for group in (wanted[:1], wanted[1:3], wanted[3:], wanted):
        for sequence, one in zip(served.generate(group), group, strict=True):
            expected = alone(model, one)
            assert written(sequence) == written(expected)
            for token, other in zip(sequence.new_tokens, expected.new_tokens, strict=True):
                assert token.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert served.stats.cached_tokens > 0
    assert len({size for size, _ in sizes}) > 1
    assert any(all(cuts) for _, cuts in sizes) and any(not all(cuts) for _, cuts in sizes)
    assert {len(cuts) for size, cuts in sizes if size == 64} == {1, 2}
    assert any(len(cuts) > 2 for size, cuts in sizes if size == 128)


@given(st.integers(1, 20000), st.sampled_from([16, 64, 512]), st.data())
def test_a_step_that_is_within_its_limits_has_a_pack(
    limit: int, unit: int, data: st.DataObject
) -> None:
    found = prefill.shapes(limit, unit, has_cuts=True)
    most = min(limit, prefill.SIZES[-1])
    behind = data.draw(st.integers(0, min(most // 2, found[-1].num_sequences * unit)))
    before = data.draw(st.integers(behind, most - behind))
    assert any(before <= shape.num_rows and behind <= shape.num_tail_rows for shape in found)
    assert all(shape.num_rows + shape.num_tail_rows < 1.3 * most + 2 * unit + 64 for shape in found)


def test_many_prompts_with_cuts_are_read_in_one_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "FEW_SEQUENCES", prefill.MAX_SEQUENCES)
    served = engine("resident", max_step_tokens=256, max_running=32, pool_tokens=4000)
    wanted = [request(ids(7, seed), 1) for seed in range(32)]  # of each, 3 behind the cut
    for sequence, one in zip(served.generate(wanted), wanted, strict=True):
        assert written(sequence) == written(alone(TINY, one))
    assert not served.runner.missed_steps


def test_prompts_without_a_pack_are_counted_by_what_they_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "FEW_SEQUENCES", 2)
    monkeypatch.setattr(prefill, "SIZES", (64,))
    served = engine("resident", max_step_tokens=200)
    served.generate(request(ids(5, seed), 1) for seed in range(3))
    served.generate([request(ids(100), 1)])
    assert served.runner.missed_tokens == {"sequences": 15, "rows": 96}  # a block less
    served.generate([request(ids(60), 1)])
    assert served.runner.missed_steps == {"sequences": 1, "rows": 1}
    text = Metrics().text(served)
    assert 'baltoro:unpacked_prefill_steps_total{reason="rows"} 1' in text
    assert 'baltoro:unpacked_prefill_tokens_total{reason="sequences"} 15' in text


def test_graphs_are_freed_before_others_are_made() -> None:
    packs = engine("resident", max_step_tokens=64).runner.packs
    assert packs is not None
    (cache, *_) = packs._caches.values()

    class Graph:
        def replay(self) -> object:
            return cache  # as a pause for attention does

    graph = Graph()
    held = weakref.ref(graph)
    cache.steps = [graph.replay]
    del graph
    assert held() is not None
    packs.drop_graphs()
    assert held() is None


@pytest.mark.gpu
def test_graphs_are_made_anew_for_other_weights_while_cycles_are_looked_for() -> None:
    config = four_layers_of_small()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(replace(config, impl=gpu_impl(config))).eval()
    model.cast(torch.bfloat16)
    limits = SchedulerConfig(max_running=3, max_step_tokens=600)
    served = Engine(model, EngineConfig(decode="resident", pool_tokens=8192, scheduler=limits))
    wanted = [request(ids(count, count), 12) for count in (100, 128, 300)]
    expected = [written(sequence) for sequence in served.generate(wanted)]

    def moved(model: Model) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    thresholds = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        for version in ("1", "2"):
            served.update_weights(version, moved)
            assert [written(sequence) for sequence in served.generate(wanted)] == expected
    finally:
        gc.set_threshold(*thresholds)


def gaps_to_a_forward_pass(model: Model, served: Engine) -> list[float]:
    """How far the log-probabilities of replies are from those of a pass without any cache."""
    draws, gaps = random.Random(0), list[float]()
    device = model.lm_head.weight.device
    for sequence in served.generate(
        request(draws.choices(range(60), k=count), 6) for count in (100, 128, 300)
    ):
        tokens = torch.tensor(sequence.tokens, device=device)
        bounds = torch.tensor([0, len(tokens)], dtype=torch.int32, device=device)
        with torch.inference_mode():
            logprobs = model.lm_head(model(tokens, bounds).hidden).log_softmax(-1)
        first = len(sequence.request.prompt_ids) - 1
        gaps += [
            abs(token.logprob - float(logprobs[first + n, token.id]))
            for n, token in enumerate(sequence.new_tokens)
        ]
    return gaps


@pytest.mark.parametrize("model", [TINY, LINEAR], ids=["k3", "kimi-linear"])
def test_replies_have_the_probabilities_of_a_forward_pass(model: Model) -> None:
    served = engine("resident", model, max_step_tokens=600, max_running=3)
    gaps = gaps_to_a_forward_pass(model, served)
    assert len(gaps) == 18 and max(gaps) < 1e-5


def four_layers_of_small() -> ModelConfig:
    small = preset("small")
    return replace(small, mixers=small.mixers[:4], vision=None, num_mtp_layers=0)


def four_plain_layers() -> ModelConfig:
    """Of Kimi Linear's kind: no residual sources, no latents of experts, decay without a bound."""
    config = four_layers_of_small()
    assert config.moe is not None
    return replace(
        config,
        kda=replace(config.kda, gate_lower_bound=None, use_full_rank_gate=False),
        mla=replace(config.mla, q_lora_rank=None, use_output_gate=False),
        moe=replace(config.moe, latent_size=None, use_latent_norm=False),
        activation="silu",
        attn_res_block_size=None,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("config", [four_layers_of_small(), four_plain_layers()], ids=["k3", "kl"])
def test_graphs_have_the_probabilities_of_a_forward_pass(config: ModelConfig) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model(replace(config, impl=gpu_impl(config))).eval()
    model.cast(torch.bfloat16)
    limits = SchedulerConfig(max_running=3, max_step_tokens=600)
    served = Engine(model, EngineConfig(decode="resident", pool_tokens=8192, scheduler=limits))
    gaps = gaps_to_a_forward_pass(model, served)
    # bf16 moves a logit by some .04 in four layers; those of another prompt are .5 apart
    assert sum(gaps) / len(gaps) < 0.15


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_on_the_second_gpu_leaves_the_first_alone() -> None:
    config = four_layers_of_small()

    def served_on(device: str) -> list[list[int]]:
        """As `baltoro serve` does: made in one thread, stepped in another."""
        torch.cuda.set_device(device)
        torch.manual_seed(0)
        with torch.device(device):
            model = Model(replace(config, impl=gpu_impl(config))).eval()
        model.cast(torch.bfloat16)
        limits = SchedulerConfig(max_running=3, max_step_tokens=600)
        served = Engine(model, EngineConfig(decode="resident", pool_tokens=8192, scheduler=limits))
        assert {str(p.device) for p in model.parameters()} == {device}
        assert str(served.runner.pool.pages.device) == device
        background = BackgroundEngine(served)

        async def replies() -> list[list[int]]:
            wanted = [request(ids(count, count), 12) for count in (100, 128, 300)]
            streams = await background.submit(lambda _: wanted, len(wanted))
            texts = [[e.token.id async for e in s.events() if e.token] for s in streams]
            await background.drain(60.0)
            return texts

        texts = asyncio.run(replies())
        torch.cuda.synchronize(device)
        return texts

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        expected = first.submit(served_on, "cuda:0").result()
        gc.collect()
        held = torch.cuda.memory_allocated(0)
        assert second.submit(served_on, "cuda:1").result() == expected
    assert torch.cuda.memory_allocated(0) <= held
    assert torch.cuda.max_memory_allocated(1) > 0
