"""Token rewards, returns and advantages.

Notation: B responses, T response tokens, P prompts, n samples per prompt. Every mask: True = keep.

Discounts and lambdas apply from one sampled token to the next sampled token. Tokens of the
environment in between are skipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypo.config.ppo_section import GROUP_ADVANTAGES
from raypo.ppo.masked import check_same_shape, in_blocks, keep

GROUP_STD_EPS = 1e-6
SCAN_CHUNK = 32
"""Number of tokens summed by one matmul with a triangular matrix. It affects speed only."""


def last_token(mask: Tensor) -> Tensor:
    """Return a mask of the last sampled token of each row, which gets the response's score.

    Args:
        mask: [B, T] bool.

    Returns:
        last: [B, T] bool, with one True per row, or none in a row without a sampled token.
    """
    mask = mask.bool()
    remaining = mask.flip(1).cumsum(1).flip(1)  # sampled tokens from here on
    return mask & (remaining == 1)


def token_rewards(
    scores: Tensor,  # [B]
    kl: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    kl_coef: float,
    extra_rewards: Tensor | None = None,  # [B, T]
) -> Tensor:
    """Return token rewards: the score at the last token, minus the KL penalty of each token.

    Args:
        scores: Score of each response.
        kl: KL of `kl_reward_terms`, in nats per token. None means no penalty.
        mask: True on sampled tokens.
        kl_coef: Weight of the penalty, in score per nat.
        extra_rewards: Rewards of an environment, per token or turn. They are added at their own
            positions, which must be sampled tokens. None means no such rewards.

    Returns:
        rewards: [B, T], 0 where masked; a row without a sampled token is 0 throughout.

    Raises:
        ValueError: the shapes differ.

    Paper: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    if scores.shape != mask.shape[:1]:
        raise ValueError(
            f"scores {tuple(scores.shape)} must have one entry for each row of "
            f"mask {tuple(mask.shape)}."
        )
    rewards = keep(scores.unsqueeze(1).expand(mask.shape), last_token(mask))
    if kl is not None and kl_coef != 0.0:
        check_same_shape(kl=kl, mask=mask)
        rewards = rewards - kl_coef * keep(kl, mask)
    if extra_rewards is not None:
        check_same_shape(extra_rewards=extra_rewards, mask=mask)
        rewards = rewards + keep(extra_rewards, mask)
    return rewards


def penalized_scores(
    scores: Tensor,  # [B]
    kl: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    kl_coef: float,
) -> Tensor:
    """Return scores minus the KL penalty of the whole response, for comparison within groups.

    Args:
        scores: Score of each response.
        kl: KL of `kl_reward_terms`, in nats per token.
        mask: True on sampled tokens.
        kl_coef: Weight of the penalty, in score per nat.

    Returns:
        scores: [B]; a response without a sampled token keeps its score.

    Raises:
        ValueError: the shapes differ.

    Paper: Ahmadian et al. 2024, arXiv:2402.14740, section 2.
    """
    check_same_shape(kl=kl, mask=mask)
    if kl_coef == 0.0:
        return scores
    # Sum in float64, so that equal responses get equal penalties regardless of padding.
    penalty = kl_coef * keep(kl, mask).sum(1, dtype=torch.float64)
    return (scores - penalty).to(scores.dtype)


def adaptive_lambdas(mask: Tensor, *, alpha: float) -> Tensor:
    """Return a GAE lambda for each response: 1 - 1 / (alpha * length), but at least 0.

    The weights 1, lambda, lambda ** 2, ... then sum to alpha * length.

    Args:
        mask: [B, T] bool. The length is the number of sampled tokens.
        alpha: Sum of the weights, per token of the response.

    Returns:
        lambdas: [B] float64.

    Paper: Yue et al. 2025 (VAPO), arXiv:2504.05118 (length-adaptive GAE).
    """
    return 1.0 - 1.0 / (alpha * mask.sum(1).double()).clamp(min=1.0)


