"""Neither padding, nor rubbish, nor the cut into micro-batches and workers can matter."""

from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypo.collectives import Workers
from raypo.config import CorrectionSection, KLSection, PPOSection
from raypo.config.ppo_subsections import CovarianceSection
from raypo.ppo.losses import explained_variance
from raypo.ppo.objective import StepCounts, policy_objective, value_objective
from raypo.ppo.surrogates import SURROGATES
from raypo.types import Experience
from tests.unit.ppo.steps import (
    AGGREGATIONS,
    INF,
    NAN,
    Step,
    add,
    experience,
    few,
    fewer,
    random_step,
    seeds,
)

CRITIC = PPOSection()
POLICIES = [
    PPOSection.model_construct(
        policy_loss=kind,
        aggregation=aggregation,
        dual_clip=1.5 if kind in ("ppo", "gspo", "clip_cov") else None,
        cispo_low=0.1,
        clip_high=0.3,
        nll_coef=0.3,
        nll_min_score=0.0,
        covariance=CovarianceSection(penalty=0.7),
        kl=KLSection(coef=0.1, placement="loss", estimator="k3"),
        correction=CorrectionSection(off_policy_mask=0.2 if kind == "sapo" else None),
    )
    for kind in SURROGATES
    for aggregation in AGGREGATIONS
]
CASES = [
    pytest.param(ppo, "log_probs", id=f"{ppo.policy_loss}-{ppo.aggregation}") for ppo in POLICIES
]
CASES.append(pytest.param(CRITIC, "values", id="critic"))


def rows_of(step: Step, **more: Any) -> Experience:
    names = ("old_log_probs", "advantages", "weights", "covariant", "returns")
    given = {name: getattr(step, name) for name in names}
    given |= {"ref_log_probs": step.old_values, "values": step.old_values}
    given |= {"high_entropy": step.values.detach() > -0.5}
    given |= {"rollout_log_probs": step.old_log_probs + 0.5 * step.old_values}
    return experience(step.mask, **given | more)


def counts_of(step: Step, ppo: PPOSection) -> StepCounts:
    return StepCounts.of(rows_of(step), ppo, Workers())


def loss_of(step: Step, ppo: PPOSection, counts: StepCounts | None = None, **more: Any):
    """Loss and statistics of policy or critic; `counts` are those of the whole step."""
    rows = rows_of(step, **more)
    counts = counts or StepCounts.of(rows, ppo, Workers())
    if ppo is CRITIC:
        return value_objective(step.values, rows, ppo, counts)
    output = policy_objective(
        step.log_probs,
        step.returns,  # some entropies
        rows,
        ppo=ppo,
        counts=counts,
        max_new_tokens=9,
        kl_coef=0.2,
        entropy_coef=0.1,
        surrogate=SURROGATES[ppo.policy_loss],
    )
    return output.loss, output.statistics


def whole(step: Step, ppo: PPOSection, leaf: str, **more: Any):
    """Loss, gradient and statistics of the step in one piece."""
    loss, stats = loss_of(step, ppo, **more)
    (gradient,) = torch.autograd.grad(loss, getattr(step, leaf))
    return loss.detach(), gradient, stats


@pytest.mark.parametrize(("ppo", "leaf"), CASES)
@given(seed=seeds, rubbish=st.sampled_from([0.0, 1e30, INF, -INF, NAN]))
@fewer
def test_padding_and_rubbish_change_nothing(ppo, leaf, seed, rubbish):
    step = random_step(seed)
    loss, gradient, stats = whole(step, ppo, leaf)

    wide_loss, wide_gradient, wide_stats = whole(step.padded(3, rubbish), ppo, leaf)

    width = step.mask.shape[1]
    torch.testing.assert_close(wide_loss, loss)
    torch.testing.assert_close(wide_gradient[:, :width], gradient)
    assert wide_gradient[:, width:].abs().sum() == 0.0
    torch.testing.assert_close(wide_stats, stats)


@pytest.mark.parametrize(("ppo", "leaf"), CASES)
@given(seed=seeds, num_workers=st.sampled_from([1, 2, 3]), weighted=st.booleans())
@few
def test_cut_into_workers_and_microbatches_changes_nothing(ppo, leaf, seed, num_workers, weighted):
    """Nor does the order of the rows: they are dealt at random."""
    step = random_step(seed)
    if not weighted:
        step = replace(step, weights=torch.ones_like(step.weights))
    loss, gradient, stats = whole(step, ppo, leaf)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(step.mask), generator=generator)
    owner = torch.randint(0, num_workers, (len(step.mask),), generator=generator)
    shares = [step.of(order[owner == worker]) for worker in range(num_workers)]

    # each worker counts its own share; the sums over workers are everybody's normalizers
    mine = torch.tensor([astuple(counts_of(share, ppo)) for share in shares])
    counts = StepCounts(*mine.sum(0).tolist())
    parts = [
        loss_of(share.of(slice(first, first + 2)), ppo, counts)
        for share in shares
        for first in range(0, max(len(share.mask), 1), 2)  # a worker without rows still takes part
    ]
    total = torch.stack([part[0] for part in parts]).sum()
    (total_gradient,) = torch.autograd.grad(total, getattr(step, leaf))

    torch.testing.assert_close(total.detach(), loss)
    torch.testing.assert_close(total_gradient, gradient)
    summed = add([part[1] for part in parts])
    torch.testing.assert_close(summed, stats, check_dtype=False)
    if "error" in stats:
        torch.testing.assert_close(explained_variance(summed), explained_variance(stats))


@pytest.mark.parametrize("ppo", [each for each in POLICIES if each.policy_loss == "ppo"])
@given(seed=seeds)
@few
def test_a_response_weighs_the_same_in_one_row_as_in_several(ppo, seed):
    """An agent's episode, cut anywhere into conversations, is one response."""
    step = random_step(seed)
    loss, gradient, _ = whole(step, ppo, "log_probs")
    cut = torch.randint(1, 7, (1,), generator=torch.Generator().manual_seed(seed)).item()
    is_first = torch.arange(step.mask.shape[1]) < cut
    both = step.of(torch.arange(len(step.mask)).repeat(2))
    halves = torch.cat([step.mask & is_first, step.mask & ~is_first])

    found, _ = loss_of(
        replace(both, mask=halves),
        ppo,
        row_index=torch.arange(2).repeat_interleave(len(step.mask)),
        sample_tokens=step.mask.sum(1).repeat(2),
    )
    (found_gradient,) = torch.autograd.grad(found, step.log_probs)

    torch.testing.assert_close(found.detach(), loss)
    torch.testing.assert_close(found_gradient, gradient)
