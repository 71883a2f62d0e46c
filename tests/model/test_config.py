from dataclasses import replace

import pytest
from model.tiny import VISION, tiny_k3

from baltoro.model.config import ImplConfig, KdaConfig, MoeConfig, gpu_impl
from baltoro.model.presets import preset


def moe(**changes: object) -> MoeConfig:
    fields: dict[str, object] = {
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 0,
        "expert_intermediate_size": 4,
    }
    return MoeConfig(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_token": 9}, "moe.num_experts_per_token=9"),
        ({"num_experts_per_token": 0}, "moe.num_experts_per_token=0"),
        ({"router_activation": "tanh"}, "moe.router_activation='tanh'"),
        ({"num_expert_groups": 3}, "must divide num_experts=8"),
        ({"num_expert_groups": 4, "topk_groups": 5}, "moe.topk_groups=5"),
        ({"num_expert_groups": 8, "num_experts_per_token": 2}, "only 1 experts survive"),
        ({"use_latent_norm": True}, "needs latent_size"),
    ],
)
def test_an_impossible_mixture_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe(**changes)


@pytest.mark.parametrize("bound", [-5.1, 0.0, 1.0])
def test_a_decay_bound_outside_its_range_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match=r"kda\.gate_lower_bound"):
        KdaConfig(num_heads=2, head_dim=8, gate_lower_bound=bound)


def test_a_vision_head_must_hold_whole_rotated_pairs() -> None:
    with pytest.raises(ValueError, match=r"vision\.qkv_hidden_size=36"):
        replace(VISION, qkv_hidden_size=36)


def test_an_unknown_mixer_is_named() -> None:
    with pytest.raises(ValueError, match="mixers='mamba'"):
        tiny_k3(mixers=("kda", "mamba"))


def test_moe_layers_begin_where_the_config_says() -> None:
    config = tiny_k3()
    assert [config.is_moe(i) for i in range(config.num_layers)] == [False, True, True, True, True]
    every_second = tiny_k3(moe=moe(layer_freq=2, first_moe_layer=1))
    assert [every_second.is_moe(i) for i in range(5)] == [False, False, True, False, True]
    assert not tiny_k3(moe=None).is_moe(3)


def test_one_word_sets_every_implementation() -> None:
    impl = ImplConfig.all("reference")
    assert {getattr(impl, field) for field in ImplConfig.__slots__} == {"reference"}


def test_a_gpu_gets_kernels_wherever_they_serve_the_model():
    k3 = preset("small")
    assert k3.moe is not None
    found = gpu_impl(k3)
    assert (found.kda, found.kda_decode, found.attention, found.moe) == (
        "triton",
        "triton",
        "flash",
        "triton",
    )
    assert found.situ == "triton"
    kimi = gpu_impl(preset("kimi-linear-48b"))
    assert (kimi.kda, kimi.situ) == ("torch", "torch")  # a gate without bound, SwiGLU
    packed = replace(k3, moe=replace(k3.moe, expert_format="mxfp4"))
    assert gpu_impl(packed).moe == "torch"
