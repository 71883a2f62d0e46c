import pytest
import torch
from ops.earned import randn
from torch.autograd import gradcheck

from baltoro.ops.impl import ImplError
from baltoro.ops.moe import route


def choose(logits, bias=None, **changes):
    options = {
        "num_experts_per_token": 2,
        "activation": "sigmoid",
        "renormalize": True,
        "scaling_factor": 1.0,
    }
    return route(logits, bias, **{**options, **changes})


def test_the_weights_are_unbiased_scores_divided_by_their_sum():
    logits, bias = randn(20, 8).float(), randn(8, seed=1).float()
    routing = choose(logits, bias, scaling_factor=2.5)
    scores = torch.sigmoid(logits)
    expected = scores.gather(1, (scores + bias).topk(2).indices)
    expected = 2.5 * expected / expected.sum(1, keepdim=True)
    assert torch.equal(routing.scores, scores)
    torch.testing.assert_close(routing.weights, expected)


def test_without_renormalisation_the_weights_are_the_scores():
    logits = randn(5, 8).float()
    routing = choose(logits, activation="softmax", renormalize=False)
    expected = logits.softmax(-1).topk(2)
    assert torch.equal(routing.expert_ids, expected.indices)
    assert torch.equal(routing.weights, expected.values)


@pytest.mark.parametrize("num_experts", [8, 896])
def test_among_equal_scores_the_lowest_id_wins(num_experts):
    routing = choose(torch.zeros(3, num_experts), num_experts_per_token=5)
    assert routing.expert_ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    logits = torch.zeros(1, num_experts)
    logits[0, [1, 6]] = 1.0
    routing = choose(logits, num_experts_per_token=4)
    assert routing.expert_ids.tolist() == [[1, 6, 0, 2]]


def test_a_constant_bias_changes_nothing():
    logits = randn(50, 16).float()
    plain, shifted = choose(logits), choose(logits, torch.full((16,), 0.25))
    assert torch.equal(plain.expert_ids, shifted.expert_ids)
    assert torch.equal(plain.weights, shifted.weights)


def test_the_bias_chooses_but_does_not_weigh():
    logits = torch.zeros(1, 4)
    routing = choose(logits, torch.tensor([0.0, 0.0, 5.0, 0.1]))
    assert routing.expert_ids.tolist() == [[2, 3]]
    assert routing.weights.tolist() == [[0.5, 0.5]]


def test_the_gradient_flows_through_the_weights_only():
    logits, bias = randn(4, 8), randn(8, seed=1)
    ids = choose(logits, bias).expert_ids

    def weights(tensor):
        routing = choose(tensor, bias, scaling_factor=1.5)
        assert torch.equal(routing.expert_ids, ids)
        assert not routing.scores.requires_grad
        return routing.weights

    assert gradcheck(weights, [logits.requires_grad_()])
    bias.requires_grad_()
    assert torch.autograd.grad(choose(logits, bias).weights.sum(), bias, allow_unused=True) == (
        None,
    )


def test_a_dropped_group_loses_to_negative_scores_in_a_kept_one():
    # Two groups of three. The first wins by its two best; its third, though negative, is chosen.
    bias = torch.tensor([3.0, 3.0, -4.0, 2.0, 2.0, 2.0])
    routing = choose(torch.zeros(1, 6), bias, num_experts_per_token=3, num_groups=2, topk_groups=1)
    assert routing.expert_ids.tolist() == [[0, 1, 2]]


def test_groups_are_ranked_by_their_two_best_and_the_lowest_group_wins_a_tie():
    bias = torch.tensor([9.0, 0.0, 5.0, 5.0, 5.0, 5.0])  # sums 9, 10, 10
    routing = choose(torch.zeros(1, 6), bias, num_groups=3, topk_groups=1)
    assert routing.expert_ids.tolist() == [[2, 3]]


def test_all_groups_kept_is_no_grouping():
    logits, bias = randn(30, 12).float(), randn(12, seed=1).float()
    grouped = choose(logits, bias, num_groups=4, topk_groups=4)
    assert torch.equal(grouped.expert_ids, choose(logits, bias).expert_ids)


def test_scores_far_below_one_still_sum_to_one():
    routing = choose(torch.full((1, 4), -30.0))
    torch.testing.assert_close(routing.weights, torch.full((1, 2), 0.5))


def test_no_tokens_are_routed_to_no_experts():
    routing = choose(torch.zeros(0, 8), torch.zeros(8))
    assert routing.expert_ids.shape == (0, 2) and routing.expert_ids.dtype == torch.int64
    assert routing.weights.shape == (0, 2)


