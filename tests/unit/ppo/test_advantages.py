import math
from math import comb

import pytest
import torch
from hypothesis import given

from raypo.config.ppo_section import GROUP_ADVANTAGES
from raypo.ppo import masked
from raypo.ppo.advantages import (
    adaptive_lambdas,
    discounted_returns,
    generalized_advantages,
    group_baseline,
    penalized_scores,
    token_rewards,
)
from tests.unit.ppo.steps import INF, NAN, fewer, plain_advantages, random_mask, seeds


def test_score_stands_on_the_last_sampled_token_and_kl_on_every_one():
    scores = torch.tensor([2.0, 3.0])
    kl = torch.tensor([[0.1, 0.2, NAN], [0.4, INF, 0.6]])
    mask = torch.tensor([[True, True, False], [True, False, True]])

    rewards = token_rewards(scores, kl, mask, kl_coef=0.5)

    # -0.5 * 0.1, 2 - 0.5 * 0.2 | -0.5 * 0.4, gap, 3 - 0.5 * 0.6
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 1.9, 0.0], [-0.2, 0.0, 2.7]]))


def test_score_is_not_lost_behind_text_that_an_environment_wrote_last():
    mask = torch.tensor([[True, True, False, False]])

    rewards = token_rewards(torch.tensor([5.0]), torch.zeros(1, 4), mask, kl_coef=0.1)

    assert rewards.tolist() == [[0.0, 5.0, 0.0, 0.0]]


def test_row_without_a_sampled_token_has_no_reward():
    mask = torch.zeros(1, 3, dtype=torch.bool)

    rewards = token_rewards(torch.tensor([NAN]), torch.full((1, 3), INF), mask, kl_coef=0.1)

    assert rewards.tolist() == [[0.0, 0.0, 0.0]]


def test_an_infinite_kl_with_a_coefficient_of_zero_is_no_nan():
    mask, kl = torch.ones(1, 2, dtype=torch.bool), torch.full((1, 2), INF)

    assert token_rewards(torch.ones(1), kl, mask, kl_coef=0.0).tolist() == [[0.0, 1.0]]


def test_rewards_of_an_environment_add_at_their_own_positions():
    mask = torch.tensor([[True, False, True]])
    extra = torch.tensor([[0.5, NAN, 0.25]])

    rewards = token_rewards(torch.tensor([1.0]), None, mask, kl_coef=0.1, extra_rewards=extra)

    assert rewards.tolist() == [[0.5, 0.0, 1.25]]


def test_penalized_score_carries_the_kl_of_the_whole_response():
    kl = torch.tensor([[0.1, 0.3, NAN]])
    mask = torch.tensor([[True, True, False]])

    # 2 - 0.5 * (0.1 + 0.3)
    torch.testing.assert_close(
        penalized_scores(torch.tensor([2.0]), kl, mask, kl_coef=0.5), torch.tensor([1.8])
    )


def test_undiscounted_return_is_the_sum_of_future_rewards():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.2, 0.9]])
    mask = torch.ones(1, 3, dtype=torch.bool)

    advantages, returns = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=1.0)

    torch.testing.assert_close(returns, torch.tensor([[1.0, 1.0, 1.0]]))
    torch.testing.assert_close(advantages, returns - values)


def test_generalized_advantages_by_hand():
    rewards, values = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)

    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.5, gae_lambda=0.5)

    # delta = 1 + 0.5 * 4 - 3 = 0, 2 - 4 = -2; A = 0 + 0.25 * -2, -2; returns = A + V
    assert advantages.tolist() == [[-0.5, -2.0]]
    assert returns.tolist() == [[2.5, 2.0]]


