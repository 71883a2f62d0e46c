from dataclasses import replace

import pytest

from baltoro.model.presets import k3, nano
from baltoro.serve.layout import pool_layout


def test_k3_in_bf16_gets_the_page_of_the_report() -> None:
    layout = pool_layout(k3(), dtype_bytes=2)
    assert layout.hash_block == 512 and layout.page_size == 6144  # report 5.4.1
    assert layout.state_bytes == 6_291_456 and layout.latent_bytes == 1152


def test_k3_has_one_group_of_latents_and_three_of_states_with_little_padding() -> None:
    layout = pool_layout(k3(), dtype_bytes=2)
    assert [len(group) for group in layout.state_groups] == [24, 24, 21]
    assert sorted(layout.kda_layers + layout.mla_layers) == list(range(93))
    assert 0.04 < layout.state_waste < 0.13  # three empty places of 72, and 5654 rounded to 6144


def test_draft_layers_are_not_in_the_pool() -> None:
    with_draft = replace(k3(), num_mtp_layers=5)
    assert pool_layout(with_draft, dtype_bytes=2) == pool_layout(k3(), dtype_bytes=2)


def test_a_page_holds_a_state_and_is_a_multiple_of_the_hash_block() -> None:
    for dtype_bytes in (2, 4, 8):
        layout = pool_layout(nano(), dtype_bytes=dtype_bytes)
        assert layout.page_size % layout.hash_block == 0
        assert layout.layer_bytes >= layout.state_bytes + layout.window_bytes
        assert layout.page_bytes == layout.layers_per_page * layout.layer_bytes


def test_a_model_of_one_kind_of_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="serves hybrids"):
        pool_layout(replace(nano(), mixers=("mla", "mla")), dtype_bytes=4)


def test_a_hash_block_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="hash_block=0"):
        pool_layout(nano(), dtype_bytes=4, hash_block=0)
