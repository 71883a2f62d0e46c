"""The decode kernel of KDA on a GPU, held to fp64 by twice the error of plain code that rounds."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from ops.harness import boundaries, poisoned_memory
from ops.test_kda_decode import (
    EPS,
    NORM_EPS,
    Batch,
    assert_decode_earned,
    decode_batch,
    run,
)
from torch import Tensor

from baltoro.ops.impl import ImplError
from baltoro.ops.kda.decode import DecodeInputs, DecodeWeights, StatePool, decode_kda

gpu = pytest.mark.gpu
fp32, bf16 = torch.float32, torch.bfloat16
# the exponentials and roots of the device are a few units off
STEPS = {torch.float32: 20.0, torch.bfloat16: 6.0}
PACKS = [
    ([1], None, ()),
    ([1, 1, 1], [1, 0, 1], (2,)),
    ([2, 0, 5, 1, 8, 3], [2, 0, 3, 0, 8, 1], (3, 5)),
]


def on_device(batch: Batch) -> dict:
    """Arguments of a call, the pool its own."""
    return {
        "inputs": DecodeInputs(*(x.cuda() for x in batch.inputs)),
        "weights": DecodeWeights(*(x.cuda() for x in batch.weights)),
        "pool": StatePool(*(x.cuda() for x in batch.pool)),
        "slots": batch.slots.cuda(),
        "cu_seqlens": None if batch.cu_seqlens is None else batch.cu_seqlens.cuda(),
        "num_kept": None if batch.num_kept is None else batch.num_kept.cuda(),
        "gate_lower_bound": batch.bound,
        "norm_eps": NORM_EPS,
        "eps": EPS,
        "impl": "triton",
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN to NaN."""
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


@gpu
@pytest.mark.parametrize(("lengths", "kept", "padding"), PACKS)
@pytest.mark.parametrize(
    ("dims", "dtype", "state_dtype", "bound"),
    [
        ((3, 128, 128), bf16, fp32, -5.0),
        ((3, 128, 128), bf16, bf16, None),
        ((2, 128, 128), fp32, fp32, -5.0),
        ((5, 64, 64), bf16, fp32, -5.0),
        ((5, 64, 64), fp32, bf16, None),
    ],
)
def test_the_kernel_earns_its_tolerance(dims, dtype, state_dtype, bound, lengths, kept, padding):
    batch = decode_batch(
        lengths,
        dims=dims,
        kept=kept,
        padding=padding,
        dtype=dtype,
        state_dtype=state_dtype,
        bound=bound,
    )
    with poisoned_memory():
        assert_decode_earned(batch, "triton", "cuda", STEPS[dtype])


@gpu
@pytest.mark.parametrize(
    ("dims", "width", "is_packed"),
    [
        ((1, 16, 16), 2, False),
        ((2, 32, 64), 3, True),
        ((16, 64, 32), 4, False),
        ((7, 128, 64), 4, True),
        ((2, 128, 128), 3, False),
    ],
)
def test_other_heads_and_windows_earn_their_tolerance(dims, width, is_packed):
    batch = decode_batch(
        [1] * 5,
        dims=dims,
        width=width,
        padding=(0,),
        kept=[0, 1, 1, 0, 1],
        dtype=torch.bfloat16,
        is_packed=is_packed,
    )
    assert_decode_earned(batch, "triton", "cuda")


@gpu
@pytest.mark.parametrize("shift", [-40.0, 40.0])
def test_gates_at_their_ends_earn_their_tolerance(shift):
    for bound in (None, -5.0):
        batch = decode_batch([4, 1], dims=(2, 64, 64), dtype=torch.float32, bound=bound)
        batch.weights.dt_bias.add_(shift)
        assert_decode_earned(batch, "triton", "cuda", 20.0)


@gpu
@pytest.mark.parametrize("state_dtype", [fp32, bf16])
def test_runs_repeat_to_the_bit_and_read_no_fresh_memory(state_dtype):
    batch = decode_batch(
        [1] * 40, dims=(16, 128, 128), dtype=torch.bfloat16, state_dtype=state_dtype, padding=(3,)
    )
    for packed in (batch, replace(batch, cu_seqlens=None)):
        y, pool = run(packed, "triton", "cuda")
        with poisoned_memory():
            other_y, other_pool = run(packed, "triton", "cuda")
        assert torch.equal(y, other_y)
        assert all(same_bits(a, b) for a, b in zip(pool, other_pool, strict=True))


@gpu
def test_several_tokens_at_once_are_single_tokens_to_the_bit():
    whole = decode_batch([6], dims=(3, 128, 128), dtype=torch.bfloat16)
    y, pool = run(whole, "triton", "cuda")
    step_pool = whole.pool
    for t in range(6):
        single = replace(
            whole,
            inputs=DecodeInputs(*(x[t : t + 1] for x in whole.inputs)),
            cu_seqlens=boundaries([1]),
            pool=step_pool,
        )
        step_y, step_pool = run(single, "triton", "cuda")
        assert torch.equal(step_y[0], y[t]), t
    assert all(same_bits(a, b) for a, b in zip(pool, step_pool, strict=True))


