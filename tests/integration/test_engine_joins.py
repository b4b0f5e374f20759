"""vLLM itself keeps what every engine promises: requests join and leave at any step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from raypo.serving.engine import Engine
from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import RUNNING, Pair, ask, engine_of
from tests.integration.test_engine import learner_log_probs
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = str(tiny_policy(tmp_path_factory.mktemp("policy")))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    made = Pair(engine_of(folder), model, learner_log_probs)
    yield made
    made.engine.shutdown()


def test_without_seeds_samples_of_one_prompt_differ_and_do_not_repeat(engine: Engine):
    same = [replace(ask(20, 1), seed=None) for _ in range(RUNNING)]
    first, second = engine.generate(same), engine.generate(same)
    assert len({tuple(each.token_ids) for each in first + second}) == 2 * RUNNING
