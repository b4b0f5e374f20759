"""KL divergence to the reference model, token by token.

Notation: B responses, T response tokens. Every mask: True = keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypo.config.ppo_subsections import MAX_KL_ERROR
from raypo.ppo.masked import check_same_shape, exact_sum, keep

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios, in nats. They are clamped to it before exp, which could overflow."""
MIN_LOG_PROB = -1e5
"""Floor of log-probs, so that log 0 becomes finite."""


def log_ratio(
    log_probs: Tensor,  # [B, T]
    base_log_probs: Tensor,  # [B, T]
    mask: Tensor | None = None,  # [B, T] bool
) -> Tensor:
    """Return `log_probs - base_log_probs`, finite even if a log-prob is -inf. NaN stays NaN.

    Returns:
        log_ratio: [B, T] in nats, of at least float32, 0 where masked.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(log_probs=log_probs, base_log_probs=base_log_probs)
    mask = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    check_same_shape(log_probs=log_probs, mask=mask)
    floor = MIN_LOG_PROB
    return keep(log_probs, mask).clamp(min=floor) - keep(base_log_probs, mask).clamp(min=floor)


def kl_estimate(
    log_probs: Tensor,  # [B, T]
    ref_log_probs: Tensor,  # [B, T]
    *,
    kind: str,
    mask: Tensor | None = None,  # [B, T] bool
) -> Tensor:
    """Estimate KL(policy || reference) from tokens that the policy sampled.

    With l = log_probs - ref_log_probs:

    - k1 = l is unbiased and may be negative.
    - k2 = l^2 / 2 is biased, with low variance.
    - k3 = exp(-l) - 1 + l is unbiased and never negative. l is clamped to at least
      -`MAX_LOG_RATIO`.

    Use these estimates as values only. For penalties to train on, use `kl_reward_terms` or
    `kl_loss_terms`, because not every kind has the right gradient.

    Returns:
        kl: [B, T] in nats, 0 where masked.

    Raises:
        ValueError: the shapes differ.

    Paper: Schulman 2020, "Approximating KL Divergence" (blog).
    """
    ratio = log_ratio(log_probs, ref_log_probs, mask)
    if kind == "k1":
        return ratio
    if kind == "k2":
        return 0.5 * ratio.square()
    assert kind == "k3", kind
    return k3(ratio)


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(-l) - 1 + l for log-ratios l, which are clamped to at least -`MAX_LOG_RATIO`.

    Large positive log-ratios occur if the policy is far from its reference model. They are not
    clamped, so the slope there stays 1.

    Returns:
        k3: Same shape as `log_ratio`, in nats, never negative.

    Paper: Schulman 2020, "Approximating KL Divergence" (blog).
    """
    clamped = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-clamped) + clamped


def kl_reward_terms(
    log_probs: Tensor,  # [B, T], of the policy that sampled
    ref_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
) -> Tensor:
    """Return the KL per token to subtract in `token_rewards` or `penalized_scores`: k1.

    In a reward, only k1 has the gradient of KL(policy || reference). With l the log-ratio (k1) and
    p the policy, the expectation of l * grad log p is the gradient of the KL of the whole response.
    This gradient includes the effect of each token on later states. k3 would give
    grad KL(policy || reference) - grad KL(reference || policy), which may push the policy away from
    the reference model. k2 is biased too.

    Returns:
        kl: [B, T] in nats, 0 where masked, detached.

    Raises:
        ValueError: the shapes differ.

    Paper: Liu et al. 2025, arXiv:2510.01555.
    """
    return log_ratio(log_probs.detach(), ref_log_probs, mask)


