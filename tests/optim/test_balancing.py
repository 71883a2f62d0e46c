"""Router balancing over steps: what counts, what is kept, and how fast loads become even."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baltoro.ops.moe import route
from baltoro.ops.quantile import exact_bias
from baltoro.optim.balancing import (
    AllReduce,
    QuantileBalancer,
    SignBalancer,
    auxiliary_loss,
    max_vio,
)
from baltoro.optim.router_health import router_alarms

E, K = 16, 3
LAYERS = ("layers.1", "layers.2")
Balancer = QuantileBalancer | SignBalancer


def skewed(num_tokens: int, num_experts: int = E, strength: float = 2.0) -> Tensor:
    """Scores of a router that likes some experts much better than others."""
    taste = torch.linspace(-strength, strength, num_experts)
    return torch.sigmoid(torch.randn(num_tokens, num_experts) + taste)


def biases() -> dict[str, Tensor]:
    return {layer: torch.zeros(E) for layer in LAYERS}


def quantile(named: dict[str, Tensor], **options: float) -> QuantileBalancer:
    return QuantileBalancer(named, num_experts_per_token=K, **options)  # type: ignore[arg-type]


def sign(named: dict[str, Tensor], **options: float) -> SignBalancer:
    return SignBalancer(named, num_experts_per_token=K, **options)  # type: ignore[arg-type]


def train_step(balancer: Balancer, scores: dict[str, Tensor]) -> None:
    for layer, scores_TE in scores.items():
        balancer.observe(layer, scores_TE, phase="train")
    balancer.update()


def scores_of(step: int, num_tokens: int = 200) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {layer: skewed(num_tokens) for layer in LAYERS}


def test_a_step_sets_each_layer_s_bias_from_its_own_tokens() -> None:
    named = biases()
    balancer = quantile(named)
    old = {layer: bias.clone() for layer, bias in named.items()}
    scores = scores_of(0, 4000)
    train_step(balancer, scores)
    for layer, bias in named.items():
        want = exact_bias(scores[layer], old[layer], num_experts_per_token=K)
        assert (bias - want).abs().max() < 2 / 1000


@pytest.mark.parametrize("make", [quantile, sign])
@pytest.mark.parametrize("phase", ["eval", "recompute"])
def test_evaluation_and_recomputed_passes_change_nothing(make: type, phase: str) -> None:
    # cases Q03 and Q04
    plain, mixed = biases(), biases()
    one, other = make(plain), make(mixed)
    for step in range(3):
        for layer, scores in scores_of(step).items():
            one.observe(layer, scores, phase="train")
            other.observe(layer, scores, phase="train")
            other.observe(layer, skewed(333) if phase == "eval" else scores, phase=phase)
        a, b = one.update(), other.update()
        for layer in LAYERS:
            assert a[layer].num_tokens == b[layer].num_tokens == 200
            assert torch.equal(a[layer].loads, b[layer].loads)
            assert torch.equal(plain[layer], mixed[layer])


@pytest.mark.parametrize("make", [quantile, sign])
def test_the_cut_into_micro_batches_does_not_matter(make: type) -> None:
    whole, parts = biases(), biases()
    one, other = make(whole), make(parts)
    scores = scores_of(0)
    for layer in LAYERS:
        one.observe(layer, scores[layer], phase="train")
        for part in scores[layer].split([50, 1, 0, 149]):
            other.observe(layer, part, phase="train")
    one.update(), other.update()
    assert all(torch.equal(whole[layer], parts[layer]) for layer in LAYERS)


@pytest.mark.parametrize("make", [quantile, sign])
def test_padding_does_not_count(make: type) -> None:
    clean, padded = biases(), biases()
    one, other = make(clean), make(padded)
    for layer, scores in scores_of(0).items():
        one.observe(layer, scores, phase="train")
        rows = torch.cat([scores[:70], torch.full((9, E), 0.99), scores[70:]])
        mask = torch.ones(209, dtype=torch.bool)
        mask[70:79] = False
        other.observe(layer, rows, phase="train", mask=mask)
    a, b = one.update(), other.update()
    for layer in LAYERS:
        assert torch.equal(clean[layer], padded[layer])
        assert a[layer].num_tokens == b[layer].num_tokens
        assert torch.equal(a[layer].loads, b[layer].loads)


@pytest.mark.parametrize("make", [quantile, sign])
def test_loads_are_those_of_the_router(make: type) -> None:
    named = {layer: torch.randn(E) * 0.1 for layer in LAYERS}
    balancer = make(named)
    logits = torch.randn(300, E).round(decimals=1)  # rounded, so that scores tie
    routing = route(
        logits,
        named["layers.1"].clone(),
        num_experts_per_token=K,
        activation="sigmoid",
        renormalize=True,
        scaling_factor=1.0,
    )
    balancer.observe("layers.1", routing.scores, phase="train")
    report = balancer.update()
    assert torch.equal(report["layers.1"].loads, routing.expert_ids.flatten().bincount(minlength=E))
    assert report["layers.1"].num_tokens == 300
    assert report["layers.2"].num_tokens == 0


@pytest.mark.parametrize("make", [quantile, sign])
def test_a_layer_without_tokens_keeps_its_bias(make: type) -> None:
    named = {layer: torch.randn(E) for layer in LAYERS}
    before = named["layers.2"].clone()
    balancer = make(named)
    balancer.observe("layers.1", skewed(50), phase="train")
    report = balancer.update()
    assert torch.equal(named["layers.2"], before)
    assert report["layers.2"].bias_drift == 0.0 and report["layers.2"].max_vio == 0.0


@pytest.mark.parametrize("make", [quantile, sign])
def test_counts_are_forgotten_after_an_update(make: type) -> None:
    named = biases()
    balancer = make(named)
    train_step(balancer, scores_of(0))
    before = {layer: bias.clone() for layer, bias in named.items()}
    report = balancer.update()
    assert all(balance.num_tokens == 0 for balance in report.values())
    assert all(torch.equal(named[layer], before[layer]) for layer in LAYERS)


class Ranks:
    """An all-reduce between threads; every rank has to call it for any to go on."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.parts: list[Tensor] = [torch.empty(0)] * num_ranks

    def hook(self, rank: int) -> AllReduce:
        def all_reduce(counts: Tensor) -> Tensor:
            self.parts[rank] = counts.clone()
            self.barrier.wait()
            return torch.stack(self.parts).sum(0, dtype=counts.dtype)

        return all_reduce


