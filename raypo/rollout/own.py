"""A user's own score shaping and advantages: asked once a step, about the rows of all workers.

B responses of this worker, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from raypo.collectives import Workers
from raypo.custom.loader import load_function
from raypo.ppo.own import StepRewards, StepScores, own_advantages, own_scores
from raypo.types import Experience


def shaped_by(
    spec: str, experience: Experience, workers: Workers, *, max_new_tokens: int
) -> Tensor:
    """Scores [B] of this worker's rows by `ppo.shaping.function`, NaN where there is none."""
    key, samples = "ppo.shaping.function", _samples(experience)
    rows, mine = _rows_of_all(
        workers,
        scores=experience.scores,
        num_tokens=experience.response_mask.sum(1),
        truncated=experience.truncated,
        group_index=experience.group_index,
        sample_index=samples,
    )
    valid = ~rows["scores"].isnan() & (rows["num_tokens"] > 0)
    rows["scores"] = torch.where(valid, rows["scores"], 0.0)
    step = StepScores(**rows, valid=valid, max_new_tokens=max_new_tokens)
    shaped = own_scores(load_function(spec, key=key), step, f"{key} ({spec})")[mine]
    return shaped.to(experience.scores)


def advantages_by(
    spec: str,
    scores: Tensor,  # [B], shaped
    rewards: Tensor,  # [B, T]
    experience: Experience,
    workers: Workers,
    *,
    gamma: float,
) -> Tensor:
    """Advantages [B, T] of this worker's rows by a function that `ppo.advantage` names."""
    key, samples = "ppo.advantage", _samples(experience)
    valid = ~scores.isnan() & experience.response_mask.any(1)
    rows, mine = _rows_of_all(
        workers,
        scores=torch.where(valid, scores, 0.0),
        rewards=rewards,
        mask=experience.response_mask & valid.unsqueeze(1),
        valid=valid,
        truncated=experience.truncated,
        group_index=experience.group_index,
        sample_index=samples,
    )
    step = StepRewards(**rows, gamma=gamma)
    of_all = own_advantages(load_function(spec, key=key), step, f"{key} ({spec})")
    return of_all[mine, : rewards.shape[1]].to(rewards)


def _samples(experience: Experience) -> Tensor:
    """[B]: of each row, which of its draw's samples it belongs to."""
    if experience.sample_index is None:
        return torch.arange(len(experience))
    return experience.sample_index


def _rows_of_all(workers: Workers, **rows: Tensor) -> tuple[dict[str, Tensor], slice]:
    """Tensors of the rows of all workers in the order of ranks, and where this worker's are."""
    shares = workers.gather({name: each.detach().cpu() for name, each in rows.items()})
    counts = [len(next(iter(share.values()))) for share in shares]
    first = sum(counts[: workers.rank])
    joined = {}
    for name in rows:
        parts = [share[name] for share in shares]
        if parts[0].dim() == 2:
            longest = max(part.shape[1] for part in parts)
            parts = [pad(part, (0, longest - part.shape[1])) for part in parts]
        joined[name] = torch.cat(parts)
    return joined, slice(first, first + counts[workers.rank])
