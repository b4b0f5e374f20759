"""The weight of the entropy bonus over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class EntropyController:
    """The entropy coefficient over a run: fixed, or steered so that entropy stays above a target.

    Steered, the coefficient acts in a step only where the last one's entropy was at or below the
    target; it grows by `delta` after each such step and shrinks by `delta`, down to 0, after every
    other one. The first step takes it as it is given.

    Example: coef 0, target 0.2, delta 0.005; entropies 0.3, 0.1, 0.1, 0.25 in steps 1 to 4: the
    bonus is 0, 0, 0.005, 0.01 in these steps, and 0 in step 5.

    Raises:
        ValueError: a number is out of range.

    Paper: He et al. 2025, arXiv:2505.22312, section 3.2.5 (adaptive entropy control; it measures
        the entropy of a step's own rollouts, which is known here only once the step is over).
    """

    coef: float
    """The coefficient, whether it acts or not."""
    target: float | None = None
    """Nats per token; None: fixed."""
    delta: float = 0.0
    """What one step adds or takes."""
    entropy: float | None = None
    """Of the last step that updated the policy, in nats per token; None: before the first."""

    def __post_init__(self) -> None:
        if self.coef < 0.0 or self.delta < 0.0:
            raise ValueError(f"coef ({self.coef}) and delta ({self.delta}) must not be negative.")
        if self.target is not None and self.target <= 0.0:
            raise ValueError(f"target ({self.target}) must be positive; None: a fixed coefficient.")

    @property
    def acting(self) -> float:
        """The weight of the entropy bonus in the next step."""
        is_enough = (
            self.target is not None and self.entropy is not None and self.entropy > self.target
        )
        return 0.0 if is_enough else self.coef

    def updated(self, entropy: float) -> EntropyController:
        """The controller for the next step.

        Args:
            entropy: of the step, in nats per token. NaN changes nothing.
        """
        if self.target is None or math.isnan(entropy):
            return self
        change = self.delta if entropy <= self.target else -self.delta
        return replace(self, coef=max(self.coef + change, 0.0), entropy=entropy)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"coef": self.coef, "entropy": self.entropy}

    def restored(self, state: dict[str, Any]) -> EntropyController:
        """This controller as `state` left it; a fixed coefficient stays the config's."""
        if self.target is None:
            return self
        return replace(self, coef=state["coef"], entropy=state["entropy"])
