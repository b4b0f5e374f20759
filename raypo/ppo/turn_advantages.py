"""Advantages of single turns, compared with turns that start from the same state (GiGPO).

Notation: B rows, T response tokens, S turns of all rows. Every mask: True = keep.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

from raypo.collectives import Workers
from raypo.ppo.advantages import discounted_returns, runs_of, token_rewards
from raypo.ppo.groups import baseline_by_index
from raypo.ppo.masked import keep
from raypo.types import Experience


def turn_advantages(
    experience: Experience,
    scores: Tensor,  # [B]
    valid: Tensor,  # [B] bool
    *,
    gamma: float,
    workers: Workers,
) -> Tensor:
    """Compute the advantage of each turn among the prompt's turns that start from the same state.

    A turn's state is the text, in tokens, that the environment wrote since the policy's previous
    turn. The state of the first turn is the prompt. Turns of one prompt with the same state form a
    group, regardless of the episode and the position. A turn's return is the
    discounted sum of its own reward and the rewards of later turns. The last turn's reward includes
    the rest of the score, which the turn rewards do not cover. Within a group, returns are compared
    as `grpo` compares scores. All workers must call this function together.

    Args:
        experience: This worker's rows.
        scores: Shaped score of each row.
        valid: False excludes a row.
        gamma: Discount from one turn to the next.
        workers: The workers that hold the groups.

    Returns:
        advantages: [B, T], the same on all tokens of a turn, 0 where masked. They are 0 for a turn
            whose state occurs in no other turn of the prompt.

    Paper: Feng et al. 2025 (GiGPO), arXiv:2505.10978, eq. 6 and 7.
    """
    mask = experience.response_mask
    turns = runs_of(mask) if experience.turn_index is None else experience.turn_index
    turns = torch.where(mask, turns, -1)
    turn_rewards, end_rewards = experience.turn_rewards, scores
    if turn_rewards is not None:
        end_rewards = scores - keep(turn_rewards, mask).sum(1)
    counted = mask & valid.unsqueeze(1)
    rewards = token_rewards(end_rewards, None, counted, kl_coef=0.0, extra_rewards=turn_rewards)
    returns = discounted_returns(rewards, counted, gamma=gamma, turns=turns)
    is_turn_start = mask & (turns != torch.nn.functional.pad(turns[:, :-1], (1, 0), value=-1))
    row, start = is_turn_start.nonzero(as_tuple=True)  # [S]
    gathered, own_turns = workers.gather_rows(
        returns[row, start],
        experience.group_index[row],
        _states(experience, row, start),
        valid[row],
    )
    all_returns, group, state, is_valid = gathered
    _, index = torch.stack([group, state]).unique(dim=1, return_inverse=True)
    advantages = baseline_by_index(all_returns, index, is_valid, kind="grpo")[own_turns].to(returns)
    if len(advantages) == 0:
        return torch.zeros_like(returns)
    turn_number = (is_turn_start.flatten().cumsum(0) - 1).clamp(min=0).view(is_turn_start.shape)
    return keep(advantages[turn_number], counted)


def _states(experience: Experience, row: Tensor, start: Tensor) -> Tensor:
    """Return a hash of each turn's state, [S] int64. It is the same on all workers."""
    ids, sampled = experience.response_ids.cpu().numpy(), experience.response_mask.cpu().numpy()
    prompts, prompt_mask = experience.prompt_ids.cpu().numpy(), experience.prompt_mask.cpu().numpy()
    hashes = []
    for row_number, turn_start in zip(row.tolist(), start.tolist(), strict=True):
        state_start = turn_start
        while state_start > 0 and not sampled[row_number, state_start - 1]:
            state_start -= 1
        prompt = prompts[row_number][prompt_mask[row_number]].tobytes() if state_start == 0 else b""
        text = prompt + ids[row_number, state_start:turn_start].tobytes()
        hashes.append(xxhash.xxh64_intdigest(text) >> 1)  # within int64
    return torch.tensor(hashes, dtype=torch.int64)
