"""Controller of the entropy coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class EntropyController:
    """The entropy coefficient over a run: fixed, or adapted so that entropy stays above a target.

    The adaptive coefficient is applied in a step only if the entropy of the step before was at or
    below the target. It grows by `delta` after each step at or below the target, and shrinks by
    `delta`, down to 0, after every other step. The first step applies the initial value.

    Example: coef 0, target 0.2, delta 0.005, and entropies 0.3, 0.1, 0.1, 0.25 in steps 1 to 4. The
    applied coefficients are 0, 0, 0.005, 0.01 in these steps, and 0 in step 5.

    Raises:
        ValueError: a number is out of range.

    Paper: He et al. 2025, arXiv:2505.22312, section 3.2.5 (adaptive entropy control). The paper
        uses the entropy of a step's own rollouts, which is known here only after the step.
    """

    coef: float
    """The coefficient, also in steps that do not apply it."""
    target: float | None = None
    """Target entropy in nats per token. None means a fixed coefficient."""
    delta: float = 0.0
    """Step size of the coefficient."""
    entropy: float | None = None
    """Entropy of the last step that updated the policy, in nats per token. None before it."""

    def __post_init__(self) -> None:
        if self.coef < 0.0 or self.delta < 0.0:
            raise ValueError(f"coef ({self.coef}) and delta ({self.delta}) must not be negative.")
        if self.target is not None and self.target <= 0.0:
            raise ValueError(f"target ({self.target}) must be positive; None: a fixed coefficient.")

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
            entropy: Entropy of the step, in nats per token. NaN changes nothing.
        """
        if self.target is None or math.isnan(entropy):
            return self
        change = self.delta if entropy <= self.target else -self.delta
        return replace(self, coef=max(self.coef + change, 0.0), entropy=entropy)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"coef": self.coef, "entropy": self.entropy}

    def restored(self, state: dict[str, Any]) -> EntropyController:
        """Return the controller with a saved state; a fixed coefficient stays the config's."""
        if self.target is None:
            return self
        return replace(self, coef=state["coef"], entropy=state["entropy"])
