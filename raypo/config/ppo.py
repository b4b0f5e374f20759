"""The `ppo` recipe's own section: estimator, losses, KL."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raypo.config.base import Config


class KLSection(Config):
    """The pull to the reference model."""

    coef: float = Field(default=0.01, ge=0.0)
    """Weight of the penalty in score per nat; 0: no reference model is started."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Per-token estimator (Schulman 2020)."""
    placement: Literal["reward"] = "reward"
    """reward: a penalty in the token rewards."""


class PPOSection(Config):
    """What turns scores into an update."""

    advantage: Literal["gae"] = "gae"
    """gae: Generalized Advantage Estimation with a critic (arXiv:1506.02438)."""
    policy_loss: Literal["ppo"] = "ppo"
    """ppo: clipped surrogate (arXiv:1707.06347)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How token losses become one number (MATH.md section 4)."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per sampled token."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """Bias-variance trade of GAE."""
    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """Ratios below 1 - clip_low get no gradient from positive pushes down."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """Ratios above 1 + clip_high get no gradient from pushes up."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound on the loss of negative advantages (arXiv:1912.09729)."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """Clip of the value change; null: plain squared error."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over a step's responses."""
    minibatch_size: int = Field(default=32, ge=1)
    """Responses per optimizer step, over all workers."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus; 0: entropy is only logged."""
    kl: KLSection = KLSection()

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator uses values."""
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference model are used."""
        return self.kl.coef > 0.0
