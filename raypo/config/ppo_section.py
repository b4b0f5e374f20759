"""The `ppo` recipe's own section: presets, estimator, losses, KL, shaping, filter, correction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypo.config.base import Config, ImportPath, flatten, is_import_path
from raypo.config.presets import PRESETS, with_preset

Preset = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce++",
    "reinforce++_baseline",
    "dapo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "vapo",
]
MAX_KL_ERROR = 0.2
"""How far off its target the adaptive KL controller takes a KL to be, relatively, at most."""
OVERLONG_SHARE = 5
"""`overlong_buffer_tokens: auto` is one token in so many of the longest response (DAPO: 4096 of
20480)."""


@dataclass(frozen=True)
class Estimator:
    """What an estimator is made of."""

    needs_critic: bool = False
    """Values of a critic are its baseline; otherwise advantages are discounted returns."""
    needs_group: bool = False
    """Scores are compared within the group of a prompt's samples, a KL penalty in the reward
    included: a penalty that the group's mean does not share in would push down on every response.
    """
    whitens: bool = False
    """Advantages get mean 0 and variance 1 over all tokens of the step that the losses count."""


ESTIMATORS = {
    "gae": Estimator(needs_critic=True, whitens=True),
    "reinforce": Estimator(whitens=True),
    "rloo": Estimator(needs_group=True),
    "reinforce_baseline": Estimator(needs_group=True, whitens=True),
    "grpo": Estimator(needs_group=True),
    "dr_grpo": Estimator(needs_group=True),
}
"""What each of `ppo.advantage` is made of; one's own has neither."""
GROUP_ADVANTAGES = tuple(kind for kind, each in ESTIMATORS.items() if each.needs_group)


def _crossed(key: str, low: float | None, high_name: str, high: float | None) -> Iterator[str]:
    if low is not None and high is not None and low >= high:
        yield (
            f"{key} ({low:g}): must be below {high_name} ({high:g}), or nothing lies between them. "
            f"Set {key} below {high:g}."
        )


class KLSection(Config):
    """The pull to the reference model."""

    section = "ppo.kl."

    coef: float = Field(default=0.01, ge=0.0)
    """Weight of the penalty in score per nat, at the start; 0: no reference model is started."""
    estimator: Literal["k1", "k2", "k3", "k3_st"] = "k1"
    """Per-token estimator (Schulman 2020): k1 in the reward; in the loss k2, k3 (as GRPO published
    it, with the gradient of the reverse KL) or k3_st (k3's value, k2's gradient; arXiv:2510.01555).
    """
    placement: Literal["reward", "loss"] = "reward"
    """reward: a penalty in the token rewards, or in the score of the response where
    ppo.advantage compares the samples of a prompt. loss: a term of the policy's loss."""
    importance_weights: bool = False
    """loss: each token's term times its ratio of new to old probability, and its weight of
    ppo.correction, so that it is unbiased where the policy has moved on; k3 then has the gradient
    of the KL itself (DeepSeek-V3.2, arXiv:2512.02556)."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: steers the coefficient to `target` (arXiv:1909.08593, section 2.2)."""
    target: float | None = Field(default=None, gt=0.0)
    """Nats per response that the adaptive controller steers to."""
    horizon: float | None = Field(default=None, gt=0.0)
    """Responses over which the adaptive controller spreads a full correction."""

    def _problems(self) -> Iterator[str]:
        if self.estimator == "k1" and self.placement == "loss":
            yield (
                "ppo.kl.estimator (k1): cannot be a loss term, its gradient is 0 in expectation. "
                "Set ppo.kl.estimator to k2 or k3, or ppo.kl.placement to reward."
            )
        if self.estimator != "k1" and self.placement == "reward":
            yield (
                f"ppo.kl.estimator ({self.estimator}): cannot be a penalty in the reward, where "
                "only k1 has the KL's gradient. "
                "Set ppo.kl.estimator to k1, or ppo.kl.placement to loss."
            )
        if self.controller == "fixed":
            why, remedy = "ppo.kl.controller is fixed", "set ppo.kl.controller to adaptive"
            yield from self._idle("target horizon", why, remedy)
            return
        for key in ("target", "horizon"):
            if getattr(self, key) is None:
                yield (
                    f"ppo.kl.{key} (null): ppo.kl.controller: adaptive needs it. "
                    f"Set ppo.kl.{key} above 0, or ppo.kl.controller to fixed."
                )
        if self.coef == 0.0:
            yield (
                "ppo.kl.coef (0.0): would stay 0 under ppo.kl.controller: adaptive. "
                "Set ppo.kl.coef above 0, or ppo.kl.controller to fixed."
            )


