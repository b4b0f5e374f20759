"""The `ppo` section: presets, estimators, losses, and the rules between its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypo.config.base import Config, ImportPath, flatten
from raypo.config.only_if import SET, above, only_if, unless
from raypo.config.ppo_subsections import (
    CorrectionSection,
    CovarianceSection,
    FilterSection,
    KLSection,
    ShapingSection,
)
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
    "opo",
    "pass_at_k",
    "dppo",
    "vespo",
]


@dataclass(frozen=True)
class Estimator:
    """Properties of an advantage estimator."""

    needs_critic: bool = False
    """True if the critic's values are the baseline. If False, advantages are discounted returns."""
    needs_group: bool = False
    """True if scores are compared within the group of a prompt's samples. A KL penalty in the
    reward is then subtracted from the scores before they are compared. If it were subtracted
    afterwards, it would lower the probability of every response."""
    whitens: bool = False
    """True if advantages get mean 0 and variance 1 over all tokens of the step that the losses
    count."""


ESTIMATORS = {
    "gae": Estimator(needs_critic=True, whitens=True),
    "reinforce": Estimator(whitens=True),
    "rloo": Estimator(needs_group=True),
    "reinforce_baseline": Estimator(needs_group=True, whitens=True),
    "grpo": Estimator(needs_group=True),
    "dr_grpo": Estimator(needs_group=True),
    "opo": Estimator(needs_group=True),
    "maxrl": Estimator(needs_group=True),
    "pass_at_k": Estimator(needs_group=True),
    "gdpo": Estimator(needs_group=True),
    "gigpo": Estimator(needs_group=True),
}
"""Properties of each estimator, by value of `ppo.advantage`. For a user's function all properties
are False."""
GROUP_ADVANTAGES = tuple(
    kind for kind, has in ESTIMATORS.items() if has.needs_group and kind not in ("gdpo", "gigpo")
)
"""Estimators that compare only the total scores of a group. gdpo is not among them because it
compares parts of the score, and gigpo because it compares turns as well."""


_MAXRL = "ppo.advantage: maxrl divides by a group's mean score, so scores must be at least 0"
_NO_REWARD_KL = {
    "maxrl": f"may lower a score below 0, but {_MAXRL}",
    "gdpo": "would change the score, but ppo.advantage: gdpo trains on the parts of the score",
    "gigpo": "would enter the scores of episodes but not the returns of turns, which "
    "ppo.advantage: gigpo also uses",
}
"""Estimators that allow no KL in the reward, and the reason."""