@pytest.mark.parametrize("sizes", [(18, 24, 30, 12), (18, 0, 30, 12), (0, 0, 0, 1)])
@pytest.mark.parametrize("make", [quantile, sign])
def test_ranks_of_any_load_reach_one_bias_and_none_hangs(
    make: type, sizes: tuple[int, ...]
) -> None:
    # case Q10
    single = biases()
    one = make(single)
    scores = {layer: skewed(sum(sizes)) for layer in LAYERS}
    train_step(one, scores)
    ranks, per_rank = Ranks(len(sizes)), [biases() for _ in sizes]

    def run(rank: int) -> None:
        balancer = make(per_rank[rank], all_reduce=ranks.hook(rank))
        for layer in LAYERS:
            part = scores[layer].split(list(sizes))[rank]
            if len(part):
                balancer.observe(layer, part, phase="train")
        balancer.update()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for named in per_rank:
        assert all(torch.equal(named[layer], single[layer]) for layer in LAYERS)


@pytest.mark.parametrize("make", [quantile, sign])
def test_state_is_saved_and_loaded_bit_for_bit_even_inside_a_step(
    make: type, tmp_path: Path
) -> None:
    # case Q08
    straight = biases()
    one = make(straight)
    for step in range(3):
        train_step(one, scores_of(step))
    half = {layer: scores.split(100) for layer, scores in scores_of(3).items()}
    for layer in LAYERS:
        one.observe(layer, half[layer][0], phase="train")
    save_file(one.state_dict(), tmp_path / "balancer.safetensors")
    resumed = biases()
    other = make(resumed)
    other.load_state_dict(load_file(tmp_path / "balancer.safetensors"))
    assert all(torch.equal(straight[layer], resumed[layer]) for layer in LAYERS)
    for balancer in (one, other):
        for layer in LAYERS:
            balancer.observe(layer, half[layer][1], phase="train")
        balancer.update()
    assert all(torch.equal(straight[layer], resumed[layer]) for layer in LAYERS)
    assert all(resumed[layer].dtype == torch.float32 for layer in LAYERS)


def test_the_bias_is_written_in_the_model_s_own_buffer() -> None:
    named = biases()
    addresses = {layer: bias.data_ptr() for layer, bias in named.items()}
    train_step(quantile(named), scores_of(0))
    assert all(named[layer].data_ptr() == addresses[layer] for layer in LAYERS)
    assert all(bias.abs().max() > 0.1 for bias in named.values())


