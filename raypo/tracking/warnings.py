"""Warnings about a run: rules over its metrics, each of which is reported once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypo.config.ppo_section import GROUP_ADVANTAGES
from raypo.metrics.catalogue import Row

PATIENCE = 3
"""Number of consecutive steps for which a condition must hold, so that one outlier is ignored."""
MAX_KL_PER_TOKEN = 0.5
"""Limit in nats. Beyond this KL, the reference's likelihoods say little about the responses."""
MAX_KL_PER_RESPONSE = 50.0
"""Limit in nats. Published runs raised the score with far less KL (arXiv:2210.10760)."""
MAX_MISMATCH_KL = 0.01
"""Limit in nats per token between engine and learner. bfloat16 rounding stays far below it."""
MAX_TRUNCATED = 0.25
"""Limit as a share of responses. A policy that ends its answers stays below it, even early on."""
MAX_ZERO_VARIANCE = 0.6
MAX_PHASE_SHARE = 0.75
MIN_PHASE_S = 1.0
"""Limit in seconds per step. A shorter phase is no problem, however large its share is."""
MIN_FALL = 0.2
"""Minimum fall of the held-out score, as a share of the standard deviation of the scores. By
chance, the mean score of a few hundred responses moves less."""

_PHASE_REMEDIES = {
    "time/generate_s": (
        "Give the engines more devices or memory (rollout.engine.count, "
        "rollout.engine.gpu_memory_fraction), or lower rollout.max_new_tokens."
    ),
    "time/wait_for_rollouts_s": (
        "Add engines (rollout.engine.count), lower rollout.max_new_tokens, or make the reward "
        "function faster."
    ),
    "time/score_s": "Make the reward function faster or batch its calls.",
    "time/log_probs_s": "Raise learner.max_tokens_per_microbatch or learner.num_workers.",
    "time/update_s": "Raise learner.max_tokens_per_microbatch or learner.num_workers, or lower "
    "ppo.num_epochs.",
    "time/push_weights_s": "Push less often: more prompts per step (rollout.prompts_per_step).",
    "time/held_out_s": "Raise eval.every, or evaluate fewer prompts.",
    "time/callbacks_s": "Make the callbacks faster.",
    "time/checkpoint_s": "Raise checkpoint.every.",
    "time/report_s": "Look at the storage behind storage_path, and raise checkpoint.every.",
}


@dataclass(frozen=True)
class Finding:
    """Description of a problem of a run, with its remedy."""

    rule: str
    step: int
    """First step at which the rule matched."""
    text: str
    remedy: str


class Watch:
    """Checker of a run's metrics, step by step. The finding of each rule is reported once."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """Start with an empty history.

        Args:
            config: The resolved config, which some rules use. None means that it is unknown.
        """
        self._config = config or {}
        self._rows: list[Row] = []
        self._reported: set[str] = set()

    def resume(self, rows: Iterable[Row]) -> None:
        """Replace the history by the rows before a resume. Their findings count as reported."""
        self._rows = []
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> list[Finding]:
        """Add the row of a step and return the findings that are new."""
        self._rows.append(row)
        new: list[Finding] = []
        for name, rule in _RULES.items():
            if name in self._reported:
                continue
            words = rule(self._rows, self._config)
            if words is not None:
                self._reported.add(name)
                new.append(Finding(name, int(row.get("step", len(self._rows))), *words))
        return new


def findings(rows: Iterable[Row], config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return all findings on a run's metrics, in the order of the steps."""
    watch = Watch(config)
    return [finding for row in rows for finding in watch.add(row)]


def phase_seconds(row: Row) -> dict[str, float]:
    """Return the seconds of a step by phase: all `time/` metrics except the step's total."""
    return {
        name: value
        for name, value in row.items()
        if name.startswith("time/") and name != "time/step_s" and math.isfinite(value)
    }


def seconds_by_phase(rows: Iterable[Row]) -> dict[str, float]:
    """Return the seconds of each phase, summed over all steps, in the order of the phases."""
    seconds: dict[str, float] = {}
    for row in rows:
        for name, value in phase_seconds(row).items():
            seconds[name] = seconds.get(name, 0.0) + value
    return seconds


Words = tuple[str, str] | None
"""Problem and remedy, or None if the rule does not match."""
Rule = Callable[[Sequence[Row], Mapping[str, Any]], Words]
"""Function of a run's rows so far and of the run's config."""