def generalized_advantages(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T], value of the state before the token is chosen
    mask: Tensor,  # [B, T] bool
    *,
    gamma: float,
    gae_lambda: float | Tensor,  # a tensor: [B], one for each row
    last_values: Tensor | None = None,  # [B]
    turns: Tensor | None = None,  # [B, T] int
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns by Generalized Advantage Estimation (GAE).

    delta_k = r_k + gamma * V_{k+1} - V_k and A_k = delta_k + gamma * lambda * A_{k+1}, where k
    numbers the sampled tokens of a row. The computation is in float64, without gradient.

    Args:
        rewards: Reward of each token.
        values: Value of the state before each token.
        mask: True on sampled tokens.
        gamma: Discount.
        gae_lambda: One lambda for all rows, or a tensor with a lambda for each row.
        last_values: Value of the state after the last sampled token of a truncated row, and 0 for a
            row that ended by itself. None means 0 for all rows.
        turns: Turn of each token. If given, gamma and lambda apply between turns, and both are 1
            within a turn. None means that they apply to each token.

    Returns:
        advantages: [B, T], not whitened, 0 where masked.
        returns: [B, T], the critic's target `advantages + values`, 0 where masked.

    Raises:
        ValueError: the shapes differ.

    Paper: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    check_same_shape(rewards=rewards, values=values, mask=mask)
    row_arguments = {"last_values": last_values, "gae_lambda": gae_lambda}
    for name, rows in row_arguments.items():
        if isinstance(rows, Tensor) and rows.shape != mask.shape[:1]:
            raise ValueError(
                f"{name} {tuple(rows.shape)} must have one entry for each row of "
                f"mask {tuple(mask.shape)}."
            )
    end_values = values.new_zeros(mask.shape[0]) if last_values is None else last_values

    row_lambdas = [gae_lambda] if isinstance(gae_lambda, Tensor) else []
    optional_turns = [] if turns is None else [turns]

    def estimate(
        rewards: Tensor, values: Tensor, mask: Tensor, end_values: Tensor, *optional: Tensor
    ) -> list[Tensor]:
        if not mask.numel():  # a worker without rows
            return [torch.zeros_like(rewards), torch.zeros_like(values)]
        indices = _sampled_positions(mask)
        masked_values = keep(values.double(), mask)
        value = _compact(masked_values, indices)
        next_value = torch.nn.functional.pad(value[:, 1:], (0, 1))
        num_tokens = mask.sum(1, keepdim=True)
        last_value = keep(end_values.unsqueeze(1).double(), num_tokens > 0)
        next_value.scatter_add_(1, (num_tokens - 1).clamp(min=0), last_value)
        reward = _compact(keep(rewards.double(), mask), indices)
        turns = _turn_numbers(optional[-1], mask, indices) if optional_turns else None
        if turns is not None:
            next_value.mul_(torch.where(turns.diff(append=turns[:, :1] - 1) == 0, 1.0, gamma))
        delta = reward.add_(next_value, alpha=1.0 if optional_turns else gamma).sub_(value)
        discount = gamma * (optional[0].to(delta) if row_lambdas else gae_lambda)
        advantages = _spread(_discounted_suffix_sums(delta, discount, turns), indices)
        advantages = keep(advantages, mask)
        return [advantages, advantages + masked_values]

    with torch.no_grad():
        arguments = (rewards, values, mask.bool(), end_values, *row_lambdas, *optional_turns)
        advantages, returns = in_blocks(estimate, *arguments)
    return advantages, returns


