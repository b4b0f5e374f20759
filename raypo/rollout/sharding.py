"""Deal a step's batch to the workers: one seeded split into minibatches, balanced by tokens.

The split into minibatches does not depend on the number of workers. Samples of a prompt stay
together if possible, because their forward passes then compute the prompt only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapreplace
from itertools import groupby

import numpy as np
import torch

from raypo.data.padding import pad_left, pad_right
from raypo.rollout.batch_scoring import reward_parts
from raypo.seeds import SeedWord
from raypo.types import Experience, Rollout

MAX_LOAD = 1.1
"""Split a group across workers when one worker exceeds 1.1x the mean token count."""


def deal(
    batch: Sequence[Rollout],
    *,
    minibatch_size: int,
    seed: tuple[int, ...],
    num_workers: int,
    teams: Sequence[range] = (),
    sequence_parallel: int = 1,
) -> list[list[Rollout]]:
    """Return each worker's share of a batch. Each rollout has the number of its minibatch.

    Args:
        batch: The rollouts of a step.
        minibatch_size: Most responses of one optimizer step over all workers. A batch that is not a
            multiple of it is split into minibatches of similar size, so that none is very small.
        seed: Seed of the permutation of the batch's groups.
        num_workers: Number of workers.
        teams: Ranks of each team, such as policy and critic. Each team gets the whole batch. Empty
            means that all workers are one team.
        sequence_parallel: Number of neighbouring workers of a team that get the same share.
    """
    ordered = sorted(batch, key=lambda rollout: rollout.key)
    prompt_lengths = [len(rollout.prompt_ids) for rollout in ordered]
    response_lengths = [len(rollout.response_ids) for rollout in ordered]
    by_group: dict[int, list[int]] = {}
    for index, rollout in enumerate(ordered):
        by_group.setdefault(rollout.group_index, []).append(index)
    groups = list(by_group.values())
    order = np.random.default_rng((SeedWord.SHARDING, *seed)).permutation(len(groups))
    in_order = [index for group in order for index in groups[group]]
    samples = [list(r) for _, r in groupby(in_order, key=lambda index: ordered[index].key[:2])]
    num_minibatches = max(math.ceil(len(samples) / minibatch_size), 1)
    dealt: list[list[Rollout]] = [[] for _ in range(num_workers)]
    for number, positions in enumerate(np.array_split(np.arange(len(samples)), num_minibatches)):
        # The group of an agent may have several prompts.
        by_prompt: dict[tuple[int, bytes], list[int]] = {}
        for index in (index for position in positions for index in samples[position]):
            prompt = ordered[index].group_index, ordered[index].prompt_ids.tobytes()
            by_prompt.setdefault(prompt, []).append(index)
        pieces = list(by_prompt.values())
        for team in teams or [range(num_workers)]:
            num_shares = len(team) // sequence_parallel
            shares = balanced_shares(pieces, prompt_lengths, response_lengths, num_shares)
            for place, rank in enumerate(team):
                share = shares[place // sequence_parallel]
                dealt[rank] += [replace(ordered[index], minibatch=number) for index in share]
    return dealt


def balanced_shares(
    pieces: list[list[int]],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    num_shares: int,
) -> list[list[int]]:
    """Split rows into shares with about equal token counts.

    A piece is the rows of one prompt. Pieces are assigned from the longest to the shortest, each to
    the share with the fewest tokens. While a share exceeds 1.1x the mean, or is empty, a piece of
    the heaviest share is halved. Its prompt is then computed twice.

    Args:
        pieces: For each prompt, the indices of its rows.
        prompt_lengths: Tokens of each row's prompt.
        response_lengths: Tokens of each row's response.
        num_shares: Number of shares.
    """

    sized = [
        (prompt_lengths[piece[0]] + sum(response_lengths[row] for row in piece), piece)
        for piece in pieces
    ]
    mean = sum(tokens for tokens, _ in sized) / num_shares
    while True:
        shares: list[list[tuple[int, list[int]]]] = [[] for _ in range(num_shares)]
        loads = [(0, share) for share in range(num_shares)]  # a heap
        for tokens, piece in sorted(sized, key=lambda entry: (-entry[0], entry[1])):
            load, lightest = loads[0]
            shares[lightest].append((tokens, piece))
            heapreplace(loads, (load + tokens, lightest))
        load, heaviest = max(loads, key=lambda entry: (entry[0], -entry[1]))
        divisible = [entry for entry in shares[heaviest] if len(entry[1]) > 1] or [
            entry for entry in sized if len(entry[1]) > 1 and not all(shares)
        ]
        if not divisible or (all(shares) and load <= MAX_LOAD * mean):
            return [[row for _, piece in share for row in piece] for share in shares]
        tokens, largest = max(divisible, key=lambda entry: entry[0])
        sized.remove((tokens, largest))
        half = len(largest) // 2
        second = prompt_lengths[largest[0]] + sum(response_lengths[row] for row in largest[half:])
        again = prompt_lengths[largest[0]]
        sized += [(tokens - second + again, largest[:half]), (second, largest[half:])]
        mean += again / num_shares


def to_experience(dealt: Sequence[Rollout], *, parts: Sequence[str] = ()) -> Experience:
    """Pad rollouts to one batch: prompts on the left, responses on the right.

    Args:
        dealt: Rollouts of this worker.
        parts: Names of the parts of the score to keep as columns of `Experience.parts`. A part is a
            named number of a reward function, or a source of the score.
    """
    turn_rewards = [r.turn_rewards for r in dealt if r.turn_rewards is not None]
    turn_index = [r.turn_index for r in dealt if r.turn_index is not None]
    references = [r.ref_log_probs for r in dealt if r.ref_log_probs is not None]
    assert len(references) in (0, len(dealt)), "some rollouts have reference log-probs, some do not"
    experts = [
        (r.prompt_experts, r.response_experts)
        for r in dealt
        if r.prompt_experts is not None and r.response_experts is not None
    ]
    assert len(experts) in (0, len(dealt)), "some rollouts have experts, some do not"
    dtype = torch.from_numpy(experts[0][0]).dtype if experts else torch.uint8
    return Experience(
        prompt_ids=pad_left([r.prompt_ids for r in dealt], torch.int64),
        prompt_mask=pad_left([np.ones(len(r.prompt_ids)) for r in dealt], torch.bool),
        response_ids=pad_right([r.response_ids for r in dealt], torch.int64),
        attention_mask=pad_right([np.ones(len(r.response_ids)) for r in dealt], torch.bool),
        response_mask=pad_right([r.response_mask for r in dealt], torch.bool),
        rollout_log_probs=pad_right([r.log_probs for r in dealt], torch.float32),
        scores=torch.tensor([r.score for r in dealt], dtype=torch.float32),
        group_index=torch.tensor([r.group_index for r in dealt], dtype=torch.int64),
        sample_index=torch.tensor([r.sample_index for r in dealt], dtype=torch.int64),
        row_index=torch.tensor([r.row_index for r in dealt], dtype=torch.int64),
        minibatch=torch.tensor([r.minibatch for r in dealt], dtype=torch.int64),
        truncated=torch.tensor([r.finish_reason == "length" for r in dealt], dtype=torch.bool),
        weight_version=torch.tensor([r.weight_version for r in dealt], dtype=torch.int64),
        weight_versions=pad_right([r.weight_versions for r in dealt], torch.int64)
        if any(r.later_versions for r in dealt)
        else None,
        parts=torch.tensor([_parts(r, parts) for r in dealt]).reshape(-1, len(parts))
        if parts
        else None,
        turn_rewards=pad_right(turn_rewards, torch.float32) if turn_rewards else None,
        turn_index=pad_right(turn_index, torch.int64) if turn_index else None,
        ref_log_probs=pad_right(references, torch.float32)
        if len(references) == len(dealt)
        else None,
        prompt_experts=pad_left([prompt for prompt, _ in experts], dtype) if experts else None,
        response_experts=pad_right([own for _, own in experts], dtype) if experts else None,
        images=tuple(r.images for r in dealt) if any(r.images for r in dealt) else None,
    )


def _parts(scored: Rollout, names: Sequence[str]) -> list[float]:
    numbers = {**scored.scores_by_source, **reward_parts(scored)}
    return [float(numbers.get(name, math.nan)) for name in names]
