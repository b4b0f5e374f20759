"""Learning of sft and dpo from prompts with images, with any cut and number of workers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

from raypo.collectives import Workers
from raypo.config import DPOSection, ExamplesLearnerSection, ModelSection
from raypo.learner import supervised
from raypo.learner.preference_tasks import PreferenceTask, VerdictTask
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import ResponseTask
from raypo.models.lora import load_policy
from raypo.types import Example, Pair, Verdict
from tests.unit.learner.plain import PlainModel, on_workers
from tests.vision_models import (
    CHANNELS,
    made_up_images,
    prompt_of,
    rows,
    separate_log_probs,
    tiny_vision_model,
)

KIND = "qwen2_5_vl"
OTHER = np.array([40, 41])
REFERENCES = (-9.0, -8.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(KIND)
    tiny_vision_model(KIND).save_pretrained(folder)
    return load_policy(ModelSection(policy=str(folder), dtype="float32")).double()


def items_of(recipe: str) -> list[Any]:
    """Return an item for each row of the tests' images."""
    columns = zip(*rows(KIND).values(), strict=True)
    if recipe == "sft":
        return [Example(prompt, response, images=images) for prompt, response, images in columns]
    if recipe == "kto":
        return [
            Verdict(prompt, response, row % 3 > 0, OTHER, REFERENCES, images)
            for row, (prompt, response, images) in enumerate(columns)
        ]
    return [
        Pair(prompt, response, OTHER, ref_log_probs=REFERENCES, images=images)
        for prompt, response, images in columns
    ]


def task_of(recipe: str, policy: Any) -> Any:
    if recipe == "sft":
        return ResponseTask(deepcopy(policy))
    kind = VerdictTask if recipe == "kto" else PreferenceTask
    return kind(deepcopy(policy), DPOSection(loss="kto" if recipe == "kto" else "sigmoid"))


def updated(recipe: str, policy: Any, workers: Workers, tokens: int) -> Any:
    section = ExamplesLearnerSection(lr=0.01, max_tokens_per_microbatch=tokens)
    task = task_of(recipe, policy)
    learner: Any = SupervisedLearner(task, section, dtype="float32", num_steps=2, workers=workers)
    figures = learner.update(items_of(recipe)[workers.rank :: workers.count], step=1)
    return figures, learner._model.gradients[0]


@pytest.mark.parametrize("recipe", ["sft", "dpo", "kto"])
def test_a_step_does_not_depend_on_workers_or_microbatches(policy: Any, recipe: str) -> None:
    """Some microbatches have no images, and some workers no microbatch with images."""
    with patch.object(supervised, "TrainedModel", PlainModel):
        ((figures, gradient),) = on_workers(1, lambda w: updated(recipe, policy, w, 10_000))
        for count, tokens in ((1, 24), (2, 10_000), (3, 24)):
            others = on_workers(count, lambda w, t=tokens: updated(recipe, policy, w, t))
            for other in others:
                assert other[0] == pytest.approx(figures, rel=1e-6, abs=1e-7)
                torch.testing.assert_close(other[1], gradient, rtol=1e-5, atol=1e-6)


def test_sft_has_the_gradient_of_transformers(policy: Any) -> None:
    model = deepcopy(policy)
    (-separate_log_probs(model, **rows(KIND)).mean()).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    with patch.object(supervised, "TrainedModel", PlainModel):
        _, gradient = updated("sft", policy, Workers(), 24)
    torch.testing.assert_close(gradient, parameters_to_vector(expected), rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_both_responses_of_a_preference_see_the_images(policy: Any, recipe: str) -> None:
    task = task_of(recipe, policy)
    log_probs = task.log_probs(task.module, items_of(recipe), "cpu")
    for row, of_row in enumerate(log_probs):
        arguments: dict[str, Any] = rows(KIND, row)
        for responses, log_prob in zip((arguments["responses"], [OTHER]), of_row, strict=True):
            arguments["responses"] = responses
            expected = separate_log_probs(policy, **arguments)
            assert log_prob == pytest.approx(float(expected.sum()), rel=1e-5)


COLOURS = {30: (1.0, 0.0, 0.0), 31: (0.0, 1.0, 0.0), 32: (0.0, 0.0, 1.0)}
"""Token of a colour's name -> red, green and blue."""


def pictures(seed: int) -> list[Example]:
    """Return examples whose prompts differ in their picture alone: a colour with noise."""
    generator = np.random.default_rng(seed)
    examples = []
    for token, colour in COLOURS.items():
        for size in ((1, 1), (2, 2)):
            images = made_up_images(KIND, size)
            shape = images.inputs["pixel_values"].shape
            pixels = np.repeat(colour, shape[1] // CHANNELS) + generator.normal(0.0, 0.1, shape)
            inputs = {**images.inputs, "pixel_values": pixels.astype(np.float32)}
            images = replace(images, inputs=inputs, digest=f"{seed} {token} {size}")
            response = np.array([token, 2], np.int32)
            examples.append(Example(prompt_of(KIND, images, 9), response, images=images))
    return examples


def test_sft_learns_the_colours_of_pictures(policy: Any) -> None:
    """It names those of new pictures, too; the random vision tower keeps every bit."""
    section = ExamplesLearnerSection(lr=3e-3, max_tokens_per_microbatch=24)
    task = ResponseTask(deepcopy(policy))
    with (
        patch.object(supervised, "TrainedModel", PlainModel),
        patch.object(PlainModel, "optimizer", torch.optim.Adam),
    ):
        learner: Any = SupervisedLearner(
            task, section, dtype="float32", num_steps=40, workers=Workers()
        )
        before = learner.evaluate(pictures(seed=99))["eval/loss"]
        for step in range(1, 41):
            learner.update(pictures(seed=step), step=step)
        after = learner.evaluate(pictures(seed=99))["eval/loss"]
    assert before > 1.0
    assert after < 0.05  # nats a token; guessing one of three colours is ln(3) / 2 = 0.55
    trained = task.network.state_dict()
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, trained[name]) == ("visual" in name), name