def test_truncated_row_bootstraps_with_its_last_value():
    rewards, values = torch.tensor([[1.0, NAN]] * 3), torch.tensor([[3.0, NAN]] * 3)
    mask = torch.tensor([[True, False], [True, False], [False, False]])
    last = torch.tensor([10.0, 0.0, NAN])

    advantages, _ = generalized_advantages(
        rewards, values, mask, gamma=0.5, gae_lambda=0.9, last_values=last
    )

    # 1 + 0.5 * 10 - 3, 1 - 3, nothing sampled
    assert advantages.tolist() == [[3.0, 0.0], [-2.0, 0.0], [0.0, 0.0]]


def test_discounted_returns_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)

    # 1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4
    assert discounted_returns(rewards, mask, gamma=0.5).tolist() == [[3.0, 4.0, 4.0]]
    assert discounted_returns(rewards, mask, gamma=0.0).tolist() == rewards.tolist()


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 70, 1060])  # of one chunk, two, two levels
@pytest.mark.parametrize(
    ("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.97, 1.0), (0.97, 0.95), (0.0, 0.95)]
)
@given(seed=seeds)
@fewer
def test_fast_scan_agrees_with_the_plain_loop(width, gamma, gae_lambda, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, width, generator=generator, dtype=torch.float64)
    last = torch.randn(5, generator=generator, dtype=torch.float64)
    mask = random_mask(5, width, generator)
    knobs = {"gamma": gamma, "gae_lambda": gae_lambda, "last_values": last}

    fast = generalized_advantages(rewards, values, mask, **knobs)

    torch.testing.assert_close(fast, plain_advantages(rewards, values, mask, **knobs))
    returns = discounted_returns(rewards, mask, gamma=gamma)
    zero = torch.zeros_like(rewards)
    plain, _ = plain_advantages(rewards, zero, mask, gamma=gamma, gae_lambda=1.0)
    torch.testing.assert_close(returns, plain)


@pytest.mark.parametrize("width", [1, 33, 70, 1060])
@given(seed=seeds)
@fewer
def test_fast_scan_with_a_lambda_for_each_row_agrees_with_the_plain_loop(width, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, width, generator=generator, dtype=torch.float64)
    last = torch.randn(5, generator=generator, dtype=torch.float64)
    lambdas = torch.tensor([0.0, 1.0, 0.5, 0.95, 0.999], dtype=torch.float64)
    mask = random_mask(5, width, generator)
    knobs = {"gamma": 0.97, "gae_lambda": lambdas, "last_values": last}

    fast = generalized_advantages(rewards, values, mask, **knobs)

    torch.testing.assert_close(fast, plain_advantages(rewards, values, mask, **knobs))


def test_an_adaptive_lambda_weighs_alpha_times_the_length_in_all():
    mask = torch.zeros(4, 1000, dtype=torch.bool)
    mask[0], mask[1, ::5], mask[2, :20] = True, True, True  # 1000, 200 with gaps, 20, none

    lambdas = adaptive_lambdas(mask, alpha=0.05)

    # 1 - 1 / 50, 1 - 1 / 10, 1 - 1 / 1, and no length gives no infinity
    torch.testing.assert_close(lambdas, torch.tensor([0.98, 0.9, 0.0, 0.0], dtype=torch.float64))
    assert float((lambdas[0] ** torch.arange(1000)).sum()) == pytest.approx(50.0)


@pytest.mark.parametrize("gae_lambda", [0.95, torch.linspace(0.0, 1.0, 7)])
def test_blocks_of_rows_change_nothing(monkeypatch, gae_lambda):
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 7, 40, generator=generator)
    mask = random_mask(7, 40, generator)
    whole = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=gae_lambda)

    monkeypatch.setattr(masked, "BLOCK_ELEMENTS", 80)  # two rows at a time

    blocks = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=gae_lambda)
    torch.testing.assert_close(blocks, whole)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_batches_pass_through(shape):
    empty, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)

    advantages, returns = generalized_advantages(empty, empty, mask, gamma=1.0, gae_lambda=1.0)

    assert advantages.shape == returns.shape == discounted_returns(empty, mask, gamma=1.0).shape
    assert token_rewards(torch.zeros(shape[0]), empty, mask, kl_coef=0.1).shape == shape


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("dr_grpo", [-2.0, -1.0, 3.0]),  # mean 3
        ("reinforce_baseline", [-2.0, -1.0, 3.0]),
        ("rloo", [-3.0, -1.5, 4.5]),  # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
        ("grpo", [x / (7**0.5 + 1e-6) for x in (-2.0, -1.0, 3.0)]),  # (4 + 1 + 9) / (3 - 1) = 7
        ("maxrl", [-2 / 3, -1 / 3, 1.0]),
        ("opo", [-1.5, -0.5, 3.5]),  # (4 * 1 + 2 * 2 + 2 * 6) / 8 = 2.5
        # pairs: best 2, 6, 6, of mean 14 / 3 and deviation (32 / 9) ** 0.5
        ("pass_at_k", [x / (32 / 9) ** 0.5 for x in (4 - 14 / 3, 4 - 14 / 3, 6 - 14 / 3)]),
    ],
)
def test_group_baselines_by_hand(kind, expected):
    scores = torch.tensor([[1.0, 2.0, 6.0]])
    lengths = torch.tensor([[4, 2, 2]])

    found = group_baseline(scores, kind=kind, lengths=lengths, pass_k=2)

    torch.testing.assert_close(found, torch.tensor([expected]))
    # a fourth sample that failed changes nothing
    failed = torch.tensor([[1.0, 2.0, NAN, 6.0]])
    valid = torch.tensor([[True, True, False, True]])
    lengths = torch.tensor([[4, 2, 9, 2]])
    found = group_baseline(failed, kind=kind, valid=valid, lengths=lengths, pass_k=2)
    torch.testing.assert_close(found[valid], torch.tensor(expected))
    assert found[~valid].tolist() == [0.0]


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
@pytest.mark.parametrize("score", [0.1, -1e-3, 1e6 / 3, 0.7])
def test_equal_rewards_are_exactly_zero(kind, score):
    for n in range(2, 12):
        for dtype in (torch.float32, torch.float64):  # float64 is where rounding shows
            scores = torch.full((2, n), abs(score) if kind == "maxrl" else score, dtype=dtype)
            lengths = torch.arange(2 * n).view(2, n)
            found = group_baseline(scores, kind=kind, lengths=lengths, pass_k=2)
            assert found.abs().sum().item() == 0.0


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_fewer_than_two_valid_samples_teach_nothing(kind):
    scores = torch.tensor([[1.0, NAN], [NAN, NAN]])
    valid = torch.tensor([[True, False], [False, False]])

    found = group_baseline(scores, kind=kind, valid=valid, lengths=torch.ones(2, 2), pass_k=2)
    assert found.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_a_group_of_one_is_refused_with_the_remedy(kind):
    with pytest.raises(ValueError, match="samples_per_prompt"):
        group_baseline(torch.zeros(3, 1), kind=kind)


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_the_scale_of_scores_scales_a_baseline_and_cancels_in_a_ratio(kind):
    scores = torch.rand(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = torch.arange(1, 11).view(2, 5)
    once, thrice = (
        group_baseline(scale * scores, kind=kind, lengths=lengths, pass_k=3) for scale in (1, 3)
    )

    scale = 1 if kind in ("grpo", "maxrl", "pass_at_k") else 3
    torch.testing.assert_close(thrice, scale * once, rtol=1e-5, atol=1e-9)  # grpo adds 1e-6


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_the_order_of_samples_and_the_place_of_failed_ones_change_nothing(kind):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 3, (4, 6), generator=generator).double()
    valid = torch.rand(4, 6, generator=generator) < 0.8
    lengths = torch.randint(1, 9, (4, 6), generator=generator)
    order = torch.randperm(6, generator=generator)
    plain = group_baseline(scores, kind=kind, valid=valid, lengths=lengths, pass_k=2)

    found = group_baseline(
        scores.masked_fill(~valid, NAN)[:, order],
        kind=kind,
        valid=valid[:, order],
        lengths=lengths[:, order],
        pass_k=2,
    )

    torch.testing.assert_close(found, plain[:, order])


