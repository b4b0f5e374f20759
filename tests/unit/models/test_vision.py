"""Images in packed rows: log-probs, values and gradients are those of transformers, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, Gemma3Config

from raypo.config import ModelSection, PolicyLoraSection
from raypo.learner.tasks import response_batch
from raypo.models import packing, vision
from raypo.models.critic import Critic, CriticStart
from raypo.models.loading import is_causal
from raypo.models.lora import load_policy
from raypo.models.packed_attention import reads_packed
from raypo.models.packing import Packed, in_whole_blocks, pack
from raypo.models.token_log_probs import packed_log_probs
from raypo.serving.frozen import ReferenceModel
from raypo.types import Example, Images
from tests.rollouts import plain_rollout
from tests.unit.learner.plain import on_workers
from tests.vision_models import (
    CONFIGS,
    made_up_images,
    of_transformers,
    rows,
    separate_log_probs,
    tiny_vision_model,
)


def names_outside_decoder(model: Any) -> set[str]:
    """Return the names of the parameters of the vision tower and its projector."""
    decoder = {id(parameter) for parameter in model.get_decoder().parameters()}
    head = id(model.get_output_embeddings().weight)
    return {n for n, p in model.named_parameters() if id(p) not in decoder | {head}}


def gradients(model: Any, results: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(-1.0, 2.0, results.numel())
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = (weights * results).sum()
    of_named = torch.autograd.grad(total, [*named.values()], allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(p) if gradient is None else gradient
        for (name, p), gradient in zip(named.items(), of_named, strict=True)
    }


def assert_equal_gradients(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    tiny_vision_model(request.param).save_pretrained(folder)
    return folder


def policy(folder: Path, **changes: Any) -> Any:
    return load_policy(ModelSection(policy=str(folder), dtype="float32", **changes))


def log_probs(model: Any, packed: Packed) -> Tensor:
    return packed_log_probs(model, packed, temperature=1.0)[0]


def test_log_probs_and_gradients_are_those_of_separate_rows(folder: Path) -> None:
    """All weights are trained here, the vision tower too."""
    model = policy(folder, freeze=[])
    assert reads_packed(model)
    expected = separate_log_probs(model, **rows(folder.name))

    mine = log_probs(model, pack(**rows(folder.name)))

    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    of_mine = gradients(model, mine)
    assert_equal_gradients(of_mine, gradients(model, expected))
    assert any(float(of_mine[name].abs().max()) > 0.0 for name in names_outside_decoder(model))


@pytest.mark.parametrize("shared_scores", [packing.SHARED_SCORES, -1])
def test_the_tower_is_frozen_and_reads_the_images_of_a_prompt_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shared_scores: int
) -> None:
    """With both kinds of attention on CPUs, and with prompts padded to blocks as on GPUs."""
    monkeypatch.setattr(packing, "SHARED_SCORES", shared_scores)
    model = policy(folder)
    backbone = model.base_model
    packed = pack(**rows(folder.name))
    monkeypatch.setattr(packing, "MAX_PADDING", 100.0)
    in_blocks = in_whole_blocks(packed, block=8)
    assert in_blocks.input_ids.shape[1] > packed.input_ids.shape[1]
    expected = separate_log_probs(model, **rows(folder.name))

    with patch.object(backbone, "get_image_features", wraps=backbone.get_image_features) as read:
        mine = log_probs(model, packed)
    in_blocks = log_probs(model, in_blocks)

    assert read.call_count == 3
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(in_blocks, expected, rtol=1e-5, atol=1e-5)
    of_mine = gradients(model, mine)
    assert_equal_gradients(of_mine, gradients(model, expected))
    assert not of_mine.keys() & names_outside_decoder(model)


@pytest.mark.parametrize("cut", [[[0], [1, 2], [3, 4, 5], [6, 7]], [[n] for n in range(8)]])
def test_microbatches_of_any_size_have_the_same_log_probs(folder: Path, cut: list[list[int]]):
    """Also one without images, and one with another image of the same size."""
    model = policy(folder)
    whole = log_probs(model, pack(**rows(folder.name)))
    in_parts = torch.cat([log_probs(model, pack(**rows(folder.name, *part))) for part in cut])
    torch.testing.assert_close(in_parts, whole, rtol=1e-5, atol=1e-5)


def test_checkpointed_layers_and_an_adapter_have_the_same_gradients(folder: Path) -> None:
    """The adapter is on the language model alone."""
    model = policy(folder, lora=PolicyLoraSection(rank=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected = separate_log_probs(model, **rows(folder.name))
    theirs = gradients(model, expected)
    assert theirs
    assert all("lora_" in name for name in theirs)
    assert not theirs.keys() & names_outside_decoder(model)

    model.gradient_checkpointing_enable({"use_reentrant": False})
    mine = log_probs(model, pack(**rows(folder.name)))

    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    assert_equal_gradients(gradients(model, mine), theirs)


@pytest.mark.parametrize("lora", [None, PolicyLoraSection(target_modules=("q_proj", "lm_head"))])
def test_the_placeholder_of_an_image_cannot_be_sampled(folder: Path, lora: Any) -> None:
    """Neither does it count in the entropy, nor do other tokens share its probability."""
    model = policy(folder, lora=lora)
    arguments = rows(folder.name, 0)
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    assert head.placeholder_id is not None
    own, entropy = packed_log_probs(model, pack(**arguments), temperature=1.0, with_entropy=True)
    head.placeholder_id = None
    free, of_free = packed_log_probs(model, pack(**arguments), temperature=1.0, with_entropy=True)
    assert (own > free).all()
    assert entropy is not None
    assert of_free is not None
    assert entropy.isfinite().all()
    assert not torch.equal(entropy, of_free)


def test_workers_are_not_asked_about_images_of_a_model_that_reads_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 3 has a vision tower, but raypo trains it on texts alone."""
    monkeypatch.setattr(vision, "workers_of_shards", lambda _: pytest.fail("asked"))
    text = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "head_dim": 4}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    tower = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
    tower |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    model = AutoModelForImageTextToText.from_config(config)
    ids = [np.array([3, 4])]
    assert vision.image_inputs(model.base_model, pack(prompts=ids, responses=ids)) == {}