def test_wrong_inputs_name_the_field():
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"router_logits is torch\.bfloat16"):
        choose(logits.bfloat16())
    with pytest.raises(ValueError, match=r"expert_bias is torch\.bfloat16 \[8\]"):
        choose(logits, torch.zeros(8).bfloat16())
    with pytest.raises(ValueError, match="activation='relu'"):
        choose(logits, activation="relu")
    with pytest.raises(ValueError, match="num_groups=3 must divide the 8 experts"):
        choose(logits, num_groups=3)
    with pytest.raises(ValueError, match="topk_groups=5 must be between 1 and 4"):
        choose(logits, num_groups=4, topk_groups=5)
    with pytest.raises(ValueError, match="num_experts_per_token=3 must be between 1 and 2"):
        choose(logits, num_experts_per_token=3, num_groups=4, topk_groups=1)


def test_scores_carry_the_router_s_gradient_when_asked_for_and_are_the_same():
    logits = randn(4, 8).requires_grad_()
    routing = choose(logits, has_score_gradient=True)
    plain = choose(logits)
    assert torch.equal(routing.scores, plain.scores) and torch.equal(routing.weights, plain.weights)
    (grad,) = torch.autograd.grad(routing.scores.sum(), logits)
    expected = torch.sigmoid(logits) * (1 - torch.sigmoid(logits))
    torch.testing.assert_close(grad, expected)


def test_replayed_experts_outside_the_own_choice_are_weighed_with_the_own_scores():
    logits, bias = randn(20, 8).requires_grad_(), randn(8, seed=1)
    worst = (torch.sigmoid(logits) + bias).sort(-1).indices[:, :3]
    options = {"num_experts_per_token": 3, "scaling_factor": 2.5}
    own = choose(logits, bias, **options)
    assert not (own.expert_ids.unsqueeze(-1) == worst.unsqueeze(1)).any()
    routing = choose(logits, bias, replay_ids=worst, **options)
    assert torch.equal(routing.expert_ids, worst) and routing.num_rerouted == 0
    assert torch.equal(routing.scores, own.scores)
    is_replayed = torch.zeros(20, 8, dtype=torch.bool).scatter_(1, worst, True)
    dense = torch.where(is_replayed, torch.sigmoid(logits), 0.0)
    dense = 2.5 * dense / dense.sum(-1, keepdim=True)
    assert routing.weights.min() > 0
    torch.testing.assert_close(routing.weights, dense.gather(1, worst), rtol=1e-14, atol=0)
    pull = randn(20, 8, seed=2)
    (grad,) = torch.autograd.grad((routing.weights * pull.gather(1, worst)).sum(), logits)
    (expected,) = torch.autograd.grad((dense * pull).sum(), logits)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(grad != 0, is_replayed)


def test_missing_rows_of_a_replay_are_routed_anew_and_counted():
    logits, bias = randn(6, 8).float(), randn(8, seed=1).float()
    own = choose(logits, bias)
    replay = own.expert_ids.clone()
    replay[0] = (replay[0] + 1) % 8
    replay[[1, 4, 5]] = -1
    routing = choose(logits, bias, replay_ids=replay)
    assert routing.num_rerouted == 3
    assert torch.equal(routing.expert_ids[0], replay[0])
    assert torch.equal(routing.expert_ids[1:], own.expert_ids[1:])
    assert torch.equal(routing.weights[1:], own.weights[1:])
    assert choose(logits, bias, replay_ids=torch.full((6, 2), -1)).num_rerouted == 6
    assert choose(torch.zeros(0, 8), replay_ids=own.expert_ids[:0]).num_rerouted == 0


def test_replayed_experts_stay_in_their_order_and_ignore_groups():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    replay = torch.tensor([[3, 0]])
    routing = choose(logits, num_groups=2, topk_groups=1, replay_ids=replay)
    assert torch.equal(routing.expert_ids, replay)
    assert routing.weights[0, 1] > routing.weights[0, 0] > 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([0, 8], r"different ids in \[0, 8\)"),
        ([-2, 3], r"different ids in \[0, 8\)"),
        ([3, -1], "-1 throughout"),
        ([5, 5], "holds 2 different ids"),
    ],
)
def test_a_row_of_a_replay_that_is_no_choice_is_named(row, reason):
    replay = torch.tensor([[0, 1], [-1, -1], row])
    with pytest.raises(ValueError, match=rf"replay_ids\[2\] is \[{row[0]}, {row[1]}\].*{reason}"):
        choose(torch.zeros(3, 8), replay_ids=replay)


def test_a_replay_of_another_shape_or_dtype_is_named():
    logits = torch.zeros(3, 8)
    for shape in ((3, 3), (2, 2), (6,)):
        with pytest.raises(
            ValueError, match=r"replay_ids is torch\.int64 .*expected int64 \[3, 2\]"
        ):
            choose(logits, replay_ids=torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"replay_ids is torch\.int32 \[3, 2\]; expected int64"):
        choose(logits, replay_ids=torch.tensor([[0, 1]] * 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="replay_ids is on meta"):
        choose(logits, replay_ids=torch.zeros(3, 2, dtype=torch.int64, device="meta"))


def test_the_kernel_refuses_a_replay():
    with torch.no_grad(), pytest.raises(ImplError, match="'triton' does not serve replay_ids"):
        choose(torch.zeros(1, 8), replay_ids=torch.tensor([[0, 1]]), impl="triton")
