"""vLLM itself keeps what every engine promises: requests join and leave at any step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import AutoModelForCausalLM

from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import Pair, engine_of
from tests.integration.test_engine import learner_log_probs
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = str(tiny_policy(tmp_path_factory.mktemp("policy")))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    made = Pair(engine_of(folder), model, learner_log_probs)
    yield made
    made.engine.shutdown()
