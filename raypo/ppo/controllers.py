"""State that the update carries from step to step: KL and entropy coefficients, score moments.

Coefficients are updated from typed statistics of the step, never from its metrics. A metric can
therefore be renamed or left out without an effect on training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.metrics.reduce import WeightedMeans
from raypo.ppo.kl import KLController, kl_statistics
from raypo.ppo.shaping import RunningMoments
from raypo.types import Experience


@dataclass(frozen=True)
class ReferenceKL:
    """KL between a step's policy before the update and the reference model, over all workers."""

    token_mean: float
    """Mean over sampled tokens, in nats."""
    response_mean: float
    """Mean over responses of the KL that is summed over a response's tokens, in nats. All rows of
    an episode are one response."""
    responses: float
    """Number of responses."""
    clamped_tokens: float
    """Number of tokens whose log-ratio is so far below 0 that k3 is clamped."""

    @classmethod
    def measure(cls, experience: Experience, workers: Workers) -> ReferenceKL:
        """Measure the KL from old and reference log-probs. All workers call it together."""
        assert experience.old_log_probs is not None
        assert experience.ref_log_probs is not None
        mask = experience.response_mask
        stats = kl_statistics(experience.old_log_probs, experience.ref_log_probs, mask)
        responses = (mask.any(1) & experience.is_first_row).sum()
        means = WeightedMeans()
        means.add("token_mean", stats["kl"], stats["tokens"])
        means.add("response_mean", stats["kl"], responses)
        means.total("responses", responses)
        means.total("clamped_tokens", stats["clamped"])
        return cls(**means.reduce(workers))

    def metrics(self) -> dict[str, float]:
        """Return the metrics `kl/*`."""
        return {
            "kl/clamped_tokens": self.clamped_tokens,
            "kl/ref_mean": self.token_mean,
            "kl/ref_response_mean": self.response_mean,
        }


@dataclass(frozen=True)
class UpdateState:
    """State of the update between steps; part of the checkpoint."""

    kl: KLController
    entropy: EntropyController
    scores: RunningMoments
    """Moments of all scores so far, for `ppo.shaping.normalize`."""

    @classmethod
    def initial(cls, ppo: PPOSection) -> UpdateState:
        """Return the state before the first step."""
        section = ppo.kl
        return cls(
            KLController(section.coef, target=section.target, horizon=section.horizon),
            EntropyController(ppo.entropy_coef, ppo.entropy_target, ppo.entropy_delta),
            RunningMoments(),
        )

    def after_step(
        self, *, scores: RunningMoments, kl: ReferenceKL | None, entropy: float | None
    ) -> UpdateState:
        """Return the state for the next step.

        Args:
            scores: Moments with the scores of this step.
            kl: KL of this step's policy. None leaves the KL coefficient unchanged.
            entropy: Entropy of this step's policy, in nats per token. None leaves the entropy
                coefficient unchanged.
        """
        return UpdateState(
            self.kl if kl is None else self.kl.updated(kl.response_mean, int(kl.responses)),
            self.entropy if entropy is None else self.entropy.updated(entropy),
            scores,
        )

    def metrics(self) -> dict[str, float]:
        """Return metrics: the KL coefficient if above 0, the entropy coefficient if adaptive."""
        metrics = {"kl/coef": self.kl.coef} if self.kl.coef > 0.0 else {}
        if self.entropy.target is not None:
            metrics["ppo/entropy_coef"] = self.entropy.acting
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(),
            "scores": self.scores.state_dict(),
        }

    def restored(self, state: dict[str, Any] | None) -> UpdateState:
        """Return this state with the values that `state_dict` saved. None leaves it unchanged."""
        if state is None:
            return self
        return UpdateState(
            self.kl.restored(state["kl"]),
            self.entropy.restored(state["entropy"]),
            RunningMoments(**state["scores"]),
        )


@dataclass(frozen=True)
class EntropyController:
    """Entropy coefficient of a run: fixed, or adapted to keep the entropy above a target.

    The adaptive coefficient is applied in a step only if the entropy of the previous step was at or
    below the target. It grows by `delta` after each step at or below the target, and shrinks by
    `delta`, down to 0, after every other step. The first step applies the initial value.

    Example: coef 0, target 0.2, delta 0.005, and entropies 0.3, 0.1, 0.1, 0.25 in steps 1 to 4. The
    applied coefficients are 0, 0, 0.005, 0.01 in these steps, and 0 in step 5.

    Paper: He et al. 2025, arXiv:2505.22312, section 3.2.5 (adaptive entropy control). The paper
        uses the entropy of a step's own rollouts, which is known here only after the step.
    """

    coef: float
    """Current coefficient. The next step applies `acting`, which is `coef` or 0."""
    target: float | None = None
    """Target entropy in nats per token. None means a fixed coefficient."""
    delta: float = 0.0
    """Step size of the coefficient."""
    entropy: float | None = None
    """Entropy of the last step that updated the policy, in nats per token, or None at the start."""

    @property
    def acting(self) -> float:
        """Coefficient that the next step applies."""
        is_enough = (
            self.target is not None and self.entropy is not None and self.entropy > self.target
        )
        return 0.0 if is_enough else self.coef

    def updated(self, entropy: float) -> EntropyController:
        """Return the controller for the next step.

        Args:
            entropy: Entropy of the step, in nats per token.
        """
        if self.target is None:
            return self
        change = self.delta if entropy <= self.target else -self.delta
        return replace(self, coef=max(self.coef + change, 0.0), entropy=entropy)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"coef": self.coef, "entropy": self.entropy}

    def restored(self, state: dict[str, Any]) -> EntropyController:
        """Return the controller with the saved state. A fixed coefficient does not change."""
        if self.target is None:
            return self
        return replace(self, coef=state["coef"], entropy=state["entropy"])
