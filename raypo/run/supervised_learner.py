"""Load the learner of recipes that train on examples, preferences or selected samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from raypo.config import RewardModelConfig
from raypo.learner.export import Export
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Item, Task
from raypo.learner.trained_model import in_shares
from raypo.rollout.sharding import balanced_shares
from raypo.run.run import Run


def new_learner(run: Run[Any], make_task: Callable[[], Task[Item]]) -> SupervisedLearner[Item]:
    """Seed torch, load the model, and return the learner of a run."""
    config, workers = run.config, run.workers
    run.tell.phase("loading the model")
    torch.manual_seed(config.seed)
    shares: Any = nullcontext()
    if not isinstance(config, RewardModelConfig):  # ZeRO-3 shards would have no float32 head
        shares = in_shares(config.learner, dtype=config.model.dtype, workers=workers)
    with shares:
        task = make_task()
    return SupervisedLearner(
        task,
        config.learner,
        dtype=config.model.dtype,
        num_steps=config.num_steps,
        workers=workers,
    )


def trained_models(
    config: Any, learner: SupervisedLearner[Any], tokenizer: Any
) -> dict[str, Export]:
    """Return exports of the trained model and, with LoRA, of the adapter, by folder name."""
    exports, model = {learner.name: learner.model_export(tokenizer)}, config.model
    if model.lora:
        exports["adapter"] = learner.adapter_export(model.lora, model.policy)
    return exports


def lengths(item: Any) -> tuple[int, int]:
    """Return an item's numbers of prompt tokens and of other tokens."""
    return len(item.prompt_ids), item.num_tokens - len(item.prompt_ids)


def even_shares(sizes: Sequence[tuple[int, int]], num_shares: int) -> list[list[int]]:
    """Split a batch over workers so that all train on about the same number of tokens.

    Args:
        sizes: The `lengths` of each item.
        num_shares: Number of workers.

    Returns:
        Indices of each worker's items.
    """
    prompt_lengths, other_lengths = ([size[part] for size in sizes] for part in (0, 1))
    return balanced_shares(
        [[index] for index in range(len(sizes))], prompt_lengths, other_lengths, num_shares
    )
