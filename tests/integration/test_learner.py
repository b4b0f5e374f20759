"""Policy under real DeepSpeed against plain PyTorch: one step is the same, however it is cut."""

from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from raypo.collectives import Workers
from raypo.learner.learner import minibatch_order
from raypo.learner.state import NonFiniteUpdateError
from raypo.models.critic import Critic, CriticStart
from raypo.models.loading import load_causal_lm
from raypo.models.networks import Policy
from raypo.types import Experience
from tests.integration.learning import (
    LR,
    MAX_NORM,
    STAGES,
    P,
    T,
    experience,
    largest_difference,
    learner,
    plain_ppo_loss,
    save_state,
    weights,
    with_targets,
)

pytestmark = pytest.mark.usefixtures("group")


def plain_pytorch(model: str, batch: Experience, order: list[int]) -> dict[str, Tensor]:
    """Whole minibatches, AdamW and clipping by hand, no DeepSpeed."""
    policy = Policy(load_causal_lm(model, dtype="float32"), temperature=1.0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    for minibatch in order:
        piece = batch.select(torch.nonzero(batch.minibatch == minibatch).flatten())
        log_probs, _ = policy(piece)
        loss = plain_ppo_loss(log_probs, piece)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
        optimizer.step()
    return {n: p.detach() for n, p in policy.model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_two_epochs_are_those_of_plain_pytorch_at_every_zero_stage(model: str, stage: int):
    trained = learner(model, stage=stage)
    before = weights(trained)
    batch = with_targets(trained.with_log_probs_and_values(experience()))
    _, update = trained.update(batch, step=1)
    order = minibatch_order(0, 1, 0, 2) + minibatch_order(0, 1, 1, 2)
    expected = plain_pytorch(model, batch, order)
    # Adam's first steps are lr * sign(gradient): a coordinate whose gradient is rounding may flip.
    assert largest_difference(weights(trained), expected) < 0.1 * LR
    assert largest_difference(before, expected) > LR
    assert update.metrics["ppo/skipped_updates"] == 0.0
    assert "lm_head.weight" not in expected  # tied: it comes once


@pytest.mark.parametrize("stage", STAGES)
def test_the_cut_into_microbatches_changes_nothing(model: str, stage: int):
    results = []
    for microbatch in (P + T, 4096):  # one row a piece, all rows in one
        trained = learner(model, stage=stage, microbatch=microbatch)
        _, update = trained.update(
            with_targets(trained.with_log_probs_and_values(experience())), step=1
        )
        results.append((weights(trained), update.metrics))
    (cut, figures_cut), (whole, figures_whole) = results
    assert largest_difference(cut, whole) < 0.1 * LR
    assert figures_cut == pytest.approx(figures_whole, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_warm_up_changes_no_bit(model: str, stage: int, dtype: str):
    deepspeed = {"zero_optimization": {"stage": stage}}  # or a single worker has stage 0
    results = []
    for is_warm in (False, True):
        trained = learner(model, stage=stage, dtype=dtype, deepspeed=deepspeed)
        batch = with_targets(trained.with_log_probs_and_values(experience()))
        random = torch.get_rng_state()
        if is_warm:
            trained.warm_up()
        assert torch.equal(random, torch.get_rng_state())
        _, update = trained.update(batch, step=1)
        results.append((weights(trained), update))
    (cold, figures), (warm, same_figures) = results
    assert largest_difference(cold, warm) == 0.0
    assert figures == same_figures


@pytest.mark.parametrize("stage", STAGES)
def test_saved_and_restored_it_goes_on_bit_for_bit(model: str, stage: int, tmp_path: Path):
    trained = learner(model, stage=stage)
    batch = with_targets(trained.with_log_probs_and_values(experience()))
    trained.update(batch, step=1)
    save_state(trained, tmp_path)
    # Checksums take most of the time of a save, and torch.load does not read them.
    assert ZipFile(tmp_path / "policy_0.pt").testzip() is not None
    _, expected = trained.update(batch, step=2)

    resumed = learner(model, stage=stage)
    resumed.restore(tmp_path)
    assert resumed.update(batch, step=2)[1] == expected
    assert largest_difference(weights(resumed), weights(trained)) == 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_restored_it_goes_on_with_a_learning_rate_of_its_own(
    model: str, stage: int, tmp_path: Path
):
    """Of a run that began with another's state, and of a trial of pbt."""
    trained = learner(model, stage=stage)
    batch = with_targets(trained.with_log_probs_and_values(experience()))
    trained.update(batch, step=1)
    save_state(trained, tmp_path)

    resumed = learner(model, stage=stage, rate=0.0)
    resumed.restore(tmp_path)
    before = weights(resumed)
    assert largest_difference(before, weights(trained)) == 0.0
    resumed.update(batch, step=2)
    assert largest_difference(weights(resumed), before) == 0.0


def test_a_saved_critic_loads_back_with_its_values(model: str, tmp_path: Path):
    trained = learner(model, stage=3)
    batch = with_targets(trained.with_log_probs_and_values(experience()))
    trained.update(batch, step=1)
    expected = trained.with_log_probs_and_values(experience()).values
    assert expected is not None
    assert expected.abs().max() > 0
    export = trained.critic_export(AutoTokenizer.from_pretrained(model))
    export.save(tmp_path, Workers())

    critic, words = Critic.load(CriticStart(str(tmp_path)), dtype="float32")
    assert "value head included" in words
    values = torch.where(batch.response_mask, critic(batch), 0.0)
    torch.testing.assert_close(values, expected)


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_goes_on_at_another_zero_stage_to_rounding(
    model: str, dtype: str, before: int, after: int, tmp_path: Path
):
    trained = learner(model, stage=before, dtype=dtype)
    batch = with_targets(trained.with_log_probs_and_values(experience()))
    trained.update(batch, step=1)
    save_state(trained, tmp_path)
    resumed = learner(model, stage=after, dtype=dtype)
    started = weights(resumed)
    resumed.restore(tmp_path)
    assert largest_difference(weights(resumed), weights(trained)) == 0.0
    assert largest_difference(weights(resumed), started) > 0.5 * LR
    _, expected = trained.update(batch, step=2)
    _, found = resumed.update(batch, step=2)
    rounding = 1e-4 if dtype == "float32" else 0.02
    assert found.metrics == pytest.approx(expected.metrics, rel=rounding, abs=rounding)
    # Moments that start at zero would make a step of LR in place of one that the old ones slow.
    unit = 0.1 * LR if dtype == "float32" else 2.0**-8
    assert largest_difference(weights(resumed), weights(trained)) < unit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_is_skipped_and_too_many_stop_the_run(
    model: str, stage: int, dtype: str
):
    trained = learner(model, stage=stage, dtype=dtype)
    before = weights(trained)
    batch = with_targets(trained.with_log_probs_and_values(experience()))
    assert batch.advantages is not None
    poisoned = batch.with_(advantages=torch.where(batch.response_mask, torch.inf, 0.0))
    with pytest.raises(NonFiniteUpdateError, match=r"learner.max_skipped_updates is 1"):
        trained.update(poisoned, step=1)
    assert largest_difference(weights(trained), before) == 0.0
