"""Who trains what: one seeded cut of the whole batch, dealt to the workers by token count.

The cut knows nothing of who sampled a rollout, so a step does not depend on the number of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from raypo.collectives import Workers
from raypo.data.padding import pad_left, pad_right
from raypo.types import Experience, ScoredRollout

_SEED_WORD = 2
"""First of the numbers that seed the cut; the prompt stream has 1, the learner 3, requests 4."""


@dataclass(frozen=True)
class Deal:
    """This worker's share of the step's rollouts."""

    rollouts: list[ScoredRollout]
    minibatch: list[int]
    """Which minibatch of the step trains each rollout."""


def deal(
    scored: list[ScoredRollout],
    *,
    minibatch_size: int,
    seed: tuple[int, ...],
    workers: Workers,
) -> Deal:
    """This worker's share of all workers' rollouts.

    Args:
        scored: The rollouts that this worker sampled.
        minibatch_size: Most responses of one optimizer step over all workers. A batch that is no
            multiple of it is cut into minibatches of like size, so that none is a single response.
        seed: Of the permutation of the whole batch.
        workers: All of them call it together.
    """
    everyone = [rollout for share in workers.gather(scored) for rollout in share]
    everyone.sort(key=lambda s: (s.rollout.group_index, s.rollout.sample_index))
    order = np.random.default_rng((_SEED_WORD, *seed)).permutation(len(everyone))
    num_minibatches = max(math.ceil(len(order) / minibatch_size), 1)
    mine: list[tuple[int, int]] = []  # (minibatch, index into everyone)
    for number, minibatch in enumerate(np.array_split(order, num_minibatches)):
        members = minibatch.tolist()
        lengths = [everyone[index].rollout.num_tokens for index in members]
        shares = balanced_shares(lengths, workers.count)
        mine += [(number, members[position]) for position in shares[workers.rank]]
    return Deal([everyone[index] for _, index in mine], [number for number, _ in mine])


def balanced_shares(lengths: list[int], num_shares: int) -> list[list[int]]:
    """Positions dealt so that the sums of lengths are close: longest first, to the lightest.

    Shares also differ by at most one in their number of positions, so that nobody is left without.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for position in sorted(range(len(lengths)), key=lambda p: (-lengths[p], p)):
        fewest = min(len(share) for share in shares)
        open_shares = [s for s in range(num_shares) if len(shares[s]) == fewest]
        lightest = min(open_shares, key=lambda s: loads[s])
        shares[lightest].append(position)
        loads[lightest] += lengths[position]
    return shares


def to_experience(deal: Deal) -> Experience:
    """The dealt rollouts as one padded batch; prompts padded left, responses right."""
    rollouts = [scored.rollout for scored in deal.rollouts]
    with_reference = all(scored.ref_log_probs is not None for scored in deal.rollouts)
    return Experience(
        prompt_ids=pad_left([r.prompt_ids for r in rollouts], torch.int64),
        prompt_mask=pad_left([np.ones(len(r.prompt_ids)) for r in rollouts], torch.bool),
        response_ids=pad_right([r.response_ids for r in rollouts], torch.int64),
        attention_mask=pad_right([np.ones(len(r.response_ids)) for r in rollouts], torch.bool),
        response_mask=pad_right([r.response_mask for r in rollouts], torch.bool),
        rollout_log_probs=pad_right([r.log_probs for r in rollouts], torch.float32),
        scores=torch.tensor([scored.score for scored in deal.rollouts], dtype=torch.float32),
        group_index=torch.tensor([r.group_index for r in rollouts], dtype=torch.int64),
        minibatch=torch.tensor(deal.minibatch, dtype=torch.int64),
        truncated=torch.tensor([r.finish_reason == "length" for r in rollouts], dtype=torch.bool),
        weight_version=torch.tensor([r.weight_version for r in rollouts], dtype=torch.int64),
        ref_log_probs=pad_right([_reference(s) for s in deal.rollouts], torch.float32)
        if with_reference
        else None,
    )


def _reference(scored: ScoredRollout) -> np.ndarray:
    assert scored.ref_log_probs is not None, "some rollouts have reference log-probs, some do not"
    return scored.ref_log_probs
