"""Presets: published combinations of keys below `ppo`, as defaults of `ppo.preset`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

PRESETS: dict[str, dict[str, Any]] = {
    # Ouyang et al. 2022, arXiv:2203.02155, section 3.5 and appendix C.4: KL in the reward.
    "ppo": {"kl": {"coef": 0.02}},
    # Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4, section 4.2.
    "grpo": {
        "advantage": "grpo",
        "aggregation": "sequence_mean",
        "kl": {"coef": 0.04, "estimator": "k3", "placement": "loss"},
    },
    # Liu et al. 2025, arXiv:2503.20783, section 3.2.
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant", "kl": {"coef": 0.0}},
    # Ahmadian et al. 2024, arXiv:2402.14740, section 2: a response is one action, so its token
    # losses are summed; `constant` is that sum up to a factor that is the same for all responses.
    "rloo": {"advantage": "rloo", "aggregation": "constant"},
    # Hu et al. 2025, arXiv:2501.03262: PPO's loss without a critic; advantages are whitened over
    # the batch.
    "reinforce++": {"advantage": "reinforce"},
    # Hu et al. 2025, arXiv:2501.03262: the group's mean is the baseline, advantages are whitened
    # over the batch, and the loss has a KL term (k2).
    "reinforce++_baseline": {
        "advantage": "reinforce_baseline",
        "kl": {"estimator": "k2", "placement": "loss"},
    },
    # Yu et al. 2025, arXiv:2503.14476, eq. 8, 11 and 13, section 4.1.
    "dapo": {
        "advantage": "grpo",
        "clip_high": 0.28,
        "kl": {"coef": 0.0},
        "filter": {"enabled": True},
        "shaping": {"overlong_buffer_tokens": "auto"},
    },
    # Zheng et al. 2025, arXiv:2507.18071, eq. 5 and section 5.1.
    "gspo": {
        "advantage": "grpo",
        "policy_loss": "gspo",
        "aggregation": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "kl": {"coef": 0.0},
    },
    # Zhao et al. 2025, arXiv:2507.20673, eq. 4: ratios are clipped at e ** +-0.4.
    "gmpo": {
        "advantage": "grpo",
        "policy_loss": "gmpo",
        "aggregation": "sequence_mean",
        "clip_low": 0.3296799539643607,
        "clip_high": 0.49182469764127035,
        "kl": {"coef": 0.0},
    },
    # MiniMax 2025, arXiv:2506.13585, eq. 4 and 5, section 3.1: dynamic sampling and overlong
    # penalty are DAPO's. MiniMax did not publish its bound on weights. The bound here, 1 +
    # clip_high = 5, is from arXiv:2510.13786.
    "cispo": {
        "advantage": "grpo",
        "policy_loss": "cispo",
        "clip_high": 4.0,
        "kl": {"coef": 0.0},
        "filter": {"enabled": True},
        "shaping": {"overlong_buffer_tokens": "auto"},
    },
    # Gao et al. 2025, arXiv:2511.20347: the surrogate has the temperatures 1.0 and 1.05.
    "sapo": {
        "advantage": "grpo",
        "policy_loss": "sapo",
        "aggregation": "sequence_mean",
        "kl": {"coef": 0.0},
    },
    # Yue et al. 2025, arXiv:2504.05118, section 4: VC-PPO's critic (arXiv:2503.01491), a lambda
    # that depends on the length, clip-higher, token mean, and a loss on positive examples. Set the
    # paper's groups of 16 by `rollout.samples_per_prompt`.
    "vapo": {
        "gae_lambda": "adaptive",
        "critic_lambda": 1.0,
        "critic_warmup_steps": 50,
        "clip_high": 0.28,
        "nll_coef": 0.1,
        "kl": {"coef": 0.0},
    },
    # Hao et al. 2025, arXiv:2505.23585: no KL and no entropy bonus. To train exactly on-policy, as
    # in the paper, set `minibatch_size` to the number of responses of a step, so that a step has
    # one update.
    "opo": {"advantage": "opo", "kl": {"coef": 0.0}},
    # Chen et al. 2025, arXiv:2508.10751, sections 2.1 and 2.4: DAPO's clip-higher and token mean,
    # and the best of 4 samples (of 32 in the paper).
    "pass_at_k": {"advantage": "pass_at_k", "clip_high": 0.28, "kl": {"coef": 0.0}},
    # Qi et al. 2026, arXiv:2602.04879: the total variation is bounded, as in the authors' run file
    # for verl. Their bound for dppo_kl is 0.05. The engine's log-probs are the old log-probs
    # (section 5.2).
    "dppo": {
        "advantage": "dr_grpo",
        "policy_loss": "dppo_tv",
        "aggregation": "constant",
        "clip_low": 0.15,
        "clip_high": 0.15,
        "old_log_probs": "engine",
        "kl": {"coef": 0.0},
    },
    # Shen et al. 2026, arXiv:2602.10693, section 4.1 and the authors' public runs. c1 and c2 are
    # constants of the surrogate (`raypo.ppo.surrogates.VESPO_SHAPES`).
    "vespo": {"advantage": "grpo", "policy_loss": "vespo", "kl": {"coef": 0.0}},
}
"""Keys below `ppo` that each preset sets, by preset. Other keys keep their defaults, which equal
the published values; a test checks the whole combination of each paper."""


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a `ppo` section, merged over the values of its preset."""
    return _merge(PRESETS.get(str(values.get("preset")), {}), values)


def _merge(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(defaults)
    for key, value in overrides.items():
        default = defaults.get(key)
        if isinstance(default, Mapping) and isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            value = _merge(default, value)
        merged[key] = value
    return merged