def discounted_returns(
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    *,
    gamma: float,
    turns: Tensor | None = None,  # [B, T] int
) -> Tensor:
    """Return for each token the discounted sum of its reward and all later rewards of its row.

    The computation is in float64, without gradient.

    Args:
        rewards: Reward of each token.
        mask: True on sampled tokens.
        gamma: Discount per sampled token.
        turns: Turn of each token. If given, gamma applies between turns only. None means that it
            applies to each token.

    Returns:
        returns: [B, T], 0 where masked.

    Raises:
        ValueError: the shapes differ.

    Paper: Hu et al. 2025, arXiv:2501.03262; Williams 1992 (REINFORCE).
    """
    check_same_shape(rewards=rewards, mask=mask)

    optional_turns = [] if turns is None else [turns]

    def estimate(rewards: Tensor, mask: Tensor, *optional_turns: Tensor) -> list[Tensor]:
        indices = _sampled_positions(mask)
        reward = _compact(keep(rewards.double(), mask), indices)
        turns = _turn_numbers(optional_turns[0], mask, indices) if optional_turns else None
        return [keep(_spread(_discounted_suffix_sums(reward, gamma, turns), indices), mask)]

    with torch.no_grad():
        (returns,) = in_blocks(estimate, rewards, mask.bool(), *optional_turns)
    return returns


def group_baseline(
    scores: Tensor,  # [P, n]
    *,
    kind: str,
    valid: Tensor | None = None,  # [P, n] bool
    lengths: Tensor | None = None,  # [P, n] int
    pass_k: int = 1,
) -> Tensor:
    """Return scores relative to the other samples of the same prompt.

    - rloo: score minus the mean of the other samples.
    - reinforce_baseline, dr_grpo: score minus the mean of the group.
    - grpo: as dr_grpo, divided by the group's unbiased standard deviation + 1e-6.
    - maxrl: as dr_grpo, divided by the group's mean.
    - opo: score minus the group's mean weighted by length. This baseline minimises the variance of
      a gradient whose squared norm grows with the length.
    - pass_at_k: `pass_at_k_advantages`.

    Args:
        scores: Score of each sample.
        kind: Name of the estimator.
        valid: False excludes a sample from mean and deviation, because it failed or has no sampled
            token. None means that all samples are valid.
        lengths: Sampled tokens of each sample, for opo.
        pass_k: Number of samples k, for pass_at_k.

    Returns:
        advantages: [P, n], 0 where not valid. Exactly 0 in a group of equal scores, or with fewer
            than two valid samples.

    Raises:
        ValueError: `kind` is unknown, the shapes differ, n is 1, or maxrl meets a negative score.

    Paper: Ahmadian et al. 2024, arXiv:2402.14740, section 2 (rloo); Hu et al. 2025,
        arXiv:2501.03262 (reinforce_baseline); Shao et al. 2024, arXiv:2402.03300, section 4.1.2
        (grpo); Liu et al. 2025, arXiv:2503.20783, section 3.2 (dr_grpo); Tajwar et al. 2026,
        arXiv:2602.02710, algorithm 1 (maxrl); Hao et al. 2025, arXiv:2505.23585 (opo).
    """
    if kind not in GROUP_ADVANTAGES:
        names = ", ".join(GROUP_ADVANTAGES)
        raise ValueError(f"kind ({kind!r}) is unknown; choose one of {names}.")
    if scores.shape[1] < 2:
        raise ValueError(
            f"samples per prompt ({scores.shape[1]}) must be at least 2 for {kind!r}: there is "
            "no other sample to compare with. Set rollout.samples_per_prompt to 2 or more."
        )
    valid = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid.bool()
    check_same_shape(scores=scores, valid=valid)
    valid_scores = keep(scores, valid)
    exact = valid_scores.double()
    count = valid.sum(1, keepdim=True).double()  # [P, 1]
    centred = keep(exact - exact.sum(1, keepdim=True) / count.clamp(min=1), valid)
    if kind == "rloo":  # R_i - mean of other samples = (R_i - mean of all) * count / (count - 1)
        centred = centred * (count / (count - 1).clamp(min=1))
    elif kind == "grpo":
        variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + GROUP_STD_EPS)
    elif kind == "maxrl":
        _refuse_negative(exact)
        # The mean is 0 only if all scores are 0, and then all advantages are 0.
        mean = exact.sum(1, keepdim=True) / count.clamp(min=1)
        centred = centred / torch.where(mean > 0, mean, 1.0)
    elif kind == "opo":
        assert lengths is not None, "opo needs the lengths of the responses"
        check_same_shape(scores=scores, lengths=lengths)
        weight = keep(lengths.double(), valid)
        baseline = (weight * exact).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)
        centred = exact - baseline
    elif kind == "pass_at_k":
        centred = pass_at_k_advantages(exact, valid, k=pass_k)
    # Compare scores for equality: the rounded mean of equal numbers may differ from them.
    lowest = exact.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    highest = exact.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    return keep(centred, valid & (highest > lowest)).to(valid_scores.dtype)


