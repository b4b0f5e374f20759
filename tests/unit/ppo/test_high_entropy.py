"""Tokens that keep a gradient; that they are those of highest entropy is in test_oracle.py."""

import pytest
import torch

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.ppo.high_entropy import with_high_entropy_tokens
from tests.unit.learner.plain import on_workers
from tests.unit.ppo.steps import NAN, experience, random_step

ROWS = 9
PPO = PPOSection(top_entropy_fraction=0.3)


@pytest.mark.parametrize("count", [2, 3, 10])  # of ten workers, one has no row
def test_the_threshold_is_that_of_all_workers(count):
    step = random_step(2, rows=ROWS, width=6).padded(2, NAN)
    rows = experience(step.mask, entropy=step.old_log_probs.abs())
    whole, metrics = with_high_entropy_tokens(rows, PPO, Workers())
    dealt = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).tensor_split(count)
    parts = [(rows.select(mine), step.mask[mine]) for mine in dealt]

    shares = on_workers(count, lambda w: with_high_entropy_tokens(parts[w.rank][0], PPO, w))

    assert whole.high_entropy is not None
    assert whole.high_entropy.sum() == int(0.3 * step.mask.sum())
    for mine, (share, of_share) in zip(dealt, shares, strict=True):
        assert share.high_entropy is not None
        width = share.high_entropy.shape[1]
        assert torch.equal(share.high_entropy, whole.high_entropy[mine, :width])
        assert of_share == metrics


def test_tokens_that_do_not_count_neither_set_the_threshold_nor_are_selected():
    step = random_step(1, rows=ROWS, width=20)
    entropy = step.old_log_probs.abs()
    left_out = torch.arange(ROWS).unsqueeze(1) == 0
    entropy[0] += 9.0
    rows = experience(step.mask, entropy=entropy, loss_mask=step.mask & ~left_out)

    selected, _ = with_high_entropy_tokens(rows, PPO, Workers())

    assert selected.high_entropy is not None
    assert selected.high_entropy.sum() == int(0.3 * rows.counted.sum())
    assert not selected.high_entropy[0].any()


def test_a_step_without_tokens_selects_none_and_has_no_threshold():
    step = random_step(0)
    rows = experience(torch.zeros_like(step.mask), entropy=step.old_log_probs)

    selected, metrics = with_high_entropy_tokens(rows, PPO, Workers())

    assert selected.high_entropy is not None
    assert not selected.high_entropy.any()
    assert metrics == {}