def test_a_reference_model_sees_the_images(folder: Path) -> None:
    """Its batches are smaller than all rows, and rows of equal token ids have other images."""
    reference = ReferenceModel(str(folder), dtype="float32", temperature=0.5, max_batch_tokens=24)
    arguments = rows(folder.name)
    rollouts = [
        plain_rollout(
            num_response=len(response), prompt_ids=prompt, response_ids=response, images=images
        )
        for prompt, response, images in zip(*arguments.values(), strict=True)
    ]
    log_probs = np.concatenate(reference.log_probs(rollouts))
    with torch.no_grad():
        expected = separate_log_probs(policy(folder), temperature=0.5, **arguments)
    torch.testing.assert_close(torch.from_numpy(log_probs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lora", [None, PolicyLoraSection(rank=2)])
def test_values_of_a_critic_are_those_of_separate_rows(folder: Path, lora: Any) -> None:
    assert is_causal(str(folder))
    critic, _ = Critic.load(
        CriticStart(str(folder)), dtype="float32", lora=lora, frozen=("vision",)
    )
    torch.nn.init.normal_(critic.value_head.weight)
    batch = response_batch(
        [
            Example(prompt, response)
            for prompt, response, _ in zip(*rows(folder.name).values(), strict=True)
        ]
    ).with_(images=tuple(rows(folder.name)["images"]))

    values = critic(batch, with_last=True)

    backbone = critic.backbone
    assert reads_packed(backbone)
    outside = names_outside_decoder(policy(folder))
    expected = []
    for prompt, response, images in zip(*rows(folder.name).values(), strict=True):
        states = of_transformers(backbone, prompt, response, images).last_hidden_state
        expected.append(critic.value_head(states[0, len(prompt) - 1 :])[:, 0])
    for row, of_row in zip(values, expected, strict=True):
        torch.testing.assert_close(row[: len(of_row)], of_row, rtol=1e-5, atol=1e-5)
    results = torch.cat([row[: len(of_row)] for row, of_row in zip(values, expected, strict=True)])
    of_mine = gradients(critic, results)
    assert_equal_gradients(of_mine, gradients(critic, torch.cat(expected)))
    assert "value_head.weight" in of_mine
    assert not {f"model.{n.removeprefix('backbone.')}" for n in of_mine} & outside


def test_at_zero_3_all_workers_call_the_tower_equally_often() -> None:
    one, two = (made_up_images("llava", (1, 1), seed=seed) for seed in (0, 1))
    own = [[one, two], [], [two]]
    with patch.object(vision, "workers_of_shards", lambda workers: workers):
        others = on_workers(3, lambda w: vision._read_for_others(w, own[w.rank]))
        nobody = on_workers(2, lambda w: vision._read_for_others(w, []))
    assert [len(images) for images in others] == [0, 2, 1]
    assert all(isinstance(each, Images) for images in others for each in images)
    assert nobody == [[], []]
