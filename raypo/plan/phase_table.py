"""What lies in the devices' memory in which phase of a colocated step on GPUs.

`raypo.run.phases` moves models by this table, and `raypo plan` predicts memory by it.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What the devices are used for."""

    START = "start"
    """Engines and frozen models start, one role after the other, and sleep before the next does:
    vLLM measures what is free. The learner is not there yet."""
    LEARN = "learn"
    """Evaluate, update, save."""
    PUSH = "push"
    """New weights go from the learner to the engines."""
    PROBE = "probe"
    """Engine and learner give their log-probs to the same tokens."""
    GENERATE = "generate"
    SCORE = "score"
    """Reward and reference models."""


TRAINING_STATE, PARAMETERS = "training state", "parameters"
ENGINE_WEIGHTS, KV_CACHE = "engine weights", "KV cache"
FROZEN_MODELS = "frozen models"

PRESENT: dict[Phase, tuple[str, ...]] = {
    Phase.START: (),
    Phase.LEARN: (TRAINING_STATE, PARAMETERS),
    Phase.PUSH: (PARAMETERS, ENGINE_WEIGHTS),
    Phase.PROBE: (PARAMETERS, ENGINE_WEIGHTS, KV_CACHE),
    Phase.GENERATE: (ENGINE_WEIGHTS, KV_CACHE),
    Phase.SCORE: (FROZEN_MODELS,),
}
"""What lies in the devices' memory. Training state: optimizer, master weights, gradients, and the
whole critic, which no push needs."""

ALLOWED: dict[Phase, tuple[Phase, ...]] = {
    Phase.START: (Phase.LEARN,),
    Phase.LEARN: (Phase.PUSH, Phase.GENERATE),
    Phase.PUSH: (Phase.PROBE,),
    Phase.PROBE: (Phase.GENERATE,),
    Phase.GENERATE: (Phase.SCORE, Phase.LEARN),
    Phase.SCORE: (Phase.GENERATE, Phase.LEARN),
}
