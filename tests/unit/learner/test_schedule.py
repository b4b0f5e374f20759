import pytest

from raypo.learner.learning_rate import learning_rate


def rates(schedule, *, num_steps=4, warmup_steps=0):
    return [
        learning_rate(step, num_steps, highest=2.0, schedule=schedule, warmup_steps=warmup_steps)
        for step in range(1, num_steps + 1)
    ]


def test_by_hand():
    assert rates("constant") == [2.0, 2.0, 2.0, 2.0]
    assert rates("linear") == [2.0, 1.5, 1.0, 0.5]
    assert rates("cosine") == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])


def test_warm_up_rises_to_the_highest_on_the_step_after_it():
    assert rates("constant", warmup_steps=3) == [0.5, 1.0, 1.5, 2.0]
    assert rates("linear", num_steps=6, warmup_steps=2) == pytest.approx(
        [2 / 3, 4 / 3, 2.0, 1.5, 1.0, 0.5]
    )


def test_a_warm_up_as_long_as_the_run_never_divides_by_zero():
    assert rates("linear", warmup_steps=4)[-1] == pytest.approx(1.6)
