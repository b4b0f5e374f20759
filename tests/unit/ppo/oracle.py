"""The formulas as one writes them on paper: loops over Python floats, no tensors, no tricks.

Rows are responses, columns tokens. `sampled(mask[i])` numbers the tokens that the policy sampled;
everything else is 0. Gradients are those on paper too, by the log-prob of each token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations, pairwise

Row = list[float]
Table = list[list[float]]
Mask = list[list[bool]]


def sampled(row: list[bool]) -> list[int]:
    return [t for t, kept in enumerate(row) if kept]


def zeros(mask: Mask) -> Table:
    return [[0.0] * len(row) for row in mask]


# Advantages


def advantages(
    scores: Row,
    kl: Table,
    mask: Mask,
    values: Table,
    group: list[int],
    *,
    kind: str,
    gamma: float,
    gae_lambda: float,
    kl_coef: float,
    discount_by: str = "token",
    turn_rewards: Table | None = None,
    lambda_alpha: float | None = None,
    critic_lambda: float | None = None,
    advantage_clip: float | None = None,
    left_out: list[bool] | None = None,
    pass_k: int = 1,
) -> tuple[Table, Table]:
    """Advantages and returns; a score that is NaN failed, and its row is in no statistic.

    Rows that are left out are compared in their group, and are in no mean and no variance. A score
    has the rewards of turns in it: without a group they are given where they were earned.
    """
    tokens = [sampled(row) if not math.isnan(scores[i]) else [] for i, row in enumerate(mask)]
    alive, is_group = [i for i in range(len(scores)) if tokens[i]], kind not in ("gae", "reinforce")
    compared = dict(zip(range(len(scores)), scores, strict=True))
    if is_group:
        whole = {i: scores[i] - kl_coef * sum(kl[i][t] for t in tokens[i]) for i in alive}
        for i in alive:
            others = [j for j in alive if group[j] == group[i]]
            mates, place = [whole[j] for j in others], others.index(i)
            lengths = [len(tokens[j]) for j in others]
            compared[i] = compare(place, mates, kind, lengths=lengths, pass_k=pass_k)
    compared |= of_parts(kind, scores, alive, group)
    rewards, found, returns = zeros(mask), zeros(mask), zeros(mask)
    for i in alive:
        for t in tokens[i]:
            earned = turn_rewards[i][t] if turn_rewards and not is_group else 0.0
            rewards[i][t] += earned - (0.0 if is_group else kl_coef * kl[i][t])
            compared[i] -= earned
        rewards[i][tokens[i][-1]] += compared[i]
        steps = times(tokens[i], discount_by)
        own = gae_lambda
        if lambda_alpha is not None:
            own = 1.0 - 1.0 / max(lambda_alpha * len(tokens[i]), 1.0)
        for k, t in enumerate(tokens[i]):
            rest = [(sum(steps[k : k + n]), later) for n, later in enumerate(tokens[i][k:])]
            if kind == "gae":
                deltas = [
                    (age, delta(rewards[i], values[i], tokens[i], k + n, gamma ** steps[k + n]))
                    for n, (age, _) in enumerate(rest)
                ]
                of_critic = own if critic_lambda is None else critic_lambda
                found[i][t], target = (
                    sum((gamma * each) ** age * value for age, value in deltas)
                    for each in (own, of_critic)
                )
                returns[i][t] = target + values[i][t]
            else:
                returns[i][t] = sum(gamma**age * rewards[i][later] for age, later in rest)
                found[i][t] = returns[i][t]
    if kind in ("gae", "reinforce", "reinforce_baseline"):
        counts = [i for i in alive if not (left_out and left_out[i])]
        whiten(found, tokens, alive, counts)
    if advantage_clip is not None:
        most = advantage_clip
        found = [[max(-most, min(most, x)) for x in row] for row in found]
    return found, returns


def whiten(table: Table, tokens: list[list[int]], alive: list[int], counts: list[int]) -> None:
    """The rows that are alive, by mean and variance of those that count."""
    everything = [table[i][t] for i in counts for t in tokens[i]]
    mean = sum(everything) / max(len(everything), 1)
    variance = sum((x - mean) ** 2 for x in everything) / max(len(everything), 1)
    for i in alive:
        for t in tokens[i]:
            table[i][t] = (table[i][t] - mean) / math.sqrt(max(variance, 1e-8))


def times(tokens: list[int], discount_by: str) -> list[int]:
    """Steps of time from each sampled token to the next."""
    by_token = discount_by == "token"
    gaps = [int(by_token or later > t + 1) for t, later in pairwise(tokens)]
    return [*gaps, 1]


def delta(rewards: Row, values: Row, tokens: list[int], k: int, gamma: float) -> float:
    after = values[tokens[k + 1]] if k + 1 < len(tokens) else 0.0
    return rewards[tokens[k]] + gamma * after - values[tokens[k]]


def compare(
    place: int, mates: Row, kind: str, *, lengths: list[int] | None = None, pass_k: int = 1
) -> float:
    """A score, by its place, against those of its group, itself included."""
    n, score = len(mates), mates[place]
    if n < 2 or max(mates) == min(mates):
        return 0.0
    mean = sum(mates) / n
    if kind == "rloo":
        return score - (sum(mates) - score) / (n - 1)
    if kind == "grpo":
        deviation = math.sqrt(sum((x - mean) ** 2 for x in mates) / (n - 1))
        return (score - mean) / (deviation + 1e-6)
    if kind == "maxrl":
        return (score - mean) / mean
    if kind == "opo":
        assert lengths is not None
        weighted = sum(length * x for length, x in zip(lengths, mates, strict=True))
        return score - weighted / sum(lengths)
    if kind == "pass_at_k":
        return best_of_choices(place, mates, pass_k)
    return score - mean


def of_parts(kind: str, scores: Row, alive: list[int], group: list[int]) -> dict[int, float]:
    """GDPO of two parts, which are the score and its square."""
    if kind != "gdpo":
        return {}
    parts = [[scores[i], scores[i] ** 2] for i in alive]
    found = parts_apart(parts, [group[i] for i in alive], weights=[1.0, 0.5])
    return dict(zip(alive, found, strict=True))


def parts_apart(parts: Table, group: list[int], *, weights: Row) -> Row:
    """Each part against its group, and their weighted sum against the batch; NaN: no such part."""
    total = [0.0] * len(parts)
    for column, weight in enumerate(weights):
        having = [i for i, each in enumerate(parts) if not math.isnan(each[column])]
        for i in having:
            others = [j for j in having if group[j] == group[i]]
            mates = [parts[j][column] for j in others]
            total[i] += weight * compare(others.index(i), mates, "grpo")
    if len(total) < 2 or max(total) == min(total):
        return [0.0] * len(total)
    mean = sum(total) / len(total)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in total) / (len(total) - 1))
    return [(x - mean) / (deviation + 1e-6) for x in total]


def best_of_choices(place: int, mates: Row, k: int) -> float:
    """The mean score of all choices of k samples with this one, against all choices."""
    best = {choice: max(mates[i] for i in choice) for choice in combinations(range(len(mates)), k)}
    if len(set(best.values())) < 2:
        return 0.0
    mean = sum(best.values()) / len(best)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in best.values()) / len(best))
    own = [value for choice, value in best.items() if place in choice]
    return (sum(own) / len(own) - mean) / deviation


# Losses


def shares(mask: Mask, *, aggregation: str, max_new_tokens: int) -> Row:
    """What one token of each response counts in the loss."""
    lengths = [len(sampled(row)) for row in mask]
    if aggregation == "token_mean":
        return [1.0 / max(sum(lengths), 1)] * len(mask)
    if aggregation == "constant":
        return [1.0 / (len(mask) * max_new_tokens)] * len(mask)
    filled = sum(length > 0 for length in lengths)
    return [1.0 / (max(filled, 1) * max(length, 1)) for length in lengths]


def policy_loss(
    log_probs: Table,
    old: Table,
    advantages: Table,
    mask: Mask,
    weights: Table | None,
    covariant: Mask,
    *,
    kind: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    cispo_low: float | None,
    covariance_kl: float,
    aggregation: str,
    max_new_tokens: int,
    rollout: Table,
    off_policy_mask: float | None,
    high_entropy: Mask | None,
) -> tuple[float, Table]:
    """The loss, and its gradient."""
    share = shares(mask, aggregation=aggregation, max_new_tokens=max_new_tokens)
    total, gradient = 0.0, zeros(mask)
    for i, row in enumerate(mask):
        change = {t: log_probs[i][t] - old[i][t] for t in sampled(row)}
        drift = sum(rollout[i][t] - log_probs[i][t] for t in change) / max(len(change), 1)
        is_off_policy = off_policy_mask is not None and drift > off_policy_mask
        for t, own in change.items():
            a = advantages[i][t]
            ratio = math.exp(sum(change.values()) / len(change) if kind == "gspo" else own)
            penalty = covariance_kl if covariant[i][t] else 0.0
            if kind == "cispo":
                lowest = 0.0 if cispo_low is None else 1 - cispo_low
                slope = -max(min(ratio, 1 + clip_high), lowest) * a
                loss = slope * log_probs[i][t]
            elif kind == "gmpo":
                bounded = {
                    other: one_sided(moved, advantages[i][other], clip_low, clip_high)
                    for other, moved in change.items()
                }
                loss = -a * math.prod(bounded.values()) ** (1 / len(change))
                slope = loss if bounded[t] == ratio else 0.0
            elif kind == "kl_cov":
                loss = -ratio * a + penalty * abs(own)
                slope = -ratio * a + math.copysign(penalty, own)
            elif kind == "sapo":
                tau = 1.0 if a > 0 else 1.05
                gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
                loss, slope = -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * ratio
            elif kind in ("dppo_tv", "dppo_kl"):
                pair = math.exp(old[i][t]), math.exp(log_probs[i][t])
                held = too_far(pair, a, kind, clip_low, clip_high)
                loss = slope = -ratio * a * (not held)
            elif kind == "vespo":
                slope = -kernel(change.values(), a) * a
                loss = slope * log_probs[i][t]
            else:
                loss, slope = clipped(ratio, a, clip_low, clip_high, dual_clip)
            counts = share[i] * (weights[i][t] if weights else 1.0)
            counts *= not (kind == "clip_cov" and covariant[i][t])
            counts *= not (is_off_policy and a < 0)
            counts *= high_entropy is None or high_entropy[i][t]
            total += counts * loss
            gradient[i][t] = counts * slope
    return total, gradient


def clipped(
    ratio: float, advantage: float, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[float, float]:
    """PPO's loss of a token, and its slope."""
    near = min(max(ratio, 1 - clip_low), 1 + clip_high)
    loss = slope = -ratio * advantage
    if near * advantage < ratio * advantage:
        loss, slope = -near * advantage, 0.0
    if dual_clip is not None and advantage < 0 and loss > -dual_clip * advantage:
        loss, slope = -dual_clip * advantage, 0.0
    return loss, slope