def test_an_average_over_steps_moves_part_of_the_way() -> None:
    full, part = biases(), biases()
    train_step(quantile(full), scores_of(0))
    train_step(quantile(part, ema=0.75), scores_of(0))
    torch.testing.assert_close(part["layers.1"], full["layers.1"] * 0.25)


def test_scores_that_are_none_stop_the_update_with_the_layer_s_name() -> None:
    named = biases()
    balancer = quantile(named)
    scores = skewed(20)
    scores[3, 4] = torch.nan
    balancer.observe("layers.2", scores, phase="train")
    with pytest.raises(ValueError, match=r"NaN or outside \[0, 1\], by layer: \{'layers\.2'"):
        balancer.update()
    assert torch.equal(named["layers.2"], torch.zeros(E))
    assert int(balancer.counts.flat.abs().sum()) == 0


@pytest.mark.parametrize("make", [quantile, sign])
def test_a_skipped_step_leaves_no_trace(make: type) -> None:
    clean, skipping = biases(), biases()
    one, other = make(clean), make(skipping)
    other.observe("layers.1", skewed(77), phase="train")
    other.discard()
    for balancer in (one, other):
        train_step(balancer, scores_of(1))
    assert all(torch.equal(clean[layer], skipping[layer]) for layer in LAYERS)


def test_the_sign_rule_moves_every_bias_by_its_step() -> None:
    named = {"layers.1": torch.zeros(4)}
    balancer = SignBalancer(named, num_experts_per_token=1, step_size=0.01)
    scores = torch.tensor([[0.9, 0.2, 0.1, 0.1]] * 3 + [[0.1, 0.9, 0.2, 0.2]])
    balancer.observe("layers.1", scores, phase="train")
    assert balancer.update()["layers.1"].loads.tolist() == [3, 1, 0, 0]
    torch.testing.assert_close(named["layers.1"], torch.tensor([-0.01, 0.0, 0.01, 0.01]))


def test_moonlight_s_sign_rule_keeps_the_mean() -> None:
    named = biases()
    train_step(SignBalancer(named, num_experts_per_token=K, is_centred=True), scores_of(0))
    assert all(abs(float(bias.mean())) < 1e-9 for bias in named.values())


def test_a_step_of_zero_only_counts() -> None:
    named = biases()
    balancer = sign(named, step_size=0.0)
    balancer.observe("layers.1", skewed(100), phase="train")
    report = balancer.update()
    assert report["layers.1"].max_vio > 1.0
    assert torch.equal(named["layers.1"], torch.zeros(E))


def test_the_reference_gives_the_biases_of_the_fast_form_to_within_a_bin() -> None:
    found = []
    for impl in ("torch", "reference"):
        torch.manual_seed(0)
        balancer = QuantileBalancer(biases(), num_experts_per_token=K, impl=impl, counts_impl=impl)
        for layer in LAYERS:
            balancer.observe(layer, skewed(500), phase="train")
        balancer.update()
        found.append(torch.stack(list(balancer.biases.values())))
        assert not balancer.counts.flat.any()
    torch.testing.assert_close(*found, rtol=0, atol=2.1e-3)


def steps_to_balance(balancer: Balancer, bias: Tensor, *, limit: int) -> int:
    """Steps of 2048 fresh tokens until MaxVio is below one half."""
    torch.manual_seed(11)
    for step in range(limit):
        balancer.observe("layer", skewed(2048, len(bias)), phase="train")
        if balancer.update()["layer"].max_vio < 0.5:
            return step
    return limit


def test_quantile_balancing_is_even_after_a_step_and_the_sign_rule_is_not() -> None:
    # anchor A12 in small
    steps = {}
    for name, step_size in (("quantile", 0.0), ("sign", 1e-2), ("slow sign", 1e-3)):
        bias = torch.zeros(64)
        balancer: Balancer
        if name == "quantile":
            balancer = QuantileBalancer({"layer": bias}, num_experts_per_token=4)
        else:
            balancer = SignBalancer({"layer": bias}, num_experts_per_token=4, step_size=step_size)
        steps[name] = steps_to_balance(balancer, bias, limit=100)
    assert steps["quantile"] <= 2
    assert 10 < steps["sign"] < 100
    assert steps["slow sign"] == 100


