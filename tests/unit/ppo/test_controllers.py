"""The coefficients of KL and entropy over steps, and the state of the update in a checkpoint."""

import json
from dataclasses import replace
from typing import Any

import pytest

from raypo.learner.learner import Learner
from raypo.ppo.controllers import EntropyController, ReferenceKL, UpdateState
from raypo.ppo.shaping import RunningMoments
from tests.unit.learner.plain import one_step, plain_models
from tests.unit.learner.test_knobs import section

STEERED = {
    "kl.controller": "adaptive",
    "kl.target": 1.0,
    "kl.horizon": 100.0,
    "entropy_coef": 0.1,
    "entropy_target": 9.0,
    "shaping.normalize": True,
}


def test_the_bonus_acts_only_after_a_step_at_or_below_the_target():
    controller = EntropyController(0.0, target=0.2, delta=0.005)
    acted = []
    for entropy in (0.3, 0.1, 0.2, 0.25, 0.1):
        acted.append(controller.acting)
        controller = controller.updated(entropy)

    assert acted == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.0])
    assert controller.acting == pytest.approx(0.01)


def test_the_first_step_takes_the_coefficient_as_it_is_given():
    assert EntropyController(0.1, target=0.2, delta=0.01).acting == 0.1


def test_a_step_that_does_not_update_the_policy_changes_no_coefficient():
    state = UpdateState.initial(section(STEERED))
    scores = RunningMoments(2.0, 1.0, 0.5)
    assert state.after_step(scores=scores, kl=None, entropy=None) == replace(state, scores=scores)


def test_fixed_coefficients_stay_and_are_never_a_checkpoints():
    state = UpdateState.initial(section({"kl.coef": 0.5, "entropy_coef": 0.3}))
    kl = ReferenceKL(token_mean=1.0, response_mean=9.0, responses=4.0, clamped_tokens=0.0)
    assert state.after_step(scores=state.scores, kl=kl, entropy=9.0) == state
    other = UpdateState.initial(section({"kl.coef": 0.1, "entropy_coef": 0.2}))
    assert state.restored(other.state_dict()) == state


def test_the_state_survives_a_checkpoint():
    ppo = section(STEERED)
    with plain_models():
        state = one_step(ppo).state
    assert state.kl.coef != ppo.kl.coef
    assert state.entropy.acting != ppo.entropy_coef
    assert state.scores.count == 12

    stored = json.loads(json.dumps(state.state_dict()))

    assert UpdateState.initial(ppo).restored(stored) == state


def test_the_names_of_metrics_have_no_effect_on_training(monkeypatch: pytest.MonkeyPatch):
    ppo = section(STEERED)
    with plain_models():
        expected = one_step(ppo)
        update = Learner.update

        def renamed(*args: Any, **kwargs: Any) -> Any:
            experience, statistics = update(*args, **kwargs)
            return experience, replace(statistics, metrics={})

        monkeypatch.setattr(Learner, "update", renamed)
        monkeypatch.setattr(ReferenceKL, "metrics", lambda self: {})
        found = one_step(ppo)

    assert not {"ppo/entropy", "kl/ref_response_mean"} & found.figures.keys()
    assert found.state == expected.state != UpdateState.initial(ppo)


@pytest.mark.parametrize("numbers", [(-0.1, None, 0.0), (0.1, 0.2, -0.1), (0.1, 0.0, 0.1)])
def test_impossible_controllers_are_refused(numbers):
    with pytest.raises(ValueError, match="must"):
        EntropyController(*numbers)