def pass_at_k_advantages(
    scores: Tensor,  # [P, n] float64
    valid: Tensor,  # [P, n] bool
    *,
    k: int,
) -> Tensor:
    """Return the advantages of training on pass@k, whose score is the best of k samples.

    A choice is a set of k valid samples of the group. Its score is its best sample's score. All
    choices are equally likely. A sample's advantage is the mean score of the choices that
    contain it, minus the mean score of all choices, divided by the standard deviation of the score
    over all choices. With scores of 0 and 1 these are the paper's equations. With k = 1 this is
    grpo with the population standard deviation. The sums over choices are in closed form: in
    ascending order of scores, sample i (from 0) is the best of C(i, k - 1) choices.

    Args:
        scores: Score of each sample, 0 where not valid.
        valid: False excludes a sample.
        k: Number of samples of a choice.

    Returns:
        advantages: [P, n], arbitrary where not valid. They are 0 in a group that has fewer than k
            valid samples, or whose choices all have the same score.

    Paper: Chen et al. 2025, arXiv:2508.10751, eq. 5 (score) and 11 to 15 (advantages).
    """
    ordered, order = scores.masked_fill(~valid, torch.inf).sort(1)  # valid samples first
    count = valid.sum(1, keepdim=True)  # [P, 1]
    rank = torch.arange(scores.shape[1], device=scores.device).unsqueeze(0)  # [1, n]
    is_sample = rank < count
    # Use scores relative to the highest one. Only choices without the highest score then add to the
    # sums, so rounding cannot hide them even if they are few.
    highest = ordered.gather(1, (count - 1).clamp(min=0))
    ordered = keep(ordered - highest, is_sample)

    def share(num_chosen: int, pool: Tensor, full_pool: Tensor) -> Tensor:
        """Return C(among, chosen) / C(all_among, chosen) without huge numbers."""
        ratio = torch.ones_like(ordered)
        for step in range(num_chosen):
            denominator = (full_pool - step).clamp(min=1)
            ratio = ratio * (pool - step).clamp(min=0) / denominator
        return ratio

    # In a choice that contains a given sample, the best is that sample or a later sample j.
    own_share = share(k - 1, rank, count - 1)
    later_terms = torch.zeros_like(ordered)
    if k > 1:
        later_terms = share(k - 2, rank - 1, count - 2) * (k - 1) / (count - 1).clamp(min=1)
    later_terms = keep(ordered * later_terms, is_sample)
    later_sum = later_terms.flip(1).cumsum(1).flip(1) - later_terms
    mean_best = ordered * own_share + later_sum
    best_share = keep(
        k * own_share / count.clamp(min=1), is_sample
    )  # share of all choices in which each sample is the best
    mean = (best_share * ordered).sum(1, keepdim=True)
    variance = (best_share * (ordered - mean).square()).sum(1, keepdim=True)
    lowest = ordered.gather(1, torch.full_like(count, min(k, scores.shape[1]) - 1))  # worst choice
    has_variance = (count >= k) & (lowest < 0.0)
    advantages = torch.where(has_variance, (mean_best - mean) / variance.sqrt(), 0.0)
    return torch.zeros_like(scores).scatter(1, order, advantages)


def _refuse_negative(scores: Tensor) -> None:
    lowest = float(scores.min()) if scores.numel() else 0.0
    if lowest < 0.0:
        raise ValueError(
            "ppo.advantage (maxrl): divides by a group's mean score, so scores must be at least "
            f"0, but the lowest of this step is {lowest:g}. Let the reward function return 0 for "
            "failures, set ppo.shaping.clip_low to 0, or choose another ppo.advantage."
        )


