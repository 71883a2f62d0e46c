import ast
from dataclasses import replace
from pathlib import Path

import pytest
from model.tiny import VISION, tiny_k3

import baltoro.ops.impl
from baltoro.model import config as model_config
from baltoro.model.config import ImplConfig, KdaConfig, MoeConfig, gpu_impl, gpu_refusals
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
    assert (kimi.kda, kimi.situ) == ("triton", "torch")  # SwiGLU
    packed = replace(k3, moe=replace(k3.moe, expert_format="mxfp4"))
    assert gpu_impl(packed).moe == "triton"


@pytest.mark.parametrize(
    ("part", "changes", "operators"),
    [
        ("kda", {"head_dim": 32}, set()),
        ("kda", {"head_dim": 96}, {"kda", "kda_decode"}),
        ("kda", {"conv_kernel_size": 5}, {"kda_decode", "short_conv"}),
        ("kda", {"gate_lower_bound": None}, set()),
        ("mla", {"kv_lora_rank": 513}, {"attention_decode"}),
        ("mla", {"qk_rope_head_dim": 65}, {"attention_decode"}),
        ("mla", {"qk_nope_head_dim": 193}, {"attention"}),
        ("mla", {"v_head_dim": 257}, {"attention"}),
        ("mla", {"v_head_dim": 256, "kv_lora_rank": 512}, set()),
        ("moe", {"num_expert_groups": 8, "topk_groups": 4}, {"route"}),
        ("moe", {"num_expert_groups": 8, "topk_groups": 8}, set()),
        ("moe", {"num_experts": 1025}, {"route"}),
        ("moe", {"latent_size": 380}, {"moe"}),
        ("moe", {"expert_intermediate_size": 12}, {"moe"}),
    ],
)
def test_what_the_kernels_do_not_serve_runs_on_torch_and_says_why(
    part: str, changes: dict[str, int | None], operators: set[str]
) -> None:
    model = preset("small")
    model = replace(model, **{part: replace(getattr(model, part), **changes)})
    refusals, impl = gpu_refusals(model), gpu_impl(model)
    assert refusals.keys() == operators
    assert all(getattr(impl, name) == "torch" for name in operators)
    for reason in refusals.values():
        assert part in reason


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [
        ("kda/triton/chunk.py", "DIMS", "KDA_DIMS"),
        ("kda/triton/decode.py", "DIMS", "KDA_DIMS"),
        ("short_conv/triton.py", "MAX_WIDTH", "MAX_TAPS"),
        ("mla/flash.py", "_MAX_DIM", "MAX_FLASH_DIM"),
        ("mla/triton.py", "MAX_RANK", "MAX_LATENT_RANK"),
        ("mla/triton.py", "MAX_SHARED", "MAX_SHARED_DIM"),
        ("moe/pairs.py", "MAX_EXPERTS", "MAX_EXPERTS"),
        ("moe/grouped.py", "WIDTH_UNIT", "EXPERT_WIDTH_UNIT"),
    ],
)
def test_limits_are_those_of_the_kernels(file: str, name: str, ours: str) -> None:
    # read, not imported: the kernels need triton
    path = Path(baltoro.ops.impl.__file__).parent / file
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            many = isinstance(target, ast.Tuple)
            values = node.value.elts if many and isinstance(node.value, ast.Tuple) else [node.value]
            found.update(zip((ast.unparse(n) for n in names), values, strict=False))
    assert ast.literal_eval(found[name]) == getattr(model_config, ours)
