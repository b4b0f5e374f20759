"""Rollouts with plain values in all fields that a test does not name."""

from typing import Any

import numpy as np

from raypo.types import Rollout


def plain_rollout(num_prompt: int = 1, num_response: int = 1, **fields: Any) -> Rollout:
    """Return a rollout of so many prompt and response tokens, all of them sampled.

    Ids and log-probs are zeros, unless `fields` has others.
    """
    plain: dict[str, Any] = {
        "prompt": "",
        "response": "",
        "prompt_ids": np.zeros(num_prompt, np.int32),
        "response_ids": np.zeros(num_response, np.int32),
        "log_probs": np.zeros(num_response, np.float32),
        "response_mask": np.ones(num_response, bool),
        "label": None,
        "prompt_index": 0,
        "sample_index": 0,
        "finish_reason": "stop",
        "weight_version": 0,
    }
    return Rollout(**(plain | fields))
