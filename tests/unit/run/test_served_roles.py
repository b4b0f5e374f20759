"""Arguments of a run's engines: the most requests that they have at a time."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from raypo.cluster.placement import served_roles
from raypo.config import PPOConfig
from raypo.rollout.collect import Sampler, Sampling
from raypo.run import shared_services
from raypo.run.served_roles import class_and_arguments
from raypo.serving.engine_sizes import max_requests_of
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Prompt
from tests.stand_ins import Engine, Lossy, completed

PROMPTS, SAMPLES = 13, 3


def ended(request: SamplingRequest) -> Completion:
    return Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0)


def config_of(**sections: dict[str, Any]) -> PPOConfig:
    values: dict[str, Any] = {
        "name": "run",
        "model": {"policy": "p"},
        "data": {"prompts": "a.jsonl"},
        "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
        "ppo": {"preset": "grpo", "minibatch_size": 39},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return PPOConfig.parse(values)


def arguments_of(config: PPOConfig) -> dict[str, Any]:
    (engine,) = (
        role for role in served_roles(config, num_workers=1, use_gpu=False) if role.kind == "engine"
    )
    return class_and_arguments(engine, config)[1]


@pytest.mark.parametrize("num_engines", [1, 2, 3, 5, 8])
def test_an_engine_has_room_for_all_requests_of_a_step(num_engines: int):
    """Counts what the sampler sends to each engine."""
    config, sent = config_of(), Counter[int]()

    class Fleet(Engine):
        def per_engine(self) -> list[Engine]:
            return [One(lambda requests: [], number=number) for number in range(num_engines)]

    @dataclass
    class One(Engine):
        number: int = 0

        def generate(self, requests: Any, on_completion: Any = None) -> Any:
            sent[self.number] += len(requests)
            return completed([ended(request) for request in requests])

    sampling = Sampling(SAMPLES, 4, 1.0, 1.0, (), seed=0)
    draws = [Prompt(n, "p", np.array([5], np.int32), group_index=n) for n in range(PROMPTS)]
    Sampler(Fleet(lambda requests: []), Lossy(), sampling).sample(draws)
    most = max_requests_of(config, num_engines=num_engines)
    assert most is not None
    assert sum(sent.values()) == PROMPTS * SAMPLES
    if num_engines == 1:
        assert most == PROMPTS * SAMPLES
    else:  # those of a lost engine too
        assert most >= 2 * max(sent.values())


def test_batches_in_flight_count_and_unknown_numbers_set_no_limit():
    assert arguments_of(config_of())["max_requests"] == PROMPTS * SAMPLES
    for mode, batches in ({"mode": "async", "max_staleness": 2}, 3), ({"mode": "one_step_off"}, 1):
        ahead = config_of(rollout=mode, placement={"mode": "dedicated"})
        assert arguments_of(ahead)["max_requests"] == batches * PROMPTS * SAMPLES
    for unknown in (
        {"eval": {"prompts": "b.jsonl", "function": "f.py:f"}},
        {"rollout": {"agent": "f.py:f", "max_episode_tokens": 4096}},
    ):
        assert arguments_of(config_of(**unknown))["max_requests"] is None


def test_trials_with_other_batches_share_an_engine(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(
        shared_services, "start_deployment", lambda deployment, places: started.append(deployment)
    )
    shared_services.start_shared(
        config_of(), "sweep", ["engine"], logs_dir=str(tmp_path), use_gpu=False
    )
    assert [deployment.kwargs["max_requests"] for deployment in started] == [None]
    larger = config_of(rollout={"prompts_per_step": 2 * PROMPTS}, ppo={"minibatch_size": 78})
    assert shared_services.roles_with_different_deployments(larger, config_of()) == set()


def test_engine_and_reference_get_the_dtype_of_the_head():
    model = {"policy": "p", "reference": "r", "head_dtype": "float32"}
    extra = {"hf_overrides": {"a": 1}, "max_num_seqs": 3}
    changed = config_of(model=model, rollout={"engine": {"extra": extra}})
    vllm = config_of(model=model, placement={"frozen": {"reference": {"backend": "vllm"}}})

    engine = arguments_of(changed)["section"].extra
    assert engine == extra | {"hf_overrides": {"a": 1, "head_dtype": "float32"}}
    assert arguments_of(config_of())["section"].extra == {}
    for config in (changed, vllm):
        (reference,) = (
            role
            for role in served_roles(config, num_workers=1, use_gpu=False)
            if role.kind == "reference"
        )
        assert class_and_arguments(reference, config)[1]["head_dtype"] == "float32"


def test_engines_of_prompts_without_images_reserve_memory_for_one():
    """A model that reads images has to have room for one, even if it gets texts alone."""
    assert arguments_of(config_of(data={"max_images": 5}))["max_images"] == 1
    assert arguments_of(config_of(data={"max_images": 5, "image_key": "image"}))["max_images"] == 5
