"""Which samples rejection sampling keeps, and which configs it refuses."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from raypo.config import ConfigError, RejectionSamplingConfig, SelectionSection
from raypo.recipes.rejection_sampling import best_of, row_of
from raypo.recipes.rounds import key_of
from raypo.types import Rollout
from tests.rollouts import plain_rollout

VALUES = {
    "name": "r",
    "model": {"policy": "m"},
    "data": {"prompts": "p.jsonl"},
    "reward": {"function": "raypo.rewards.verifiers:exact_match"},
}


def scored(group: int, number: int, score: float, response: str = "") -> Rollout:
    text = response or f"{group}.{number}"
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return plain_rollout(
        2,
        len(ids),
        prompt=f"prompt {group}",
        response=text,
        response_ids=ids,
        label=7,
        prompt_index=group,
        sample_index=number,
        group_index=group,
        score=score,
    )


SAMPLES = [
    scored(0, 0, 0.2),
    scored(0, 1, 0.9, "right"),
    scored(0, 2, 0.9, "right"),
    scored(0, 3, 0.5),
    scored(1, 0, math.nan),
    scored(1, 1, 0.1),
    scored(1, 2, 0.4),
]


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({}, [(0, 1), (1, 2)]),
        ({"top_k": 2}, [(0, 1), (0, 3), (1, 2), (1, 1)]),
        ({"top_k": 2, "distinct": False}, [(0, 1), (0, 2), (1, 2), (1, 1)]),
        ({"top_k": None, "min_score": 0.4}, [(0, 1), (0, 3), (1, 2)]),
        ({"top_k": 1, "min_score": 0.5}, [(0, 1)]),
        ({"min_score": 2.0}, []),
    ],
)
def test_the_best_of_each_prompt_are_kept_down_to_the_least_score(section, kept):
    for samples in (SAMPLES, SAMPLES[::-1]):
        assert [key_of(each) for each in best_of(samples, SelectionSection(**section))] == kept


def test_a_row_is_one_that_sft_takes_chat_messages_as_json():
    said = row_of(SAMPLES[1])
    assert (said["prompt"], said["response"], said["label"]) == ("prompt 0", "right", "7")
    messages = [{"role": "user", "content": "how many?"}]
    chat = replace(SAMPLES[1], messages=messages)
    assert json.loads(row_of(chat)["prompt"]) == messages


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rejection_sampling": {"top_k": None}},
            "nothing is rejected if top_k and min_score are both null. Set one of them",
        ),
        (
            {"rollout": {"samples_per_prompt": 2}, "rejection_sampling": {"top_k": 2}},
            "Set rollout.samples_per_prompt to 3 or more, or rejection_sampling.min_score",
        ),
        (
            {"rollout": {"mode": "async"}, "placement": {"mode": "dedicated"}},
            "Set rollout.mode to sync",
        ),
        (
            {"rollout": {"router_replay": "engine"}},
            r"rollout.router_replay \(engine\): rejection_sampling does not compare",
        ),
        ({"model": {"policy": "m", "critic": "c"}}, "model.critic: there is no such key"),
        ({"model": {"policy": "m", "lora": {"push": "adapter"}}}, "Set it to merged"),
        ({"learner": {"num_workers": 40}}, "Set learner.num_workers to at most 32"),
        ({"ppo": {}}, "ppo"),
    ],
)
def test_a_config_that_cannot_act_is_refused(changes, told):
    with pytest.raises(ConfigError, match=told):
        RejectionSamplingConfig.parse(VALUES | changes)


def test_all_samples_may_pass_where_a_score_is_asked_for():
    values = {"rollout": {"samples_per_prompt": 1}, "rejection_sampling": {"min_score": 1.0}}
    assert RejectionSamplingConfig.parse(VALUES | values).rows_per_update == 32
