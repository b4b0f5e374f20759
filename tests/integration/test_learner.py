"""Policy under real DeepSpeed against plain PyTorch: one step is the same, however it is cut."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import LearnerSection, ModelSection, PPOSection
from raypo.learner.learner import Learner, minibatch_order
from raypo.learner.state import NonFiniteUpdateError
from raypo.models.loading import load_causal_lm
from raypo.models.networks import Policy
from raypo.ppo.losses import policy_loss
from raypo.types import Experience
from tests.tiny import tiny_policy

B, P, T = 6, 5, 7  # responses, prompt tokens, response tokens
LR, MAX_NORM = 1e-3, 0.5
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def experience() -> Experience:
    """Ragged prompts and responses in two minibatches of three."""
    generator = torch.Generator().manual_seed(1)
    prompt_tokens = torch.randint(2, P + 1, (B, 1), generator=generator)
    response_tokens = torch.randint(1, T + 1, (B, 1), generator=generator)
    prompt_mask = torch.arange(P) >= P - prompt_tokens
    mask = torch.arange(T) < response_tokens
    return Experience(
        prompt_ids=torch.randint(4, 60, (B, P), generator=generator) * prompt_mask,
        prompt_mask=prompt_mask,
        response_ids=torch.randint(4, 60, (B, T), generator=generator) * mask,
        attention_mask=mask,
        response_mask=mask,
        rollout_log_probs=torch.zeros(B, T),
        scores=torch.zeros(B),
        group_index=torch.arange(B),
        minibatch=torch.tensor([0, 0, 0, 1, 1, 1]),
        truncated=torch.zeros(B, dtype=torch.bool),
        weight_version=torch.zeros(B, dtype=torch.int64),
    )


def learner(
    model: str, *, stage: int, microbatch: int = 4096, clip: float = 0.2, rate: float = LR
) -> Learner:
    return Learner(
        ModelSection(policy=model),
        PPOSection(num_epochs=2, clip_low=clip, clip_high=clip),
        LearnerSection(
            zero_stage=stage,  # type: ignore[arg-type]
            policy_lr=rate,
            critic_lr=LR,
            max_grad_norm=MAX_NORM,
            max_tokens_per_microbatch=microbatch,
            max_skipped_updates=1,
        ),
        temperature=1.0,
        max_new_tokens=T,
        seed=0,
        workers=Workers(),
    )


def with_targets(evaluated: Experience) -> Experience:
    generator = torch.Generator().manual_seed(2)
    mask = evaluated.response_mask
    return evaluated.with_(
        advantages=torch.randn(B, T, generator=generator) * mask,
        returns=torch.randn(B, T, generator=generator) * mask,
    )


def weights(of: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in of.named_weights()}


def plain_pytorch(model: str, batch: Experience, order: list[int]) -> dict[str, Tensor]:
    """Whole minibatches, AdamW and clipping by hand, no DeepSpeed."""
    policy = Policy(load_causal_lm(model, dtype="float32"), temperature=1.0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    for minibatch in order:
        piece = batch.select(torch.nonzero(batch.minibatch == minibatch).flatten())
        log_probs, _ = policy(piece)
        assert piece.old_log_probs is not None
        assert piece.advantages is not None
        loss, _ = policy_loss(log_probs, piece.old_log_probs, piece.advantages, piece.response_mask)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
        optimizer.step()
    return {n: p.detach() for n, p in policy.model.named_parameters(remove_duplicate=False)}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("stage", STAGES)
def test_two_epochs_are_those_of_plain_pytorch_at_every_zero_stage(model: str, stage: int):
    trained = learner(model, stage=stage)
    before = weights(trained)
    batch = with_targets(trained.evaluate(experience()))
    figures = trained.update(batch, step=1)
    order = minibatch_order(0, 1, 0, 2) + minibatch_order(0, 1, 1, 2)
    expected = plain_pytorch(model, batch, order)
    # Adam's first steps are lr * sign(gradient): a coordinate whose gradient is rounding may flip.
    assert largest_difference(weights(trained), expected) < 0.1 * LR
    assert largest_difference(before, expected) > LR
    assert figures["ppo/skipped_updates"] == 0.0
    assert "lm_head.weight" in expected  # tied, and named all the same


@pytest.mark.parametrize("stage", STAGES)
def test_the_cut_into_microbatches_changes_nothing(model: str, stage: int):
    results = []
    for microbatch in (P + T, 4096):  # one row a piece, all rows in one
        trained = learner(model, stage=stage, microbatch=microbatch)
        figures = trained.update(with_targets(trained.evaluate(experience())), step=1)
        results.append((weights(trained), figures))
    (cut, figures_cut), (whole, figures_whole) = results
    assert largest_difference(cut, whole) < 0.1 * LR
    assert figures_cut == pytest.approx(figures_whole, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_saved_and_restored_it_goes_on_bit_for_bit(model: str, stage: int, tmp_path: Path):
    trained = learner(model, stage=stage)
    batch = with_targets(trained.evaluate(experience()))
    trained.update(batch, step=1)
    trained.save(tmp_path)
    expected = trained.update(batch, step=2)

    resumed = learner(model, stage=stage)
    resumed.restore(tmp_path)
    assert resumed.update(batch, step=2) == expected
    assert largest_difference(weights(resumed), weights(trained)) == 0.0


def test_another_zero_stage_is_refused_with_both_layouts(model: str, tmp_path: Path):
    learner(model, stage=2).save(tmp_path)
    with pytest.raises(ValueError, match=r'"zero_stage": 2.*"zero_stage": 1'):
        learner(model, stage=1).restore(tmp_path)


def test_before_the_policy_moves_its_ratio_is_exactly_one(model: str):
    """Old and new log-probs are of one cut, so not even rounding comes between them."""
    trained = learner(model, stage=2, microbatch=2 * (P + T), rate=0.0)
    figures = trained.update(with_targets(trained.evaluate(experience())), step=1)
    assert figures["ppo/policy_updates"] == 4
    assert figures["ppo/ratio_mean"] == 1.0
    assert figures["ppo/clip_fraction"] == figures["ppo/approx_kl"] == 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_is_skipped_and_too_many_stop_the_run(model: str, stage: int):
    trained = learner(model, stage=stage)
    before = weights(trained)
    batch = with_targets(trained.evaluate(experience()))
    assert batch.advantages is not None
    poisoned = batch.with_(advantages=torch.where(batch.response_mask, torch.inf, 0.0))
    with pytest.raises(NonFiniteUpdateError, match=r"learner.max_skipped_updates is 1"):
        trained.update(poisoned, step=1)
    assert largest_difference(weights(trained), before) == 0.0
