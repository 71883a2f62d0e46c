"""The bytes of the pool: views that share no byte, and states that come back as they went."""

import random
from dataclasses import replace

import pytest
import torch
from model.tiny import tiny_k3
from torch import Tensor

from baltoro.model.model import Model
from baltoro.serve.engine import Engine, EngineConfig
from baltoro.serve.pool import PagePool
from baltoro.serve.prefix import extend_chain, root_hash
from baltoro.serve.request import Request
from baltoro.serve.sampling import Sampling
from baltoro.serve.scheduler import SchedulerConfig


def served(host_bytes: int = 0) -> Engine:
    torch.manual_seed(1)
    scheduler = SchedulerConfig(max_running=2, max_step_tokens=64)
    config = EngineConfig(
        pool_tokens=60, hash_block=4, num_kept_states=3, host_bytes=host_bytes, scheduler=scheduler
    )
    return Engine(Model(tiny_k3()).eval(), config)


def request(seed: int, count: int = 2) -> Request:
    prompt = random.Random(seed).choices(range(60), k=30)
    return Request(
        request_id="",
        prompt_ids=tuple(prompt),
        max_new_tokens=count,
        sampling=Sampling(temperature=0.0),
    )


def grouped(pool: PagePool) -> list[tuple[int, Tensor]]:
    """Windows and states of all layers in all pages, each with the group of its layer."""
    found = []
    for layers in pool.layout.state_groups:
        for layer_idx in layers:
            group, slots = pool.states(layer_idx)
            found += [(group, slots.windows), (group, slots.states)]
    return found


def test_no_two_views_of_a_page_share_a_byte() -> None:
    pool = served().runner.pool  # vllm 44848: one stride for both views of a region
    latents = [pool.latents(layer_idx) for layer_idx in pool.layout.mla_layers]
    num_groups = len(pool.layout.state_groups)
    views = [view[group + 1] for group, view in grouped(pool)]
    views += [latent[num_groups + 1] for latent in latents]
    for number, view in enumerate(views, 1):
        view.fill_(number)
    for number, view in enumerate(views, 1):
        assert (view == number).all()


def test_every_layers_state_comes_back_from_cpu_memory_bit_by_bit() -> None:
    engine = served(host_bytes=1 << 22)  # ATOM 2154: 69 of 93 layers went on from zeros, fluently
    pool = engine.runner.pool
    (first,) = engine.generate([request(0)])
    key = max(engine.cache.device.checkpoints.values(), key=lambda c: c.position).key
    kept = engine.cache.device.checkpoints[key].state_pages
    before = [state[kept[group]].clone() for group, state in grouped(pool)]
    assert all(state.any() for state in before)
    for seed in range(1, 40):
        engine.generate([request(seed)])
        if key not in engine.cache.device.checkpoints:
            break
    assert key in engine.cache.host.checkpoints
    again = engine.submit(request(0))
    plan = engine.scheduler.plan()
    assert plan is not None and plan.ops.loads and again.table is not None
    pool.prepare(plan.ops)
    pages = again.table.state_pages
    for state, (group, view) in zip(before, grouped(pool), strict=True):
        assert torch.equal(state, view[pages[group]])
    assert first.finish_reason == "length"


def test_a_state_kept_on_the_way_is_that_of_a_prompt_which_ends_there() -> None:
    together, apart = served(), served()
    for engine in (together, apart):
        engine.model.double()
    together, apart = (Engine(engine.model, engine.config) for engine in (together, apart))
    prompts = [request(seed).prompt_ids[: 30 - 3 * seed] for seed in range(2)]  # 30 and 27
    for n, ids in enumerate(prompts):
        together.submit(replace(request(n), prompt_ids=ids))
    together.step()
    assert together.stats.computed_tokens == 57
    for n, ids in enumerate(prompts):
        end = (len(ids) - 1) // 4 * 4
        apart.generate([replace(request(n, 1), prompt_ids=ids[:end])])
        kept = [
            engine.cache.device.checkpoints[hashes(engine, ids[:end])[-1]].state_pages
            for engine in (together, apart)
        ]
        for (group, ours), (_, expected) in zip(
            grouped(together.runner.pool), grouped(apart.runner.pool), strict=True
        ):
            assert torch.allclose(ours[kept[0][group]], expected[kept[1][group]], atol=1e-12)


def hashes(engine: Engine, ids: tuple[int, ...]) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, root_hash(engine.weights_version, ""), list(ids), 4, ())
    return chain


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_fetched_while_others_run_is_what_was_put_away(device: str) -> None:
    torch.manual_seed(1)
    model = Model(tiny_k3()).eval().to(device, torch.float64)
    texts = []
    for is_caching in (True, False):
        config = EngineConfig(
            pool_tokens=60,
            hash_block=4,
            num_kept_states=3,
            host_bytes=1 << 23,
            is_caching=is_caching,
            scheduler=SchedulerConfig(max_running=1, max_step_tokens=64),
        )
        engine = Engine(model, config)
        engine.runner.pool.pages[1:].fill_(255)
        requests = [request(seed % 6, 3 + seed % 5) for seed in range(30)]
        sequences = engine.generate(requests)
        texts.append([[token.id for token in s.new_tokens] for s in sequences])
        assert (engine.cache.stats.num_prefetched > 50) == is_caching
        engine.cache.audit()
    assert texts[0] == texts[1]
