import pytest
import torch
from hypothesis import given

from raypo.config.ppo_section import ESTIMATORS, GROUP_ADVANTAGES
from raypo.ppo.advantages import group_baseline
from raypo.ppo.groups import baseline_by_index
from tests.unit.ppo.steps import NAN, estimate, few, seeds

MASK = torch.tensor([[True, True], [True, False], [True, True]])
SCORES = torch.tensor([1.0, 2.0, 6.0])
KL = torch.tensor([[0.2, 0.4], [0.6, NAN], [0.0, 0.0]])
GROUP = torch.tensor([4, 4, 4])


def estimated(kind, **knobs):
    return estimate(SCORES, MASK, kind=kind, group_index=GROUP, **knobs)


def spread(scores):
    return torch.where(MASK, torch.tensor(scores).unsqueeze(1), 0.0)


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_groups_compare_scores_with_the_kl_of_the_whole_response_in_them(kind):
    _, returns = estimated(kind, kl=KL, kl_coef=0.5)

    # scores less 0.5 * (0.6, 0.6, 0): 0.7, 1.7, 6, of mean 2.8
    centred = [0.7 - 2.8, 1.7 - 2.8, 6.0 - 2.8]
    std = (sum(x * x for x in centred) / 2) ** 0.5
    pair_std = (sum((x - 13.7 / 3) ** 2 for x in (1.7, 6.0, 6.0)) / 3) ** 0.5
    expected = {
        "rloo": [0.7 - 3.85, 1.7 - 3.35, 6.0 - 1.2],  # each less the mean of the others
        "grpo": [x / (std + 1e-6) for x in centred],  # the deviation has the KL in it
        "maxrl": [x / 2.8 for x in centred],
        "opo": [x - 15.1 / 5 for x in (0.7, 1.7, 6.0)],  # (2 * 0.7 + 1.7 + 2 * 6) / 5
        # the best of each pair: 1.7, 6, 6, of mean 13.7 / 3
        "pass_at_k": [(x - 13.7 / 3) / pair_std for x in (3.85, 3.85, 6.0)],
    }
    torch.testing.assert_close(returns, spread(expected.get(kind, centred)))


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_a_kl_in_the_reward_is_no_push_down_on_a_whole_group(kind):
    mask = torch.ones(4, 500, dtype=torch.bool)
    knobs = {"kind": kind, "gamma": 1.0, "kl_coef": 0.01, "group_index": torch.zeros(4).long()}
    alike = torch.full((4, 500), 0.05)

    advantages, _ = estimate(torch.ones(4), mask, kl=alike, **knobs)

    assert advantages.abs().max().item() == 0.0
    apart = alike * torch.tensor([[0.8], [0.9], [1.1], [1.2]])
    advantages, _ = estimate(torch.ones(4), mask, kl=apart, **knobs)
    torch.testing.assert_close(advantages.mean(0), torch.zeros(500), atol=1e-5, rtol=0)
    if kind == "pass_at_k":  # the best of two: the last is in no pair that it wins
        assert advantages[0, 0] > advantages[1, 0] > advantages[2, 0]
        return
    assert (advantages[:2] > 0).all()  # nearer to the reference than the group
    assert (advantages[2:] < 0).all()


@pytest.mark.parametrize(
    ("critic_lambda", "num_fits", "value_of_the_first"), [(1.0, 1, 1.0), (None, 10, 0.0002)]
)
def test_a_score_reaches_the_first_of_500_tokens_in_one_fit_by_targets_of_lambda_one(
    critic_lambda, num_fits, value_of_the_first
):
    values, mask = torch.zeros(1, 500), torch.ones(1, 500, dtype=torch.bool)
    for _ in range(num_fits):  # a table fits its targets perfectly
        _, values = estimate(
            torch.ones(1),
            mask,
            kind="gae",
            gamma=1.0,
            gae_lambda=0.95,
            critic_lambda=critic_lambda,
            values=values,
        )
    assert float(values[0, 0]) == pytest.approx(value_of_the_first, rel=1e-6, abs=5e-5)
    assert values[0, -1] == 1.0


@pytest.mark.parametrize("kind", sorted({*ESTIMATORS} - {"gigpo"}))
def test_failed_and_empty_responses_are_in_no_statistic(kind):
    values = torch.zeros(3, 2)
    knobs = {"kind": kind, "gamma": 1.0, "kl_coef": 0.1}
    three = estimate(SCORES, MASK, group_index=GROUP, values=values, kl=KL, **knobs)

    five = estimate(
        torch.cat([SCORES, torch.tensor([NAN, 100.0])]),
        torch.cat([MASK, torch.tensor([[True, True], [False, False]])]),
        group_index=torch.full((5,), 4),
        values=torch.full((5, 2), NAN).index_put_((torch.arange(3),), values),
        kl=torch.cat([KL, torch.full((2, 2), NAN)]),
        **knobs,
    )

    for a, b in zip(three, five, strict=True):
        torch.testing.assert_close(b[:3], a)
        assert b[3:].abs().sum() == 0.0


@given(seed=seeds)
@few
def test_order_of_rows_and_their_deal_to_groups_change_no_baseline(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 3, generator=generator)
    lengths = torch.randint(1, 9, (4, 3), generator=generator)
    order = torch.randperm(12, generator=generator)
    index = torch.tensor([7, 1, 30, 2]).repeat_interleave(3)
    every = torch.ones(12, dtype=torch.bool)

    for kind in GROUP_ADVANTAGES:
        given = scores.abs() if kind == "maxrl" else scores
        flat = baseline_by_index(
            given.flatten()[order],
            index[order],
            every,
            kind=kind,
            lengths=lengths.flatten()[order],
            pass_k=2,
        )
        expected = group_baseline(given, kind=kind, lengths=lengths, pass_k=2)
        torch.testing.assert_close(flat, expected.flatten()[order])


def test_a_group_whose_other_samples_were_lost_teaches_nothing():
    every = torch.ones(3, dtype=torch.bool)
    alone = baseline_by_index(
        torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 2]), every, kind="rloo"
    )

    assert alone.tolist() == [0.0, 0.0, 0.0]
    assert baseline_by_index(alone[:0], GROUP[:0], every[:0], kind="rloo").tolist() == []
