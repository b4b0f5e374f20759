"""Each estimator, loss, KL term and correction against loops over Python floats."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import CorrectionSection, PPOSection
from raypo.config.ppo_section import ESTIMATORS
from raypo.ppo.corrections import bounded_weights
from raypo.ppo.covariance import covariant_tokens
from raypo.ppo.high_entropy import with_high_entropy_tokens
from raypo.ppo.kl import kl_estimate, kl_loss_terms
from raypo.ppo.surrogates import SURROGATES
from tests.unit.ppo import oracle
from tests.unit.ppo.steps import (
    AGGREGATIONS,
    CORRECTIONS,
    INF,
    KL_KINDS,
    MASK_RATIOS,
    NAN,
    Step,
    estimate,
    experience,
    few,
    policy_loss,
    random_step,
    seeds,
    value_loss,
)

RUBBISH = st.sampled_from([0.0, 1e30, INF, -INF, NAN])


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Of any small shape, with gaps, an empty row and rubbish behind the mask."""
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    step = random_step(draw(seeds), rows=rows, width=width)
    return step.padded(draw(st.integers(0, 2)), draw(RUBBISH))


def assert_close(actual: Tensor, expected: Any) -> None:
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach(), expected.reshape(actual.shape))


@pytest.mark.parametrize("kind", sorted({*ESTIMATORS} - {"gigpo"}))
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("discount_by", ["token", "turn"])
@given(
    step=steps(),
    samples=st.integers(2, 4),
    failed=st.booleans(),
    turns=st.booleans(),
    alpha=st.sampled_from([None, 0.3]),
    critic_lambda=st.sampled_from([None, 0.6, 1.0]),
    clip=st.sampled_from([None, 0.7]),
    masks=st.booleans(),
    pass_k=st.integers(1, 4),
)
@few
def test_advantages_and_returns(
    *,
    kind,
    gamma,
    discount_by,
    step,
    samples,
    failed,
    turns,
    alpha,
    critic_lambda,
    clip,
    masks,
    pass_k,
):
    rows = len(step.mask)
    scores = torch.randn(rows, generator=torch.Generator().manual_seed(rows)).double()
    if kind == "maxrl":
        scores = scores.abs()
    scores[samples:][:samples] = 0.7  # a group of equal scores, if there is a second one
    if failed:
        scores[-1] = NAN
    group = torch.arange(rows) // samples
    kl = torch.where(step.mask, step.log_probs - step.old_log_probs, NAN).detach()
    knobs: dict[str, Any] = {"kind": kind, "gamma": gamma, "gae_lambda": 0.8, "pass_k": pass_k}
    knobs |= {"kl_coef": 0.0 if kind == "maxrl" else 0.3}  # whose scores are at least 0
    knobs |= {"discount_by": discount_by, "critic_lambda": critic_lambda, "advantage_clip": clip}
    left_out = torch.arange(rows) % 3 == 1 if masks else None  # truncated, with `mask_truncated`
    adaptive: dict[str, Any] = {}
    if alpha is not None:
        adaptive = {"gae_lambda": "adaptive", "lambda_alpha": alpha}
    earned = torch.where(step.mask, step.old_log_probs, NAN).detach() if turns else None

    advantages, returns = estimate(
        scores,
        step.mask,
        kl=kl,
        values=step.old_values,
        group_index=group,
        turn_rewards=earned,
        loss_mask=None if left_out is None else step.mask & ~left_out.unsqueeze(1),
        **knobs | adaptive,
    )

    expected = oracle.advantages(
        scores.tolist(),
        kl.tolist(),
        step.mask.tolist(),
        step.old_values.tolist(),
        group.tolist(),
        turn_rewards=None if earned is None else earned.tolist(),
        lambda_alpha=alpha,
        left_out=None if left_out is None else left_out.tolist(),
        **knobs,
    )
    assert_close(advantages, expected[0])
    assert_close(returns, expected[1])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", SURROGATES)
@given(
    step=steps(),
    weighted=st.booleans(),
    dual=st.booleans(),
    off_policy_mask=st.sampled_from([None, 0.01, 0.3]),
    selects=st.booleans(),
)
@few
def test_policy_loss_and_gradient(
    *, kind, aggregation, step, weighted, dual, off_policy_mask, selects
):
    dual_clipped = kind in ("ppo", "gspo", "clip_cov")
    knobs: dict[str, Any] = {
        "kind": kind,
        "clip_low": 0.1,
        "clip_high": 0.25,
        "dual_clip": 1.2 if dual and dual_clipped else None,
        "cispo_low": 0.15 if dual else None,
        "covariance_kl": 0.3,
        "aggregation": aggregation,
        "max_new_tokens": 13,
        "off_policy_mask": off_policy_mask,
    }
    rollout = step.old_log_probs + 0.5 * step.returns
    high_entropy = step.returns > 0 if selects else None

    loss, _ = policy_loss(
        *step.policy(),
        weights=step.weights if weighted else None,
        covariant=step.covariant,
        rollout=rollout,
        high_entropy=high_entropy,
        **knobs,
    )

    new, old, advantages, mask = (each.tolist() for each in step.policy())
    weights = step.weights.tolist() if weighted else None
    tables = new, old, advantages, mask, weights, step.covariant.tolist()
    expected = oracle.policy_loss(
        *tables,
        rollout=rollout.tolist(),
        high_entropy=None if high_entropy is None else high_entropy.tolist(),
        **knobs,
    )
    (gradient,) = torch.autograd.grad(loss, step.log_probs)
    assert_close(loss, expected[0])
    assert_close(gradient, expected[1])


