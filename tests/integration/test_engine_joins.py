"""vLLM keeps what every engine promises, under raypo's scheduler and under its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import AutoModelForCausalLM

from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import Pair, engine_of
from tests.integration.test_engine import learner_log_probs
from tests.tiny import tiny_policy


@pytest.fixture(scope="module", params=[True, False], ids=["raypo's scheduler", "vLLM's"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = str(tiny_policy(tmp_path_factory.mktemp("policy")))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    made = Pair(
        engine_of(folder, **({} if request.param else {"scheduler_cls": None})),
        model,
        learner_log_probs,
    )
    is_lean = "Lean" in type(made.engine._loop._inside._scheduler).__name__
    assert is_lean == request.param
    yield made
    made.engine.shutdown()
