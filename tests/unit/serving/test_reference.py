from __future__ import annotations

import numpy as np

from raypo.serving.reference import right_aligned
from raypo.types import Rollout


def rollout(prompt: list[int], response: list[int]) -> Rollout:
    return Rollout(
        prompt="",
        response="",
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        log_probs=np.zeros(len(response), dtype=np.float32),
        response_mask=np.ones(len(response), dtype=bool),
        label=None,
        prompt_index=0,
        sample_index=0,
        finish_reason="stop",
        weight_version=0,
    )


def test_rows_end_at_the_last_column() -> None:
    ids, mask = right_aligned([rollout([1, 2, 3], [4]), rollout([5], [6, 7, 8, 9])])

    assert ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert mask.tolist() == [[False, True, True, True, True], [True] * 5]