class CorrectionSection(Config):
    """Weights for tokens that the engine sampled with other probabilities than the learner's.

    A ratio is the learner's probability before the update over the engine's. Tokens that are
    dropped get weight 0 and stay in the loss's denominator.
    """

    section = "ppo.correction."

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
    max_staleness: int | None = Field(default=None, ge=0)
    """With any kind, none included: a token is dropped whose weights were more versions older than
    those that the update starts from; null: none is."""

    def _problems(self) -> Iterator[str]:
        users = {
            "cap": ("tis", "sequence_tis", "geometric_tis", "mis"),
            "low": ("icepop", "mis"),
            "high": ("icepop", "mis"),
            "mask_ratio": ("mis",),
        }
        for name, kinds in users.items():
            swap = name == "high" and self.kind in users["cap"]
            remedy = "Set ppo.correction.cap instead" if swap else "Remove it"
            for key, value in self.set_keys(name) if self.kind not in kinds else ():
                yield (
                    f"{key} ({value}): is used by {', '.join(kinds)}, not by "
                    f"ppo.correction.kind: {self.kind}. {remedy}, or choose such a kind."
                )

    @property
    def acts(self) -> bool:
        """Whether any token may get a weight other than 1."""
        return self.kind != "none" or self.token_veto is not None


class CovarianceSection(Config):
    """Which tokens `ppo.policy_loss: clip_cov` and `kl_cov` hold back, as they cost the most
    entropy: those where log-prob and advantage, each less its mean over the step, have a large
    product (arXiv:2505.22617). They are chosen once a step, by the log-probs before its updates.
    """

    fraction: float = Field(default=2e-4, gt=0.0, le=1.0)
    """Share of the step's tokens that is held back, at least one token. clip_cov: drawn from those
    between `low` and `high`; kl_cov: those of the largest product."""
    low: float = 1.0
    """clip_cov: smallest product that is held back."""
    high: float = 5.0
    """clip_cov: largest product that is held back."""
    penalty: float = Field(default=1.0, ge=0.0)
    """kl_cov: weight of the change of these tokens' log-probs, in nats, as a loss."""

    def _problems(self) -> Iterator[str]:
        return _crossed("ppo.covariance.low", self.low, "high", self.high)


class ShapingSection(Config):
    """From the raw score to the one that is trained on; the steps are taken in this order."""

    section = "ppo.shaping."

    function: ImportPath | None = None
    """Your own, `file.py:name`: (`raypo.ppo.custom_functions.StepScores`) -> scores; null: none."""
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

    def _problems(self) -> Iterator[str]:
        if self.truncated_score is not None and self.truncated_scale is not None:
            yield (
                f"ppo.shaping.truncated_score ({self.truncated_score:g}): replaces what "
                f"ppo.shaping.truncated_scale ({self.truncated_scale:g}) would lower. "
                "Set one of them to null."
            )
        yield from _crossed("ppo.shaping.clip_low", self.clip_low, "clip_high", self.clip_high)

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

    def _problems(self) -> Iterator[str]:
        return _crossed("ppo.filter.low", self.low, "high", self.high)


