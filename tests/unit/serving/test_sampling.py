from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from raypo.serving.sampling import (
    Completion,
    SamplingRequest,
    log_prob_gap,
    probe_requests,
    validate_request,
)

REQUEST = SamplingRequest(np.array([1, 2, 3], dtype=np.int32), max_new_tokens=5, temperature=1.0)


def completion(*log_probs: float) -> Completion:
    values = np.array(log_probs, dtype=np.float32)
    return Completion(np.zeros(len(values), dtype=np.int32), values, "stop", 1)


def test_a_request_that_fits_exactly_is_served() -> None:
    validate_request(REQUEST, vocabulary_size=4, max_model_len=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": np.array([1, 4])}, r"4 is not in the policy's vocabulary \(0 to 3\)"),
        ({"prompt_ids": np.array([-1])}, r"-1 is not in the policy's vocabulary"),
        ({"prompt_ids": np.array([], dtype=np.int32)}, r"prompt_ids \(int32 \(0,\)\)"),
        ({"prompt_ids": np.array([1.0])}, r"prompt_ids \(float64 \(1,\)\)"),
        ({"max_new_tokens": 0}, r"max_new_tokens \(0\)"),
        ({"max_new_tokens": 6}, r"3 tokens leaves no room for max_new_tokens \(6\)"),
        ({"temperature": -0.1}, r"temperature \(-0.1\)"),
        ({"top_p": 0.0}, r"top_p \(0.0\)"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_request(replace(REQUEST, **changes), vocabulary_size=4, max_model_len=8)


def test_probes_have_fixed_seeds() -> None:
    requests = probe_requests([REQUEST.prompt_ids] * 2, max_new_tokens=3)
    assert [(r.seed, r.max_new_tokens, r.temperature) for r in requests] == [(0, 3, 1), (1, 3, 1)]


def test_gap_is_over_all_tokens() -> None:
    learner = [np.array([-1.0, -2.5]), np.array([-3.0])]
    gap = log_prob_gap([completion(-1.0, -2.0), completion(-3.25)], learner)
    assert gap == (0.5, 0.25)


def test_gap_does_not_hide_nan() -> None:
    assert all(map(np.isnan, log_prob_gap([completion(np.nan, -1.0)], [np.array([-1.0, -1.0])])))


@pytest.mark.parametrize("learner", [[], [np.array([-1.0, -1.0])], [np.array([])]])
def test_gap_needs_the_same_tokens(learner: list) -> None:
    with pytest.raises(ValueError, match="same, non-empty responses"):
        log_prob_gap([completion(-1.0)], learner)
