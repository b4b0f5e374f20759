"""Sections of `ppo`: KL, rollout correction, covariance, score shaping, filter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from raypo.config.base import Config, ImportPath
from raypo.config.only_if import SET, above, only_if

MAX_KL_ERROR = 0.2
"""Bound on the relative error of the KL in the adaptive KL controller."""
OVERLONG_SHARE = 5
"""Divisor of rollout.max_new_tokens for `overlong_buffer_tokens: auto` (DAPO: 4096 of 20480
tokens)."""


def _crossed(key: str, low: float | None, high_name: str, high: float | None) -> Iterator[str]:
    """Yield a problem if the lower of two bounds is not below the upper one."""
    if low is not None and high is not None and low >= high:
        yield (
            f"{key} ({low:g}): must be below {high_name} ({high:g}), or the range is empty. Set "
            f"{key} below {high:g}."
        )


class KLSection(Config):
    """KL penalty towards the reference model."""

    coef: float = Field(default=0.01, ge=0.0)
    """Initial coefficient of the KL penalty, in score per nat. 0 means no penalty, and no reference
    model is started."""
    estimator: Literal["k1", "k2", "k3", "k3_st"] = "k1"
    """Per-token KL estimator (Schulman 2020). In the reward: k1. In the loss: k2, k3 (as GRPO
    published it, with the gradient of KL(reference || policy)) or k3_st (value of k3, gradient of
    k2; arXiv:2510.01555)."""
    placement: Literal["reward", "loss"] = "reward"
    """Place of the penalty. reward: in the token rewards, or in the score of the response if
    ppo.advantage compares the samples of a prompt; loss: a term of the policy loss."""
    importance_weights: Annotated[bool, only_if("placement", "loss"), only_if("coef", above(0))] = (
        False
    )
    """Multiply the KL term of each token by the token's ratio of new to old probability and by its
    weight from ppo.correction. The term is then unbiased even after the
    policy has changed, and k3 has the gradient of the KL itself (DeepSeek-V3.2, arXiv:2512.02556).
    """
    controller: Literal["fixed", "adaptive"] = "fixed"
    """Controller of the coefficient. fixed: constant; adaptive: adjusted so that the KL approaches
    `target` (arXiv:1909.08593, section 2.2)."""
    target: Annotated[float | None, only_if("controller", "adaptive")] = Field(default=None, gt=0.0)
    """Target KL of the adaptive controller, in nats per response."""
    horizon: Annotated[float | None, only_if("controller", "adaptive")] = Field(
        default=None, gt=0.0
    )
    """Number of responses over which the adaptive controller spreads a full correction."""

    def _problems(self) -> Iterator[str]:
        if self.estimator == "k1" and self.placement == "loss":
            yield (
                "ppo.kl.estimator (k1): cannot be a loss term, its gradient is 0 in expectation. "
                "Set ppo.kl.estimator to k2 or k3, or ppo.kl.placement to reward."
            )
        if self.estimator != "k1" and self.placement == "reward":
            yield (
                f"ppo.kl.estimator ({self.estimator}): cannot be a penalty in the reward, where "
                "only k1 has the KL's gradient. "
                "Set ppo.kl.estimator to k1, or ppo.kl.placement to loss."
            )
        if self.controller == "fixed":
            return
        for key in ("target", "horizon"):
            if getattr(self, key) is None:
                yield (
                    f"ppo.kl.{key} (null): ppo.kl.controller: adaptive needs it. "
                    f"Set ppo.kl.{key} above 0, or ppo.kl.controller to fixed."
                )
        if self.coef == 0.0:
            yield (
                "ppo.kl.coef (0.0): would stay 0 under ppo.kl.controller: adaptive. "
                "Set ppo.kl.coef above 0, or ppo.kl.controller to fixed."
            )


class CorrectionSection(Config):
    """Rollout correction: importance weights for the mismatch between engine and learner.

    A ratio is the learner's probability before the update divided by the engine's. Tokens that are
    dropped get weight 0 and still count in the denominator of the loss.
    """

    kind: Literal["none", "tis", "sequence_tis", "geometric_tis", "icepop", "mis"] = "none"
    """Kind of correction. none: all weights are 1. tis, sequence_tis, geometric_tis: the weight is
    the token's ratio, the product of the response's ratios, or their geometric mean, truncated at
    `cap`. icepop: the weight is the token's ratio, and tokens outside [low, high] are dropped. mis:
    weights as in tis, and responses whose `mask_ratio` is outside [low, high] are dropped."""
    cap: Annotated[float | None, only_if("kind", "tis", "sequence_tis", "geometric_tis", "mis")] = (
        Field(default=None, ge=1.0)
    )
    """Largest weight. null means 2, or 1.001 for
    geometric_tis."""
    low: Annotated[float | None, only_if("kind", "icepop", "mis")] = Field(
        default=None, ge=0.0, le=1.0
    )
    """Smallest ratio that is kept, of a token (icepop) or of a response (mis). null means 0.5 for
    icepop (arXiv:2510.18855), 0.999 for mis with the geometric mean, and 0.5 for mis with the
    product."""
    high: Annotated[float | None, only_if("kind", "icepop", "mis")] = Field(default=None, ge=1.0)
    """Largest ratio that is kept, of a token (icepop) or of a response (mis). null means 5 for
    icepop, 1.001 for mis with the geometric mean, and 2 for mis with the product."""
    mask_ratio: Annotated[Literal["geometric", "product"], only_if("kind", "mis")] = "geometric"
    """Ratio of a response. geometric: the geometric mean of its tokens' ratios; product:
    their product. The default bounds of geometric are near 1. They suit responses of thousands of
    tokens, and short responses need wider bounds."""
    token_veto: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Drop every response with a token whose ratio is below this value, like 1e-4. It works with
    every `kind`, including none. null means no veto."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Drop every token whose staleness is above this value. Staleness is the weight version at the
    start of the update minus the version that sampled the token. This works with every `kind`,
    including none. null means that no token is dropped."""
    off_policy_mask: float | None = Field(default=None, gt=0.0)
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, eq. 9): drop the tokens with a
    negative advantage of every response whose mean log-ratio, of the engine's probability to the
    current policy's, is above this value, in nats per token, like 0.5. It is computed anew in each
    update, and works with every `kind`, including none. null means no mask."""

    @property
    def acts(self) -> bool:
        """True if a token may get a weight other than 1 from `kind` or `token_veto`."""
        return self.kind != "none" or self.token_veto is not None


class CovarianceSection(Config):
    """Restriction of high-covariance tokens, whose updates reduce entropy most
    (arXiv:2505.22617). `ppo.policy_loss: clip_cov` removes their loss; `kl_cov` adds a penalty.
    Covariance is the product of log-prob and advantage, each centred over the step. The tokens are
    chosen once per step, with the log-probs before the step's updates.
    """

    fraction: Annotated[float, only_if("ppo.policy_loss", "clip_cov", "kl_cov")] = Field(
        default=2e-4, gt=0.0, le=1.0
    )
    """Fraction of the step's tokens that is restricted, at least one token. clip_cov: drawn at
    random from those with a covariance between `low` and `high`; kl_cov: those with the largest
    covariance."""
    low: Annotated[float, only_if("ppo.policy_loss", "clip_cov")] = 1.0
    """Lower bound on the covariance of the restricted tokens."""
    high: Annotated[float, only_if("ppo.policy_loss", "clip_cov")] = 5.0
    """Upper bound on the covariance of the restricted tokens."""
    penalty: Annotated[float, only_if("ppo.policy_loss", "kl_cov")] = Field(default=1.0, ge=0.0)
    """Weight of a loss term for the restricted tokens. The term is the absolute change of their
    log-probs, in nats."""

    def _problems(self) -> Iterator[str]:
        return _crossed("ppo.covariance.low", self.low, "high", self.high)


class ShapingSection(Config):
    """Shaping of the raw score before training, in the order of the keys below."""

    function: ImportPath | None = None
    """Shaping function, `file.py:name`, with the signature
    (`raypo.ppo.custom_functions.StepScores`) -> scores. null means none."""
    overlong_buffer_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Number of tokens before rollout.max_new_tokens over which the overlong penalty grows
    (arXiv:2503.14476, eq. 13). auto: a fifth of rollout.max_new_tokens. null means no penalty."""
    overlong_factor: Annotated[float, only_if("overlong_buffer_tokens", SET)] = Field(
        default=1.0, ge=0.0
    )
    """Overlong penalty at the limit, in units of the score."""
    truncated_score: float | None = None
    """Score of every response that reached rollout.max_new_tokens. null means that it keeps its own
    score."""
    truncated_scale: Annotated[float | None, only_if("truncated_score", None)] = Field(
        default=None, ge=0.0, le=1.0
    )
    """Factor c for truncated responses, whose score becomes score - (1 - c) * abs(score). null
    means no change."""
    normalize: bool = False
    """Subtract the running mean of all scores so far, and divide by their standard deviation."""
    clip_low: float | None = None
    """Lower bound on the shaped score. null means no bound."""
    clip_high: float | None = None
    """Upper bound on the shaped score. null means no bound."""

    def _problems(self) -> Iterator[str]:
        yield from _crossed("ppo.shaping.clip_low", self.clip_low, "clip_high", self.clip_high)

    def overlong_tokens(self, max_new_tokens: int) -> int | None:
        """Return `overlong_buffer_tokens` as a number of tokens, with auto resolved."""
        if self.overlong_buffer_tokens == "auto":
            return max(max_new_tokens // OVERLONG_SHARE, 1)
        return self.overlong_buffer_tokens


class FilterSection(Config):
    """Dynamic sampling: replace groups that give no learning signal (arXiv:2503.14476, eq. 11)."""

    enabled: bool = False
    """Train only on groups that pass the filter, and sample further prompts to replace the others.
    """
    min_std: Annotated[float, only_if("enabled", True)] = Field(default=1e-6, ge=0.0)
    """Exclusive lower bound on the standard deviation of a kept group's scores."""
    low: Annotated[float | None, only_if("enabled", True)] = None
    """Exclusive lower bound on the mean score of a kept group. null means no bound."""
    high: Annotated[float | None, only_if("enabled", True)] = None
    """Exclusive upper bound on the mean score of a kept group. null means no bound."""
    max_refills: Annotated[int, only_if("enabled", True)] = Field(default=10, ge=0)
    """Maximum number of times that a step samples further prompts. After that it trains on the
    groups that passed, and reports it."""

    def _problems(self) -> Iterator[str]:
        return _crossed("ppo.filter.low", self.low, "high", self.high)
