"""From scores to advantages, KL and corrections, over an experience."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from raypo.collectives import Workers
from raypo.config import CorrectionSection, PPOSection
from raypo.ppo.controllers import ReferenceKL, UpdateState
from raypo.ppo.corrections import MAX_LAG, mismatch_metrics, with_corrections
from raypo.ppo.estimators import with_advantages
from raypo.ppo.objective import StepCounts
from raypo.types import Experience
from tests.unit.learner.plain import one_step, plain_models
from tests.unit.learner.test_knobs import section


def test_the_raw_scores_stay_what_they_were():
    with plain_models():
        raw = one_step(section({}))
        shaped = one_step(section({"shaping.clip_high": 0.0, "shaping.normalize": True}))
    assert shaped.experience.scores.tolist() == raw.experience.scores.tolist()
    assert shaped.figures["ppo/shaped_score_mean"] < raw.figures["ppo/shaped_score_mean"]


def two_turns_and_one() -> Experience:
    """A response of two tokens with an environment's between them, and one of a single token.

    The policy is 0.5, (9) and 0.25 nats a token above the reference, and 1.
    """
    sampled = torch.tensor([[True, False, True], [True, False, False]])
    old = torch.full((2, 3), -1.0)
    above = torch.tensor([[0.5, 9.0, 0.25], [1.0, 0.0, 0.0]])
    return Experience(
        prompt_ids=torch.tensor([[5], [6]]),
        prompt_mask=torch.ones(2, 1, dtype=torch.bool),
        response_ids=torch.tensor([[7, 8, 2], [2, 0, 0]]),
        attention_mask=torch.tensor([[True, True, True], [True, False, False]]),
        response_mask=sampled,
        rollout_log_probs=torch.full((2, 3), -7.0),  # an engine far off: not its KL
        scores=torch.tensor([3.0, 1.0]),
        group_index=torch.tensor([0, 0]),
        minibatch=torch.tensor([0, 0]),
        truncated=torch.tensor([False, False]),
        weight_version=torch.tensor([0, 0]),
        ref_log_probs=old - above,
        old_log_probs=old,
    )


def shaped(keys: dict[str, Any], *, coef: float | None = None) -> tuple[Experience, dict]:
    """`two_turns_and_one` with advantages; `coef` is where the controller stands."""
    ppo = PPOSection.model_validate({"advantage": "reinforce", **keys})
    state = UpdateState.initial(ppo)
    if coef is not None:
        state = replace(state, kl=replace(state.kl, coef=coef))
    batch = two_turns_and_one()
    batch, figures, _ = with_advantages(batch, ppo, state, Workers(), max_new_tokens=3, step=1)
    return batch, figures | ReferenceKL.measure(batch, Workers()).metrics() | state.metrics()


def test_the_penalty_is_the_learners_kl_at_the_controllers_coefficient():
    kl = {"coef": 0.1, "controller": "adaptive", "target": 1.0, "horizon": 100.0}

    batch, figures = shaped({"kl": kl}, coef=2.0)

    # rewards -2 * 0.5, the gap, 3 - 2 * 0.25 | 1 - 2 * 1, and the returns from there on
    assert batch.returns is not None
    torch.testing.assert_close(batch.returns, torch.tensor([[1.5, 0.0, 2.5], [-1.0, 0.0, 0.0]]))
    assert figures["kl/coef"] == 2.0
    assert figures["kl/ref_mean"] == pytest.approx(1.75 / 3)  # tokens
    assert figures["kl/ref_response_mean"] == pytest.approx(1.75 / 2)  # responses


def test_a_truncated_response_moves_no_other_ones_advantage():
    truncated = torch.tensor([False, True, False])
    two = two_turns_and_one()
    three = two.select(torch.tensor([0, 1, 1])).with_(truncated=truncated)
    three = three.with_(scores=torch.tensor([3.0, 50.0, 1.0]))
    keys = {"advantage": "reinforce", "kl": {"coef": 0.0}}
    found = []
    for batch, more in ((two, {}), (three, {"mask_truncated": True})):
        ppo = PPOSection.model_validate({**keys, **more})
        batch, *_ = with_advantages(
            batch, ppo, UpdateState.initial(ppo), Workers(), max_new_tokens=3, step=1
        )
        assert batch.advantages is not None
        found.append(batch.advantages)
        counts = StepCounts.of(batch, ppo, Workers())
        assert (counts.tokens, counts.sequences, counts.responses) == (3, 2, 2)
    torch.testing.assert_close(found[1][[0, 2]], found[0])


def test_an_environments_tokens_do_not_make_a_response_overlong():
    keys = {"kl": {"coef": 0.0}, "shaping": {"overlong_buffer_tokens": 1}}

    _, figures = shaped(keys)

    # two sampled tokens of at most three; with the environment's there would be three
    assert figures["ppo/shaped_score_mean"] == 2.0


def test_tokens_of_weights_that_are_too_old_weigh_nothing_and_the_others_what_they_did():
    versions = torch.tensor([[3, 3, 5], [4, 4, 4]])
    batch = two_turns_and_one().with_(weight_versions=versions)
    section = CorrectionSection(max_staleness=1)

    weights = with_corrections(batch, section, version=5).weights

    assert weights is not None
    assert weights.tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    ppo = PPOSection(correction=section)
    figures = mismatch_metrics(batch, ppo, Workers(), version=5)
    assert figures["mismatch/dropped_fraction"] == pytest.approx(1 / 3)
    assert figures["rollout/staleness_mean"] == 1.0  # of (2 + 0) / 2 and 1
    assert figures["rollout/staleness_max"] == 2.0
    shares = [figures[f"rollout/staleness_share_{lag}"] for lag in range(3)]
    assert shares == pytest.approx([1 / 3] * 3)
    by_lag = [figures[f"mismatch/kl_lag_{lag}"] for lag in range(3)]
    assert sum(by_lag) / 3 == pytest.approx(figures["mismatch/kl"])


def test_metrics_by_lag_end_at_the_largest_with_metrics_of_its_own():
    batch = two_turns_and_one().with_(weight_version=torch.tensor([0, 49]))
    figures = mismatch_metrics(batch, PPOSection(), Workers(), version=50)
    shares = {name: value for name, value in figures.items() if "staleness_share" in name}
    assert len(shares) == MAX_LAG + 1
    assert shares.pop(f"rollout/staleness_share_{MAX_LAG}") == pytest.approx(2 / 3)
    assert shares.pop("rollout/staleness_share_1") == pytest.approx(1 / 3)
    assert not any(shares.values())


def test_the_gap_to_the_engine_is_not_told_where_the_engines_log_probs_are_the_old_ones():
    figures = mismatch_metrics(
        two_turns_and_one(), PPOSection(old_log_probs="engine"), Workers(), version=0
    )
    assert figures["rollout/staleness_max"] == 0.0
    assert not any(name.startswith("mismatch/kl") for name in figures)


def test_log_probs_that_the_engine_does_not_know_are_counted_above_all_where_they_are_trained_on():
    batch = two_turns_and_one()
    unknown = torch.tensor(
        [[-1.0, torch.nan, torch.nan], [-1.0, 0.0, 0.0]]
    )  # one of an environment
    batch = batch.with_(rollout_log_probs=unknown, old_log_probs=unknown)
    figures = mismatch_metrics(batch, PPOSection(old_log_probs="engine"), Workers(), version=0)
    assert figures["mismatch/unknown_tokens"] == 1.0


def test_rewards_of_turns_leave_the_score_of_an_episode_what_it_is():
    """The estimator credits them where they were earned; who looks at scores sees all of them."""
    turns = torch.tensor([[2.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    ppo = PPOSection.model_validate({"advantage": "reinforce", "kl": {"coef": 0.0}})
    batch, figures, _ = with_advantages(
        two_turns_and_one().with_(turn_rewards=turns),
        ppo,
        UpdateState.initial(ppo),
        Workers(),
        max_new_tokens=3,
        step=1,
    )
    assert batch.returns is not None
    torch.testing.assert_close(batch.returns, torch.tensor([[3.0, 0.0, 1.0], [1.0, 0.0, 0.0]]))
    assert figures["ppo/shaped_score_mean"] == 2.0