def kl_loss_terms(
    log_probs: Tensor,  # [B, T], with gradient
    ref_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    kind: str,
    old_log_probs: Tensor | None = None,  # [B, T]
) -> Tensor:
    """Return KL terms per token to aggregate and add to the loss.

    Only `log_probs` gets a gradient. In expectation:

    - k2 has the gradient of KL(policy || reference) of the next token, in each state of a response.
    - k3, as published with GRPO, has the gradient of KL(reference || policy).
    - k3_st has the value of k3 and the gradient of k2.

    No kind accounts for the effect of a token on later states. A penalty in the reward does.

    Args:
        log_probs: Log-probs of the policy, in nats.
        ref_log_probs: Log-probs of the reference model.
        mask: True on sampled tokens.
        kind: k2, k3 or k3_st.
        old_log_probs: Log-probs of the policy that sampled. If given, each term is multiplied by
            the ratio exp(log_probs - old_log_probs), so that the gradients stay right off-policy.
            For k2 and k3_st the ratio is a weight without gradient. For k3 the ratio has a
            gradient, and k3 then has the gradient of KL(policy || reference). None means no ratio.

    Returns:
        kl: [B, T] in nats, 0 where masked.

    Raises:
        ValueError: the shapes differ.

    Paper: Liu et al. 2025, arXiv:2510.01555 (k2 as a loss); Shao et al. 2024, arXiv:2402.03300,
        eq. 4 (k3 as a loss); DeepSeek-AI 2025, arXiv:2512.02556, section 3.1 (k3 with its ratio).
    """
    reference = ref_log_probs.detach()
    terms = kl_estimate(log_probs, reference, kind="k3" if kind == "k3" else "k2", mask=mask)
    if kind == "k3_st":
        value = kl_estimate(log_probs, reference, kind="k3", mask=mask).detach()
        terms = value + (terms - terms.detach())
    if old_log_probs is None:
        return terms
    old_log_ratio = log_ratio(log_probs, old_log_probs.detach(), mask)
    ratio = old_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return terms * (ratio if kind == "k3" else ratio.detach())


def kl_statistics(
    log_probs: Tensor,  # [B, T]
    ref_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
) -> dict[str, Tensor]:
    """Return statistics of the KL (k1) as sums, to add over micro-batches and workers.

    Returns:
        stats: Detached float64 scalars: `kl` (nats), `tokens`, `clamped` (tokens with a log-ratio
            below -`MAX_LOG_RATIO`, where k3 is clamped). `kl / tokens` is in nats per token;
            `KLController` takes nats per response.

    Raises:
        ValueError: the shapes differ.
    """
    with torch.no_grad():
        ratio = log_ratio(log_probs, ref_log_probs, mask)
        return {
            "kl": exact_sum(ratio),
            "tokens": mask.sum().double(),
            "clamped": (ratio < -MAX_LOG_RATIO).sum().double(),
        }


@dataclass(frozen=True)
class KLController:
    """KL coefficient of a run: fixed, or adapted towards a target KL.

    Example: coef 0.1, target 6, horizon 1000. A step of 100 responses at 9 nats per response gives
    0.1 * (1 + clip(9 / 6 - 1, -0.2, 0.2) * 100 / 1000) = 0.102.

    The config section `ppo.kl` validates these values.

    Paper: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    coef: float
    """Weight of the penalty, in score per nat."""
    target: float | None = None
    """Target KL in nats per response. None means a fixed coefficient."""
    horizon: float | None = None
    """Number of responses over which the coefficient changes by the relative error of the KL, which
    is clipped to 20 %. None means a fixed coefficient."""

    def updated(self, kl: float, num_responses: int) -> KLController:
        """Return the controller for the next step.

        Args:
            kl: Mean KL of the step's responses, each summed over its tokens, in nats. NaN leaves
                the coefficient unchanged.
            num_responses: Responses of the step, over all workers.

        Raises:
            ValueError: the step has too many responses for the horizon, so that the coefficient
                could turn negative.
        """
        if self.target is None or self.horizon is None or math.isnan(kl):
            return self
        max_change = MAX_KL_ERROR * num_responses / self.horizon
        if max_change >= 1.0:
            raise ValueError(
                f"horizon ({self.horizon}) must be above {MAX_KL_ERROR} * the responses of a "
                f"step ({num_responses}), or the coefficient could turn negative. "
                f"Set it to {num_responses} or more."
            )
        error = min(max(kl / self.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
        return replace(self, coef=self.coef * (1.0 + error * num_responses / self.horizon))

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"coef": self.coef}

    def restored(self, state: dict[str, float]) -> KLController:
        """Return the controller with the saved coefficient.

        A fixed coefficient keeps its value from the config.
        """
        return self if self.target is None else replace(self, coef=state["coef"])
