"""Phases of a colocated step on GPUs, and the models that are in device memory in each.

`raypo.run.phases` moves models according to this table, and `raypo plan` predicts memory from it.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Part of a step, by its use of the devices."""

    START = "start"
    """Start of engines and frozen models, before the learner exists. Roles start one by one, and
    each sleeps before the next starts, because vLLM measures the free memory."""
    LEARN = "learn"
    """Evaluation, update and checkpoint."""
    PUSH = "push"
    """Weight sync from the learner to the engines."""
    PROBE = "probe"
    """Comparison of the log-probs of engine and learner on the same tokens."""
    GENERATE = "generate"
    SCORE = "score"
    """Forward passes of reward and reference models."""


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
"""Contents of device memory by phase. The training state is optimizer, master weights, gradients
and the whole critic, none of which a push needs."""

ALLOWED: dict[Phase, tuple[Phase, ...]] = {
    Phase.START: (Phase.LEARN,),
    Phase.LEARN: (Phase.PUSH, Phase.GENERATE),
    Phase.PUSH: (Phase.PROBE,),
    Phase.PROBE: (Phase.GENERATE,),
    Phase.GENERATE: (Phase.SCORE, Phase.LEARN),
    Phase.SCORE: (Phase.GENERATE, Phase.LEARN),
}
