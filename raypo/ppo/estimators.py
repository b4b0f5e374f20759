"""The advantage estimators by name, composed of the parts in `raypo.ppo.advantages`.

Notation: B responses, T response tokens. Every mask: True = keep. Batch statistics are over all
workers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config.ppo_section import ESTIMATORS
from raypo.ppo.advantages import (
    discounted_returns,
    generalized_advantages,
    group_baseline,
    penalized_scores,
    runs_of,
    token_rewards,
)
from raypo.ppo.masked import check_choice, check_same_shape, keep, masked_moments, masked_whiten


def estimate_advantages(  # noqa: PLR0913 (what each of the estimators needs)
    scores: Tensor,  # [B], shaped; NaN where scoring failed
    mask: Tensor,  # [B, T] bool
    *,
    kind: str,
    gamma: float,
    discount_by: str = "token",
    gae_lambda: float | Tensor = 1.0,  # a tensor: [B]
    critic_lambda: float | None = None,
    clip: float | None = None,
    kl: Tensor | None = None,  # [B, T]
    kl_coef: float = 0.0,
    extra_rewards: Tensor | None = None,  # [B, T]
    values: Tensor | None = None,  # [B, T]
    last_values: Tensor | None = None,  # [B]
    group_index: Tensor | None = None,  # [B] int
    sample_index: Tensor | None = None,  # [B] int
    turn_index: Tensor | None = None,  # [B, T] int
    counted: Tensor | None = None,  # [B, T] bool
    workers: Workers | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of a step, whitened if the estimator does so.

    All workers call it together. A response whose score is NaN is left out of all statistics and
    gets advantage 0. (To leave it out of the loss's denominator too, clear its mask there.)

    Args:
        scores: Shaped score of each response; NaN where scoring failed.
        mask: True on sampled tokens.
        kind: Name of the estimator.
        gamma: Discount.
        discount_by: token applies `gamma` and the lambdas from token to token, turn from turn to
            turn of a response.
        gae_lambda: Lambda of the advantages, for `gae`.
        critic_lambda: Lambda of the critic's targets, for `gae`. None means `gae_lambda`.
        clip: Bound of an advantage's absolute value, after whitening. None means no bound.
        kl: KL of `kl_reward_terms` in nats per token, if the penalty is in the reward. The group
            estimators subtract the penalty of the whole response from its score before scores are
            compared. So grpo divides by the deviation of the penalised scores: in a group of equal
            scores only the KL decides, with full weight however small `kl_coef` is.
        kl_coef: Weight of the penalty, in score per nat.
        extra_rewards: See `token_rewards`.
        values: Values of the critic, for `gae`.
        last_values: See `generalized_advantages`, for `gae`.
        group_index: Rows with the same number, on any worker, are samples of one prompt. Required
            by the group estimators.
        sample_index: Rows of a group with the same number are one sample, which counts once. They
            must have the same score. None means that each row is a sample.
        turn_index: Turn of each token, for `discount_by`. None means that a turn is a run of
            consecutive sampled tokens.
        counted: Tokens that the losses count. Whitened advantages have mean 0 and variance 1 over
            these. None means `mask`.
        workers: The workers that hold the step. None means this process only.

    Returns:
        advantages: [B, T], 0 where masked.
        returns: [B, T], not whitened, 0 where masked; the critic's target for `gae`.

    Raises:
        ValueError: `kind` is unknown, an argument that it needs is missing, or the shapes differ.

    Paper: see the parts in `raypo.ppo.advantages` and `masked_whiten`; Yuan et al. 2025 (VC-PPO),
        arXiv:2503.01491 (decoupled GAE: a separate lambda for the critic).
    """
    check_choice("kind", kind, ESTIMATORS)
    check_choice("discount_by", discount_by, ("token", "turn"))
    turns = None
    if discount_by == "turn":
        turns = runs_of(mask) if turn_index is None else turn_index
    estimator, workers = ESTIMATORS[kind], workers or Workers()
    valid = ~scores.isnan() & mask.any(1)
    mask = mask & valid.unsqueeze(1)
    if estimator.needs_group:
        if group_index is None:
            raise ValueError(f"kind ({kind!r}) compares samples of a prompt; pass group_index.")
        if kl is not None:
            scores, kl = penalized_scores(scores, kl, mask, kl_coef=kl_coef), None
        scores = baseline_over_workers(
            scores, group_index, valid, kind=kind, workers=workers, sample_index=sample_index
        )
    rewards = token_rewards(scores, kl, mask, kl_coef=kl_coef, extra_rewards=extra_rewards)
    if estimator.needs_critic:
        if values is None:
            raise ValueError(f"kind ({kind!r}) needs the critic's values.")
        by_lambda = partial(
            generalized_advantages,
            rewards,
            values,
            mask,
            gamma=gamma,
            last_values=last_values,
            turns=turns,
        )
        advantages, returns = by_lambda(gae_lambda=gae_lambda)
        if critic_lambda is not None:
            _, returns = by_lambda(gae_lambda=critic_lambda)
    else:
        advantages = returns = discounted_returns(rewards, mask, gamma=gamma, turns=turns)
    if estimator.whitens:
        moments = masked_moments(advantages, mask if counted is None else mask & counted)
        advantages = masked_whiten(advantages, mask, moments=workers.sum(moments))
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    return advantages, returns


