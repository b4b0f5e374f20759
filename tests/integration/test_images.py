"""Prompts with images: what an engine reads of them, and a whole run on generated pictures."""

import json
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from raypo import PPOConfig, PPOTrainer
from raypo.config import DataSection, EngineSection
from raypo.data.prompts import load_prompts
from raypo.models.loading import load_tokenizer
from raypo.rollout.image_reader import image_reader
from raypo.serving.engine import Engine
from raypo.serving.requests import SamplingRequest
from raypo.types import Images, Prompt
from tests.tiny_vision import picture, tiny_qwen_vl

COLORS = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 255, 0), "gray": (90, 90, 90)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    tiny_qwen_vl(folder / "model")
    rows = []
    for number, (name, color) in enumerate(COLORS.items()):
        (folder / f"{name}.png").write_bytes(picture(color, (56 + 28 * (number % 2), 56)))
        rows.append({"prompt": "<image>Name it.", "image": f"{name}.png", "answer": name})
    rows[-1] = {
        "prompt": "<image> or <image>?",
        "image": ["red.png", "gray.png"],
        "answer": "gray",
    }
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prompts_of(folder: Path) -> list[Prompt]:
    section = DataSection(
        prompts=(f"{folder}/train.jsonl",), image_key="image", as_chat=True, max_prompt_tokens=64
    )
    model = f"{folder}/model"
    loaded = load_prompts(section, load_tokenizer(model), reader=lambda: image_reader(model))
    return list(loaded.prompts)


@pytest.fixture(scope="module")
def sampled(folder: Path) -> Any:
    """Requests of one engine, what vLLM's scheduler got of them, and their completions."""
    engine = Engine(
        f"{folder}/model",
        section=EngineSection(kv_cache_gb=0.05),
        dtype="float32",
        max_model_len=128,
        reads_weights=True,
        max_images=2,
    )
    prompts, ids, features = prompts_of(folder), set(), {}
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    add = scheduler.add_request

    def add_request(request: Any) -> None:
        ids.add(tuple(request.prompt_token_ids))
        for feature in request.mm_features:
            if feature.data is not None:  # else vLLM has it in its cache
                features[feature.identifier] = feature.data
        add(request)

    scheduler.add_request = add_request
    requests = [
        SamplingRequest(prompt.token_ids, 24, 1.3, seed=seed, images=prompt.images)
        for prompt in prompts
        for seed in range(4)
    ]
    yield SimpleNamespace(
        requests=requests,
        prompts=prompts,
        ids=ids,
        features=features,
        completions=[future.result() for future in engine.submit(requests[:1])]
        + [future.result() for future in engine.submit(requests[1:])],
    )
    engine.shutdown()


def test_an_engine_reads_the_ids_and_pixels_of_the_learner(sampled: SimpleNamespace):
    assert sampled.ids == {tuple(prompt.token_ids.tolist()) for prompt in sampled.prompts}
    assert len(sampled.features) == len(COLORS)
    for prompt in sampled.prompts:
        parts = [sampled.features[sha256(file).hexdigest()] for file in prompt.images.files]
        for name, values in prompt.images.inputs.items():
            read = np.concatenate([part[name].data.numpy().reshape(-1) for part in parts])
            assert np.array_equal(read, values.reshape(-1)), name


def test_log_probs_are_those_of_transformers_and_no_placeholder_is_sampled(
    folder: Path, sampled: SimpleNamespace
):
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
    for request, completion in zip(sampled.requests, sampled.completions, strict=True):
        images: Images = request.images
        assert images.placeholder_id not in completion.token_ids
        ids = torch.tensor(np.concatenate([request.prompt_ids, completion.token_ids]))[None].long()
        inputs = {name: torch.from_numpy(values) for name, values in images.inputs.items()}
        with torch.no_grad():
            is_image = (ids == images.placeholder_id).int()
            logits = model(input_ids=ids, mm_token_type_ids=is_image, **inputs).logits
        logits[..., images.placeholder_id] -= 100
        log_probs = (logits / 1.3).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        expected = log_probs[len(request.prompt_ids) - 1 :].numpy()
        assert np.allclose(completion.log_probs, expected, atol=1e-4)


@pytest.mark.usefixtures("local_ray")
def test_ppo_with_a_critic_and_a_reference_runs_on_images(folder: Path):
    values = {
        "name": "images",
        "num_steps": 2,
        "storage_path": f"{folder}/runs",
        "model": {name: f"{folder}/model" for name in ("policy", "reference", "critic")},
        "data": {
            "prompts": f"{folder}/train.jsonl",
            "label_key": "answer",
            "image_key": "image",
            "as_chat": True,
            "max_prompt_tokens": 64,
        },
        "ppo": {"advantage": "gae", "minibatch_size": 8, "kl": {"coef": 0.01}},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 8},
        "reward": {"function": "tests.integration.task:digit_share"},
        "learner": {"policy_lr": 1e-3},
        "eval": {"prompts": f"{folder}/train.jsonl", "every": 2},
    }
    result = PPOTrainer(PPOConfig.parse(values, origin="test")).fit()
    assert result.return_value == {"status": "finished", "step": 2}
    assert result.metrics is not None
    assert result.metrics["mismatch/log_prob_gap_max"] < 1e-4
    assert result.metrics["ppo/value_loss"] > 0
    exported = Path(result.path, "policy")
    before = AutoModelForImageTextToText.from_pretrained(folder / "model")
    after = AutoModelForImageTextToText.from_pretrained(exported)
    changed = {
        name.split(".")[1]
        for (name, one), (_, other) in zip(
            before.named_parameters(), after.named_parameters(), strict=True
        )
        if not torch.equal(one, other)
    }
    assert changed == {"language_model"} or changed == {"language_model", "weight"}
    assert Path(exported, "processor_config.json").is_file()
