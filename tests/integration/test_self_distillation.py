"""A policy under real DeepSpeed that is its own teacher, against the deployed teacher's answers."""

from dataclasses import replace

import numpy as np
import pytest

from raypo.serving.frozen import ReferenceModel
from raypo.types import Taught
from tests.integration.learning import STAGES
from tests.integration.recipe_learners import example_learner

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("stage", STAGES)
def test_the_policys_own_opinion_is_that_of_a_deployment_of_it(model: str, stage: int):
    learner = example_learner("distillation", model, "float32", {"zero_stage": stage})
    generator = np.random.default_rng(0)
    nothing = np.zeros((0, 0))
    items = []
    for prompt, response in ((9, 7), (3, 1), (3, 4), (1, 6)):
        ids = generator.integers(4, 60, prompt + response).astype(np.int32)
        items.append(Taught(ids[:prompt], ids[prompt:], nothing, nothing))
    mine = learner.asked(items, learner.task.top_log_probs)  # type: ignore[attr-defined]
    deployed = ReferenceModel(model, dtype="float32", temperature=1.0, max_batch_tokens=24)
    sequences = [(each.prompt_ids, each.response_ids) for each in items]
    theirs = deployed.top_log_probs(sequences, 64, learner.task.module._vocabulary)  # type: ignore
    known = []
    for item, own, other in zip(items, mine, theirs, strict=True):
        assert own[0].shape == own[1].shape == (len(item.response_ids), 64)
        np.testing.assert_allclose(own[0], other[0], atol=1e-4)
        np.testing.assert_array_equal(own[1][:, 0], other[1][:, 0])
        known.append(replace(item, teacher_log_probs=own[0], teacher_ids=own[1]))
    metrics = learner.update(known, step=1)  # with its own prompt it learns nothing
    assert metrics["train/loss"] == pytest.approx(0.0, abs=1e-5)
