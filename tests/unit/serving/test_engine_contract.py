"""The engine around the stand-in for vLLM keeps what every engine promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import Pair, engine_of
from tests.stand_in_vllm import in_place_of_vllm, weight_of
from tests.tiny import tiny_policy


def log_probs(model: Any, prompt: np.ndarray, response: np.ndarray, _: float) -> np.ndarray:
    return -np.arange(len(response)) - weight_of(dict(model.named_parameters()))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = str(tiny_policy(tmp_path_factory.mktemp("policy")))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with in_place_of_vllm(step_s=1e-3):
        made = Pair(engine_of(folder), model, log_probs, has_keys=False)
        yield made
        made.engine.shutdown()