def test_maxrl_weighs_the_right_answers_of_a_prompt_by_one_over_its_success_rate():
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])

    found = group_baseline(scores, kind="maxrl")

    # 1 / 0.25 - 1, 1 / 0.75 - 1; no right answer teaches nothing
    expected = [[3.0, -1.0, -1.0, -1.0], [1 / 3, 1 / 3, 1 / 3, -1.0], [0.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected))
    with pytest.raises(ValueError, match=r"maxrl.*at least 0.*lowest of this step is -1"):
        group_baseline(scores - 1.0, kind="maxrl")


@pytest.mark.parametrize(("num_samples", "k"), [(8, 1), (8, 4), (5, 5), (32, 4), (300, 16)])
def test_pass_at_k_of_right_and_wrong_has_the_papers_equations(num_samples, k):
    right = torch.arange(num_samples + 1).unsqueeze(1)  # a group for each number of right ones
    scores = (torch.arange(num_samples) < right).double()

    found = group_baseline(scores, kind="pass_at_k", pass_k=k)

    for num_right in range(num_samples + 1):
        wrong = num_samples - num_right
        missed = comb(wrong, k) / comb(num_samples, k)  # 1 - the mean of equation 11
        deviation = math.sqrt((1 - missed) * missed)  # 12
        up = down = 0.0
        if num_right > 0 and wrong >= k:
            up = missed / deviation  # 14
            others = comb(wrong - 1, k - 1) / comb(num_samples - 1, k - 1)
            down = (missed - others) / deviation  # 15
        expected = scores[num_right] * up + (1 - scores[num_right]) * down
        torch.testing.assert_close(found[num_right], expected, rtol=1e-9, atol=0)


