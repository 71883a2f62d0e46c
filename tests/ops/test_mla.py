import pytest
import torch
from ops.earned import Allocations, assert_earned, randn
from torch.autograd import gradcheck

from baltoro.ops.mla import dense, flash, varlen_attention

IMPLS = ["reference", "torch"]
SCALE = 0.4
EXP_STEPS = (
    40.0  # PyTorch's fused CPU kernel takes an exponential good to 20 units of its last place
)


def attend(impl, lengths_q, lengths_k, q, k, v, causal=True):
    return varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q=torch.tensor([0, *lengths_q]).cumsum(0).int(),
        cu_seqlens_k=torch.tensor([0, *lengths_k]).cumsum(0).int(),
        causal=causal,
        scale=SCALE,
        impl=impl,
    )


def inputs(num_queries, num_keys, key_dim=12, value_dim=8, num_heads=2):
    return [
        2 * randn(num_queries, num_heads, key_dim),
        2 * randn(num_keys, num_heads, key_dim, seed=1),
        randn(num_keys, num_heads, value_dim, seed=2),
    ]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value_dim", [2, 3, 4])
def test_gradients_equal_finite_differences(value_dim, causal, impl):
    leaves = [t.requires_grad_() for t in inputs(3, 6, 3, value_dim)]
    lengths = [2, 0, 1], [4, 1, 1]
    assert gradcheck(lambda *t: attend(impl, *lengths, *t, causal=causal), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        ([2], [2]),
        ([37], [37]),
        ([17, 1, 33], [17, 1, 33]),
        ([17, 1, 0, 5], [40, 9, 3, 6]),
    ],
)
def test_the_fused_form_earns_its_tolerance(lengths_q, lengths_k, causal, dtype):
    def op(impl, *tensors):
        return attend(impl, lengths_q, lengths_k, *tensors, causal=causal)

    assert_earned(op, inputs(sum(lengths_q), sum(lengths_k)), dtype, rounding_steps=EXP_STEPS)


@pytest.mark.parametrize("value_dim", [24, 32])
def test_values_as_wide_as_keys_or_wider_earn_it_too(value_dim):
    tensors = inputs(19, 19, 24, value_dim)
    assert_earned(
        lambda impl, *t: attend(impl, [19], [19], *t),
        tensors,
        torch.float32,
        rounding_steps=EXP_STEPS,
    )


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_queries_give_no_rows_and_zero_gradients(lengths):
    tensors = [t.requires_grad_() for t in inputs(0, 5)]
    num_keys = [5, *[0] * (len(lengths) - 1)] if lengths else []
    leaves = tensors if lengths else [t[:0] for t in tensors]
    out = attend("torch", lengths, num_keys, *leaves)
    assert out.shape == (0, 2, 8)
    out.sum().backward()
    assert all((t.grad == 0).all() for t in tensors)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_do_not_see_each_other(causal, impl):
    q, k, v = inputs(30, 30)
    lengths = [16, 1, 13]
    packed = attend(impl, lengths, lengths, q, k, v, causal=causal)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        single = attend(impl, [length], [length], q[rows], k[rows], v[rows], causal=causal)
        torch.testing.assert_close(packed[rows], single)
        start += length


@pytest.mark.parametrize("impl", IMPLS)
def test_queries_are_the_last_tokens_of_their_keys(impl, monkeypatch):
    monkeypatch.setattr(dense, "_MASK_ROWS", 7)
    q, k, v = inputs(40, 40)
    whole = attend(impl, [40], [40], q, k, v)
    for num_queries in (1, 2, 7, 19, 39):
        part = attend(impl, [num_queries], [40], q[-num_queries:], k, v)
        torch.testing.assert_close(part, whole[-num_queries:])


@pytest.mark.parametrize("impl", IMPLS)
def test_the_future_leaves_the_past_bit_equal(impl):
    q, k, v = (t.float() for t in inputs(50, 50))
    before = attend(impl, [50], [50], q, k, v)
    for tensor in (q, k, v):
        tensor[31:] = 7.0
    assert torch.equal(attend(impl, [50], [50], q, k, v)[:31], before[:31])


@pytest.mark.parametrize("impl", IMPLS)
def test_without_positions_earlier_tokens_may_be_permuted(impl):
    q, k, v = inputs(1, 20)
    order = torch.randperm(20)
    out = attend(impl, [1], [20], q, k[order], v[order])
    torch.testing.assert_close(out, attend(impl, [1], [20], q, k, v))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(900, 900), (700, 900)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_never_held_at_once(num_queries, num_keys, dtype):
    tensors = [t.to(dtype).requires_grad_() for t in inputs(num_queries, num_keys, 8, 6, 4)]
    with Allocations() as seen:
        out = attend("torch", [num_queries], [num_keys], *tensors)
        torch.autograd.grad(out, tensors, torch.ones_like(out))
        with torch.no_grad():
            attend("torch", [num_queries], [num_keys], *tensors)
    assert seen.largest() <= dense._MASK_ROWS * num_keys
    assert seen.largest() < 4 * num_queries * num_keys // 4


@pytest.mark.parametrize("impl", IMPLS)
def test_wrong_lengths_name_the_field(impl):
    q, k, v = inputs(4, 6)
    with pytest.raises(ValueError, match="sequence 1 has 3 queries and 2 keys"):
        attend(impl, [1, 3], [4, 2], q, k, v)
    with pytest.raises(ValueError, match="sequence 0 has 4 queries and 0 keys"):
        attend(impl, [4, 0], [0, 6], q, k, v, causal=False)
    with pytest.raises(ValueError, match=r"cu_seqlens_q is .* to the 4 tokens"):
        attend(impl, [3], [6], q, k, v)
    with pytest.raises(ValueError, match=r"cu_seqlens_k is .* must not decrease"):
        attend(impl, [2, 2], [9, -3], q, k, v)
    with pytest.raises(ValueError, match="cu_seqlens_q holds 2 sequences and cu_seqlens_k 1"):
        attend(impl, [2, 2], [6], q, k, v)
    with pytest.raises(ValueError, match="do not fit"):
        attend(impl, [4], [6], q, k[..., :3], v)
    with pytest.raises(ValueError, match=r"k torch\.float32"):
        attend(impl, [4], [6], q, k.float(), v)


def test_a_length_for_cudnn_fills_its_tiles_and_wastes_an_eighth_at_most():
    lengths = [flash.padded_length(length) for length in range(2048, 20000)]
    for length, padded in zip(range(2048, 20000), lengths, strict=True):
        assert length <= padded <= 1.125 * length and padded % 128 == 0
    assert len(set(lengths)) <= 8 * 4
