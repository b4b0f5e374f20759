"""Each estimator and each loss learns: the score climbs, and falls when the advantage is flipped.

A bandit in language: a tiny Llama writes three tokens and is paid for tokens of the lower half of
its vocabulary. All but the sampling is the real code.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.learner.learner import Learner
from raypo.ppo.controllers import UpdateState
from raypo.ppo.corrections import with_corrections
from raypo.ppo.estimators import with_advantages
from raypo.rollout.sharding import deal, to_experience
from raypo.types import Rollout
from tests.rollouts import plain_rollout
from tests.unit.learner.plain import (
    TEMPERATURE,
    VOCABULARY,
    PlainModel,
    plain_learner,
    plain_models,
)

TOKENS, PROMPTS, SAMPLES = 3, 8, 4
STEPS = 8


@pytest.fixture(autouse=True)
def adam(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(PlainModel, "optimizer", functools.partial(torch.optim.AdamW))
    with plain_models():
        yield


@torch.no_grad()
def sample(learner: Learner, generator: torch.Generator) -> list[Rollout]:
    """`SAMPLES` responses to each of `PROMPTS` one-token prompts, in one batch."""
    policy: Any = learner
    model = policy._policy.module.model
    ids = torch.arange(PROMPTS).repeat_interleave(SAMPLES)[:, None]  # [B, 1]
    chosen = []
    for _ in range(TOKENS):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1] / TEMPERATURE
        log_p = logits.log_softmax(-1)
        token = torch.multinomial(log_p.exp(), 1, generator=generator)
        chosen.append(log_p.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    log_probs = torch.cat(chosen, dim=1).float().numpy()
    return [
        replace(_rollout(row, ids[row].numpy(), log_probs[row]), score=_score(ids[row, 1:]))
        for row in range(len(ids))
    ]


def _score(response: torch.Tensor) -> float:
    return float((response < VOCABULARY // 2).float().mean())


def _rollout(row: int, ids: np.ndarray, log_probs: np.ndarray) -> Rollout:
    return plain_rollout(
        num_response=TOKENS,
        prompt_ids=ids[:1].astype(np.int32),
        response_ids=ids[1:].astype(np.int32),
        log_probs=log_probs,
        prompt_index=row // SAMPLES,
        sample_index=row % SAMPLES,
        finish_reason="length",
        group_index=row // SAMPLES,
    )


def learned(ppo: PPOSection, *, sign: float) -> float:
    """How much the mean score has risen from the first to the last step."""
    workers, generator = Workers(), torch.Generator().manual_seed(0)
    learner, state = plain_learner(ppo, workers, rate=0.03), UpdateState.initial(ppo)
    scores = []
    for step in range(1, STEPS + 1):
        scored = sample(learner, generator)
        scores.append(np.mean([each.score for each in scored]))
        batch = to_experience(
            *deal(scored, minibatch_size=ppo.minibatch_size, seed=(0, step), num_workers=1)
        )
        batch, _, scores_so_far = with_advantages(
            learner.with_log_probs_and_values(batch),
            ppo,
            state,
            workers,
            max_new_tokens=TOKENS,
            step=step,
        )
        state = replace(state, scores=scores_so_far)
        batch = with_corrections(batch, ppo.correction, version=0)
        assert batch.advantages is not None
        learner.update(replace(batch, advantages=sign * batch.advantages), step=step)
    return float(scores[-1] - scores[0])


CASES: list[dict[str, Any]] = [
    {"advantage": name}
    for name in (
        "gae",
        "reinforce",
        "reinforce_baseline",
        "rloo",
        "grpo",
        "dr_grpo",
        "opo",
        "maxrl",
    )
]
CASES += [{"advantage": "pass_at_k", "pass_k": 2}]
CASES += [
    {"advantage": "grpo", "policy_loss": name}
    for name in ("gspo", "cispo", "sapo", "dppo_tv", "vespo")
]
CASES += [{"advantage": "grpo", "aggregation": "constant", "correction": {"kind": "tis"}}]


@pytest.mark.parametrize("keys", CASES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_the_score_climbs_and_falls_with_the_sign_flipped(keys: dict[str, Any]):
    ppo = PPOSection.model_validate({"minibatch_size": 16, "kl": {"coef": 0.0}, **keys})

    assert learned(ppo, sign=1.0) > 0.1
    assert learned(ppo, sign=-1.0) < -0.1
