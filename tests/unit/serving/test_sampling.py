from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from raypo.serving.requests import SamplingRequest, validate_request

REQUEST = SamplingRequest(np.array([1, 2, 3], dtype=np.int32), max_new_tokens=5, temperature=1.0)


def test_a_request_that_fits_exactly_is_served() -> None:
    validate_request(REQUEST, vocabulary_size=4, max_model_len=8)
    with pytest.raises(ValueError, match="no room"):
        validate_request(REQUEST, vocabulary_size=4, max_model_len=7)


def test_an_engine_that_reads_no_text_refuses_stop_strings() -> None:
    request = replace(REQUEST, stop=("Q:",))
    validate_request(request, vocabulary_size=4, max_model_len=8)
    with pytest.raises(
        ValueError,
        match=(
            r"stop \(\['Q:'\]\): stop strings must not be empty texts, and need an engine with "
            r"reads_text"
        ),
    ):
        validate_request(request, vocabulary_size=4, max_model_len=8, reads_text=False)


@pytest.mark.parametrize("key", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_an_engine_that_speculates_refuses_truncation(key: dict[str, float]) -> None:
    validate_request(replace(REQUEST, **key), vocabulary_size=4, max_model_len=8)
    with pytest.raises(ValueError, match="cannot truncate the distribution"):
        validate_request(
            replace(REQUEST, **key), vocabulary_size=4, max_model_len=8, truncates=False
        )


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
        ({"top_k": 0}, r"top_k \(0\) must be 1 or more, or None"),
        ({"min_p": 1.5}, r"min_p \(1.5\) must lie in \[0, 1\]"),
        ({"stop": ("",)}, r"stop \(\[''\]\): .*reads_text"),
        ({"timeout_s": 0.0}, r"timeout_s \(0\.0\): must be above 0"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_request(replace(REQUEST, **changes), vocabulary_size=4, max_model_len=8)
