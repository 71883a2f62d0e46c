"""States as int8 in CPU memory: how far off they are, and what they save."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model.tiny import tiny_k3
from torch import Tensor

from baltoro.checkpoint.load import load
from baltoro.model.model import Model, ModelOutput
from baltoro.model.presets import preset
from baltoro.serve.cold import LEVELS, ColdStates
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.layout import pool_layout
from baltoro.serve.pages import Table
from baltoro.serve.pool import PagedCache, PagePool, Span
from baltoro.serve.request import Request
from baltoro.serve.sampling import Sampling
from baltoro.serve.scheduler import SchedulerConfig

GOLDEN = Path(__file__).parents[1] / "golden"
NUM_AFTER = 64  # tokens behind the state


def made(model: Model, dtype: torch.dtype = torch.float32) -> tuple[PagePool, ColdStates, Table]:
    """A pool with pages for one sequence."""
    layout = pool_layout(model.config, dtype_bytes=dtype.itemsize)
    num_groups, num_latents = len(layout.state_groups), 1 + 400 // layout.page_size
    pool = PagePool(
        model.config,
        layout,
        num_pages=num_groups + num_latents,
        host_pages=0,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    table = Table(
        kv_pages=list(range(num_groups + 1, num_groups + num_latents + 1)),
        state_pages=tuple(range(1, num_groups + 1)),
        num_hit=0,
        stops=frozenset(),
        is_cacheable=False,
        last_kept=0,
    )
    return pool, ColdStates(layout, [pool.states(i) for i in layout.kda_layers]), table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_value_is_off_by_half_a_step_of_its_row_and_windows_by_nothing(
    dtype: torch.dtype,
) -> None:
    pool, cold, table = made(Model(tiny_k3()).eval(), dtype)
    views = [pool.states(i) for i in pool.layout.kda_layers]
    draws = torch.Generator().manual_seed(1)
    before: list[tuple[Tensor, Tensor]] = []
    for group, (windows, states) in views:
        page = table.state_pages[group]
        windows[page] = torch.randn(windows[page].shape, generator=draws).to(dtype)
        sizes = torch.randn(states[page].shape[:-1], generator=draws).exp()[..., None]
        states[page] = torch.randn(states[page].shape, generator=draws) * sizes
        states[page][0, 3] = 0.0
        before.append((windows[page].clone(), states[page].clone()))
    packed = cold.packed(table.state_pages)
    assert packed.shape[0] == pool.layout.num_cold_pages
    pool.pages.fill_(255)
    cold.unpack(packed, table.state_pages)
    once = [states[table.state_pages[group]].clone() for group, (_, states) in views]
    cold.unpack(cold.packed(table.state_pages), table.state_pages)
    twice = [states[table.state_pages[group]] for group, (_, states) in views]
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0.0)
    for (group, (windows, states)), (window, state) in zip(views, before, strict=True):
        page = table.state_pages[group]
        assert torch.equal(windows[page], window)
        half = state.abs().amax(-1, keepdim=True) / LEVELS / 2
        error = (states[page] - state).abs()
        assert (error <= half * 1.001).all() and not states[page][0, 3].any()
        assert error.max() > 0.5 * half.max()  # it is as coarse as it says


@pytest.mark.parametrize("name", ["k3-mini", "k3-mini-long", "kimi-linear-mini"])
@pytest.mark.parametrize("num_before", [32, 300])
def test_logits_behind_a_cold_state_are_nearly_those_behind_the_exact_one(
    name: str, num_before: int
) -> None:
    model = load(GOLDEN / name)  # random weights; its logits have a standard deviation of 1
    pool, cold, table = made(model)
    ids = torch.randint(0, 250, (num_before + NUM_AFTER,), generator=torch.manual_seed(1))

    def run(start: int, stop: int, **options: Any) -> tuple[Tensor, ModelOutput]:
        bounds = torch.tensor([0, stop - start], dtype=torch.int32)
        cache = PagedCache(pool, "prefill", [Span(table, start, stop)])
        output = model(ids[start:stop], bounds, cache, **options)
        return model.lm_head(output.hidden), output

    def error(logits_NW: Tensor) -> Tensor:
        return (logits_NW - exact_NW).norm(dim=-1) / exact_NW.norm(dim=-1)

    with torch.inference_mode():
        run(0, num_before)
        packed = cold.packed(table.state_pages)
        exact_NW, output = run(num_before, len(ids), keep_expert_ids=True)
        cold.unpack(packed, table.state_pages)
        same_experts_NW, _ = run(num_before, len(ids), replay=output.expert_ids)
        cold.unpack(packed, table.state_pages)
        free_NW, _ = run(num_before, len(ids))
    assert 0.0 < error(same_experts_NW).max() < 0.1
    assert error(same_experts_NW).median() < 0.01
    # a router whose scores are nearly equal may choose another expert
    assert error(free_NW).median() < 0.03


def test_three_pages_of_state_become_one() -> None:
    for name in ("k3", "small"):
        layout = pool_layout(preset(name), dtype_bytes=2)
        assert layout.cold_bytes < 0.32 * (layout.state_bytes + layout.window_bytes)
        assert (len(layout.state_groups), layout.num_cold_pages) == (3, 1)


def served(cold_states: str, host_bytes: int = 1 << 20) -> Engine:
    torch.manual_seed(1)
    return Engine(
        Model(tiny_k3()).eval(),
        EngineConfig(
            pool_tokens=60,
            hash_block=4,
            num_kept_states=3,
            host_bytes=host_bytes,
            cold_states=cold_states,  # type: ignore[arg-type]
            scheduler=SchedulerConfig(max_running=2, max_step_tokens=64),
        ),
    )


def request(seed: int) -> Request:
    prompt = random.Random(seed).choices(range(60), k=30)
    return Request(
        request_id="",
        prompt_ids=tuple(prompt),
        max_new_tokens=2,
        sampling=Sampling(temperature=0.0),
    )


def test_the_account_does_not_change_and_what_comes_back_is_nearly_right() -> None:
    found = []
    for form in ("exact", "int8"):
        engine = served(form)
        (first,) = engine.generate([request(0)])
        for seed in range(1, 30):
            engine.generate([request(seed)])
        (again,) = engine.generate([request(0)])
        stats = engine.cache.stats
        assert again.num_cached == 28 and stats.host_hit_tokens == 28
        found.append((first, again, stats))
    (exact, same, before), (_, cold, after) = found
    assert [t.logprob for t in same.new_tokens] == pytest.approx(
        [t.logprob for t in exact.new_tokens], abs=1e-4
    )
    assert cold.new_tokens[0].logprob != exact.new_tokens[0].logprob
    assert cold.new_tokens[0].logprob == pytest.approx(exact.new_tokens[0].logprob, abs=0.05)
    for name in ("query_tokens", "kv_hit_tokens", "agreed_hit_tokens", "num_states_hit"):
        assert getattr(before, name) == getattr(after, name)
    assert after.num_written_back < before.num_written_back


def test_the_same_memory_holds_more_states() -> None:
    kept = []
    for form in ("exact", "int8"):
        engine = served(form, host_bytes=40 * served("exact").layout.page_bytes)
        for seed in range(40):
            engine.generate([request(seed)])
        engine.cache.audit()
        kept.append(len(engine.cache.host.checkpoints))
    assert kept[1] > kept[0]


def test_states_are_exact_unless_asked_for_and_other_forms_are_refused() -> None:
    assert EngineConfig().cold_states == "exact"
    with pytest.raises(ValueError, match="cold_states='int4'"):
        EngineConfig(cold_states="int4")  # type: ignore[arg-type]
