"""Which tokens are held back; that they are the largest is in test_oracle.py."""

from functools import partial

import pytest
import torch

from raypo.ppo.covariance import covariant_tokens
from tests.unit.learner.plain import on_workers
from tests.unit.ppo.steps import NAN, random_step

ROWS = 9


def chosen(step, rows=None, workers=None, **knobs):
    rows = torch.arange(ROWS) if rows is None else rows
    identity = torch.stack([rows // 3, rows % 3, 0 * rows], 1)
    mine = step.of(rows)
    return covariant_tokens(
        mine.old_log_probs, mine.advantages, mine.mask, identity, workers=workers, **knobs
    )


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
    knobs = {"kind": kind, "fraction": 0.2, "low": -1.0, "high": 1.0, "seed": (7,)}
    whole = chosen(step, **knobs)
    dealt = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).tensor_split(count)

    shares = on_workers(count, lambda w: chosen(step, dealt[w.rank], w, **knobs))

    assert whole.any()
    for rows, share in zip(dealt, shares, strict=True):
        assert (share == whole[rows]).all()


def test_a_step_without_tokens_or_of_one_is_no_error():
    one = partial(covariant_tokens, identity=torch.zeros(1, 3, dtype=torch.int64), fraction=0.5)
    x, yes = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    assert one(x, x, yes, kind="kl_cov").all()
    assert not one(x, x, yes, kind="clip_cov").any()
    assert not one(x, x, ~yes, kind="kl_cov").any()
    with pytest.raises(ValueError, match=r"'cov'.*clip_cov, kl_cov"):
        one(x, x, yes, kind="cov")