class PPOSection(Config):
    """The algorithm that turns scores into updates."""

    preset: Preset | None = None
    """Published combination of settings (raypo.config.presets). Keys that the file sets override
    it."""
    advantage: (
        Literal[
            "gae",
            "reinforce",
            "reinforce_baseline",
            "rloo",
            "grpo",
            "dr_grpo",
            "opo",
            "maxrl",
            "pass_at_k",
            "gdpo",
            "gigpo",
        ]
        | ImportPath
    ) = "gae"
    """Advantage estimator (`raypo.ppo.estimators`). Only gae uses a critic (arXiv:1506.02438). opo:
    baseline weighted by length (arXiv:2505.23585); maxrl: scores from 0 to 1 minus the group's
    mean, divided by that mean (arXiv:2602.02710); pass_at_k: the best of any `pass_k` samples
    (arXiv:2508.10751); gdpo: the parts of the score, each normalised within the group
    (arXiv:2601.05242); gigpo: grpo, plus each turn's return compared with the returns of the
    group's other turns that follow the same observation of the environment (arXiv:2505.10978). Or a
    function of your own, `file.py:name`, with the signature
    (`raypo.ppo.custom_functions.StepRewards`) -> advantages."""
    pass_k: Annotated[int, only_if("advantage", "pass_at_k")] = Field(default=4, ge=1)
    """Number k of samples of which only the best one counts, at most
    rollout.samples_per_prompt. k = 1 is grpo with the population standard deviation."""
    part_weights: Annotated[
        dict[str, Annotated[float, Field(gt=0.0, allow_inf_nan=False)]] | None,
        only_if("advantage", "gdpo"),
    ] = None
    """Weights of the parts of the score, by name, such as {correct: 1, format: 0.5}. A part
    is one of three things: a number that the reward function returns beside `score`; the score of
    one of several reward functions given in Python; or a source of the score, like `judge`. The
    total score is not trained on."""
    policy_loss: (
        Literal[
            "ppo",
            "gspo",
            "gmpo",
            "cispo",
            "sapo",
            "clip_cov",
            "kl_cov",
            "dppo_tv",
            "dppo_kl",
            "vespo",
        ]
        | ImportPath
    ) = "ppo"
    """Surrogate loss of the policy. ppo: arXiv:1707.06347; gspo: arXiv:2507.18071, with an
    advantage per token (section 4.3); gmpo: arXiv:2507.20673; cispo: arXiv:2506.13585; sapo:
    arXiv:2511.20347; clip_cov: ppo without the tokens that `covariance` selects; kl_cov: ppo
    without a clip, and with a penalty on these tokens (both arXiv:2505.22617); dppo_tv and dppo_kl:
    bounds on the change of a token's probability instead of a clip of its ratio (arXiv:2602.04879);
    vespo: a soft kernel of the response's ratio (arXiv:2602.10693). Or a function of your own,
    `file.py:name`, with the signature (`raypo.SurrogateInputs`) -> loss of each token."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Aggregation of the policy's token losses into one number (`raypo.ppo.losses.aggregate`).
    token_mean: mean over all tokens; sequence_mean: mean over responses of each response's token
    mean; constant: sum divided by responses * max_new_tokens. All rows of an agent's episode are
    one response. The critic's loss is always a mean over tokens."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount factor per sampled token, or per turn with `discount_by: turn`. gigpo always
    discounts per turn, to compute the returns of turns (0.95 in its paper)."""
    discount_by: Annotated[
        Literal["token", "turn"],
        only_if("advantage", *(name for name in ESTIMATORS if name != "gigpo")),
        only_if("rollout.environment", SET) | only_if("rollout.agent", SET),
    ] = "token"
    """Unit of discounting. token: gamma and the lambdas of gae apply from token to token; turn:
    they apply from one turn of an episode to the next, and are 1 within a turn. A turn is the
    policy's response to one call."""
    gae_lambda: Annotated[
        Annotated[float, Field(ge=0.0, le=1.0)] | Literal["adaptive"], only_if("advantage", "gae")
    ] = 0.95
    """Lambda of GAE, which trades bias against variance. adaptive: 1 - 1 / (lambda_alpha * length)
    for each response, with its length in sampled tokens (VAPO, arXiv:2504.05118)."""
    lambda_alpha: Annotated[
        float, only_if("gae_lambda", "adaptive"), only_if("advantage", "gae")
    ] = Field(default=0.05, gt=0.0)
    """Scale of the adaptive lambda. Responses of up to 1 / lambda_alpha tokens get lambda 0."""
    critic_lambda: Annotated[float | None, only_if("advantage", "gae")] = Field(
        default=None, ge=0.0, le=1.0
    )
    """Lambda of the critic's targets (1 in VC-PPO, arXiv:2503.01491). null means 1 in the first
    `critic_warmup_steps`, and `gae_lambda` afterwards. With a smaller lambda in the warm-up the
    score of a long response would not reach the values of its first tokens."""
    bootstrap_truncated: Annotated[
        bool, only_if("advantage", "gae"), only_if("mask_truncated", False)
    ] = False
    """Use the critic's value of the last state as the future return of a truncated response,
    instead of 0."""
    advantage_clip: float | None = Field(default=None, gt=0.0)
    """Clip advantages to +- this value, after any whitening by the estimator. null means no clip.
    """
    mask_truncated: bool = False
    """Leave responses that reached rollout.max_new_tokens out of all losses, their denominators
    (including that of `aggregation: constant`), and the mean and variance for whitening. Their
    scores still count in the group's baseline (overlong filtering, arXiv:2503.14476)."""
    clip_low: Annotated[float, unless("policy_loss", "cispo", "sapo", "kl_cov", "vespo")] = Field(
        default=0.2, gt=0.0, le=1.0
    )
    """Lower clip range, for ppo, gspo, gmpo and clip_cov: a token with a negative advantage and a
    ratio below 1 - clip_low gets no gradient that would lower the ratio further. dppo_tv: largest
    decrease of a token's probability; dppo_kl: largest KL of such a decrease, in nats."""
    clip_high: Annotated[float, unless("policy_loss", "sapo", "kl_cov", "vespo")] = Field(
        default=0.2, gt=0.0
    )
    """Upper clip range: a token with a positive advantage and a ratio above 1 + clip_high gets no
    gradient that would raise the ratio further. cispo: truncate the weight of a token at 1 +
    clip_high. dppo_tv, dppo_kl: like clip_low, for an increase."""
    dual_clip: Annotated[float | None, only_if("policy_loss", "ppo", "gspo", "clip_cov")] = Field(
        default=None, gt=1.0
    )
    """Dual-clip bound on the loss of negative advantages (arXiv:1912.09729). null means no bound.
    """
    cispo_low: Annotated[float | None, only_if("policy_loss", "cispo")] = Field(
        default=None, gt=0.0, le=1.0
    )
    """Lower bound 1 - cispo_low on the weight of a token (arXiv:2506.13585, eq. 5). null
    means no bound, as in the paper's runs."""
    nll_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of the mean negative log-likelihood of positive examples (VAPO,
    arXiv:2504.05118). 0 means no such term."""
    nll_min_score: Annotated[float, only_if("nll_coef", above(0))] = 1.0
    """Minimum score, before KL and shaping, of a positive example."""
    value_clip: Annotated[float | None, only_if("advantage", "gae")] = Field(default=0.2, gt=0.0)
    """Clip range of the critic's value around the value before the update. null means plain squared
    error."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the responses of a step."""
    minibatch_size: int = Field(default=32, ge=1)
    """Responses per optimizer step, over all workers. A step with fewer responses than planned is
    split into minibatches of similar size, none larger than this."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Number of steps at the start of the run that update only the critic. In these steps the
    critic's targets have lambda 1 unless `critic_lambda` is set."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Initial coefficient of the entropy bonus. 0 means that entropy is only logged."""
    entropy_target: float | None = Field(default=None, gt=0.0)
    """Lower target of the entropy, in nats per token (arXiv:2505.22312). After a step with an
    entropy at or below the target the coefficient grows by `entropy_delta`, and the bonus is on.
    After any other step the coefficient shrinks by `entropy_delta`, and the bonus is off. null
    means a fixed coefficient."""
    entropy_delta: Annotated[float, only_if("entropy_target", SET)] = Field(default=0.005, gt=0.0)
    """Step size of the entropy coefficient controller."""
    top_entropy_fraction: Annotated[float, only_if("old_log_probs", "learner")] = Field(
        default=1.0, gt=0.0, le=1.0
    )
    """Fraction of the step's tokens, those of highest entropy before its updates, that keep their
    policy gradient (0.2 in arXiv:2506.01939). The surrogate of all others is 0; their KL in the
    loss, their entropy bonus, and their share of the denominator stay. 1 means all tokens."""
    kl: KLSection = KLSection()
    covariance: CovarianceSection = CovarianceSection()
    shaping: Annotated[ShapingSection, unless("advantage", "gdpo")] = ShapingSection()
    filter: FilterSection = FilterSection()
    old_log_probs: Literal["learner", "engine"] = "learner"
    """Source of the old log-probs in the ratio. learner: the learner computes them before the
    update, and `correction` handles their mismatch with the engine's; engine: the engine's own
    log-probs are used, at no cost. The ratio and its clip then also cover staleness and rounding.
    The KL in the reward uses the same log-probs."""
    correction: CorrectionSection = CorrectionSection()

    @model_validator(mode="before")
    @classmethod
    def _start_from_the_preset(cls, values: Any) -> Any:
        return with_preset(values) if isinstance(values, Mapping) else values

    def default_value(self, key: str) -> Any:
        """Return the preset's value of a key if the preset sets it, else the default."""
        return flatten(PRESETS.get(self.preset or "", {})).get(key, super().default_value(key))

    def _problems(self) -> Iterator[str]:
        section = self.correction
        if self.old_log_probs == "engine" and section.acts:
            key, off = ("kind", "none") if section.kind != "none" else ("token_veto", "null")
            yield (
                f"ppo.correction.{key} ({getattr(section, key)}): compares the learner's "
                "log-probs before the update with the engine's, but with ppo.old_log_probs: "
                "engine they are not computed, because the ratio in the loss corrects the "
                f"difference. Set ppo.old_log_probs to learner, or ppo.correction.{key} to {off}."
            )
        if self.has_kl_in_reward and self.advantage in _NO_REWARD_KL:
            yield (
                f"ppo.kl.placement (reward): the KL {_NO_REWARD_KL[self.advantage]}. Set "
                "ppo.kl.placement to loss and ppo.kl.estimator to k3, or ppo.kl.coef to 0."
            )
        shaping = self.shaping
        if self.advantage == "maxrl" and (shaping.clip_low is None or shaping.clip_low < 0.0):
            for key in ("normalize", "overlong_buffer_tokens"):
                if value := getattr(shaping, key):
                    yield (
                        f"ppo.shaping.{key} ({value}): may lower a score below 0, but {_MAXRL}. "
                        f"Remove ppo.shaping.{key}, or set ppo.shaping.clip_low to 0."
                    )
        if self.advantage == "gdpo" and not self.part_weights:
            yield (
                f"ppo.part_weights ({self.part_weights}): ppo.advantage: gdpo trains on the parts "
                "of the score. Set it to their names and weights, such as {correct: 1, format: "
                "0.5}."
            )
        lambdas = (self.gae_lambda, self.critic_lambda) if self.needs_critic else ()
        if self.discount_by == "turn" and {self.gamma, *lambdas} <= {1.0, None}:
            and_lambdas = ", and so are the lambdas" if lambdas else ""
            yield (
                f"ppo.discount_by (turn): has no effect, because ppo.gamma is 1{and_lambdas}. "
                "Remove ppo.discount_by, or set ppo.gamma below 1."
            )
        if self.critic_warmup_steps and not self.needs_critic:  # also if a preset sets it
            yield (
                f"ppo.critic_warmup_steps ({self.critic_warmup_steps}): ppo.advantage: "
                f"{self.advantage} has no critic. Set ppo.critic_warmup_steps to 0, or "
                "ppo.advantage to gae."
            )
        if self.needs_critic and self.gae_lambda == "adaptive" and self.discount_by == "turn":
            yield (
                "ppo.gae_lambda (adaptive): depends on the number of tokens of a response, but "
                "ppo.discount_by: turn applies it to turns. Set ppo.gae_lambda to a number, or "
                "ppo.discount_by to token."
            )

    def critic_lambda_at(self, step: int) -> float | None:
        """Return the lambda of the critic's targets in a step, counted from 1.

        None means the lambda of the advantages.
        """
        warming_up = self.critic_lambda is None and step <= self.critic_warmup_steps
        return 1.0 if warming_up else self.critic_lambda

    @property
    def estimator(self) -> Estimator:
        """Properties of the advantage estimator."""
        return ESTIMATORS.get(self.advantage, Estimator())

    @property
    def needs_critic(self) -> bool:
        """True if the advantage estimator uses values."""
        return self.estimator.needs_critic

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts of the score that are trained on."""
        return tuple(self.part_weights or ())

    @property
    def needs_group(self) -> bool:
        """True if the advantage estimator compares the samples of a prompt."""
        return self.estimator.needs_group

    @property
    def needs_reference(self) -> bool:
        """True if log-probs of the reference model are used."""
        return self.kl.coef > 0.0

    @property
    def allows_for_staleness(self) -> bool:
        """True if the loss accounts for tokens that older weights sampled."""
        return self.old_log_probs == "engine" or self.correction.kind != "none"

    @property
    def has_kl_in_reward(self) -> bool:
        """True if the token rewards contain a KL penalty."""
        return self.needs_reference and self.kl.placement == "reward"

    @property
    def needs_covariance(self) -> bool:
        """True if the policy loss holds back tokens of high covariance."""
        return self.policy_loss in ("clip_cov", "kl_cov")

    @property
    def needs_entropy(self) -> bool:
        """True if the entropies before the update select tokens."""
        return self.top_entropy_fraction < 1.0

    def computes_old_log_probs(self, *, is_one_update: bool) -> bool:
        """Return whether the learner's log-probs before the update need a separate forward pass.

        The first update computes the same log-probs. A separate pass is needed only if something
        reads the log-probs earlier, or if a second update follows.

        Args:
            is_one_update: True if all responses of the step are one minibatch.
        """
        if self.old_log_probs == "engine":
            return False
        reads = self.has_kl_in_reward or self.correction.acts or self.needs_covariance
        return reads or self.needs_entropy or self.num_epochs > 1 or not is_one_update
