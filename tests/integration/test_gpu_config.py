"""The DeepSpeed config of a GPU's worker, read by DeepSpeed itself: engines are built, and learn.

A worker alone. Policy and critic at each stage that DeepSpeed is told: test_offload.py. Several
workers: test_workers.py and tests/slow/test_more_workers.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypo.learner.trained_model import outermost_networks
from raypo.models import embedding
from tests.integration.learning import experience, learner, with_targets
from tests.integration.off_load import (
    comes_back,
    gap,
    models_of,
    moved_beside_stayed,
    off_and_back,
)
from tests.integration.recipe_learners import KINDS, example_learner, items_of

pytestmark = pytest.mark.usefixtures("group", "as_on_a_gpu")
CASES = [("ppo", stage, False) for stage in (2, 3)] + [
    (kind, (number + more) % 4, True) for number, kind in enumerate(KINDS) for more in (0, 2)
]
"""Recipe, ZeRO stage, and whether `learner.deepspeed` says it; else raypo gives a worker alone its
own stage. Each recipe at each stage: tests/slow/test_every_learner.py."""
PAIRS = [(0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "float32"), (3, "bfloat16")]
"""ZeRO stages and dtypes: every class of DeepSpeed's optimizers."""


def section_of(stage: int, *, is_told: bool) -> dict[str, Any]:
    told = {"deepspeed": {"zero_optimization": {"stage": stage}}} if is_told else {}
    return {"zero_stage": stage, **told}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "stage", "is_told"), CASES)
def test_the_learner_starts_learns_and_goes_on_after_an_off_load_bit_for_bit(
    model: str,
    kind: str,
    stage: int,
    is_told: bool,
    dtype: str,
):
    keys = section_of(stage, is_told=is_told)

    def make() -> Any:
        if kind == "ppo":  # policy and critic
            return learner(model, stage=stage, dtype=dtype, deepspeed=keys.get("deepspeed"))
        return example_learner(kind, model, dtype, keys)

    before = make()
    batch = with_targets(before.with_log_probs_and_values(experience())) if kind == "ppo" else None

    def update(each: Any, step: int) -> None:
        each.update(items_of(kind) if batch is None else batch, step=step)

    assert moved_beside_stayed(make, update)["moved"] == 0.0


def test_the_part_of_the_acceptance_says_that_all_came_back(model: str):
    assert comes_back(model, stage=2, dtype="bfloat16") == {"moved": 0.0, "control": 0.0}


@pytest.mark.parametrize(("stage", "dtype"), PAIRS)
def test_an_off_load_in_the_middle_of_a_step_keeps_the_gradients_that_are_summed_up(
    model: str,
    stage: int,
    dtype: str,
):
    told = {"zero_optimization": {"stage": stage}}
    moved, stayed = (
        learner(model, stage=stage, dtype=dtype, deepspeed=told)._policy for _ in range(2)
    )
    for each in (moved, stayed):
        each.set_learning_rate(1e-3)
    for step in range(2):
        for piece in range(3):
            batch = experience().select(torch.tensor([piece, piece + 3]))
            losses = [each(batch)[0].sum() for each in (moved, stayed)]
            for each, loss in zip((moved, stayed), losses, strict=True):
                each.backward(loss)
            off_and_back(SimpleNamespace(_model=moved, **moves_of(moved)))
        assert moved.step() == stayed.step(), step
    mine, theirs = (dict(each.named_weights(each.module.model)) for each in (moved, stayed))
    assert all(torch.equal(mine[name], weight) for name, weight in theirs.items())


def moves_of(trained: Any) -> dict[str, Any]:
    """The moves of a learner that has this one model."""
    offload = trained.offload
    return {
        "offload_training_state": offload.training_state,
        "offload_parameters": offload.parameters,
        "reload": offload.reload,
    }


@pytest.mark.parametrize(("stage", "dtype"), PAIRS)
def test_nothing_is_copied_of_sums_of_gradients_between_two_steps(
    model: str,
    stage: int,
    dtype: str,
):
    """They would take as much pinned memory as the master weights, and as much time."""
    told = {"zero_optimization": {"stage": stage}}
    trained = learner(model, stage=stage, dtype=dtype, deepspeed=told)
    trained.update(with_targets(trained.with_log_probs_and_values(experience())), step=1)
    policy = trained._policy
    policy.offload.training_state()
    copied = sum(len(p) for _, places in policy.offload._host._places.values() for p in places)
    policy.offload.reload()
    zero, adam = policy._engine.optimizer, policy.offload._optimizer
    elements = sum(s["exp_avg"].numel() for s in adam.state.values())
    has_masters = dtype == "bfloat16" or type(zero).__name__ != "AdamW"
    steps = sum(s["step"].nbytes for s in adam.state.values())
    assert copied == 4 * elements * (2 + has_masters) + steps


def test_the_device_is_not_synchronized_at_every_forward_pass(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
):
    from deepspeed.accelerator import get_accelerator

    trained = learner(model, stage=2, dtype="bfloat16")
    batch = with_targets(trained.with_log_probs_and_values(experience()))
    for step in (1, 2):  # DeepSpeed's throughput timer begins after two steps
        trained.update(batch, step=step)
    calls: list[int] = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: calls.append(1))
    trained.update(batch, step=3)
    assert not calls


@pytest.mark.parametrize(("stage", "dtype"), PAIRS)
def test_a_worker_alone_has_streams_beside_its_computation_only_at_stage_3(
    model: str,
    stage: int,
    dtype: str,
):
    """Without them, stage 3 waits for all computation at every fetch of weights."""
    for told in ({"stage": stage}, {"stage": stage, "overlap_comm": None}):
        trained = learner(model, stage=stage, dtype=dtype, deepspeed={"zero_optimization": told})
        assert [e._engine.zero_overlap_comm() for e in models_of(trained)] == [stage == 3] * 2


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_lookups_that_a_gpu_pads_learn_the_same_bits(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    stage: int,
    checkpoints: bool,
):
    """At these lengths no lookup is as long as those that a GPU pads, so the bounds are moved."""
    monkeypatch.setattr(embedding, "RACY_COUNTS", range(8, 200))
    keys: dict[str, Any] = {
        "max_tokens_per_microbatch": 4096,
        "activation_checkpointing": checkpoints,
    }
    keys |= section_of(stage, is_told=True)
    plain, padded = (example_learner("sft", model, "bfloat16", keys) for _ in range(2))
    (network,) = outermost_networks(padded._model.module)
    counts = []
    network.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: counts.append(args[0].numel())
    )
    embedding.avoid_racy_counts(network)
    for step in (1, 2):
        items = items_of("sft")
        assert plain.update(items, step=step) == padded.update(items, step=step)
    assert counts
    assert all(8 <= count < 200 for count in counts)
    assert gap(plain, padded) == 0.0