@given(step=steps(), value_clip=st.sampled_from([None, 0.2]))
@few
def test_value_loss_and_gradient(step, value_clip):
    loss, _ = value_loss(*step.critic(), value_clip=value_clip)

    tables = [tensor.tolist() for tensor in step.critic()]
    expected = oracle.value_loss(*tables, value_clip=value_clip)
    (gradient,) = torch.autograd.grad(loss, step.values)
    assert_close(loss, expected[0])
    assert_close(gradient, expected[1])


@pytest.mark.parametrize("kind", KL_KINDS)
@given(step=steps(), scale=st.sampled_from([1.0, 100.0]), weighted=st.booleans())
@few
def test_kl_and_its_slope(kind, step, scale, weighted):
    reference = scale * step.old_log_probs  # the larger scale meets the clamp
    tables = [each.tolist() for each in (step.log_probs, reference, step.mask)]

    old = step.old_log_probs if weighted and kind != "k1" else None

    value, slope = oracle.kl(*tables, kind=kind, old=None if old is None else old.tolist())

    if kind != "k3_st" and old is None:
        estimate = kl_estimate(step.log_probs, reference, kind=kind, mask=step.mask)
        assert_close(estimate, value)
    if kind != "k1":
        terms = kl_loss_terms(step.log_probs, reference, step.mask, kind=kind, old_log_probs=old)
        assert_close(terms, value)
        assert_close(torch.autograd.grad(terms.sum(), step.log_probs)[0], slope)


@given(step=steps(), fraction=st.sampled_from([1e-6, 0.1, 0.5, 1.0]))
@few
def test_the_tokens_of_high_covariance(step, fraction):
    number = torch.arange(len(step.mask))
    found = covariant_tokens(
        experience(
            step.mask,
            old_log_probs=step.old_log_probs,
            advantages=step.advantages,
            sample_index=number,
            row_index=0 * number,
        ),
        PPOSection.model_validate({"policy_loss": "kl_cov", "covariance": {"fraction": fraction}}),
        Workers(),
        seed=(),
    )

    tables = [each.tolist() for each in (step.old_log_probs, step.advantages, step.mask)]
    assert set(map(tuple, found.nonzero().tolist())) == set(
        oracle.covariant(*tables, fraction=fraction)
    )


@given(step=steps(), fraction=st.sampled_from([1e-6, 0.1, 0.5, 0.999]), equal=st.booleans())
@few
def test_the_tokens_of_high_entropy(step, fraction, equal):
    entropy = step.old_log_probs.abs()
    entropy = entropy.ceil() if equal else entropy
    ppo = PPOSection(top_entropy_fraction=fraction)

    selected, metrics = with_high_entropy_tokens(
        experience(step.mask, entropy=entropy), ppo, Workers()
    )

    expected = oracle.high_entropy(entropy.tolist(), step.mask.tolist(), fraction=fraction)
    assert selected.high_entropy is not None
    assert selected.high_entropy.tolist() == expected
    chosen = entropy[selected.high_entropy]
    assert metrics == {"ppo/entropy_threshold": pytest.approx(chosen.min().item())}


@pytest.mark.parametrize("mask_ratio", MASK_RATIOS)
@pytest.mark.parametrize("kind", CORRECTIONS)
@given(
    step=steps(),
    low=st.sampled_from([0.0, 0.7, 0.95]),
    high=st.sampled_from([1.05, 1.4]),
    token_veto=st.sampled_from([None, 0.5, 0.8]),
)
@few
def test_correction_weights(kind, mask_ratio, step, low, high, token_veto):
    bounds: dict[str, Any] = {"low": low, "high": high, "cap": 1.1, "mask_ratio": mask_ratio}
    bounds |= {"kind": kind, "token_veto": token_veto}

    section = CorrectionSection.model_construct(**bounds)
    weights, _ = bounded_weights(step.log_probs, step.old_log_probs, step.mask, section)

    tables = [each.tolist() for each in (step.log_probs, step.old_log_probs, step.mask)]
    assert_close(weights, oracle.weights(*tables, **bounds))