def _kl_drift(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
    token, response = (_drift(rows, name) for name in ("kl/ref_mean", "kl/ref_response_mean"))
    is_adaptive = (_get(config, "ppo", "kl") or {}).get("controller") == "adaptive"
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


def _drift(rows: Sequence[Row], name: str) -> list[float]:
    """Return the last values of a KL metric, minus its value before the first update.

    That value is nonzero only if the initial policy differs from the reference (`model.reference`).
    """
    start = rows[0].get(name, 0.0) if rows[0].get("step") == 1 else 0.0
    return [value - max(start, 0.0) for value in _newest(rows, name)]


def _held_out_falls(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
    held_out = _values(rows, "eval/score_mean")
    trained = _values(rows, "rollout/score_mean")
    if len(held_out) < 3 or "eval/score_mean" not in rows[-1]:
        return None
    start = _values(rows[:1], "eval/initial_score_mean") or held_out[:1]
    best = max([*start, *held_out])
    gained, lost = best - start[0], best - max(held_out[-2:])
    # Use the spread of the training scores, because that of the held-out scores is unknown. The two
    # may come from different reward functions.
    spread = rows[-1].get("rollout/score_std", 0.0)
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


def _policy_dies(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
    """Match if the newest scores are far below those before the first update."""
    name, label, patience = "eval/score_mean", "held-out", 2
    start = _values(rows[:1], "eval/initial_score_mean")
    if not start:  # no evaluation at the start: step 1 samples before any update
        name, label, patience = "rollout/score_mean", "training", PATIENCE
        start = _values(rows[:1], name) if rows[0].get("step") == 1 else []
    newest = _values(rows, name)[-patience:]
    if not start or not newest or name not in rows[-1]:
        return None
    spread = rows[0].get("rollout/score_std", math.inf)
    if min(newest) >= 0.0 and start[0] <= 1.0:  # the largest std of scores in [0, 1]
        spread = min(spread, math.sqrt(max(start[0] * (1.0 - start[0]), 0.0)))
    falls = [start[0] - value for value in newest]
    is_lasting = len(falls) == patience and min(falls) > 0.5 * spread
    is_total = name.startswith("eval/") and falls[-1] > 0.9 * spread
    if not 0.0 < spread < math.inf or not (is_lasting or is_total):
        return None
    return (
        f"the {label} score fell from {start[0]:.3f}, before the first update, to "
        f"{newest[-1]:.3f}: the policy is losing abilities that it had.",
        "Read the newest samples. Lower learner.policy_lr or ppo.num_epochs, or raise "
        "ppo.kl.coef, and start over: later steps rarely repair it."
        if "rollout/score_mean" in rows[-1]
        else "Read the newest answers, and lower learner.lr.",
    )


def _length_explodes(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
    lengths = _values(rows, "rollout/response_tokens_mean")
    if len(lengths) < 2 * PATIENCE:
        return None
    start, now = sum(lengths[:PATIENCE]) / PATIENCE, min(lengths[-PATIENCE:])
    if now > 2.0 * start and now - start > 16:
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


def _engine_mismatch(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
    gaps = _newest(rows, "mismatch/kl")
    usual = {"top_p": (None, 1.0), "top_k": (None,), "min_p": (None, 0.0)}
    cut = [key for key, off in usual.items() if _get(config, "rollout", key) not in off]
    is_bare = (_get(config, "ppo", "correction") or {}).get("kind", "none") == "none"
    if gaps and min(gaps) > MAX_MISMATCH_KL:
        age = rows[-1].get("rollout/staleness_mean", 0.0)
        which = f"weights {age:.1f} versions apart" if age else "the same weights"
        return (
            f"engine and learner differ by {gaps[-1]:.3f} nats per token on {which}.",
            f"Remove {' and '.join(cut)} from rollout: the engine's log-probs come from a "
            "truncated distribution, the learner's from the full one."
            if cut
            else f"{'Set ppo.correction.kind: tis, or use' if is_bare else 'Use'} model.dtype: "
            "float32.",
        )
    return None


def _zero_variance(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
    if _get(config, "ppo", "advantage") not in GROUP_ADVANTAGES:
        return None
    shares = _newest(rows, "rollout/zero_variance_fraction")
    if shares and min(shares) > MAX_ZERO_VARIANCE:
        return (
            (
                f"in {shares[-1]:.0%} of the groups all samples score the same, so the policy "
                "learns nothing from them."
            ),
            "Use prompts of suitable difficulty, "
            + (
                "or more rollout.samples_per_prompt; drawing other groups instead takes time."
                if (_get(config, "ppo", "filter") or {}).get("enabled")
                else (
                    "more rollout.samples_per_prompt, or ppo.filter.enabled: true to draw other "
                    "groups instead."
                )
            ),
        )
    return None


def _entropy_collapses(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
    entropy = _values(rows, "ppo/entropy")
    if len(entropy) < 2 * PATIENCE:
        return None
    if entropy[0] > 0 and max(entropy[-PATIENCE:]) < 0.1 * entropy[0]:
        return (
            f"entropy fell from {entropy[0]:.2f} to {entropy[-1]:.3f} nats per token: the samples "
            "of a prompt are nearly the same.",
            "Raise ppo.kl.coef or ppo.entropy_coef, or ppo.clip_high above ppo.clip_low.",
        )
    return None


def _skipped_updates(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
    for name, key in (("ppo/skipped_updates", "policy_lr"), ("train/skipped_updates", "lr")):
        skipped = rows[-1].get(name, 0)
        if skipped > 0:
            which = "1 update was" if skipped == 1 else f"{skipped:.0f} updates were"
            return (
                f"{which} skipped because loss or gradients were not finite.",
                f"Lower learner.{key}, or use model.dtype: float32.",
            )
    return None


def _one_phase(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
    recent = rows[-2 * PATIENCE :]
    if len(rows) < 2 * PATIENCE + 1:  # the first step warms up
        return None
    if "rollout/score_mean" not in rows[-1]:  # other recipes spend their time on updates anyway
        return None
    seconds = seconds_by_phase(recent)
    if not seconds:
        return None
    name = max(seconds, key=lambda each: seconds[each])
    share = seconds[name] / (sum(seconds.values()) or 1.0)
    is_short = seconds[name] < MIN_PHASE_S * len(recent)
    if share <= MAX_PHASE_SHARE or is_short or name not in _PHASE_REMEDIES:
        return None
    return f"{share:.0%} of a step's time goes into {name}.", _PHASE_REMEDIES[name]


def _beyond(metric: str, limit: float, text: str, remedy: str) -> Rule:
    """Return a rule that matches if the last `PATIENCE` values of a metric are above a limit."""

    def rule(rows: Sequence[Row], config: Mapping[str, Any]) -> Words:
        values = _newest(rows, metric)
        return (text.format(values[-1]), remedy) if values and min(values) > limit else None

    return rule


_RULES: dict[str, Rule] = {
    "kl_drift": _kl_drift,
    "held_out_falls": _held_out_falls,
    "policy_dies": _policy_dies,
    "length": _length_explodes,
    "truncated": _beyond(
        "rollout/truncated_fraction",
        MAX_TRUNCATED,
        "{:.0%} of the responses are cut off at rollout.max_new_tokens.",
        "If answers should end by themselves, raise rollout.max_new_tokens, or check that the "
        "policy learned to end them.",
    ),
    "clip_fraction": _beyond(
        "ppo/clip_fraction",
        0.3,
        "{:.0%} of the tokens are clipped: an update goes further than PPO trusts.",
        "Lower learner.policy_lr or ppo.num_epochs, or raise ppo.minibatch_size.",
    ),
    "engine_mismatch": _engine_mismatch,
    "correction_drops": _beyond(
        "mismatch/dropped_fraction",
        0.5,
        "{:.0%} of the tokens are dropped by ppo.correction and not trained on.",
        "Widen ppo.correction.low and ppo.correction.high (short responses drift further from a "
        "geometric mean of 1 than long ones), or set ppo.correction.kind: tis.",
    ),
    "zero_variance_groups": _zero_variance,
    "entropy_collapse": _entropy_collapses,
    "skipped_updates": _skipped_updates,
    "one_phase": _one_phase,
}


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def _newest(rows: Sequence[Row], name: str) -> list[float]:
    """Return a metric's last `PATIENCE` values.

    The list is empty if there are fewer values, or if the newest step lacks the metric.
    """
    values = _values(rows, name) if name in rows[-1] else []
    return values[-PATIENCE:] if len(values) >= PATIENCE else []


def _get(config: Mapping[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, Mapping) else None
