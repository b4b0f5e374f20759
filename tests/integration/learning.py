"""A batch for learners under real DeepSpeed in this process, and a process group of one."""

import gc
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import LearnerSection, ModelSection, PPOSection
from raypo.learner.learner import Learner
from raypo.learner.state import write_tensors
from raypo.types import Experience

B, P, T = 6, 5, 7  # responses, prompt tokens, response tokens
LR, MAX_NORM = 1e-3, 0.5
STAGES = [0, 3]
"""ZeRO stages of a single worker: raypo runs 1 and 2 as 0, because nothing is sharded."""


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
    model: str,
    *,
    stage: int,
    microbatch: int = 4096,
    clip: float = 0.2,
    rate: float = LR,
    workers: Workers | None = None,
    deepspeed: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    **section: Any,
) -> Learner:
    """Two epochs of PPO with a critic; `section` are further keys of `model`."""
    return Learner(
        ModelSection.model_validate({"policy": model, "dtype": "float32", **section}),
        PPOSection(num_epochs=2, clip_low=clip, clip_high=clip),
        LearnerSection(
            zero_stage=stage,  # type: ignore[arg-type]
            policy_lr=rate,
            critic_lr=LR,
            lr_schedule="cosine",  # the first step has the whole rate
            max_tokens_per_microbatch=microbatch,
            max_skipped_updates=1,
            deepspeed=dict(deepspeed or {}),
            **(optimizer or {"max_grad_norm": MAX_NORM}),
        ),
        temperature=1.0,
        max_new_tokens=T,
        num_steps=9,
        seed=0,
        workers=workers or Workers(),
    )


def with_targets(evaluated: Experience) -> Experience:
    generator = torch.Generator().manual_seed(2)
    mask = evaluated.response_mask
    return evaluated.with_(
        advantages=torch.randn(B, T, generator=generator) * mask,
        returns=torch.randn(B, T, generator=generator) * mask,
    )


def plain_ppo_loss(log_probs: Tensor, batch: Experience) -> Tensor:
    """The mean over tokens of -min(ratio * A, clip(ratio) * A), as one writes it on paper."""
    assert batch.old_log_probs is not None
    assert batch.advantages is not None
    mask = batch.response_mask
    ratio = (log_probs - batch.old_log_probs)[mask].exp()
    advantages = batch.advantages[mask]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def weights(of: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in of.named_weights()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def held_bytes() -> int:
    """Of the numbers of all tensors of this process, but for those of a file that is mapped."""
    gc.collect()
    sizes: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are asked for their class
        tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    for each in tensors:
        storage = each.untyped_storage()
        if each.is_floating_point() and storage.device.type == "cpu" and storage.resizable():
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def save_state(learner: Any, directory: Path) -> None:
    """Write a learner's files of a checkpoint."""
    for name, content in learner.state_files().items():
        write_tensors(directory / name, content)
