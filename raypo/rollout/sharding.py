"""Shard a step's batch over the workers: one seeded split into minibatches, balanced by tokens.

The split does not depend on which worker sampled a rollout, so a step does not depend on the number
of workers. Samples of a prompt stay together if possible, because their forward passes then compute
the prompt only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapreplace
from itertools import groupby

import numpy as np
import torch
import xxhash

from raypo.collectives import Workers
from raypo.data.padding import pad_left, pad_right
from raypo.rollout.batch_scoring import reward_parts
from raypo.seeds import SeedWord
from raypo.types import Experience, Rollout

MAX_LOAD = 1.1
"""Split a group across workers when one worker exceeds 1.1x the mean token count."""


def shard(
    scored: list[Rollout],
    *,
    minibatch_size: int,
    seed: tuple[int, ...],
    workers: Workers,
    teams: Sequence[range] = (),
) -> list[Rollout]:
    """Return this worker's share of all workers' rollouts, each with the number of its minibatch.

    Workers exchange the lengths of all rollouts. A rollout itself is sent only to the worker that
    trains it.

    Args:
        scored: The rollouts that this worker sampled.
        minibatch_size: Most responses of one optimizer step over all workers. A batch that is not a
            multiple of it is split into minibatches of similar size, so that none is very small.
        seed: Seed of the permutation of the batch's groups.
        workers: All workers, which call this together.
        teams: Ranks of each team, such as policy and critic. Each team gets the whole batch. Empty
            means that all workers are one team.
    """
    # For each rollout: its key (three numbers), its lengths, and a hash of its prompt.
    known = [(*r.key, len(r.prompt_ids), len(r.response_ids), _prompt(r)) for r in scored]
    everyone = sorted(each for share in workers.gather(known) for each in share)
    prompt_lengths, response_lengths = ([each[place] for each in everyone] for place in (3, 4))

    def group_of(index: int) -> int:
        return everyone[index][0]

    groups = [list(members) for _, members in groupby(range(len(everyone)), key=group_of)]
    order = np.random.default_rng((SeedWord.SHARDING, *seed)).permutation(len(groups))
    in_order = [index for group in order for index in groups[group]]
    samples = [list(rows) for _, rows in groupby(in_order, key=lambda index: everyone[index][:2])]
    num_minibatches = max(math.ceil(len(samples) / minibatch_size), 1)
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(workers.count)]
    for number, places in enumerate(np.array_split(np.arange(len(samples)), num_minibatches)):
        minibatch = [index for place in places for index in samples[place]]
        # The group of an agent may have several prompts.
        by_prompt: dict[tuple[int, int], list[int]] = {}
        for index in minibatch:
            by_prompt.setdefault((group_of(index), everyone[index][5]), []).append(index)
        pieces = list(by_prompt.values())
        for team in teams or [range(workers.count)]:
            shares = balanced_shares(pieces, prompt_lengths, response_lengths, len(team))
            for rank, share in zip(team, shares, strict=True):
                dealt[rank] += [(number, index) for index in share]
    keys = [each[:3] for each in everyone]
    own = {each.key: each for each in scored}
    sent = [[own[keys[index]] for _, index in hand if keys[index] in own] for hand in dealt]
    received = {each.key: each for share in workers.exchange(sent) for each in share}
    return [replace(received[keys[index]], minibatch=n) for n, index in dealt[workers.rank]]


def _prompt(rollout: Rollout) -> int:
    """Return a hash of the prompt's tokens."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rollout.prompt_ids).tobytes())


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
        for tokens, piece in sorted(sized, key=lambda each: (-each[0], each[1])):
            load, lightest = loads[0]
            shares[lightest].append((tokens, piece))
            heapreplace(loads, (load + tokens, lightest))
        load, heaviest = max(loads, key=lambda each: (each[0], -each[1]))
        divisible = [each for each in shares[heaviest] if len(each[1]) > 1] or [
            each for each in sized if len(each[1]) > 1 and not all(shares)
        ]
        if not divisible or (all(shares) and load <= MAX_LOAD * mean):
            return [[row for _, piece in share for row in piece] for share in shares]
        tokens, largest = max(divisible, key=lambda each: each[0])
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
    )


def _parts(scored: Rollout, names: Sequence[str]) -> list[float]:
    given = {**scored.scores_by_source, **reward_parts(scored)}
    return [float(given.get(name, math.nan)) for name in names]
