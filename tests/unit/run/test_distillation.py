"""Which teacher is asked about what."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from raypo.collectives import Workers
from raypo.config import DistillationConfig
from raypo.data.stream import ShuffledStream
from raypo.recipes.distillation import DistillationRecipe
from raypo.types import Example, ScoredRollout
from tests.stand_ins import completed
from tests.unit.run.test_rejection_sampling import scored

CONFIG = DistillationConfig.parse(
    {
        "name": "d",
        "model": {"policy": "p", "teacher": {"a": "one", "b": "other", "c": "one"}},
        "data": {"prompts": ["a.jsonl", "b.jsonl", "c.jsonl"], "response_key": "text"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 1},
        "distillation": {"on_policy_fraction": 0.25, "top_k": 1},
    }
)


def of_source(group: int, source: str) -> ScoredRollout:
    made = scored(group, 0, 0.0)
    return replace(made, rollout=replace(made.rollout, data_source=source))


class Teacher:
    def __init__(self, number: int) -> None:
        self.number, self.responses = number, []

    def top_log_probs(self, sequences: list, count: int, vocabulary: int) -> Future[list]:
        self.responses += [bytes(response.astype(np.uint8)).decode() for _, response in sequences]
        told = [np.full((len(response), count), -1.0, np.float32) for _, response in sequences]
        return completed([(each, np.full(each.shape, self.number, np.int32)) for each in told])


def text(written: str) -> Example:
    return Example(
        np.zeros(1, np.int32), np.frombuffer(written.encode(), np.uint8).astype(np.int32)
    )


def test_each_teacher_is_asked_about_its_own_sources():
    one, other = Teacher(0), Teacher(1)
    texts = [("a", text("at")), ("b", text("bt")), ("c", text("ct"))]
    recipe: Any = SimpleNamespace(
        run=SimpleNamespace(config=CONFIG, workers=Workers()),
        texts=ShuffledStream(texts, seed=0),
        _vocabulary=300,
    )
    samples = [of_source(0, "a"), of_source(1, "b"), of_source(2, "c"), of_source(3, "b")]
    services: Any = SimpleNamespace(references={"reference_0": one, "reference_1": other})

    found, _ = DistillationRecipe.select(recipe, samples, services, 1)

    assert sorted(one.responses) == ["0.0", "2.0", "at", "ct"]
    assert sorted(other.responses) == ["1.0", "3.0", "bt"]
    assert len(found) == 7
    for taught in found.values():
        written = bytes(taught.response_ids.astype(np.uint8)).decode()
        assert taught.teacher_ids.max() == (0 if written in one.responses else 1)
        assert taught.teacher_log_probs.shape == (len(written), 1)