class PPOSection(Config):
    """What turns scores into an update."""

    section = "ppo."

    preset: Preset | None = None
    """A published combination (raypo.config.presets); other keys win over it."""
    advantage: (
        Literal["gae", "reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo"] | ImportPath
    ) = "gae"
    """Estimator (`raypo.ppo.estimators`); only gae has a critic (arXiv:1506.02438). Or your own,
    `file.py:name`: (`raypo.ppo.custom_functions.StepRewards`) -> advantages."""
    policy_loss: (
        Literal["ppo", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov"] | ImportPath
    ) = "ppo"
    """Surrogate: arXiv:1707.06347, arXiv:2507.18071 (with an advantage for each token, section
    4.3), arXiv:2507.20673, arXiv:2506.13585, arXiv:2511.20347; clip_cov and kl_cov are ppo and its
    unclipped form with `covariance` (arXiv:2505.22617). Or your own, `file.py:name`:
    (`raypo.ppo.surrogates.Tokens`) -> the loss of each token."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How the policy's token losses become one number (`raypo.ppo.losses.aggregate`); an agent's
    episode is one response, with all its rows. The critic's loss is always a mean over tokens."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount per sampled token, or per turn."""
    discount_by: Literal["token", "turn"] = "token"
    """turn: gamma and the lambdas of gae hold from one turn of an episode to the next, and within a
    turn both are 1; a turn is the answer to one call of the policy."""
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
    advantage_clip: float | None = Field(default=None, gt=0.0)
    """Advantages are cut to +- this, after they are whitened where the estimator does so; null: no
    cut."""
    mask_truncated: bool = False
    """Responses that ran into rollout.max_new_tokens are in no loss, in no denominator (that of
    `aggregation: constant` included) and in no mean or variance that advantages are whitened by;
    their scores still count where a group is compared (overlong filtering, arXiv:2503.14476)."""
    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """A token whose ratio is below 1 - clip_low gets no gradient that would lower it further (its
    advantage is negative); ppo, gspo, gmpo and clip_cov."""
    clip_high: float = Field(default=0.2, gt=0.0)
    """A token whose ratio is above 1 + clip_high gets no gradient that would raise it further (its
    advantage is positive); cispo cuts its weight there."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound on the loss of negative advantages (arXiv:1912.09729); ppo, gspo and clip_cov."""
    cispo_low: float | None = Field(default=None, gt=0.0, le=1.0)
    """cispo: a token's weight is at least 1 - cispo_low (arXiv:2506.13585, eq. 5); null: no bound,
    as the paper ran it."""
    nll_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the mean negative log-likelihood of positive examples (VAPO, arXiv:2504.05118);
    0: none."""
    nll_min_score: float = 1.0
    """A response is a positive example where its score, before KL and shaping, is at least this."""
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
    """Weight of the entropy bonus, at the start; 0: entropy is only logged."""
    entropy_target: float | None = Field(default=None, gt=0.0)
    """Nats per token that entropy is kept above: the bonus acts only after a step at or below it,
    and its weight then grows by `entropy_delta`, else it shrinks (arXiv:2505.22312); null: the
    weight is fixed."""
    entropy_delta: float = Field(default=0.005, gt=0.0)
    """What a step adds to the weight of the entropy bonus, or takes from it."""
    kl: KLSection = KLSection()
    covariance: CovarianceSection = CovarianceSection()
    shaping: ShapingSection = ShapingSection()
    filter: FilterSection = FilterSection()
    old_log_probs: Literal["learner", "engine"] = "learner"
    """What a ratio compares the policy with. learner: its own log-probs before the update, which
    are computed; how far the engine was from them is for `correction` to weigh. engine: those that
    the engine sampled with, which are there: the ratio then spans the whole way, staleness and
    rounding included, and the clip bounds it. So is the KL in the reward of these log-probs."""
    correction: CorrectionSection = CorrectionSection()

    @model_validator(mode="before")
    @classmethod
    def _start_from_the_preset(cls, values: Any) -> Any:
        return with_preset(values) if isinstance(values, Mapping) else values

    def _usual(self, key: str) -> Any:
        """The value of the preset, if it has one."""
        return flatten(PRESETS.get(self.preset or "", {})).get(key, super()._usual(key))

    def _problems(self) -> Iterator[str]:
        section = self.correction
        if self.old_log_probs == "engine" and section.acts:
            key, off = ("kind", "none") if section.kind != "none" else ("token_veto", "null")
            yield (
                f"ppo.correction.{key} ({getattr(section, key)}): weighs the learner's log-probs "
                f"before the update against the engine's, and ppo.old_log_probs: engine leaves "
                f"them uncomputed: the ratio of the loss corrects already. Set "
                f"ppo.old_log_probs to learner, or ppo.correction.{key} to {off}."
            )
        yield from self._problems_of_the_critic()
        yield from self._problems_of_the_loss()
        yield from self._problems_of_what_is_off()

    def _problems_of_the_critic(self) -> Iterator[str]:
        needed = ("bootstrap_truncated", "critic_warmup_steps")
        for key in () if self.needs_critic else needed:
            if value := getattr(self, key):
                yield (
                    f"ppo.{key} ({value}): ppo.advantage: {self.advantage} has no critic. "
                    f"Set ppo.{key} to {type(self).model_fields[key].default}, or ppo.advantage to "
                    "gae."
                )
        if not self.needs_critic:
            keys = "gae_lambda critic_lambda value_clip"
            why = f"ppo.advantage: {self.advantage} has no critic"
            yield from self._idle(keys, why, "set ppo.advantage to gae")
        is_adaptive = self.needs_critic and self.gae_lambda == "adaptive"
        if not is_adaptive:
            why, remedy = "ppo.gae_lambda is not adaptive", "set ppo.gae_lambda to adaptive"
            yield from self._idle("lambda_alpha", why, remedy)
        if self.mask_truncated:
            why = "ppo.mask_truncated keeps truncated responses out of the critic's loss"
            yield from self._idle("bootstrap_truncated", why, "set ppo.mask_truncated to false")
        if is_adaptive and self.discount_by == "turn":
            yield (
                "ppo.gae_lambda (adaptive): follows from the tokens of a response, and "
                "ppo.discount_by: turn applies it to turns. Set ppo.gae_lambda to a number, or "
                "ppo.discount_by to token."
            )

    def _problems_of_the_loss(self) -> Iterator[str]:
        loss = self.policy_loss
        own_bound = f"ppo.policy_loss: {loss} bounds the loss of negative advantages in its own way"
        clips = {"cispo": "clip_low", "sapo": "clip_low clip_high", "kl_cov": "clip_low clip_high"}
        for keys, losses, why in (
            (clips.get(loss, ""), ("ppo", "gspo"), f"ppo.policy_loss: {loss} has no such clip"),
            ("dual_clip", ("ppo", "gspo", "clip_cov"), own_bound),
            ("cispo_low", ("cispo",), f"ppo.policy_loss: {loss} has no such clip"),
            ("covariance.fraction", ("clip_cov", "kl_cov"), f"ppo.policy_loss is {loss}"),
            ("covariance.low covariance.high", ("clip_cov",), f"ppo.policy_loss is {loss}"),
            ("covariance.penalty", ("kl_cov",), f"ppo.policy_loss is {loss}"),
        ):
            if loss not in losses:
                yield from self._idle(keys, why, f"set ppo.policy_loss to {' or '.join(losses)}")

    def _problems_of_what_is_off(self) -> Iterator[str]:
        lambdas = (self.gae_lambda, self.critic_lambda) if self.needs_critic else ()
        if self.entropy_target is None:
            yield from self._idle(
                "entropy_delta", "ppo.entropy_target is null", "set ppo.entropy_target"
            )
        if self.kl.placement == "reward":
            why, remedy = "ppo.kl.placement is reward", "set ppo.kl.placement to loss"
            yield from self._idle("kl.importance_weights", why, remedy)
        if self.kl.coef == 0.0:
            why, remedy = "ppo.kl.coef is 0", "set ppo.kl.coef above 0"
            yield from self._idle("kl.importance_weights", why, remedy)
        if is_import_path(self.advantage):
            why = f"ppo.advantage: {self.advantage} discounts by itself"
            yield from self._idle("discount_by", why, "set ppo.advantage to one of raypo's")
        if self.gamma == 1.0 and all(each in (1.0, None) for each in lambdas):
            why = "ppo.gamma is 1" + (", and so are the lambdas" if lambdas else "")
            yield from self._idle("discount_by", why, "set ppo.gamma below 1")
        if self.nll_coef == 0.0:
            yield from self._idle("nll_min_score", "ppo.nll_coef is 0", "set ppo.nll_coef")
        if not self.filter.enabled:
            keys = "filter.min_std filter.low filter.high filter.max_refills"
            why, remedy = "ppo.filter.enabled is false", "set ppo.filter.enabled to true"
            yield from self._idle(keys, why, remedy)
        if self.shaping.overlong_buffer_tokens is None:
            key = "ppo.shaping.overlong_buffer_tokens"
            yield from self._idle("shaping.overlong_factor", f"{key} is null", f"set {key}")

    def critic_lambda_at(self, step: int) -> float | None:
        """Lambda of the critic's targets in a step, counted from 1; None: that of the policy."""
        warming_up = self.critic_lambda is None and step <= self.critic_warmup_steps
        return 1.0 if warming_up else self.critic_lambda

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator uses values."""
        return ESTIMATORS.get(self.advantage, Estimator()).needs_critic

    @property
    def needs_group(self) -> bool:
        """Whether the advantage estimator compares the samples of a prompt."""
        return self.advantage in GROUP_ADVANTAGES

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference model are used."""
        return self.kl.coef > 0.0

    @property
    def allows_for_staleness(self) -> bool:
        """Whether the loss knows that a token was sampled by older weights."""
        return self.old_log_probs == "engine" or self.correction.kind != "none"

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the token rewards have a KL penalty in them."""
        return self.needs_reference and self.kl.placement == "reward"

    @property
    def needs_covariance(self) -> bool:
        """Whether the policy's loss holds back tokens of high covariance."""
        return self.policy_loss in ("clip_cov", "kl_cov")

    def computes_old_log_probs(self, *, is_one_update: bool) -> bool:
        """Whether the learner's log-probs before the update take a pass of their own.

        They do not where nothing reads them before the first update, which has them too.

        Args:
            is_one_update: All responses of the step are one minibatch.
        """
        if self.old_log_probs == "engine":
            return False
        reads = self.has_kl_in_reward or self.correction.acts or self.needs_covariance
        return reads or self.num_epochs > 1 or not is_one_update