def too_far(
    pair: tuple[float, float], advantage: float, kind: str, clip_low: float, clip_high: float
) -> bool:
    """A token, before and now, against all others; a random step may have a probability above 1."""
    before, now = pair
    distance = abs(now - before)
    if kind == "dppo_kl":
        others = [max(1 - p, 1e-8) for p in pair]
        distance = before * math.log(before / now) + (1 - before) * math.log(others[0] / others[1])
    if advantage > 0:
        return now > before and distance > clip_high
    return now < before and distance > clip_low


def kernel(change: Iterable[float], advantage: float) -> float:
    """The weight of VESPO's gradient: a function of the product of a response's ratios."""
    whole = math.prod(math.exp(each) for each in change)
    c1, c2 = (2, 3) if advantage >= 0 else (3, 2)
    return whole**c1 * math.exp(c2 * (1 - whole))


def one_sided(moved: float, advantage: float, clip_low: float, clip_high: float) -> float:
    """A ratio, cut where its advantage would drive it further."""
    ratio = math.exp(moved)
    return min(ratio, 1 + clip_high) if advantage > 0 else max(ratio, 1 - clip_low)


def value_loss(
    values: Table,
    old_values: Table,
    returns: Table,
    mask: Mask,
    *,
    value_clip: float | None,
) -> tuple[float, Table]:
    """The mean over tokens, and its gradient by the values."""
    share = shares(mask, aggregation="token_mean", max_new_tokens=0)
    total, gradient = 0.0, zeros(mask)
    for i, row in enumerate(mask):
        for t in sampled(row):
            error = values[i][t] - returns[i][t]
            loss, slope = 0.5 * error**2, error
            if value_clip is not None:
                moved = values[i][t] - old_values[i][t]
                near = old_values[i][t] + min(max(moved, -value_clip), value_clip)
                worse = 0.5 * (near - returns[i][t]) ** 2
                if worse > loss:
                    loss, slope = worse, 0.0
            total += share[i] * loss
            gradient[i][t] = share[i] * slope
    return total, gradient


