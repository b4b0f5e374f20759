"""The `ppo` recipe's own section: presets, estimator, losses, KL, shaping, filter, correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from raypo.config.base import Config, flatten
from raypo.config.presets import PRESETS, with_preset

GROUP_ADVANTAGES = ("reinforce_baseline", "rloo", "grpo", "dr_grpo")
"""Estimators that compare the samples of a prompt."""
OVERLONG_SHARE = 5
"""`overlong_buffer_tokens: auto` is one token in so many of the longest response (DAPO: 4096 of
20480)."""


def _refuse_crossed(key: str, low: float | None, high_name: str, high: float | None) -> None:
    if low is not None and high is not None and low >= high:
        raise ValueError(
            f"{key} ({low:g}): must be below {high_name} ({high:g}), or nothing lies between them. "
            f"Set {key} below {high:g}."
        )


class KLSection(Config):
    """The pull to the reference model."""

    coef: float = Field(default=0.01, ge=0.0)
    """Weight of the penalty in score per nat, at the start; 0: no reference model is started."""
    estimator: Literal["k1", "k2", "k3", "k3_st"] = "k1"
    """Per-token estimator (Schulman 2020): k1 in the reward; in the loss k2, k3 (as GRPO published
    it, with the gradient of the reverse KL) or k3_st (k3's value, k2's gradient; arXiv:2510.01555).
    """
    placement: Literal["reward", "loss"] = "reward"
    """reward: a penalty in the token rewards, or in the score of the response where
    ppo.advantage compares the samples of a prompt. loss: a term of the policy's loss."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: steers the coefficient to `target` (arXiv:1909.08593, section 2.2)."""
    target: float | None = Field(default=None, gt=0.0)
    """Nats per response that the adaptive controller steers to."""
    horizon: float | None = Field(default=None, gt=0.0)
    """Responses over which the adaptive controller spreads a full correction."""

    @model_validator(mode="after")
    def _estimator_fits_its_place(self) -> Self:
        if self.estimator == "k1" and self.placement == "loss":
            raise ValueError(
                "ppo.kl.estimator (k1): cannot be a loss term, its gradient is 0 in expectation. "
                "Set ppo.kl.estimator to k2 or k3, or ppo.kl.placement to reward."
            )
        if self.estimator != "k1" and self.placement == "reward":
            raise ValueError(
                f"ppo.kl.estimator ({self.estimator}): cannot be a penalty in the reward, where "
                "only k1 has the KL's gradient. "
                "Set ppo.kl.estimator to k1, or ppo.kl.placement to loss."
            )
        return self

    @model_validator(mode="after")
    def _controller_has_what_it_needs(self) -> Self:
        steers = self.controller == "adaptive"
        for key in ("target", "horizon"):
            value = getattr(self, key)
            if steers and value is None:
                raise ValueError(
                    f"ppo.kl.{key} (null): ppo.kl.controller: adaptive needs it. "
                    f"Set ppo.kl.{key} above 0, or ppo.kl.controller to fixed."
                )
            if not steers and value is not None:
                raise ValueError(
                    f"ppo.kl.{key} ({value:g}): is used by ppo.kl.controller: adaptive alone. "
                    f"Set ppo.kl.{key} to null, or ppo.kl.controller to adaptive."
                )
        if steers and self.coef == 0.0:
            raise ValueError(
                "ppo.kl.coef (0.0): would stay 0 under ppo.kl.controller: adaptive. "
                "Set ppo.kl.coef above 0, or ppo.kl.controller to fixed."
            )
        return self


class CorrectionSection(Config):
    """Weights for tokens that the engine sampled with other probabilities than the learner's.

    A ratio is the learner's probability before the update over the engine's. Tokens that are
    dropped get weight 0 and stay in the loss's denominator.
    """

    kind: Literal["none", "tis", "sequence_tis", "geometric_tis", "icepop", "mis"] = "none"
    """tis, sequence_tis, geometric_tis: the ratio of the token, the product over the response or
    their geometric mean, cut to `cap`. icepop: the ratio of the token, dropped outside the mask.
    mis: as tis, and a response is dropped whose ratio is outside the mask."""
    cap: float | None = Field(default=None, ge=1.0)
    """Largest weight of tis, sequence_tis, geometric_tis and mis; null: 2, geometric_tis 1.001."""
    low: float | None = Field(default=None, ge=0.0, le=1.0)
    """Smallest ratio that icepop keeps of a token, mis of a response; null: icepop 0.5
    (arXiv:2510.18855), mis 0.999 by the geometric mean and 0.5 by the product."""
    high: float | None = Field(default=None, ge=1.0)
    """Largest ratio that icepop and mis keep; null: icepop 5, mis 1.001 by the geometric mean and 2
    by the product."""
    mask_ratio: Literal["geometric", "product"] = "geometric"
    """What mis judges a response by: the geometric mean of its tokens' ratios, whose bounds near 1
    suit responses of thousands of tokens (short ones want wider ones), or their product."""
    token_veto: float | None = Field(default=None, gt=0.0, lt=1.0)
    """With any kind, none included: a response is dropped that has a token of a ratio below this,
    like 1e-4; null: no veto."""

    @model_validator(mode="after")
    def _what_is_set_can_act(self) -> Self:
        users = {
            "cap": ("tis", "sequence_tis", "geometric_tis", "mis"),
            "low": ("icepop", "mis"),
            "high": ("icepop", "mis"),
            "mask_ratio": ("mis",),
        }
        for key, kinds in users.items():
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and self.kind not in kinds:
                swap = key == "high" and self.kind in users["cap"]
                remedy = "Set ppo.correction.cap instead" if swap else "Remove it"
                raise ValueError(
                    f"ppo.correction.{key} ({value}): is used by {', '.join(kinds)}, not by "
                    f"ppo.correction.kind: {self.kind}. {remedy}, or choose such a kind."
                )
        return self

    @property
    def acts(self) -> bool:
        """Whether any token may get a weight other than 1."""
        return self.kind != "none" or self.token_veto is not None