def baseline_over_workers(
    scores: Tensor,  # [B]
    group_index: Tensor,  # [B] int
    valid: Tensor,  # [B] bool
    *,
    kind: str,
    workers: Workers,
    sample_index: Tensor | None = None,  # [B] int
) -> Tensor:
    """Compute `group_baseline` for groups whose samples are on any row of any worker.

    All workers call it together.

    Args:
        scores: Score of each row of this worker.
        group_index: See `estimate_advantages`, likewise `sample_index`.
        valid: False leaves a row out.
        kind: Name of the estimator.
        workers: The workers that hold the groups.

    Returns:
        advantages: [B] for this worker's rows, 0 where not valid.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(scores=scores, group_index=group_index, valid=valid)
    samples = [] if sample_index is None else [sample_index.cpu()]
    mine = (scores.detach().cpu(), group_index.cpu(), valid.cpu(), *samples)
    shares = workers.gather(mine)
    everyone = [torch.cat(column) for column in zip(*shares, strict=True)]
    first = sum(len(share[0]) for share in shares[: workers.rank])
    compared = baseline_by_index(*everyone, kind=kind)[first : first + len(scores)]
    return compared.to(scores.device)


def baseline_by_index(
    scores: Tensor,  # [B]
    group_index: Tensor,  # [B] int
    valid: Tensor,  # [B] bool
    sample_index: Tensor | None = None,  # [B] int
    *,
    kind: str,
) -> Tensor:
    """Compute `group_baseline` for a flat batch in any order. Groups may differ in size.

    Args:
        scores: Score of each row.
        group_index: Rows with the same number are one group.
        valid: False leaves a row out.
        sample_index: Rows of a group with the same number are one sample. None means that each row
            is one.
        kind: Name of the estimator.

    Returns:
        advantages: [B], 0 where not valid or where a group has fewer than two valid samples.

    Raises:
        ValueError: the shapes differ, or `kind` is unknown.
    """
    check_same_shape(scores=scores, group_index=group_index, valid=valid)
    if len(scores) == 0:
        return scores
    if sample_index is not None:
        pairs = torch.stack([group_index, sample_index])
        _, sample, counts = pairs.unique(dim=1, return_inverse=True, return_counts=True)
        if len(counts) < len(scores):  # use the first valid row of each sample
            rows = torch.arange(len(scores)) + len(scores) * ~valid
            first = rows.new_full(counts.shape, 2 * len(scores))
            first = first.scatter_reduce(0, sample, rows, "amin") % len(scores)
            chosen = scores[first], group_index[first], valid[first]
            return keep(baseline_by_index(*chosen, kind=kind)[sample], valid)
    _, group, sizes = group_index.unique(return_inverse=True, return_counts=True)
    order = group.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes  # [P]
    place = torch.empty_like(group)  # number of each row within its group
    place[order] = torch.arange(len(group), device=group.device) - starts[group[order]]
    shape = (len(sizes), max(int(sizes.max()), 2))
    table = scores.new_zeros(shape).index_put_((group, place), scores)
    kept = valid.new_zeros(shape).index_put_((group, place), valid)
    return group_baseline(table, kind=kind, valid=kept)[group, place]
