"""Rules on updates: weights, learning rate, critic, advantages, distance from the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raypo.config.ppo_section import GROUP_ADVANTAGES
from raypo.health.rule import PATIENCE, PROMPTS_PER_STEP, Alarm, History, Rule, rule, value_at

MAX_KL_PER_TOKEN = 0.5
"""Limit in nats. Beyond this KL, the reference's likelihoods say little about the responses."""
MAX_KL_PER_RESPONSE = 50.0
"""Limit in nats. Published runs raised the score with far less KL (arXiv:2210.10760)."""
MAX_MISMATCH_KL = 0.01
"""Limit in nats per token between engine and learner. bfloat16 rounding stays far below it."""
MIN_STALE_KL = 1e-5
"""Limit in nats per token. float32 rounding stays far below it."""
MAX_CLIPPED = 0.3
"""Limit as a share of tokens. Runs that learn stay below 0.2, as PPO's authors advise."""
MAX_UPDATE_KL = 0.1
"""Limit in nats per token. The log-ratio then spreads by sqrt(2 * 0.1) = 0.45."""
MIN_KL_PER_RESPONSE = 1e-3
"""Limit in nats. By Pinsker's inequality, a score in [0, 1] has then moved by at most
sqrt(KL / 2) = 0.022."""
MIN_UPDATES_STEPS = 20
MAX_ZERO_VARIANCE = 0.6
MIN_EXPLAINED = 0.02
MIN_GROUPS = 24
CRITIC_STEPS = 10