class ShapingSection(Config):
    """From the raw score to the one that is trained on; the steps are taken in this order."""

    overlong_buffer_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Last tokens before rollout.max_new_tokens over which a penalty grows (arXiv:2503.14476, eq.
    13); auto: a fifth of rollout.max_new_tokens; null: no penalty."""
    overlong_factor: float = Field(default=1.0, ge=0.0)
    """The penalty at the limit, in score."""
    truncated_score: float | None = None
    """Score of every response that ran into rollout.max_new_tokens; null: its own."""
    truncated_scale: float | None = Field(default=None, ge=0.0, le=1.0)
    """c: a truncated response loses (1 - c) of its score's size; null: nothing."""
    normalize: bool = False
    """Subtract the running mean of all scores seen, divide by their standard deviation."""
    clip_low: float | None = None
    """Smallest shaped score; null: no bound."""
    clip_high: float | None = None
    """Largest shaped score; null: no bound."""

    @model_validator(mode="after")
    def _steps_do_not_contradict(self) -> Self:
        if self.truncated_score is not None and self.truncated_scale is not None:
            raise ValueError(
                f"ppo.shaping.truncated_score ({self.truncated_score:g}): replaces what "
                f"ppo.shaping.truncated_scale ({self.truncated_scale:g}) would lower. "
                "Set one of them to null."
            )
        _refuse_crossed("ppo.shaping.clip_low", self.clip_low, "clip_high", self.clip_high)
        return self

    def overlong_tokens(self, max_new_tokens: int) -> int | None:
        """`overlong_buffer_tokens` in tokens, auto resolved."""
        if self.overlong_buffer_tokens == "auto":
            return max(max_new_tokens // OVERLONG_SHARE, 1)
        return self.overlong_buffer_tokens


class FilterSection(Config):
    """Dynamic sampling: groups that teach nothing are replaced (arXiv:2503.14476, eq. 11)."""

    enabled: bool = False
    """Train only on groups that pass, and sample further prompts for those that do not."""
    min_std: float = Field(default=1e-6, ge=0.0)
    """A kept group's scores have a standard deviation above this."""
    low: float | None = None
    """A kept group's mean score is above this; null: no bound."""
    high: float | None = None
    """A kept group's mean score is below this; null: no bound."""
    max_refills: int = Field(default=10, ge=0)
    """Most rounds of further prompts in a step; then it trains on what there is, and says so."""

    @model_validator(mode="after")
    def _some_mean_passes(self) -> Self:
        _refuse_crossed("ppo.filter.low", self.low, "high", self.high)
        return self


class PPOSection(Config):
    """What turns scores into an update."""

    preset: Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "dapo", "gspo"] | None = None
    """A published combination (raypo.config.presets); other keys win over it."""
    advantage: Literal["gae", "reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo"] = "gae"
    """Estimator (`raypo.ppo.estimators`); only gae has a critic (arXiv:1506.02438)."""
    policy_loss: Literal["ppo", "gspo", "cispo", "sapo"] = "ppo"
    """Surrogate: arXiv:1707.06347, arXiv:2507.18071 (with an advantage for each token, section
    4.3), arXiv:2506.13585, arXiv:2511.20347."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How the policy's token losses become one number (`raypo.ppo.losses.aggregate`); the critic's
    loss is always a mean over tokens."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per sampled token."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] | Literal["adaptive"] = 0.95
    """Bias-variance trade of GAE; adaptive: 1 - 1 / (lambda_alpha * length) for each response, its
    length in sampled tokens (VAPO, arXiv:2504.05118)."""
    lambda_alpha: float = Field(default=0.05, gt=0.0)
    """Scale of `gae_lambda: adaptive`, which is 0 up to responses of 1 / lambda_alpha tokens."""
    critic_lambda: float | None = Field(default=None, ge=0.0, le=1.0)
    """Lambda of the critic's targets (VC-PPO, arXiv:2503.01491, takes 1); null: `gae_lambda`, but 1
    in the first `critic_warmup_steps`: with less, the values of a long response's first tokens
    would not hear of its score."""
    bootstrap_truncated: bool = False
    """gae: a truncated response goes on with the critic's value of its last state, not with 0."""
    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """A token whose ratio is below 1 - clip_low gets no gradient that would lower it further (its
    advantage is negative); ppo and gspo."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """A token whose ratio is above 1 + clip_high gets no gradient that would raise it further (its
    advantage is positive); cispo cuts its weight there."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound on the loss of negative advantages (arXiv:1912.09729); ppo and gspo."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """Clip of the value change; null: plain squared error."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over a step's responses."""
    minibatch_size: int = Field(default=32, ge=1)
    """Responses per optimizer step, over all workers; a step with fewer responses than planned is
    cut into minibatches of like size, none larger."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """First steps of the run that update only the critic, by targets of lambda 1 unless
    `critic_lambda` is set."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus; 0: entropy is only logged."""
    kl: KLSection = KLSection()
    shaping: ShapingSection = ShapingSection()
    filter: FilterSection = FilterSection()
    correction: CorrectionSection = CorrectionSection()

    @model_validator(mode="before")
    @classmethod
    def _start_from_the_preset(cls, values: Any) -> Any:
        return with_preset(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _dual_clip_has_a_place(self) -> Self:
        if self.dual_clip is not None and self.policy_loss in ("cispo", "sapo"):
            raise ValueError(
                f"ppo.dual_clip ({self.dual_clip:g}): ppo.policy_loss: {self.policy_loss} bounds "
                "the loss of negative advantages in its own way. Set ppo.dual_clip to null."
            )
        return self

    @model_validator(mode="after")
    def _a_critic_is_there_where_one_is_meant(self) -> Self:
        for key in ("bootstrap_truncated", "critic_warmup_steps"):
            value = getattr(self, key)
            if value and not self.needs_critic:
                raise ValueError(
                    f"ppo.{key} ({value}): ppo.advantage: {self.advantage} has no critic. "
                    f"Remove ppo.{key}, or set ppo.advantage to gae."
                )
        return self

    @model_validator(mode="after")
    def _what_is_set_can_act(self) -> Self:
        unused_clips = {"cispo": ("clip_low",), "sapo": ("clip_low", "clip_high")}
        for keys, can_act, reason, remedy in (
            (
                ("gae_lambda", "critic_lambda", "value_clip"),
                self.needs_critic,
                f"ppo.advantage: {self.advantage} has no critic",
                "set ppo.advantage to gae",
            ),
            (
                ("lambda_alpha",),
                self.needs_critic and self.gae_lambda == "adaptive",
                "ppo.gae_lambda is not adaptive",
                "set ppo.gae_lambda to adaptive",
            ),
            (
                unused_clips.get(self.policy_loss, ()),
                False,
                f"ppo.policy_loss: {self.policy_loss} has no such clip",
                "set ppo.policy_loss to ppo or gspo",
            ),
            (
                ("filter.min_std", "filter.low", "filter.high", "filter.max_refills"),
                self.filter.enabled,
                "ppo.filter.enabled is false",
                "set ppo.filter.enabled to true",
            ),
            (
                ("shaping.overlong_factor",),
                self.shaping.overlong_buffer_tokens is not None,
                "ppo.shaping.overlong_buffer_tokens is null",
                "set ppo.shaping.overlong_buffer_tokens",
            ),
        ):
            for key in () if can_act else keys:
                self._refuse_if_set(key, reason, remedy)
        return self

    def _refuse_if_set(self, key: str, reason: str, remedy: str) -> None:
        """A resolved file says every key, so one at its default or its preset's is not set."""
        section, _, name = key.rpartition(".")
        owner = getattr(self, section) if section else self
        value, default = getattr(owner, name), type(owner).model_fields[name].default
        usual = flatten(PRESETS.get(self.preset or "", {})).get(key, default)
        if value is not None and value != usual:
            told = value if isinstance(value, str) else f"{value:g}"
            raise ValueError(
                f"ppo.{key} ({told}): has no effect, {reason}. Remove ppo.{key}, or {remedy}."
            )

    def critic_lambda_at(self, step: int) -> float | None:
        """Lambda of the critic's targets in a step, counted from 1; None: that of the policy."""
        warming_up = self.critic_lambda is None and step <= self.critic_warmup_steps
        return 1.0 if warming_up else self.critic_lambda

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator uses values."""
        return self.advantage == "gae"

    @property
    def needs_group(self) -> bool:
        """Whether the advantage estimator compares the samples of a prompt."""
        return self.advantage in GROUP_ADVANTAGES

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference model are used."""
        return self.kl.coef > 0.0

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the token rewards have a KL penalty in them."""
        return self.needs_reference and self.kl.placement == "reward"

    @property
    def reads_old_log_probs(self) -> bool:
        """Whether old log-probs are read before a step's first update, or in its second epoch."""
        return self.num_epochs > 1 or self.has_kl_in_reward or self.correction.acts
