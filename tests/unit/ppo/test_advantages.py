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
    token_rewards,
)
from tests.unit.ppo.steps import INF, NAN, fewer, plain_advantages, random_mask, seeds


def test_an_infinite_kl_with_a_coefficient_of_zero_is_no_nan():
    mask, kl = torch.ones(1, 2, dtype=torch.bool), torch.full((1, 2), INF)

    assert token_rewards(torch.ones(1), kl, mask, kl_coef=0.0).tolist() == [[0.0, 1.0]]


def test_truncated_row_bootstraps_with_its_last_value():
    rewards, values = torch.tensor([[1.0, NAN]] * 3), torch.tensor([[3.0, NAN]] * 3)
    mask = torch.tensor([[True, False], [True, False], [False, False]])
    last = torch.tensor([10.0, 0.0, NAN])

    advantages, _ = generalized_advantages(
        rewards, values, mask, gamma=0.5, gae_lambda=0.9, last_values=last
    )

    # 1 + 0.5 * 10 - 3, 1 - 3, nothing sampled
    assert advantages.tolist() == [[3.0, 0.0], [-2.0, 0.0], [0.0, 0.0]]


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