@gpu
def test_a_verification_leaves_states_and_changes_no_output():
    kept = decode_batch([4, 2], dims=(3, 128, 128), dtype=torch.bfloat16)
    y, _ = run(kept, "triton", "cuda")
    verified = replace(kept, num_kept=torch.zeros(2, dtype=torch.int32))
    other_y, pool = run(verified, "triton", "cuda")
    assert torch.equal(y, other_y)
    assert all(same_bits(a, b) for a, b in zip(pool, kept.pool, strict=True))


@gpu
def test_states_and_rows_are_served_where_they_lie():
    batch = decode_batch([2, 1, 3], dims=(3, 64, 64), dtype=torch.bfloat16, padding=(1,))
    y, pool = run(batch, "triton", "cuda")
    arguments = on_device(batch)
    apart = [torch.stack([x, x, x], dim=1)[:, 1] for x in arguments["pool"]]
    wider = [torch.cat([x, x], dim=-1)[..., : x.shape[-1]] for x in arguments["inputs"]]
    arguments |= {"pool": StatePool(*apart), "inputs": DecodeInputs(*wider)}
    assert not apart[1].is_contiguous() and not wider[0].is_contiguous()
    assert torch.equal(decode_kda(**arguments).cpu(), y)
    assert all(same_bits(a.cpu(), b) for a, b in zip(apart, pool, strict=True))


@gpu
def test_slots_far_beyond_four_gigabytes_are_reached():
    batch = decode_batch([1, 1], dims=(1, 64, 64), dtype=torch.bfloat16)
    y, pool = run(batch, "triton", "cuda")
    arguments = on_device(batch)
    gap = 2**29 + 64
    memory = torch.empty(gap * len(batch.pool.states), dtype=torch.float32, device="cuda")
    states = memory.as_strided(batch.pool.states.shape, (gap, 64 * 64, 64, 1))
    states.copy_(arguments["pool"].states)
    arguments["pool"] = arguments["pool"]._replace(states=states)
    assert torch.equal(decode_kda(**arguments).cpu(), y)
    assert same_bits(states.cpu(), pool.states)


@gpu
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_cuda_graph_replays_on_other_slots_and_lengths(is_packed):
    lengths, others = ([1] * 4, [1] * 4) if not is_packed else ([3, 1, 2, 0], [0, 2, 1, 3])
    batch = decode_batch(lengths, dims=(3, 128, 128), dtype=torch.bfloat16, is_packed=is_packed)
    live = batch.live
    changed = replace(
        batch,
        slots=torch.stack([live[2], live[0] * 0, live[1], live[0]]).to(torch.int32),
        cu_seqlens=boundaries(others) if is_packed else None,
        num_kept=torch.tensor([0, 1, 1, min(1, others[3])], dtype=torch.int32),
    )
    y, pool = run(changed, "triton", "cuda")
    first = replace(batch, num_kept=torch.zeros(4, dtype=torch.int32))
    arguments = on_device(first)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decode_kda(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = decode_kda(**arguments)
    arguments["slots"].copy_(changed.slots)
    arguments["num_kept"].copy_(changed.num_kept)
    if is_packed:
        arguments["cu_seqlens"].copy_(changed.cu_seqlens)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replayed.cpu(), y)
    assert all(same_bits(a.cpu(), b) for a, b in zip(arguments["pool"], pool, strict=True))


@gpu
def test_no_sequences_are_no_work():
    batch = decode_batch([1], dims=(2, 64, 64), dtype=torch.bfloat16)
    arguments = on_device(replace(batch, cu_seqlens=None))
    arguments["inputs"] = DecodeInputs(*(x[:0] for x in arguments["inputs"]))
    arguments["slots"] = arguments["slots"][:0]
    assert decode_kda(**arguments).shape == (0, 2, 64)


@gpu
def test_what_no_kernel_serves_on_the_device_is_refused_with_the_reason():
    with pytest.raises(ImplError, match=r"serves head dims .* not K=16, V=24, W=4"):
        run(decode_batch([1], dtype=torch.bfloat16), "triton", "cuda")
    with pytest.raises(ImplError, match="not K=64, V=64, W=5"):
        batch = decode_batch([1], dims=(1, 64, 64), width=5, dtype=torch.bfloat16)
        run(batch, "triton", "cuda")
    arguments = on_device(decode_batch([1], dims=(2, 64, 64), dtype=torch.bfloat16))
    arguments["pool"] = arguments["pool"]._replace(states=arguments["pool"].states.mT)
    with pytest.raises(ImplError, match="needs states whose slots are contiguous"):
        decode_kda(**arguments)


def test_what_no_kernel_serves_is_refused_with_the_reason():
    with pytest.raises(ImplError, match="needs tensors on a CUDA device, not on cpu"):
        run(decode_batch([1], dtype=torch.bfloat16), "triton")
    with pytest.raises(ImplError, match="serves bfloat16 and float32, not float64"):
        run(decode_batch([1]), "triton")