def test_a_range_that_follows_the_bias_serves_biases_far_from_zero() -> None:
    bias = torch.tensor([40.0, -40.0, 0.0, 5.0])
    balancer = QuantileBalancer({"layer": bias}, num_experts_per_token=1)
    for _ in range(6):
        balancer.observe("layer", skewed(4096, 4), phase="train")
        report = balancer.update()
    assert report["layer"].max_vio < 0.2
    assert bias.abs().max() < 2.0


@pytest.mark.parametrize("make", [QuantileBalancer, SignBalancer])
def test_equal_scores_go_to_the_lowest_ids_and_are_counted_and_named_there(make: type) -> None:
    # case Q01
    named = {"layer": torch.zeros(8)}
    balancer = make(named, num_experts_per_token=2)
    routing = route(
        torch.zeros(128, 8),
        named["layer"],
        num_experts_per_token=2,
        activation="sigmoid",
        renormalize=True,
        scaling_factor=1.0,
    )
    balancer.observe("layer", routing.scores, phase="train")
    report = balancer.update()["layer"]
    assert report.loads.tolist() == routing.expert_ids.flatten().bincount(minlength=8).tolist()
    assert report.loads.tolist() == [128, 128, 0, 0, 0, 0, 0, 0]
    (dead,) = router_alarms("layer", report, router_grad_norm=1.0)
    assert dead.name == "dead_experts" and dead.message.startswith("6 of 8")


def test_the_auxiliary_loss_is_one_when_even_and_pushes_scores_towards_it() -> None:
    even = torch.eye(4).repeat(3, 1) * 0.5 + 0.1
    assert float(auxiliary_loss(even, torch.zeros(4), num_experts_per_token=1)) == pytest.approx(
        1.0
    )
    scores = skewed(500).requires_grad_()
    loss = auxiliary_loss(scores, torch.zeros(E), num_experts_per_token=K)
    loss.backward()
    assert loss > 1.1 and scores.grad is not None
    pull = scores.grad.sum(0)
    assert pull[-1] > 0 > pull[0]


def test_the_auxiliary_loss_skips_padding_and_survives_its_absence() -> None:
    scores = skewed(30)
    mask = torch.arange(30) < 20
    got = auxiliary_loss(scores, torch.zeros(E), num_experts_per_token=K, mask=mask)
    assert got == auxiliary_loss(scores[:20], torch.zeros(E), num_experts_per_token=K)
    nothing = torch.zeros(30, dtype=torch.bool)
    assert auxiliary_loss(scores, torch.zeros(E), num_experts_per_token=K, mask=nothing) == 0.0


def test_max_vio_is_zero_when_even_or_empty() -> None:
    assert max_vio(torch.tensor([3, 3, 3])) == 0.0
    assert max_vio(torch.zeros(3, dtype=torch.int64)) == 0.0
    assert max_vio(torch.tensor([8, 0, 0, 0])) == 3.0


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="biases is empty"):
        quantile({})
    with pytest.raises(ValueError, match=r"a: bias is torch\.bfloat16 \[4\], not fp32"):
        quantile({"a": torch.zeros(4, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="num_experts_per_token=3: must be between 1 and 2 for a"):
        quantile({"a": torch.zeros(3)})
    with pytest.raises(ValueError, match="num_bins=0"):
        quantile(biases(), num_bins=0)
    with pytest.raises(ValueError, match=r"ema=1\.0"):
        quantile(biases(), ema=1.0)
    with pytest.raises(ValueError, match=r"step_size=-0\.1"):
        sign(biases(), step_size=-0.1)
    balancer = quantile(biases())
    with pytest.raises(ValueError, match="phase='training': must be one of train, recompute, eval"):
        balancer.observe("layers.1", skewed(3), phase="training")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layer='layers\.7' is not balanced"):
        balancer.observe("layers.7", skewed(3), phase="train")
    with pytest.raises(ValueError, match=r"scores \[3, 5\]"):
        balancer.observe("layers.1", skewed(3, 5), phase="train")
    state = balancer.state_dict()
    with pytest.raises(ValueError, match="balancer state has"):
        balancer.load_state_dict({"counts": state["counts"]})
    with pytest.raises(ValueError, match=r"bias\.layers\.1: torch\.bfloat16"):
        balancer.load_state_dict(state | {"bias.layers.1": torch.zeros(E, dtype=torch.bfloat16)})
