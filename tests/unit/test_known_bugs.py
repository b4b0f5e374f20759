"""The fifteen bugs of this field (MATH.md section 7): where each is tested, the rest right here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.data.batching import batches_by_tokens
from raypo.data.stream import Draw
from raypo.ppo.estimators import estimate_advantages
from raypo.rollout.collect import Sampling, judge, sample
from raypo.rollout.dealing import Deal, to_experience
from raypo.rollout.judges import Judges
from raypo.rollout.sync_weights import Probe, WeightError, push_weights
from raypo.serving.sampling import Completion
from raypo.types import Prompt
from tests.unit.config.test_run_config import with_keys

TESTS = Path(__file__).parents[1]
FORMULAS, KNOBS = "unit/ppo/test_field_bugs.py", "unit/learner/test_knobs.py"
HERE = "unit/test_known_bugs.py"
WHERE = {
    1: [(FORMULAS, "test_bug_1_"), ("unit/learner/test_wiring.py", "test_rows_microbatches_")],
    2: [(FORMULAS, "test_bug_2_"), (KNOBS, "test_every_key_has_a_case")],
    3: [(FORMULAS, "test_bug_3_")],
    4: [(FORMULAS, "test_bug_4_")],
    5: [(FORMULAS, "test_bug_5_"), (KNOBS, "test_the_controller_takes_the_kl_of_a_response")],
    6: [(FORMULAS, "test_bug_6_")],
    7: [(KNOBS, "test_bug_7_")],
    8: [(HERE, "test_bug_8_"), ("integration/test_engine.py", "test_a_bad_push_is_refused")],
    9: [("unit/rollout/test_dealing.py", "test_bug_9_")],
    10: [(HERE, "test_bug_10_")],
    11: [(HERE, "test_bug_11_")],
    12: [(HERE, "test_bug_12_")],
    13: [("unit/data/test_stream.py", "test_a_resumed_stream_goes_on_with_the_same_draws_at_an")],
    14: [(FORMULAS, "test_bug_14_"), ("unit/models/test_token_log_probs.py", "test_")],
    15: [(HERE, "test_bug_15_")],
}


@pytest.mark.parametrize("bug", range(1, 16))
def test_each_bug_has_a_test(bug: int):
    for file, name in WHERE[bug]:
        assert f"def {name}" in (TESTS / file).read_text(), (file, name)


PROMPT = np.array([5, 6], np.int32)
SAMPLED = np.array([7, 8, 9], np.int32)
SAMPLING = Sampling(
    samples_per_prompt=2, max_new_tokens=3, temperature=1.0, top_p=1.0, stop_token_ids=(), seed=0
)


def completion(log_prob: float = -1.0) -> Completion:
    return Completion(
        token_ids=SAMPLED,
        log_probs=np.full(3, log_prob, np.float32),
        finish_reason="length",
        weight_version=1,
    )


class Engine:
    """Answers every request alike, on one replica."""

    def __init__(self) -> None:
        self.generate = SimpleNamespace(remote=self._pending, on_all=lambda r: [self._pending(r)])

    def each_preferred(self) -> list["Engine"]:
        return [self]

    def _pending(self, requests: list[Any]) -> Any:
        return answer_of([completion() for _ in requests])


def answer_of(value: Any) -> Any:
    return SimpleNamespace(result=lambda: value)


class Lossy:
    """A tokenizer that decodes everything to one text, as many do with spaces and bytes."""

    def batch_decode(self, ids: list[Any], **_: Any) -> list[str]:
        return ["?"] * len(ids)


def sampled(num_draws: int) -> list[Any]:
    draws = [Draw(index, Prompt(0, "same text", PROMPT)) for index in range(num_draws)]
    return sample(draws, Engine(), Lossy(), SAMPLING)


def test_bug_8_an_engine_that_kept_its_old_weights_stops_the_run():
    learner: Any = SimpleNamespace(
        named_weights=lambda: iter([("w", torch.ones(2))]),
        log_probs=lambda batch: torch.where(batch.response_mask, -1.0 - gap, 0.0),
    )
    push = {
        "transport": SimpleNamespace(push=lambda *_, **__: None),
        "probe": Probe([PROMPT], max_new_tokens=3, temperature=1.0, dtype="float32", seed=0),
        "workers": Workers(),
    }
    gap = 0.0
    assert push_weights(learner, Engine(), version=1, **push)["mismatch/probe_gap_max"] == 0.0
    gap = 0.01
    with pytest.raises(WeightError, match="other log-probs to the same"):
        push_weights(learner, Engine(), version=2, **push)


def test_bug_10_the_token_budget_is_used_to_its_last_token():
    assert batches_by_tokens("abcd", [1, 1, 1, 1], [3, 3, 3, 3], 16) == [[0, 1, 2, 3]]
    assert batches_by_tokens("abcd", [1, 1, 1, 1], [3, 3, 3, 3], 15) == [[0, 1, 2], [3]]
    # and the longest sequence that the config admits is exactly the budget
    PPOConfig.parse(with_keys(learner__max_tokens_per_microbatch=256 + 64))


def test_bug_11_equal_prompts_drawn_twice_are_two_groups():
    rollouts = sampled(2)
    assert [r.group_index for r in rollouts] == [0, 0, 1, 1]
    groups = torch.tensor([r.group_index for r in rollouts])
    advantages, _ = estimate_advantages(
        torch.tensor([0.0, 2.0, 10.0, 10.0]),
        torch.ones(4, 1, dtype=torch.bool),
        kind="dr_grpo",
        gamma=1.0,
        group_index=groups,
    )
    assert advantages.flatten().tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_bug_12_what_is_trained_are_the_sampled_ids_whatever_the_text_says():
    rollouts = sampled(1)
    assert rollouts[0].response == "?"
    judges = Judges(lambda given: [1.0] * len(given), (), {"function": 1.0})
    scored = judge(rollouts, judges, None)
    batch = to_experience(Deal(scored, [0, 0]))
    assert batch.response_ids.tolist() == [SAMPLED.tolist()] * 2
    assert batch.prompt_ids.tolist() == [PROMPT.tolist()] * 2


def test_bug_15_frozen_models_get_the_policys_ids_and_functions_the_text():
    """Only models of the policy's own vocabulary are handed ids; a reward is given the text."""
    seen: dict[str, Any] = {}

    def log_probs(rollouts: list[Any]) -> Any:
        seen["reference"] = [r.response_ids.tolist() for r in rollouts]
        return answer_of([np.zeros(3, np.float32)] * len(rollouts))

    def reward(rollouts: list[Any]) -> list[float]:
        seen["reward"] = [r.response for r in rollouts]
        return [0.0] * len(rollouts)

    judges = Judges(reward, (), {"function": 1.0})
    judge(sampled(1), judges, SimpleNamespace(log_probs=SimpleNamespace(remote=log_probs)))

    assert seen == {"reference": [SAMPLED.tolist()] * 2, "reward": ["?", "?"]}
