"""Move a learner to the host and back, and compare the bytes of all that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from raypo.learner import trained_model
from raypo.learner.deepspeed_config import deepspeed_config
from raypo.learner.trained_model import TrainedModel
from tests.integration.learning import experience, learner, weights, with_targets

SUMS = "grad_partitions_flat_buffer"
"""Stage 3's sums of gradients. The first micro-batch of a step overwrites them: between two steps
nobody reads them, and they need not come back."""


def configure_as_on_a_gpu() -> None:
    """Give DeepSpeed the config that a worker with a GPU gives it, from now on."""

    def on_a_gpu(*args: Any, **keys: Any) -> dict[str, Any]:
        return deepspeed_config(*args, **{**keys, "on_gpu": True})

    trained_model.deepspeed_config = on_a_gpu


def models_of(learner: Any) -> list[TrainedModel]:
    """Return the models under DeepSpeed of any recipe's learner."""
    found = [getattr(learner, name, None) for name in ("_trained_policy", "_critic", "_model")]
    return [each for each in found if isinstance(each, TrainedModel)]


def held_bytes_of(learner: Any) -> dict[str, Tensor]:
    """Copy all that a learner's models, their optimizers and DeepSpeed hold, uint8 by name.

    The walk knows nothing of what an off-load moves: it takes all tensors that it finds.
    """
    found = {}
    for number, model in enumerate(models_of(learner)):
        engine = model._engine
        engine.empty_partition_cache()
        optimizer = vars(engine.optimizer)
        own: dict[str, Any] = {
            "module": dict(engine.module.named_parameters()),
            "buffers": dict(engine.module.named_buffers()),
            "zero": optimizer,
            "adam": vars(optimizer.get("optimizer", engine.optimizer)),
            "masters": list(model._masters.values()),
        }
        sums = optimizer.get(SUMS)
        is_summing = engine._unmanaged_backward_count > 0
        passed_over = None if sums is None or is_summing else sums.untyped_storage()._cdata
        for name, tensor in _tensors(own, f"{number}"):
            if tensor.untyped_storage()._cdata != passed_over:
                found[name] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).clone()
    return found


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_meta or value.untyped_storage().nbytes() == 0:
            return
        yield name, value
        for more in ("grad", "ds_tensor"):
            yield from _tensors(getattr(value, more, None), f"{name}.{more}")
    elif isinstance(value, dict):
        for number, (key, each) in enumerate(value.items()):
            yield from _tensors(each, f"{name}.{key if isinstance(key, str) else number}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _tensors(each, f"{name}.{number}")


def off_and_back(learner: Any) -> None:
    """Move a learner to the host and back; no byte of what it holds may differ.

    No kernel of the model runs in between, so this is exact on any device.
    """
    before = held_bytes_of(learner)
    learner.offload_training_state()
    learner.offload_parameters()
    learner.reload()
    after = held_bytes_of(learner)
    assert before.keys() == after.keys()
    lost = [name for name, each in before.items() if not torch.equal(each, after[name])]
    assert not lost, f"{len(lost)} of {len(before)} tensors came back with other bytes: {lost[:5]}"


def gap(one: Any, other: Any) -> float:
    """Mean absolute difference of two learners' weights; 0.0 only where all bits are equal."""
    mine, theirs = weights(one), weights(other)
    total = sum(float((w.double() - theirs[name].double()).abs().sum()) for name, w in mine.items())
    return total / sum(each.numel() for each in mine.values())


def moved_beside_stayed(
    make: Callable[[], Any], update: Callable[[Any, int], Any], *, num_stayed: int = 1
) -> dict[str, float]:
    """Update equal learners twice; before each step the first one is moved to the host and back.

    Returns:
        moved: Gap between the one that was moved and the first that stayed.
        control: Gap between the first and the last that stayed; not 0 where kernels do not repeat.
    """
    moved, *stayed = (make() for _ in range(1 + num_stayed))
    for step in (1, 2):
        off_and_back(moved)
        for each in (moved, *stayed):
            update(each, step)
    return {"moved": gap(moved, stayed[0]), "control": gap(stayed[-1], stayed[0])}


def comes_back(model: str, *, stage: int, dtype: str) -> dict[str, float]:
    """Move policy and critic to the host and back, and compare all bytes and two updates.

    On a GPU kernels may not repeat. Then the learner that was moved may differ from one that
    stayed, but not by more than two that stayed differ from each other.
    """
    told = {"zero_optimization": {"stage": stage}}  # a worker alone is given another stage

    def make() -> Any:
        return learner(model, stage=stage, dtype=dtype, deepspeed=told)

    batch = with_targets(make().with_log_probs_and_values(experience()))
    found = moved_beside_stayed(
        make, lambda each, step: each.update(batch, step=step), num_stayed=2
    )
    assert found["moved"] <= 3.0 * found["control"], found
    return found
