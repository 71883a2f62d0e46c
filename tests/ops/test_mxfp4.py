from pathlib import Path

import pytest
import torch
from ops.earned import randn
from safetensors import safe_open

from baltoro.ops.mxfp4 import Mxfp4Tensor, decode_mxfp4, encode_mxfp4

GOLDEN = Path(__file__).parents[1] / "golden" / "k3-mxfp4-mini"
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def bits(values):
    """To compare signs of zero and infinities too."""
    return values.view({4: torch.int32, 2: torch.int16, 8: torch.int64}[values.element_size()])


def golden_codes():
    with safe_open(GOLDEN / "codes.safetensors", "pt") as file:
        packed, scale, value = (file.get_tensor(name) for name in ("packed", "scale", "value"))
    return Mxfp4Tensor(packed, scale), value


def golden_experts():
    with safe_open(GOLDEN / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.endswith("weight_packed"):
                scale = file.get_tensor(name.replace("packed", "scale"))
                yield Mxfp4Tensor(file.get_tensor(name), scale)


def random_weight(rows, largest_byte=253, seed=0):
    """Every code under scale bytes whose values fp32 can hold."""
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(256, (rows, 32), dtype=torch.uint8, generator=draw)
    scale = torch.randint(largest_byte, (rows, 2), dtype=torch.uint8, generator=draw)
    return Mxfp4Tensor(packed, scale)


def assert_same(left, right):
    assert torch.equal(left.packed, right.packed)
    assert torch.equal(left.scale, right.scale)


def test_codes_have_the_values_of_e2m1_low_nibble_first():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[::2] | (codes[1::2] << 4)).unsqueeze(0)
    values = decode_mxfp4(
        Mxfp4Tensor(packed, torch.tensor([[127]], dtype=torch.uint8)), torch.float32
    )
    expected = torch.tensor(GRID + [-value for value in GRID]).repeat(2)
    assert torch.equal(bits(values[0]), bits(expected))
    assert packed[0, 5] == 0xBA and values[0, 10:12].tolist() == [-1.0, -1.5]