# KL and the correction


def covariant(
    log_probs: Table, advantages: Table, mask: Mask, *, fraction: float
) -> list[tuple[int, int]]:
    """The tokens with the largest product of log-prob and advantage, each less its mean."""
    tokens = [(i, t) for i, row in enumerate(mask) for t in sampled(row)]
    means = [
        sum(table[i][t] for i, t in tokens) / max(len(tokens), 1)
        for table in (log_probs, advantages)
    ]
    by_product = sorted(
        tokens,
        key=lambda token: (
            -(log_probs[token[0]][token[1]] - means[0])
            * (advantages[token[0]][token[1]] - means[1])
        ),
    )
    return by_product[: max(int(fraction * len(tokens)), 1)]


def high_entropy(entropy: Table, mask: Mask, *, fraction: float) -> Mask:
    """The tokens whose entropy is at least that of the last of the top `fraction`."""
    ranked = sorted((entropy[i][t] for i, row in enumerate(mask) for t in sampled(row)))
    most = max(int(fraction * len(ranked)), 1)
    return [
        [kept and entropy[i][t] >= ranked[-most] for t, kept in enumerate(row)]
        for i, row in enumerate(mask)
    ]


def kl(
    log_probs: Table, reference: Table, mask: Mask, *, kind: str, old: Table | None = None
) -> tuple[Table, Table]:
    """The value of each token, and its slope as a term of the loss; `old`: with its ratio."""
    value, slope = zeros(mask), zeros(mask)
    for i, row in enumerate(mask):
        for t in sampled(row):
            gap = log_probs[i][t] - reference[i][t]
            k3 = math.exp(-max(gap, -20.0)) - 1 + max(gap, -20.0)
            value[i][t] = {"k1": gap, "k2": gap**2 / 2}.get(kind, k3)
            own = 1 - math.exp(-gap) if gap > -20.0 else 0.0
            slope[i][t] = {"k1": 1.0, "k3": own}.get(kind, gap)
            if old is not None:
                ratio = math.exp(log_probs[i][t] - old[i][t])
                through = value[i][t] if kind == "k3" else 0.0  # d ratio = ratio
                value[i][t], slope[i][t] = ratio * value[i][t], ratio * (slope[i][t] + through)
    return value, slope


def weights(
    old: Table,
    rollout: Table,
    mask: Mask,
    *,
    kind: str,
    low: float,
    high: float,
    cap: float,
    mask_ratio: str,
    token_veto: float | None,
) -> Table:
    """The correction's weight of each token."""
    found = zeros(mask)
    for i, row in enumerate(mask):
        by_token = {t: math.exp(old[i][t] - rollout[i][t]) for t in sampled(row)}
        product = math.prod(by_token.values())
        mean = product ** (1 / max(len(by_token), 1))
        judged = mean if mask_ratio == "geometric" else product
        if token_veto is not None and min(by_token.values(), default=1.0) < token_veto:
            continue
        if kind == "mis" and not low <= judged <= high:
            continue
        for t, w in by_token.items():
            found[i][t] = {
                "none": 1.0,
                "sequence_tis": min(product, cap),
                "geometric_tis": min(mean, cap),
                "icepop": w if low <= w <= high else 0.0,
            }.get(kind, min(w, cap))
    return found
