"""Tests of reading config.json without transformers."""

from typing import Any

import pytest
from transformers import LlamaConfig

from raypo.models.model_files import max_positions

LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 100,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 800),
        ({"rope_type": "default", "factor": 2.0}, 800),
        (LINEAR, 1600),
        ({"type": "dynamic", "factor": 2}, 1600),
        (LLAMA_3, 800),
        (YARN, 800),
        ({**YARN, "factor": 8.0}, 1600),
        ({"type": "mrope", "mrope_section": [2, 2, 4]}, 800),
        ({"type": "su", "factor": 2.0}, 800),
        ({"rope_type": "longrope", "factor": 2.0}, 800),
        ({"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}, 1600),
    ],
)
def test_positions_are_stretched_where_they_are_not_yet(rope: Any, expected: int):
    values = {"max_position_embeddings": 800}
    assert max_positions({**values, "rope_scaling": rope}) == expected
    assert max_positions({**values, "rope_parameters": rope}) == expected
    assert max_positions({"text_config": {**values, "rope_parameters": rope}}) == expected


def test_positions_of_gemma_3_are_stretched_already():
    values = {"max_position_embeddings": 800, "rope_scaling": LINEAR}
    assert max_positions({"text_config": {**values, "model_type": "gemma3_text"}}) == 800


def test_a_config_of_transformers_says_the_same():
    for rope, expected in ((LINEAR, 1600), (LLAMA_3, 800), (YARN, 800)):
        parameters: Any = {**rope, "rope_theta": 1e4}
        config = LlamaConfig(max_position_embeddings=800, rope_parameters=parameters)
        assert max_positions(config.to_dict()) == expected
