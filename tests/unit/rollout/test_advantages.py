"""What advantages carry from step to step survives a checkpoint."""

import json

from raypo.config import KLSection
from raypo.ppo.shaping import RunningMoments
from raypo.rollout.advantages import AdvantageState
from tests.unit.learner.plain import one_step, plain_models
from tests.unit.learner.test_knobs import section

ADAPTIVE = {"kl.controller": "adaptive", "kl.target": 1.0, "kl.horizon": 100.0}


def test_the_state_survives_a_checkpoint():
    ppo = section({**ADAPTIVE, "shaping.normalize": True})
    with plain_models():
        state = one_step(ppo).state
    assert state.kl.coef != ppo.kl.coef
    assert state.scores.count == 12

    stored = json.loads(json.dumps(state.state_dict()))

    assert AdvantageState.of(ppo.kl).restored(stored) == state


def test_a_fixed_coefficient_is_the_configs_and_never_a_checkpoints():
    state = AdvantageState.of(KLSection(coef=0.5))
    stored = AdvantageState.of(KLSection(coef=0.1)).state_dict()
    assert state.restored(stored).kl.coef == 0.5
    assert state.scores == RunningMoments()


def test_the_raw_scores_stay_what_they_were():
    with plain_models():
        raw = one_step(section({}))
        shaped = one_step(section({"shaping.clip_high": 0.0, "shaping.normalize": True}))
    assert shaped.experience.scores.tolist() == raw.experience.scores.tolist()
    assert shaped.figures["ppo/shaped_score_mean"] < raw.figures["ppo/shaped_score_mean"]
