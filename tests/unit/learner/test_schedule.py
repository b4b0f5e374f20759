import pytest
import torch

from raypo.collectives import Workers
from raypo.config import PPOSection, WorkersSection
from raypo.learner.learning_rate import learning_rate
from tests.unit.learner.plain import one_step, plain_learner, plain_models


def rates(schedule, *, num_steps=4, warmup_steps=0, floor=0.0):
    section = WorkersSection(lr_schedule=schedule, lr_warmup_steps=warmup_steps, lr_floor=floor)
    return [
        learning_rate(step, num_steps, highest=2.0, section=section)
        for step in range(1, num_steps + 1)
    ]


def test_by_hand():
    assert rates("constant") == [2.0, 2.0, 2.0, 2.0]
    assert rates("linear") == [2.0, 1.5, 1.0, 0.5]
    assert rates("cosine") == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])


def test_a_schedule_falls_to_its_floor_and_not_below():
    assert rates("linear", floor=0.5) == [2.0, 1.75, 1.5, 1.25]
    assert rates("cosine", floor=0.5) == pytest.approx(
        [2.0, 1.5 + 0.125**0.5, 1.5, 1.5 - 0.125**0.5]
    )
    assert rates("cosine", floor=1.0) == [2.0, 2.0, 2.0, 2.0]


def test_warm_up_rises_to_the_highest_on_the_step_after_it():
    assert rates("constant", warmup_steps=3) == [0.5, 1.0, 1.5, 2.0]
    assert rates("linear", num_steps=6, warmup_steps=2) == pytest.approx(
        [2 / 3, 4 / 3, 2.0, 1.5, 1.0, 0.5]
    )


def test_a_warm_up_as_long_as_the_run_never_divides_by_zero():
    assert rates("linear", warmup_steps=4)[-1] == pytest.approx(1.6)


def test_a_policy_begins_its_schedule_when_its_critic_has_warmed_up():
    ppo = PPOSection(minibatch_size=12, critic_warmup_steps=2)
    with plain_models():
        evaluated = one_step(ppo).experience
        learner = plain_learner(
            ppo, Workers(), rate=0.3, num_steps=6, lr_schedule="linear", lr_warmup_steps=1
        )
        found = [learner.update(evaluated, step=step)[1].metrics for step in range(1, 7)]

    by_model = [
        [figures.get(f"ppo/{model}_learning_rate") for figures in found]
        for model in ("policy", "critic")
    ]
    assert by_model[0][:2] == [None, None]
    assert by_model[0][2:] == pytest.approx([0.15, 0.3, 0.2, 0.1])
    assert by_model[1] == pytest.approx([0.15, 0.3, 0.24, 0.18, 0.12, 0.06])


def test_an_update_is_as_large_as_its_rate():
    ppo = PPOSection(minibatch_size=12, advantage="grpo")
    moved = []
    with plain_models():
        evaluated = one_step(ppo).experience
        for step in (1, 4):
            learner = plain_learner(ppo, Workers(), num_steps=4, lr_schedule="linear")
            before = {name: w.clone() for name, w in plain_weights(learner)}
            learner.update(evaluated, step=step)
            moved.append([w - before[name] for name, w in plain_weights(learner)])

    for first, last in zip(*moved, strict=True):
        torch.testing.assert_close(last, first / 4)


def plain_weights(learner):
    return [(n, p.detach()) for n, p in learner._policy.module.named_parameters()]


def test_an_unknown_schedule_is_an_error():
    section = WorkersSection.model_construct(
        lr_schedule="polynomial", lr_warmup_steps=0, lr_floor=0.0
    )
    with pytest.raises(ValueError, match=r"learner.lr_schedule \(polynomial\)"):
        learning_rate(1, 4, highest=2.0, section=section)