def test_decoding_gives_the_golden_bits_under_every_scale_byte():
    weight, value = golden_codes()
    decoded = decode_mxfp4(weight, torch.float32)
    assert decoded.dtype == torch.float32
    assert torch.equal(bits(decoded), bits(value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_hold_the_golden_values_and_the_exact_one_at_scale_byte_254(dtype):
    weight, value = golden_codes()
    decoded = decode_mxfp4(weight, dtype)
    assert decoded.dtype == dtype
    assert torch.equal(bits(decoded[:254].float()), bits(value[:254]))
    assert decoded[254, 2].item() == 2.0**127


def test_scale_byte_255_is_nan_for_its_group_alone():
    weight = Mxfp4Tensor(
        torch.zeros(1, 32, dtype=torch.uint8), torch.tensor([[255, 127]], dtype=torch.uint8)
    )
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values = decode_mxfp4(weight, dtype)
        assert values[0, :32].isnan().all() and (values[0, 32:] == 0).all()


def test_golden_experts_keep_their_bytes_with_their_scales_as_hint():
    for weight in golden_experts():
        for dtype in (torch.bfloat16, torch.float32):
            assert_same(encode_mxfp4(decode_mxfp4(weight, dtype), weight.scale), weight)


def test_golden_experts_keep_their_bytes_unaided_where_a_group_reaches_4():
    num_groups = num_low = 0
    for weight in golden_experts():
        again = encode_mxfp4(decode_mxfp4(weight, torch.bfloat16))
        low_codes = (weight.packed & 7).unflatten(-1, (-1, 16)).amax(-1)
        high_codes = (weight.packed >> 4 & 7).unflatten(-1, (-1, 16)).amax(-1)
        reaches_4 = torch.maximum(low_codes, high_codes) >= 6
        same = (again.packed == weight.packed).unflatten(-1, (-1, 16)).all(-1)
        assert torch.equal(same & (again.scale == weight.scale), reaches_4)
        num_groups, num_low = num_groups + same.numel(), num_low + int((~reaches_4).sum())
    assert num_low < num_groups // 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_bytes_survive_with_their_scales_as_hint(dtype):
    weight = random_weight(400)
    weight.packed[:100] &= 0x33  # groups that never reach 4
    weight.packed[100:150] = 0x80  # zeros of both signs
    assert_same(encode_mxfp4(decode_mxfp4(weight, dtype), weight.scale), weight)


def test_without_a_hint_low_groups_keep_their_values_under_another_scale():
    weight = random_weight(50)
    weight.packed.bitwise_and_(0xBB)  # magnitudes up to 1.5
    weight.scale.clamp_(min=2)
    values = decode_mxfp4(weight, torch.float32)
    again = encode_mxfp4(values)
    assert (again.scale < weight.scale).any()
    assert torch.equal(bits(decode_mxfp4(again, torch.float32)), bits(values))


def test_a_hint_that_does_not_fit_is_not_taken():
    values = torch.zeros(1, 64)
    values[0, 0], values[0, 32] = 5.0, 1.0
    plain = encode_mxfp4(values)
    assert plain.scale.tolist() == [[127, 125]]
    hinted = encode_mxfp4(values, torch.tensor([[127, 128]], dtype=torch.uint8))
    assert hinted.scale.tolist() == [[127, 128]]  # 5 fits no scale; 1 is half of 2
    hinted = encode_mxfp4(values, torch.tensor([[124, 255]], dtype=torch.uint8))
    assert_same(hinted, plain)
    values[0, 32] = 2.0**-149  # vanishes in fp32 under a large scale
    assert encode_mxfp4(values, torch.full((1, 2), 254, dtype=torch.uint8)).scale[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_packing_again_changes_nothing(dtype):
    first = encode_mxfp4(randn(2, 24, 96).to(dtype))
    again = encode_mxfp4(decode_mxfp4(first, torch.float32))
    assert_same(again, first)


def test_every_value_goes_to_the_nearest_code_and_ties_to_the_even_one():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    near = [tie + side for tie in ties for side in (-1e-6, 0.0, 1e-6)]
    values = torch.tensor([*near, 6.0, 7.0, 7.9, 4.0] + [0.0] * 7, dtype=torch.float64)
    decoded = decode_mxfp4(encode_mxfp4(values.unsqueeze(0)), torch.float64)[0]
    after_tie = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    expected = []
    for code, even in enumerate(after_tie):
        expected += [GRID[code], even, GRID[code + 1]]
    expected += [6.0, 6.0, 6.0, 4.0] + [0.0] * 7
    assert decoded.tolist() == expected


def test_random_weights_go_to_the_nearest_value_of_their_scale():
    weight = randn(64, 64)
    encoded = encode_mxfp4(weight)
    scale = 2.0 ** (encoded.scale.double() - 127).repeat_interleave(32, -1)
    grid = torch.tensor(GRID + [-value for value in GRID], dtype=torch.float64)
    nearest = ((weight / scale).unsqueeze(-1) - grid).abs().amin(-1) * scale
    error = (decode_mxfp4(encoded, torch.float64) - weight).abs()
    torch.testing.assert_close(error, nearest)
    largest = (weight / scale).unflatten(-1, (-1, 32)).abs().amax(-1)
    assert (largest >= 4).all() and (largest < 8).all()


def test_a_group_of_zeros_has_scale_byte_0_and_keeps_its_signs():
    weight = torch.zeros(1, 64)
    weight[0, 32:] = -0.0
    encoded = encode_mxfp4(weight)
    assert encoded.scale.tolist() == [[0, 0]]
    assert torch.equal(bits(decode_mxfp4(encoded, torch.float32)), bits(weight))


def test_magnitudes_at_both_ends_of_fp32_are_held():
    weight = torch.zeros(1, 64)
    weight[0, 0] = 2.0**-149
    weight[0, 1] = 2.0**-127
    weight[0, 32] = torch.finfo(torch.float32).max
    encoded = encode_mxfp4(weight)
    assert encoded.scale.tolist() == [[0, 252]]
    values = decode_mxfp4(encoded, torch.float32)
    assert values[0, [0, 1]].tolist() == [0.0, 2.0**-127]
    assert values[0, 32] == 6 * 2.0**125


def test_leading_dims_are_kept():
    weight = randn(3, 2, 5, 64)
    encoded = encode_mxfp4(weight)
    assert encoded.packed.shape == (3, 2, 5, 32) and encoded.scale.shape == (3, 2, 5, 2)
    one = Mxfp4Tensor(encoded.packed[2, 1], encoded.scale[2, 1])
    assert_same(encode_mxfp4(weight[2, 1]), one)
    assert decode_mxfp4(encoded, torch.float32).shape == weight.shape
    empty = encode_mxfp4(torch.zeros(0, 64))
    assert decode_mxfp4(empty, torch.bfloat16).shape == (0, 64)


def test_wrong_inputs_name_the_field():
    with pytest.raises(ValueError, match="weight holds NaN or infinity"):
        encode_mxfp4(torch.full((1, 32), torch.nan))
    with pytest.raises(ValueError, match="weight holds NaN or infinity"):
        encode_mxfp4(torch.full((1, 32), torch.inf))
    with pytest.raises(ValueError, match=r"shape \[2, 33\]; its last dim must be a multiple of 32"):
        encode_mxfp4(torch.zeros(2, 33))
    with pytest.raises(ValueError, match=r"weight has dtype torch\.int64"):
        encode_mxfp4(torch.zeros(2, 32, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"scale_hint is torch\.uint8 \[2, 2\]"):
        encode_mxfp4(torch.zeros(2, 32), torch.zeros(2, 2, dtype=torch.uint8))
    weight = random_weight(2)
    with pytest.raises(ValueError, match=r"dtype=torch\.float16 cannot hold every value"):
        decode_mxfp4(weight, torch.float16)
    with pytest.raises(ValueError, match=r"scale has shape \[2, 1\]"):
        decode_mxfp4(Mxfp4Tensor(weight.packed, weight.scale[:, :1]), torch.float32)
    with pytest.raises(ValueError, match=r"packed has dtype torch\.int32"):
        decode_mxfp4(Mxfp4Tensor(weight.packed.int(), weight.scale), torch.float32)
    with pytest.raises(ValueError, match=r"packed has shape \[2, 17\]"):
        decode_mxfp4(
            Mxfp4Tensor(torch.zeros(2, 17, dtype=torch.uint8), weight.scale), torch.float32
        )
