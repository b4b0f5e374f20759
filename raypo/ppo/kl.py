"""Divergence from the reference model, token by token.

B responses, T response tokens. Every mask: True = keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypo.config.ppo_section import MAX_KL_ERROR
from raypo.ppo.masked import check_choice, check_same_shape, exact_sum, keep

KL_KINDS = ("k1", "k2", "k3")
KL_LOSS_KINDS = ("k2", "k3", "k3_st")
MAX_LOG_RATIO = 20.0
"""Nats to which a log-ratio is clamped before exp, on the sides where exp would overflow."""
MIN_LOG_PROB = -1e5
"""Stands in for log 0, so that the difference of two log-probs is always a number."""


def log_ratio(
    log_probs: Tensor,  # [B, T]
    base_log_probs: Tensor,  # [B, T]
    mask: Tensor | None = None,  # [B, T] bool
) -> Tensor:
    """`log_probs - base_log_probs`, finite where a log-prob is -inf; NaN stays NaN.

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
    """Estimates of KL(policy || reference) from tokens that the policy sampled.

    k1 = l is unbiased and may be negative; k2 = l^2 / 2 is biased with low variance;
    k3 = exp(-l) - 1 + l is unbiased and never negative; l = log_probs - ref_log_probs.
    In k3, l is first clamped to -`MAX_LOG_RATIO` from below. These are values: a penalty to train
    on is `kl_reward_terms` or `kl_loss_terms`, where not every kind has the right gradient.

    Returns:
        kl: [B, T] in nats, 0 where masked.

    Raises:
        ValueError: `kind` is unknown or the shapes differ.

    Paper: Schulman 2020, "Approximating KL Divergence" (blog).
    """
    check_choice("kind", kind, KL_KINDS)
    ratio = log_ratio(log_probs, ref_log_probs, mask)
    if kind == "k1":
        return ratio
    if kind == "k2":
        return 0.5 * ratio.square()
    return k3(ratio)


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-l) - 1 + l of log-ratios l, which are clamped from below, where exp(-l) is large.

    Above, where a policy has drifted far from its reference, nothing is clamped: the slope stays 1.

    Returns:
        k3: its shape, in nats, never negative.

    Paper: Schulman 2020, "Approximating KL Divergence" (blog).
    """
    clamped = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-clamped) + clamped


def kl_reward_terms(
    log_probs: Tensor,  # [B, T], of the policy that sampled
    ref_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    kind: str,
) -> Tensor:
    """Per-token KL to subtract from the reward, for `token_rewards` or `penalized_scores`.

    Only k1 has the gradient of KL(policy || reference) there: the expectation of l * grad log p is
    the gradient of the KL of the whole response, earlier tokens leading to later states included.
    k3 in its place gives grad KL(policy || reference) - grad KL(reference || policy), which may
    push away from the reference, and k2 is biased too.

    Returns:
        kl: [B, T] in nats, 0 where masked, detached.

    Raises:
        ValueError: `kind` is not k1, or the shapes differ.

    Paper: Liu et al. 2025, arXiv:2510.01555.
    """
    if kind != "k1":
        raise ValueError(
            f"kind ({kind!r}) cannot be a penalty in the reward: only k1 has the KL's gradient "
            "there. Use 'k1', or place the penalty in the loss."
        )
    return kl_estimate(log_probs.detach(), ref_log_probs, kind=kind, mask=mask)


def kl_loss_terms(
    log_probs: Tensor,  # [B, T], with gradient
    ref_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    kind: str,
    old_log_probs: Tensor | None = None,  # [B, T]
) -> Tensor:
    """Per-token KL terms to aggregate and add to the loss; only `log_probs` gets a gradient.

    In expectation, k2 and k3_st have the gradient of KL(policy || reference) of the next token in
    each state that a response went through; k3, as GRPO published it, that of the reverse
    KL(reference || policy). k3_st has k3's value. How a token leads to later states is in none of
    them: only a penalty in the reward gives credit for that.

    Args:
        old_log_probs: of the policy that sampled. Given, each term is multiplied by the ratio
            exp(log_probs - old_log_probs), so that the above holds after the policy has moved on.
            The ratio of k3 has a gradient, with which k3 has that of KL(policy || reference); k2
            and k3_st have it without, and their ratio is a mere weight. None: no ratio.

    Returns:
        kl: [B, T] in nats, 0 where masked.

    Raises:
        ValueError: `kind` is k1 or unknown, or the shapes differ.

    Paper: Liu et al. 2025, arXiv:2510.01555 (k2 as a loss); Shao et al. 2024, arXiv:2402.03300,
        eq. 4 (k3 as a loss); DeepSeek-AI 2025, arXiv:2512.02556, section 3.1 (k3 with its ratio).
    """
    if kind == "k1":
        raise ValueError(
            "kind ('k1') cannot be a loss term: its gradient is 0 in expectation, so it pulls "
            "nowhere. Use 'k2' or 'k3', or place the penalty in the reward."
        )
    check_choice("kind", kind, KL_LOSS_KINDS)
    reference = ref_log_probs.detach()
    terms = kl_estimate(log_probs, reference, kind="k3" if kind == "k3" else "k2", mask=mask)
    if kind == "k3_st":
        value = kl_estimate(log_probs, reference, kind="k3", mask=mask).detach()
        terms = value + (terms - terms.detach())
    if old_log_probs is None:
        return terms
    change = log_ratio(log_probs, old_log_probs.detach(), mask)
    ratio = change.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return terms * (ratio if kind == "k3" else ratio.detach())


def kl_statistics(
    log_probs: Tensor,  # [B, T]
    ref_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
) -> dict[str, Tensor]:
    """What to log of the divergence (k1), as sums that add over micro-batches and workers.

    Returns:
        stats: detached float64 scalars: `kl` (nats), `tokens`, `clamped` (tokens with a log-ratio
            below -`MAX_LOG_RATIO`, where k3 is held). `kl / tokens` is in nats per token; what
            `KLController` takes is nats per response.

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
    """The KL coefficient over a run: fixed, or steered towards a target KL.

    Example: coef 0.1, target 6, horizon 1000; a step of 100 responses at 9 nats per response gives
    0.1 * (1 + clip(9 / 6 - 1, -0.2, 0.2) * 100 / 1000) = 0.102.

    Raises:
        ValueError: target and horizon are not both set or both None, or a number is out of range.

    Paper: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    coef: float
    """Weight of the penalty, in score per nat."""
    target: float | None = None
    """Nats per response that the coefficient steers to; None: fixed."""
    horizon: float | None = None
    """Responses over which a full correction is spread; None: fixed."""

    def __post_init__(self) -> None:
        if self.coef < 0.0:
            raise ValueError(f"coef ({self.coef}) must not be negative.")
        if (self.target is None) != (self.horizon is None):
            raise ValueError(
                f"target ({self.target}) and horizon ({self.horizon}) belong together: set both "
                "for an adaptive coefficient, neither for a fixed one."
            )
        if self.target is not None and self.horizon is not None:
            if self.target <= 0.0 or self.horizon <= 0.0:
                raise ValueError(
                    f"target ({self.target}) and horizon ({self.horizon}) must be positive."
                )
            if self.coef == 0.0:
                raise ValueError("coef (0.0) would stay 0: an adaptive one starts above 0.")

    def updated(self, kl: float, num_responses: int) -> KLController:
        """The controller for the next step.

        Args:
            kl: mean over all responses of the step of their summed KL, in nats per response. NaN
                changes nothing: it says nothing of where to steer.
            num_responses: responses of the step, over all workers.

        Raises:
            ValueError: the step is so large against the horizon that the coefficient could turn
                negative.
        """
        if self.target is None or self.horizon is None or math.isnan(kl):
            return self
        reach = MAX_KL_ERROR * num_responses / self.horizon
        if reach >= 1.0:
            raise ValueError(
                f"horizon ({self.horizon}) must be above {MAX_KL_ERROR} * the responses of a "
                f"step ({num_responses}), or the coefficient could turn negative. "
                f"Set it to {num_responses} or more."
            )
        error = min(max(kl / self.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
        return replace(self, coef=self.coef * (1.0 + error * num_responses / self.horizon))

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coef": self.coef}

    def restored(self, state: dict[str, float]) -> KLController:
        """This controller as `state` left it; a fixed coefficient stays the config's."""
        return self if self.target is None else replace(self, coef=state["coef"])
