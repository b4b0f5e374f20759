"""Rules on data, scores and responses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raypo.health.rule import PATIENCE, PROMPTS_PER_STEP, Alarm, History, Rule, rule, value_at

MAX_TRUNCATED = 0.25
"""Limit as a share of responses. A policy that ends its answers stays below it, even early on."""
NO_END = 0.95
MIN_FALL = 0.2
"""Minimum fall of the held-out score, as a share of the standard deviation of the scores. By
chance, the mean score of a few hundred responses moves less."""
MAX_HEADERS = 0.05
MAX_DUPLICATES = 0.1
MAX_OVERLAP = 0.01
MIN_CORRELATION = 0.5
"""Correlation of score and length within groups: length explains 25 % of the scores' variance."""
LABEL_STEPS = 5


@rule()
def constant_reward(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, and in all steps before, every sample has the same score."""
    spreads = history.values("rollout/score_std")
    if len(spreads) < PATIENCE or max(spreads) > 1e-9:
        return None
    score = history.last.get("rollout/score_mean", math.nan)
    return (
        f"every sample of {len(spreads)} steps scored {score:.3g}: there is nothing to learn from.",
        "Run raypo try-reward, and look whether reward.function finds what it looks for in the "
        "response (its format, data.label_key).",
    )


@rule(LABEL_STEPS)
def shifted_labels(history: History, config: Mapping[str, Any]) -> Alarm:
    """Over the last 5 steps, more responses contain the label of the row before or after their
    prompt's than their own, by more than 3 standard errors. Rows whose prompt contains one of these
    labels do not count."""
    for which in ("previous", "next"):
        names = f"rollout/{which}_label_fraction", "rollout/own_label_fraction"
        other, own = (history.newest(name, LABEL_STEPS) for name in names)
        counts = history.newest("rollout/labels_compared", LABEL_STEPS)
        if not (other and own and counts) or not sum(counts):
            continue
        theirs, mine = (
            sum(share * count for share, count in zip(shares, counts, strict=True)) / sum(counts)
            for shares in (other, own)
        )
        error = math.sqrt((theirs * (1 - theirs) + mine * (1 - mine)) / sum(counts))
        if theirs - mine > 3.0 * error:
            return (
                f"{theirs:.0%} of the responses contain the label of the {which} row, and "
                f"{mine:.0%} that of their own: the labels are shifted by a row.",
                "Join prompts and labels by a key again, and look at some rows of data.prompts "
                "(raypo try-reward shows three).",
            )
    return None


@rule(1)
def duplicated_prompts(history: History, config: Mapping[str, Any]) -> Alarm:
    """More than 10 % of the rows of `data.prompts` repeat the prompt and label of an earlier row.
    Prompts of episodes are not compared, because their tasks may lie in other columns."""
    share = history.first.get("data/duplicate_fraction", 0.0)
    if share <= MAX_DUPLICATES or history.num_steps > 1:
        return None
    return (
        f"{share:.0%} of the training prompts repeat an earlier one, so some prompts train more "
        "often than others.",
        "Remove the copies from data.prompts; to weight sources on purpose, use their weights.",
    )


@rule(1)
def held_out_in_training(history: History, config: Mapping[str, Any]) -> Alarm:
    """More than 1 % of the held-out prompts are also training prompts, with the same label. Prompts
    of episodes are not compared."""
    share = history.first.get("data/held_out_overlap", 0.0)
    if share <= MAX_OVERLAP or history.num_steps > 1:
        return None
    return (
        f"{share:.0%} of the held-out prompts are also training prompts, so the held-out score "
        "says little about new prompts.",
        "Remove them from data.prompts or from eval.prompts.",
    )


@rule()
def wrong_template(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, more than 5 % of the responses contain the header with which the chat
    template begins an answer, in what the policy wrote itself: it opens the turn."""
    shares = history.newest("rollout/turn_header_fraction")
    if not shares or min(shares) <= MAX_HEADERS:
        return None
    return (
        f"{shares[-1]:.0%} of the responses contain the chat template's header of an answer: "
        "prompts do not end with it, or answers do not end where the template ends them.",
        "Give prompts as chat messages (data.prompt_key) so that the template is applied, and "
        "compare the prompt of `raypo show` with what the model was trained on.",
    )


@rule(2 * PATIENCE)
def end_never_learned(history: History, config: Mapping[str, Any]) -> Alarm:
    """In a run with labels (`data.label_key`), in each of the first 6 steps and in all later ones,
    more than 95 % of the responses are cut off at their maximum length. Without labels, a reward
    function may judge openings of texts."""
    if "data" in config and value_at(config, "data.label_key") is None:
        return None
    shares = history.values("rollout/truncated_fraction")
    if len(shares) < 2 * PATIENCE or min(shares) <= NO_END:
        return None
    return (
        f"{shares[-1]:.0%} of the responses are cut off, as in every step before: the policy does "
        "not end its answers.",
        "Look whether the end-of-sequence token of its generation_config.json is the one that it "
        "was trained on, fine-tune it first (recipe: sft), or raise rollout.max_new_tokens.",
    )


@rule()
def truncation_bias(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, more than 25 % of the responses are cut off, but not more than 95 %:
    their scores are those of unfinished answers."""
    shares = history.newest("rollout/truncated_fraction")
    if not shares or min(shares) <= MAX_TRUNCATED or min(shares) > NO_END:
        return None
    gaps = history.newest("rollout/truncated_score_gap")
    scores = f", and score {gaps[-1]:.2g} less than others" if gaps and gaps[-1] > 0 else ""
    is_masked = value_at(config, "ppo.mask_truncated")
    masks = "" if is_masked else ", or leave them out with ppo.mask_truncated: true"
    return (
        f"{shares[-1]:.0%} of the responses are cut off at rollout.max_new_tokens{scores}.",
        f"If answers should end by themselves, raise rollout.max_new_tokens{masks}, or check that "
        "the policy learned to end them.",
    )


@rule(2 * PATIENCE)
def length_exploited(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, and in the sixth or later, responses are half as long again as in the
    first 3 (and by 4 tokens), and within groups score and length correlate by 0.5 or more."""
    lengths = history.values("rollout/response_tokens_mean")
    linked = history.newest("rollout/score_length_correlation")
    if len(lengths) < 2 * PATIENCE or not linked or min(linked) < MIN_CORRELATION:
        return None
    start, now = sum(lengths[:PATIENCE]) / PATIENCE, min(lengths[-PATIENCE:])
    if now < 1.5 * start or now - start < 4.0:
        return None
    return (
        f"responses have grown from {start:.0f} to {lengths[-1]:.0f} tokens, and longer ones score "
        f"higher (correlation {linked[-1]:.2f}): the reward pays for length.",
        "Correct reward.function for length, set ppo.shaping's penalty for overlong responses, or "
        "raise ppo.kl.coef.",
    )


@rule(2 * PATIENCE)
def length_drift(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, and in the sixth or later, responses are twice as long as in the first 3
    (and by 16 tokens) without a gain in the held-out score, or shorter than 0.3 of them."""
    lengths = history.values("rollout/response_tokens_mean")
    if len(lengths) < 2 * PATIENCE:
        return None
    start, now = sum(lengths[:PATIENCE]) / PATIENCE, min(lengths[-PATIENCE:])
    held_out = history.at_start("eval/initial_score_mean") + history.values("eval/score_mean")
    gains = len(held_out) > 1 and held_out[-1] > held_out[0]
    if now > 2.0 * start and now - start > 16 and not gains:
        if length_exploited.check(history, config):
            return None
        return (
            f"responses have grown from {start:.0f} to {lengths[-1]:.0f} tokens.",
            "Check whether the reward favours length; ppo.shaping has a penalty for overlong "
            "responses.",
        )
    if max(lengths[-PATIENCE:]) < 0.3 * start and start > 8:
        return (
            f"responses have shrunk from {start:.0f} to {lengths[-1]:.0f} tokens.",
            "Check whether the reward favours short answers, and whether ppo.kl.coef is so high "
            "that the shortest responses cost least.",
        )
    return None


@rule(2)
def reward_gamed(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 2 evaluations in a row, and in the third or later, the held-out score is below its best by
    0.3 of its gain and by 0.2 of the scores' standard deviation, while the training score is at its
    best."""
    held_out = history.values("eval/score_mean")
    trained = history.values("rollout/score_mean")
    if len(held_out) < 3 or "eval/score_mean" not in history.last:
        return None
    start = history.at_start("eval/initial_score_mean") or held_out[:1]
    best = max([*start, *held_out])
    gained, lost = best - start[0], best - max(held_out[-2:])
    # Use the spread of the training scores, because that of the held-out scores is unknown. The two
    # may come from different reward functions.
    spread = history.last.get("rollout/score_std", 0.0)
    if 0.0 <= held_out[-1] <= best <= 1.0:  # the largest std of scores in [0, 1]
        spread = min(spread, math.sqrt(held_out[-1] * (1.0 - held_out[-1])))
    is_at_its_best = trained and max(trained) - trained[-1] <= 0.05 * (max(trained) - min(trained))
    if gained > 0 and lost > max(0.3 * gained, MIN_FALL * spread) and is_at_its_best:
        return (
            f"the held-out score fell from {best:.3f} to {held_out[-1]:.3f} while the score that "
            "is trained on is at its best.",
            "Read the samples with the best scores; raise ppo.kl.coef, or take an earlier "
            "checkpoint.",
        )
    return None


@rule()
def policy_dies(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 2 evaluations in a row (without an evaluation at the start: 3 training scores), the score
    is below that before the first update by half the scores' standard deviation, or in 1 evaluation
    by 0.9 of it. Training scores of fewer than 16 prompts per step: by more, because chance moves
    their mean further, twice the standard deviation by the root of the number of prompts."""
    name, label, patience, limit = "eval/score_mean", "held-out", 2, 0.5
    start = history.at_start("eval/initial_score_mean")
    if not start:  # no evaluation at the start: step 1 samples before any update
        name, label, patience = "rollout/score_mean", "training", PATIENCE
        start = history.at_start(name) if history.first.get("step") == 1 else []
        limit = max(limit, 2.0 / math.sqrt(value_at(config, PROMPTS_PER_STEP) or math.inf))
    last = history.values(name)[-patience:]
    if not start or not last or name not in history.last:
        return None
    spread = history.first.get("rollout/score_std", math.inf)
    if min(last) >= 0.0 and start[0] <= 1.0:  # the largest std of scores in [0, 1]
        spread = min(spread, math.sqrt(max(start[0] * (1.0 - start[0]), 0.0)))
    falls = [start[0] - value for value in last]
    is_lasting = len(falls) == patience and min(falls) > limit * spread
    is_total = name.startswith("eval/") and falls[-1] > 0.9 * spread
    if not 0.0 < spread < math.inf or not (is_lasting or is_total):
        return None
    return (
        f"the {label} score fell from {start[0]:.3f}, before the first update, to "
        f"{last[-1]:.3f}: the policy is losing abilities that it had.",
        "Read the newest samples. Lower learner.policy_lr or ppo.num_epochs, or raise "
        "ppo.kl.coef, and start over: later steps rarely repair it."
        if "rollout/score_mean" in history.last
        else "Read the newest answers, and lower learner.lr.",
    )


RULES: tuple[Rule, ...] = (
    constant_reward,
    shifted_labels,
    duplicated_prompts,
    held_out_in_training,
    wrong_template,
    end_never_learned,
    truncation_bias,
    length_exploited,
    length_drift,
    reward_gamed,
    policy_dies,
)
