"""Which samples iterative DPO compares, and which configs it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from raypo.config import ConfigError, IterativeDPOConfig
from raypo.recipes.iterative_dpo import best_and_worst, pair_of, row_of
from raypo.recipes.rounds import key_of
from tests.unit.run.test_rejection_sampling import VALUES, scored

SAMPLES = [
    scored(0, 0, 0.5),
    scored(0, 1, 0.9),
    scored(0, 2, 0.9),
    scored(0, 3, 0.2),
    scored(1, 0, 1.0),
    scored(1, 1, 1.0),
    scored(2, 0, float("nan")),
    scored(2, 1, 0.4),
    scored(3, 0, 0.3),
    scored(3, 1, 0.4),
]


@pytest.mark.parametrize(
    ("min_gap", "pairs"),
    [(0.0, [((0, 1), (0, 3)), ((3, 1), (3, 0))]), (0.5, [((0, 1), (0, 3))]), (1.0, [])],
)
def test_the_best_is_compared_with_the_worst_and_ties_are_skipped(min_gap, pairs):
    for samples in (SAMPLES, SAMPLES[::-1]):
        found = best_and_worst(samples, min_gap=min_gap)
        assert [(key_of(best), key_of(worst)) for best, worst in found] == pairs


def test_a_pair_has_what_the_reference_says_of_whole_responses():
    best, worst = SAMPLES[1], SAMPLES[3]
    assert pair_of(best, worst).ref_log_probs is None
    told = [
        replace(each, ref_log_probs=np.array([-1.0, value, -0.25], np.float32))
        for each, value in ((best, -0.5), (worst, -2.0))
    ]
    assert pair_of(told[0], told[1]).ref_log_probs == (-1.75, -3.25)


def test_a_row_is_one_that_dpo_and_reward_models_take():
    said = row_of(SAMPLES[1], SAMPLES[3])
    assert (said["prompt"], said["chosen"], said["rejected"]) == ("prompt 0", "0.1", "0.3")
    assert (said["chosen_score"], said["rejected_score"]) == (0.9, 0.2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollout": {"samples_per_prompt": 1}}, "Set rollout.samples_per_prompt to 2 or more"),
        ({"dpo": {"loss": "kto"}}, "Set dpo.loss to sigmoid or another loss of pairs"),
        (
            {"dpo": {"loss": "simpo"}, "iterative_dpo": {"reference": "start"}},
            "has no effect, because dpo.loss is simpo. Remove iterative",
        ),
        ({"model": {"policy": "m", "reference": "r"}}, "Remove model.reference"),
        ({"learner": {"max_tokens_per_microbatch": 330}}, "to at least 384"),
    ],
)
def test_a_config_that_cannot_act_is_refused(changes, told):
    with pytest.raises(ConfigError, match=told):
        IterativeDPOConfig.parse(VALUES | changes)


def test_only_a_reference_that_stays_is_deployed():
    start = {"iterative_dpo": {"reference": "start"}}
    assert IterativeDPOConfig.parse(VALUES).reference is None
    assert IterativeDPOConfig.parse(VALUES | start).reference == "m"
    named = {"model": {"policy": "m", "reference": "r"}}
    assert IterativeDPOConfig.parse(VALUES | start | named).reference == "r"
    adapted = {"model": {"policy": "m", "lora": {}}}
    assert IterativeDPOConfig.parse(VALUES | start | adapted).reference is None
