import pytest

from raypo.ppo.entropy import EntropyController
from tests.unit.ppo.steps import NAN


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


def test_a_step_without_an_entropy_changes_nothing():
    controller = EntropyController(0.1, target=0.2, delta=0.01)
    assert controller.updated(NAN) == controller


def test_a_fixed_coefficient_stays_and_is_never_a_checkpoints():
    controller = EntropyController(0.1)
    assert controller.updated(9.0) == controller
    assert controller.restored({"coef": 0.5, "entropy": 1.0}).acting == 0.1


def test_a_steered_coefficient_survives_a_checkpoint():
    controller = EntropyController(0.1, target=0.2, delta=0.01)
    later = controller.updated(0.5)
    assert later.acting == 0.0
    assert controller.restored(later.state_dict()) == later


@pytest.mark.parametrize("numbers", [(-0.1, None, 0.0), (0.1, 0.2, -0.1), (0.1, 0.0, 0.1)])
def test_impossible_controllers_are_refused(numbers):
    with pytest.raises(ValueError, match="must"):
        EntropyController(*numbers)