@rule()
def stale_weights(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row without staleness, `mismatch/kl` is above 1e-5 nats per token and above
    ten times its value in every earlier step."""
    gaps = history.values("mismatch/kl")
    earlier, last = gaps[:-PATIENCE], history.newest("mismatch/kl")
    is_fresh = not any(history.newest("rollout/staleness_mean"))
    if earlier and last and is_fresh and min(last) > max(MIN_STALE_KL, 10.0 * max(earlier)):
        return (
            f"engine and learner suddenly differ by {last[-1]:.2g} nats per token (at most "
            f"{max(earlier):.2g} before): the engines sample with old or partly pushed weights.",
            "Resume from the checkpoint before: a resume pushes all weights again. Then try "
            "another rollout.engine.transport, and report it.",
        )
    return None


@rule()
def engine_mismatch(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row without staleness, `mismatch/kl` is above 0.01 nats per token."""
    gaps = history.newest("mismatch/kl")
    usual = {"top_p": (None, 1.0), "top_k": (None,), "min_p": (None, 0.0)}
    cut = [key for key, off in usual.items() if value_at(config, f"rollout.{key}") not in off]
    is_bare = value_at(config, "ppo.correction.kind") in (None, "none")
    is_fresh = not any(history.newest("rollout/staleness_mean"))
    if not gaps or min(gaps) <= MAX_MISMATCH_KL or not is_fresh or stale_weights.check(history, {}):
        return None
    return (
        f"engine and learner differ by {gaps[-1]:.3f} nats per token on the same weights.",
        f"Remove {' and '.join(cut)} from rollout: the engine's log-probs come from a "
        "truncated distribution, the learner's from the full one."
        if cut
        else f"{'Set ppo.correction.kind: tis, or use' if is_bare else 'Use'} model.dtype: "
        "float32.",
    )


@rule()
def off_policy_drift(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row with staleness, `mismatch/kl` is above half the square of `ppo.clip_low`
    (of 0.2 with a `ppo.policy_loss` that does not clip the ratio of single tokens): a usual token's
    ratio leaves the clip range before its first update."""
    gaps, ages = history.newest("mismatch/kl"), history.newest("rollout/staleness_mean")
    clips_tokens = value_at(config, "ppo.policy_loss") in (None, "ppo", "clip_cov")
    clip = (clips_tokens and value_at(config, "ppo.clip_low")) or 0.2
    # Of a small KL, the log-ratio's standard deviation is sqrt(2 * KL).
    if not gaps or not ages or not min(ages) or min(gaps) <= clip**2 / 2:
        return None
    is_bare = value_at(config, "ppo.correction.kind") in (None, "none")
    return (
        f"samples are {ages[-1]:.1f} weight versions old, and {gaps[-1]:.3f} nats per token away "
        "from the policy that learns from them.",
        "Lower rollout.max_staleness or learner.policy_lr"
        + (", or set ppo.correction.kind: tis." if is_bare else "."),
    )


@rule()
def kl_runaway(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, the KL to the reference has grown by 0.5 nats per token or 50 per
    response since before the first update."""
    token, response = (_drift(history, name) for name in ("kl/ref_mean", "kl/ref_response_mean"))
    is_adaptive = value_at(config, "ppo.kl.controller") == "adaptive"
    other = "Raise ppo.kl.coef or use ppo.kl.controller: adaptive"
    remedy = (
        f"{'Lower ppo.kl.target' if is_adaptive else other}, and read the samples: a score that "
        "rises at this distance is often a sign of reward hacking."
    )
    if token and min(token) > MAX_KL_PER_TOKEN:
        return f"the policy has drifted {token[-1]:.2f} nats per token from the reference.", remedy
    if response and min(response) > MAX_KL_PER_RESPONSE:
        far = f"the policy has drifted {response[-1]:.0f} nats per response from the reference."
        return far, remedy
    return None


def _drift(history: History, name: str) -> list[float]:
    """Return the last values of a KL metric, minus its value before the first update.

    That value is nonzero only if the initial policy differs from the reference (`model.reference`).
    """
    start = history.first.get(name, 0.0) if history.first.get("step") == 1 else 0.0
    return [value - max(start, 0.0) for value in history.newest(name)]


@rule()
def learning_rate_high(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, more than 30 % of the tokens are clipped (`ppo/clip_fraction`), or an
    update moves the policy by more than 0.1 nats per token (`ppo/approx_kl`)."""
    remedy = "Lower learner.policy_lr or ppo.num_epochs, or raise ppo.minibatch_size."
    clipped, moved = history.newest("ppo/clip_fraction"), history.newest("ppo/approx_kl")
    if clipped and min(clipped) > MAX_CLIPPED:
        far = "an update goes further than PPO trusts."
        return f"{clipped[-1]:.0%} of the tokens are clipped: {far}", remedy
    if moved and min(moved) > MAX_UPDATE_KL:
        return f"an update moves the policy by {moved[-1]:.2f} nats per token.", remedy
    return None


@rule(MIN_UPDATES_STEPS)
def learning_rate_low(history: History, config: Mapping[str, Any]) -> Alarm:
    """After 20 steps with an update at the largest learning rate so far, `kl/ref_response_mean` has
    stayed below 0.001 nats in the last 10: no score in [0, 1] can have moved by more than 0.022."""
    # The drift is tested first, because the learning rates of all steps take longer to read.
    drift = history.newest("kl/ref_response_mean", 10)
    start = history.first.get("kl/ref_response_mean", 0.0)
    far = max((abs(value - start) for value in drift), default=math.inf)
    # Steps without a gradient have another cause.
    moving = [norm for norm in history.newest("ppo/policy_grad_norm", 10) if norm > 0.0]
    if far >= MIN_KL_PER_RESPONSE or not moving:
        return None
    rates = history.values("ppo/policy_learning_rate")
    peak = 0.9 * max(rates, default=0.0)
    warm = sum(rate >= peak and rate > 0.0 for rate in rates)
    if warm < MIN_UPDATES_STEPS:
        return None
    return (
        f"after {warm} updates the policy is at most {far:.1g} nats per response away from "
        "where it began: it does not move.",
        f"Raise learner.policy_lr (it is {rates[-1]:.1g}) by a factor of 3 to 10. With "
        "model.dtype: bfloat16, look whether the weights change at all.",
    )


@rule()
def entropy_collapse(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, and in the sixth or later, `ppo/entropy` is below a tenth of its first
    value, while the scores still spread by a quarter of what they did, and their mean has gained
    less than two thirds of what it could (of scores outside of [0, 1]: than two standard
    deviations)."""
    entropy, spread = history.values("ppo/entropy"), history.values("rollout/score_std")
    if len(entropy) < 2 * PATIENCE or entropy[0] <= 0:
        return None
    is_solved = bool(spread) and max(spread[-PATIENCE:]) < 0.25 * spread[0]
    scores = history.values("rollout/score_mean")
    if spread and len(scores) >= 2 * PATIENCE:
        start, now = (sum(part) / PATIENCE for part in (scores[:PATIENCE], scores[-PATIENCE:]))
        is_share = min(scores) >= 0.0 and max(scores) <= 1.0
        much = (1.0 - start) / 1.5 if is_share else 2.0 * max(spread[:PATIENCE])
        is_solved |= now - start >= much > 0.0
    if max(entropy[-PATIENCE:]) < 0.1 * entropy[0] and not is_solved:
        return (
            f"entropy fell from {entropy[0]:.2f} to {entropy[-1]:.3f} nats per token: the samples "
            "of a prompt are nearly the same.",
            "Raise ppo.kl.coef or ppo.entropy_coef, or ppo.clip_high above ppo.clip_low.",
        )
    return None


@rule(2 * CRITIC_STEPS)
def blind_critic(history: History, config: Mapping[str, Any]) -> Alarm:
    """After 20 steps with an update of the critic, `ppo/explained_variance` is below 0.02 in each
    of the last 10: the critic is no better than a constant."""
    known = history.newest("ppo/explained_variance", CRITIC_STEPS)
    if len(history.values("ppo/value_loss")) < 2 * CRITIC_STEPS or not known:
        return None
    if max(known) >= MIN_EXPLAINED or not any(history.newest("rollout/score_std")):
        return None
    return (
        f"the critic explains {known[-1]:.0%} of the returns' variance: its values are no better "
        "than a constant.",
        "Raise learner.critic_lr, set ppo.critic_warmup_steps, start it from a reward model "
        "(model.critic), or use an advantage without a critic (ppo.preset: grpo).",
    )


@rule()
def no_advantage(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, and in as many as draw 24 prompts, every advantage is 0
    (`ppo/advantage_abs_mean`), though the scores differ."""
    # By chance, the few groups of small steps often have equal scores.
    per_step = value_at(config, PROMPTS_PER_STEP) or MIN_GROUPS
    count = max(PATIENCE, math.ceil(MIN_GROUPS / per_step))
    sizes, spread = (
        history.newest(name, count) for name in ("ppo/advantage_abs_mean", "rollout/score_std")
    )
    if not sizes or not spread or max(sizes) > 1e-8 or min(spread) == 0.0:
        return None
    return (
        f"all advantages are 0, though the scores spread by {spread[-1]:.2g}: the samples of each "
        "prompt score the same, so nothing is learned.",
        "Raise rollout.temperature or rollout.samples_per_prompt, and look whether the reward "
        "function reads the response at all.",
    )


@rule()
def zero_variance_groups(history: History, config: Mapping[str, Any]) -> Alarm:
    """With an advantage that compares the scores of a group: in 3 steps in a row, the scores are
    equal in more than 60 % of the groups, but not in all."""
    if value_at(config, "ppo.advantage") not in GROUP_ADVANTAGES:
        return None
    shares = history.newest("rollout/zero_variance_fraction")
    if shares and min(shares) > MAX_ZERO_VARIANCE and min(shares) < 1.0:
        return (
            f"in {shares[-1]:.0%} of the groups all samples score the same, so the policy "
            "learns nothing from them.",
            "Use prompts of suitable difficulty, "
            + (
                "or more rollout.samples_per_prompt; drawing other groups instead takes time."
                if value_at(config, "ppo.filter.enabled")
                else "more rollout.samples_per_prompt, or ppo.filter.enabled: true to draw other "
                "groups instead."
            ),
        )
    return None


@rule()
def correction_drops(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, `ppo.correction` drops more than half of the tokens."""
    dropped = history.newest("mismatch/dropped_fraction")
    if not dropped or min(dropped) <= 0.5:
        return None
    return (
        f"{dropped[-1]:.0%} of the tokens are dropped by ppo.correction and not trained on.",
        "Widen ppo.correction.low and ppo.correction.high (short responses drift further from a "
        "geometric mean of 1 than long ones), or set ppo.correction.kind: tis.",
    )


@rule(1)
def skipped_updates(history: History, config: Mapping[str, Any]) -> Alarm:
    """An update was skipped in this step, because loss or gradients were not finite."""
    for name, key in (("ppo/skipped_updates", "policy_lr"), ("train/skipped_updates", "lr")):
        skipped = history.last.get(name, 0)
        if skipped > 0:
            which = "1 update was" if skipped == 1 else f"{skipped:.0f} updates were"
            return (
                f"{which} skipped because loss or gradients were not finite.",
                f"Lower learner.{key}, or use model.dtype: float32.",
            )
    return None


RULES: tuple[Rule, ...] = (
    skipped_updates,
    stale_weights,
    engine_mismatch,
    off_policy_drift,
    learning_rate_high,
    learning_rate_low,
    kl_runaway,
    entropy_collapse,
    blind_critic,
    no_advantage,
    zero_variance_groups,
    correction_drops,
)
