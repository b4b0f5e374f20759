"""Neither padding, nor rubbish, nor the cut into micro-batches and workers can matter."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypo.ppo.losses import AGGREGATIONS, count_for, explained_variance, policy_loss, value_loss
from raypo.ppo.surrogates import SURROGATES
from tests.unit.ppo.steps import INF, NAN, Step, add, few, fewer, random_step, seeds

POLICY = [
    (kind, aggregation, weighted)
    for kind, aggregation, weighted in itertools.product(SURROGATES, AGGREGATIONS, (False, True))
]
VALUE = list(itertools.product((None, 0.2), AGGREGATIONS))
MAX_NEW_TOKENS = 9


def policy(step: Step, case, normalizer=None):
    kind, aggregation, weighted = case
    return policy_loss(
        *step.policy(),
        kind=kind,
        dual_clip=1.5 if kind in ("ppo", "gspo", "clip_cov") else None,
        cispo_low=0.1,
        covariant=step.covariant,
        clip_high=0.3,
        aggregation=aggregation,
        weights=step.weights if weighted else None,
        max_new_tokens=MAX_NEW_TOKENS,
        normalizer=normalizer,
    )


def critic(step: Step, case, normalizer=None):
    value_clip, aggregation = case
    return value_loss(
        *step.critic(),
        value_clip=value_clip,
        aggregation=aggregation,
        max_new_tokens=MAX_NEW_TOKENS,
        normalizer=normalizer,
    )


CASES = [pytest.param(policy, case, "log_probs", id="-".join(map(str, case))) for case in POLICY]
CASES += [pytest.param(critic, case, "values", id="-".join(map(str, case))) for case in VALUE]


def whole(loss_of, step: Step, case, leaf: str):
    """Loss, gradient and statistics of the step in one piece."""
    loss, stats = loss_of(step, case)
    (gradient,) = torch.autograd.grad(loss, getattr(step, leaf))
    return loss.detach(), gradient, stats


@pytest.mark.parametrize(("loss_of", "case", "leaf"), CASES)
@given(seed=seeds, rubbish=st.sampled_from([0.0, 1e30, INF, -INF, NAN]))
@fewer
def test_padding_and_rubbish_change_nothing(loss_of, case, leaf, seed, rubbish):
    step = random_step(seed)
    loss, gradient, stats = whole(loss_of, step, case, leaf)

    wide_loss, wide_gradient, wide_stats = whole(loss_of, step.padded(3, rubbish), case, leaf)

    width = step.mask.shape[1]
    torch.testing.assert_close(wide_loss, loss)
    torch.testing.assert_close(wide_gradient[:, :width], gradient)
    assert wide_gradient[:, width:].abs().sum() == 0.0
    torch.testing.assert_close(wide_stats, stats)


@pytest.mark.parametrize(("loss_of", "case", "leaf"), CASES)
@given(seed=seeds)
@fewer
def test_order_of_rows_changes_nothing(loss_of, case, leaf, seed):
    step = random_step(seed)
    loss, gradient, stats = whole(loss_of, step, case, leaf)
    order = torch.randperm(len(step.mask), generator=torch.Generator().manual_seed(seed))

    shuffled_loss, shuffled_stats = loss_of(step.of(order), case)
    (shuffled_gradient,) = torch.autograd.grad(shuffled_loss, getattr(step, leaf))

    torch.testing.assert_close(shuffled_loss, loss)
    torch.testing.assert_close(shuffled_gradient, gradient)
    torch.testing.assert_close(shuffled_stats, stats)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize(("loss_of", "case", "leaf"), CASES)
@given(seed=seeds)
@fewer
def test_cut_into_workers_and_microbatches_changes_nothing(loss_of, case, leaf, num_workers, seed):
    step = random_step(seed)
    loss, gradient, stats = whole(loss_of, step, case, leaf)
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(0, num_workers, (len(step.mask),), generator=generator)
    shares = [step.of(torch.nonzero(owner == worker).flatten()) for worker in range(num_workers)]

    # each worker counts its own share; the sum over workers is everybody's normalizer
    aggregation = case[1]
    normalizer = sum(count_for(share.mask, aggregation=aggregation) for share in shares)
    parts = [
        loss_of(share.of(slice(first, first + 2)), case, normalizer=normalizer)
        for share in shares
        for first in range(0, max(len(share.mask), 1), 2)  # a worker without rows still takes part
    ]
    total = torch.stack([part[0] for part in parts]).sum()
    (total_gradient,) = torch.autograd.grad(total, getattr(step, leaf))

    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(total_gradient, gradient)
    summed = add([part[1] for part in parts])
    torch.testing.assert_close(summed, stats, check_dtype=False)
    if "error" in stats:
        torch.testing.assert_close(explained_variance(summed), explained_variance(stats))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=seeds)
@few
def test_a_response_weighs_the_same_in_one_row_as_in_several(aggregation, seed):
    """An agent's episode, cut anywhere into conversations, is one response."""
    step = random_step(seed)
    whole_loss, gradient, _ = whole(policy, step, ("ppo", aggregation, False), "log_probs")
    cut = torch.randint(1, 7, (1,), generator=torch.Generator().manual_seed(seed)).item()
    is_first = torch.arange(step.mask.shape[1]) < cut
    parts = [
        replace(step, log_probs=step.log_probs, mask=step.mask & half)
        for half in (is_first, ~is_first)
    ]
    tokens = step.mask.sum(1)
    normalizer = count_for(step.mask, aggregation=aggregation)
    losses = [
        policy_loss(
            *part.policy(),
            dual_clip=1.5,
            clip_high=0.3,
            aggregation=aggregation,
            max_new_tokens=MAX_NEW_TOKENS,
            sample_tokens=tokens,
            normalizer=normalizer,
        )[0]
        for part in parts
    ]
    total = torch.stack(losses).sum()
    (total_gradient,) = torch.autograd.grad(total, step.log_probs)
    torch.testing.assert_close(total.detach(), whole_loss)
    torch.testing.assert_close(total_gradient, gradient)
