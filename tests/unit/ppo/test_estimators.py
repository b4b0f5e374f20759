import pytest
import torch
from hypothesis import given

from raypo.config.ppo_section import GROUP_ADVANTAGES
from raypo.ppo.advantages import group_baseline
from raypo.ppo.groups import baseline_by_index
from tests.unit.ppo.steps import estimate, few, seeds

GROUP = torch.tensor([4, 4, 4])


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
