"""Which tokens are held back; that they are the largest is in test_oracle.py."""

from dataclasses import replace

import pytest
import torch

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.ppo.covariance import covariant_tokens
from tests.unit.learner.plain import on_workers
from tests.unit.ppo.steps import NAN, experience, random_step

ROWS = 9


def chosen(step, rows=None, workers=None, *, kind, seed=(), **covariance):
    rows = torch.arange(len(step.mask)) if rows is None else rows
    mine = step.of(rows)
    held = experience(
        mine.mask,
        old_log_probs=mine.old_log_probs,
        advantages=mine.advantages,
        group_index=rows // 3,
        sample_index=rows % 3,
        row_index=0 * rows,
    )
    ppo = PPOSection.model_validate({"policy_loss": kind, "covariance": covariance})
    return covariant_tokens(held, ppo, workers or Workers(), seed=seed)


def test_clip_cov_draws_from_those_between_its_bounds():
    step = random_step(1, rows=ROWS, width=20)
    window = {"kind": "clip_cov", "low": 0.1, "high": 0.6}
    everyone = chosen(step, fraction=1.0, seed=(1,), **window)
    count = int(step.mask.sum())
    some = [chosen(step, fraction=0.1, seed=(seed,), **window) for seed in (1, 1, 2)]

    centred = [
        torch.where(step.mask, each - each[step.mask].mean(), 0.0)
        for each in (step.old_log_probs, step.advantages)
    ]
    products = centred[0] * centred[1]
    assert (everyone == step.mask & (products > 0.1) & (products < 0.6)).all()
    assert [int(each.sum()) for each in some] == [int(0.1 * count)] * 3
    assert all((each & ~everyone).sum() == 0 for each in some)
    assert (some[0] == some[1]).all()
    assert (some[0] != some[2]).any()  # another draw


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("count", [2, 3])
def test_who_holds_a_response_does_not_matter(kind, count):
    step = random_step(2, rows=ROWS, width=6).padded(2, NAN)
    knobs = {"kind": kind, "fraction": 0.2, "seed": (7,)}
    knobs |= {"low": -1.0, "high": 1.0} if kind == "clip_cov" else {}
    whole = chosen(step, **knobs)
    dealt = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).tensor_split(count)

    shares = on_workers(count, lambda w: chosen(step, dealt[w.rank], w, **knobs))

    assert whole.any()
    for rows, share in zip(dealt, shares, strict=True):
        assert (share == whole[rows]).all()


def test_a_step_without_tokens_or_of_one_is_no_error():
    one = random_step(0, rows=1, width=1)
    assert chosen(one, kind="kl_cov").all()
    assert not chosen(one, kind="clip_cov").any()
    assert not chosen(replace(one, mask=~one.mask), kind="kl_cov").any()
