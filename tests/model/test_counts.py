import pytest
import torch
from model.tiny import VISION, tiny_k3, tiny_kimi_linear

from baltoro.model.config import ModelConfig
from baltoro.model.counts import flop_counts, meta_model, parameter_counts
from baltoro.model.model import Model


@pytest.mark.parametrize("config", [tiny_k3(vision=VISION), tiny_kimi_linear(num_mtp_layers=1)])
def test_parts_add_up_to_the_real_model(config: ModelConfig) -> None:
    counts = parameter_counts(config)
    model = Model(config)
    elements = sum(t.numel() for t in model.state_dict().values())
    padding = 0 if config.kda.gate_lower_bound is None else 3 * (8 - 3)
    assert counts.total == sum(counts.parts.values()) == elements + padding


def test_meta_model_has_shapes_and_no_memory() -> None:
    model = meta_model(tiny_k3())
    assert all(t.is_meta for t in model.state_dict().values())


def test_matmul_flops_are_twice_the_weights_a_token_meets() -> None:
    config = tiny_k3()
    torch.manual_seed(0)
    model = Model(config)
    matrices = sum(
        p.numel() * (2 / 6 if ".experts." in n else 1)
        for n, p in model.named_parameters()
        if p.dim() >= 2 and not n.startswith("embed")
    )
    assert flop_counts(config, 1).matmul == round(2 * matrices)


def test_attention_flops_grow_with_the_length_and_kda_flops_do_not() -> None:
    short, long = (flop_counts(tiny_k3(), length) for length in (1024, 4096))
    assert long.kda == short.kda
    assert long.attention == pytest.approx(4 * short.attention, rel=1e-2)
    assert long.total == long.matmul + long.attention + long.kda
