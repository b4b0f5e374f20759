"""The formulas as one writes them on paper: loops over Python floats, no tensors, no tricks.

Rows are responses, columns tokens. `sampled(mask[i])` numbers the tokens that the policy sampled;
everything else is 0. Gradients are those on paper too, by the log-prob of each token.
"""

from __future__ import annotations

import math

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
) -> tuple[Table, Table]:
    """Advantages and returns; a score that is NaN failed, and its row is in no statistic."""
    tokens = [sampled(row) if not math.isnan(scores[i]) else [] for i, row in enumerate(mask)]
    alive = [i for i in range(len(scores)) if tokens[i]]
    compared = dict(zip(range(len(scores)), scores, strict=True))
    if kind not in ("gae", "reinforce"):
        whole = {i: scores[i] - kl_coef * sum(kl[i][t] for t in tokens[i]) for i in alive}
        for i in alive:
            mates = [whole[j] for j in alive if group[j] == group[i]]
            compared[i] = compare(whole[i], mates, kind)
    rewards, found, returns = zeros(mask), zeros(mask), zeros(mask)
    for i in alive:
        for t in tokens[i] if kind in ("gae", "reinforce") else []:
            rewards[i][t] -= kl_coef * kl[i][t]
        rewards[i][tokens[i][-1]] += compared[i]
        for k, t in enumerate(tokens[i]):
            rest = list(enumerate(tokens[i][k:]))
            if kind == "gae":
                found[i][t] = sum(
                    (gamma * gae_lambda) ** n
                    * delta(rewards[i], values[i], tokens[i], k + n, gamma)
                    for n, _ in rest
                )
                returns[i][t] = found[i][t] + values[i][t]
            else:
                returns[i][t] = sum(gamma**n * rewards[i][later] for n, later in rest)
                found[i][t] = returns[i][t]
    if kind in ("gae", "reinforce", "reinforce_baseline"):
        everything = [found[i][t] for i in alive for t in tokens[i]]
        mean = sum(everything) / max(len(everything), 1)
        variance = sum((x - mean) ** 2 for x in everything) / max(len(everything), 1)
        for i in alive:
            for t in tokens[i]:
                found[i][t] = (found[i][t] - mean) / math.sqrt(max(variance, 1e-8))
    return found, returns


def delta(rewards: Row, values: Row, tokens: list[int], k: int, gamma: float) -> float:
    after = values[tokens[k + 1]] if k + 1 < len(tokens) else 0.0
    return rewards[tokens[k]] + gamma * after - values[tokens[k]]


def compare(score: float, mates: Row, kind: str) -> float:
    """A score against those of its group, itself included."""
    n = len(mates)
    if n < 2 or max(mates) == min(mates):
        return 0.0
    mean = sum(mates) / n
    if kind == "rloo":
        return score - (sum(mates) - score) / (n - 1)
    if kind == "grpo":
        deviation = math.sqrt(sum((x - mean) ** 2 for x in mates) / (n - 1))
        return (score - mean) / (deviation + 1e-6)
    return score - mean


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
    *,
    kind: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    aggregation: str,
    max_new_tokens: int,
) -> tuple[float, Table]:
    """The loss, and its gradient."""
    share = shares(mask, aggregation=aggregation, max_new_tokens=max_new_tokens)
    total, gradient = 0.0, zeros(mask)
    for i, row in enumerate(mask):
        change = {t: log_probs[i][t] - old[i][t] for t in sampled(row)}
        for t, own in change.items():
            a = advantages[i][t]
            ratio = math.exp(sum(change.values()) / len(change) if kind == "gspo" else own)
            if kind == "cispo":
                slope = -min(ratio, 1 + clip_high) * a
                loss = slope * log_probs[i][t]
            elif kind == "sapo":
                tau = 1.0 if a > 0 else 1.05
                gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
                loss, slope = -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * ratio
            else:
                clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
                loss, slope = -ratio * a, -ratio * a
                if clipped * a < ratio * a:
                    loss, slope = -clipped * a, 0.0
                if dual_clip is not None and a < 0 and loss > -dual_clip * a:
                    loss, slope = -dual_clip * a, 0.0
            counts = share[i] * (weights[i][t] if weights else 1.0)
            total += counts * loss
            gradient[i][t] = counts * slope
    return total, gradient


def value_loss(
    values: Table,
    old_values: Table,
    returns: Table,
    mask: Mask,
    *,
    value_clip: float | None,
    aggregation: str,
    max_new_tokens: int,
) -> tuple[float, Table]:
    """The loss, and its gradient by the values."""
    share = shares(mask, aggregation=aggregation, max_new_tokens=max_new_tokens)
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


def kl(log_probs: Table, reference: Table, mask: Mask, *, kind: str) -> tuple[Table, Table]:
    """The value of each token, and its slope as a term of the loss."""
    value, slope = zeros(mask), zeros(mask)
    for i, row in enumerate(mask):
        for t in sampled(row):
            gap = log_probs[i][t] - reference[i][t]
            k3 = math.exp(-max(gap, -20.0)) - 1 + max(gap, -20.0)
            value[i][t] = {"k1": gap, "k2": gap**2 / 2}.get(kind, k3)
            own = 1 - math.exp(-gap) if gap > -20.0 else 0.0
            slope[i][t] = {"k1": 1.0, "k3": own}.get(kind, gap)
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