def _sampled_positions(mask: Tensor) -> Tensor | None:
    """Return each sampled token's index among its row's sampled tokens, and T for masked tokens.

    None means that no row has a masked token before a sampled one, so no values must be moved.
    """
    if not (mask[:, 1:] & ~mask[:, :-1]).any():
        return None
    return torch.where(mask, mask.cumsum(1) - 1, mask.shape[1])


def _compact(x: Tensor, indices: Tensor | None) -> Tensor:
    """Move the values of sampled tokens to the front of each row, and pad with zeros.

    `x` must be 0 where masked.
    """
    if indices is None:
        return x
    return x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_(1, indices, x)[:, :-1]


def _spread(x: Tensor, indices: Tensor | None) -> Tensor:
    """Undo `_compact`. Values at masked positions are arbitrary."""
    return x if indices is None else x.gather(1, indices.clamp(max=x.shape[1] - 1))


def runs_of(mask: Tensor) -> Tensor:
    """Number the runs of consecutive sampled tokens in each row, from 1: [B, T] int64.

    A masked token gets the number of the preceding run.
    """
    is_run_start = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return is_run_start.cumsum(1)


def _turn_numbers(turns: Tensor, mask: Tensor, indices: Tensor | None) -> Tensor:
    """Return the turn numbers (from 0) of the sampled tokens, compacted as in `_compact`.

    The result is [B, T] int64, with -1 at the remaining positions.
    """
    compacted = _compact(torch.where(mask, turns, 0), indices)
    turn_number = (compacted.diff(prepend=compacted[:, :1]) != 0).cumsum(1)
    index = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(index < mask.sum(1, keepdim=True), turn_number, -1)


def _discounted_suffix_sums(
    x: Tensor, discount: float | Tensor, turns: Tensor | None = None
) -> Tensor:
    """Compute y_k = x_k + discount * y_{k+1} along rows of x [B, T], in chunks.

    The sums within a chunk are a matmul with a triangular matrix of powers. The contribution of
    later chunks follows the same recurrence over the chunks' first sums, with
    discount ** SCAN_CHUNK. The discount is one number, or a tensor [B] of one discount per row.

    With `turns` the discount applies between turns only: the recurrence runs over the sums of
    turns, and the values before k in its own turn are subtracted.
    """
    if turns is not None:
        turn_number = turns.clamp(min=0)
        sums = x.new_zeros(x.shape).scatter_add_(1, turn_number, x)  # sum of each turn
        exclusive_cumsum, turn_start_cumsum = x.cumsum(1) - x, sums.cumsum(1) - sums
        later_sums = _discounted_suffix_sums(sums, discount)
        return later_sums.gather(1, turn_number) - (
            exclusive_cumsum - turn_start_cumsum.gather(1, turn_number)
        )
    if isinstance(discount, float) and discount == 0.0:
        return x
    rows, width = x.shape
    chunk = min(SCAN_CHUNK, max(width, 1))
    num_chunks = -(-width // chunk)
    padding = num_chunks * chunk - width
    padded = torch.nn.functional.pad(x, (0, padding)) if padding else x
    steps = torch.arange(chunk, device=x.device)
    exponents = steps.unsqueeze(1) - steps  # [from, to]
    base = discount[:, None, None] if isinstance(discount, Tensor) else float(discount)
    powers = torch.where(exponents >= 0, base ** exponents.clamp(min=0).to(x), 0.0)
    sums = padded.reshape(rows, num_chunks, chunk) @ powers  # [B, chunks, chunk]
    if num_chunks > 1:
        later_sums = _discounted_suffix_sums(sums[:, 1:, 0].contiguous(), discount**chunk)
        end_discounts = base ** (chunk - steps).to(x)  # [chunk], or [B, 1, chunk]
        sums[:, :-1].addcmul_(later_sums.unsqueeze(2), end_discounts)
    return sums.reshape(rows, num_chunks * chunk)[:, :width]
