"""Arguments of a run's engines: the most requests that they have at a time."""

from collections import Counter
from typing import Any

import pytest

from raypo.cluster.placement import served_roles
from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.run import shared_services
from raypo.run.served_roles import class_and_arguments
from raypo.run.services import own_engines
from raypo.serving.engine_sizes import max_requests_of

PROMPTS, SAMPLES = 13, 3


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


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_engines", [1, 2, 3, 5, 8])
def test_an_engine_has_room_for_all_requests_of_a_step(num_workers: int, num_engines: int):
    """Counts what `sample_on_engines` sends: ceil(requests / engines) to a worker's first ones."""
    config = config_of(learner={"num_workers": num_workers})
    sent: Counter[int] = Counter()
    for rank in range(num_workers):
        requests = SAMPLES * len(range(rank, PROMPTS, num_workers))
        engines = own_engines(Workers(rank, num_workers), num_engines)
        size = -(-requests // len(engines))
        for place, engine in enumerate(engines):
            sent[engine] += max(0, min(size, requests - place * size))
    most = max_requests_of(config, num_engines=num_engines)
    assert most is not None
    if num_engines == 1:
        assert most >= PROMPTS * SAMPLES == sent[0]
        assert most < PROMPTS * SAMPLES + num_workers * SAMPLES
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
    assert shared_services.roles_apart(larger, config_of()) == set()
