"""Responses of several turns: what an environment wrote between them changes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypo.config.ppo_section import ESTIMATORS, GROUP_ADVANTAGES
from raypo.ppo.groups import baseline_by_index
from tests.unit.ppo.steps import INF, NAN, estimate, few, seeds


@pytest.mark.parametrize("discount_by", ["token", "turn"])
@pytest.mark.parametrize("kind", sorted({*ESTIMATORS} - {"gigpo"}))
@given(seed=seeds, rubbish=st.sampled_from([0.0, 1e30, INF, -INF, NAN]))
@few
def test_what_an_environment_writes_and_how_much_changes_no_advantage(
    kind, discount_by, seed, rubbish
):
    """Turns are told apart by what stands between them; how long it is cannot matter."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def laid_out(x: torch.Tensor, gaps: list[int], between: float) -> torch.Tensor:
        """Three turns of two tokens each, with so many of the environment's between them."""
        parts = [x[:, :2]]
        for turn, gap in zip((x[:, 2:4], x[:, 4:]), gaps, strict=True):
            parts += [torch.full((len(x), gap), between, dtype=x.dtype), turn]
        return torch.cat(parts, 1)

    scores, kl, values, earned = normal(4), normal(4, 6), normal(4, 6), normal(4, 6)
    if kind == "maxrl":  # its scores are at least 0
        scores = scores.abs()

    def estimated(gaps: list[int], between: float) -> tuple[torch.Tensor, ...]:
        mask = laid_out(torch.ones(4, 6), gaps, 0.0).bool()
        return tuple(
            each[mask]
            for each in estimate(
                scores,
                mask,
                kind=kind,
                gamma=0.9,
                gae_lambda=0.8,
                discount_by=discount_by,
                kl=laid_out(kl, gaps, between),
                kl_coef=0.0 if kind == "maxrl" else 0.1,
                values=laid_out(values, gaps, between),
                turn_rewards=laid_out(earned, gaps, between),
                group_index=torch.tensor([0, 0, 1, 1]),
            )
        )

    torch.testing.assert_close(estimated([1, 1], 0.0), estimated([3, 2], rubbish))


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_the_rows_of_an_episode_count_once_in_its_group(kind):
    scores = torch.tensor([1.0, 2.0, 2.0, 2.0, 6.0, NAN, NAN])
    group = torch.tensor([0, 0, 0, 0, 0, 0, 0])
    sample = torch.tensor([2, 0, 0, 0, 1, 3, 3])
    valid = ~scores.isnan()

    lengths = torch.tensor([3, 1, 4, 1, 5, 9, 2])

    found = baseline_by_index(scores, group, valid, sample, kind=kind, lengths=lengths, pass_k=2)

    alone = baseline_by_index(
        torch.tensor([1.0, 2.0, 6.0]),
        group[:3],
        torch.ones(3, dtype=torch.bool),
        kind=kind,
        lengths=torch.tensor([3, 6, 5]),
        pass_k=2,
    )
    expected = [alone[0], alone[1], alone[1], alone[1], alone[2], 0.0, 0.0]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("kind", sorted({*ESTIMATORS} - {"gigpo"}))
@given(seed=seeds)
@few
def test_turns_that_nothing_stands_between_are_told_apart_by_their_numbers(kind, seed):
    """An environment may write nothing: a discount by turn holds there too."""
    generator = torch.Generator().manual_seed(seed)
    scores, values, earned = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2,), (2, 6), (2, 6))
    )
    if kind == "maxrl":  # its scores are at least 0
        scores = scores.abs()
    apart = torch.tensor([True, True, False, True, True, False, True, True]).expand(2, 8)

    def estimated(
        mask: torch.Tensor, turn_index: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        def laid_out(x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(mask.shape, dtype=x.dtype).masked_scatter_(mask, x)

        return tuple(
            each[mask]
            for each in estimate(
                scores,
                mask,
                kind=kind,
                gamma=0.5,
                gae_lambda=0.25,
                discount_by="turn",
                values=laid_out(values),
                turn_rewards=laid_out(earned),
                group_index=torch.tensor([0, 0]),
                turn_index=turn_index,
            )
        )

    numbers = torch.tensor([0, 0, 1, 1, 2, 2]).expand(2, 6)
    together = torch.ones(2, 6, dtype=torch.bool)
    expected = estimated(apart)
    torch.testing.assert_close(estimated(together, turn_index=numbers), expected)
    gaps = torch.where(apart, torch.tensor([0, 0, -1, 4, 4, -1, 7, 7]), -1)
    torch.testing.assert_close(estimated(apart, turn_index=gaps), expected)