def test_pass_at_one_is_grpo_with_the_deviation_of_the_population():
    scores = torch.randn(3, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = (scores - scores.mean(1, keepdim=True)) / scores.std(1, correction=0, keepdim=True)

    torch.testing.assert_close(group_baseline(scores, kind="pass_at_k", pass_k=1), expected)


def test_pass_at_k_of_fewer_than_k_valid_samples_teaches_nothing():
    scores = torch.tensor([[1.0, 0.0, NAN, 0.0]])

    found = group_baseline(scores, kind="pass_at_k", valid=~scores.isnan(), pass_k=4)

    assert found.tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_unknown_group_kind_and_shapes_are_refused():
    with pytest.raises(ValueError, match=r"'gae'.*rloo, reinforce_baseline, grpo, dr_grpo"):
        group_baseline(torch.zeros(1, 2), kind="gae")
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="share one shape"):
        generalized_advantages(
            torch.zeros(2, 3), torch.zeros(2, 2), mask, gamma=1.0, gae_lambda=1.0
        )
    with pytest.raises(ValueError, match="one entry for each row"):
        token_rewards(torch.zeros(3), None, mask, kl_coef=0.0)
    with pytest.raises(ValueError, match="one entry for each row"):
        generalized_advantages(
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            mask,
            gamma=1.0,
            gae_lambda=1.0,
            last_values=torch.zeros(3),
        )
    with pytest.raises(ValueError, match=r"gae_lambda \(3,\) must have one entry for each row"):
        generalized_advantages(
            torch.zeros(2, 3), torch.zeros(2, 3), mask, gamma=1.0, gae_lambda=torch.ones(3)
        )


@pytest.mark.parametrize("turns", [None, torch.zeros(0, 0, dtype=torch.int64)])
def test_a_worker_without_rows_has_no_advantages(turns):
    none, mask = torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)
    both = generalized_advantages(none, none, mask, gamma=0.9, gae_lambda=0.9, turns=turns)
    assert [each.shape for each in both] == [none.shape] * 2
