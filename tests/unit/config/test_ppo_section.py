"""The `ppo` section: what is refused with which remedy, and the published presets."""

import math
from typing import Literal, get_args, get_origin

import pytest

from raypo.config import PRESETS, PPOConfig, PPOSection, flatten
from raypo.config.ppo_section import ESTIMATORS, GROUP_ADVANTAGES
from raypo.ppo.surrogates import SURROGATES
from tests.unit.config.test_run_config import refused, with_keys

ADAPTIVE = {"ppo__kl__controller": "adaptive"}


def choices(section, key):
    """The names that a key takes, beside a function's path where it takes one."""
    annotation = section.model_fields[key].annotation
    named = [each for each in get_args(annotation) if get_origin(each) is Literal]
    return set(get_args(named[0] if named else annotation))


def test_the_choices_are_those_that_the_mathematics_has():
    fields = PPOSection().__class__
    assert choices(fields, "advantage") == set(ESTIMATORS)
    assert choices(fields, "policy_loss") == set(SURROGATES)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_what_an_estimator_needs_is_what_the_mathematics_says(kind):
    parts = {"right": 1.0} if kind == "gdpo" else None
    section = PPOSection.model_validate(
        {"advantage": kind, "kl": {"coef": 0.0}, "part_weights": parts}
    )
    assert section.needs_critic == ESTIMATORS[kind].needs_critic
    assert (
        section.needs_group
        == ESTIMATORS[kind].needs_group
        == (kind in (*GROUP_ADVANTAGES, "gdpo", "gigpo"))
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"ppo__advantage": "rloo", "rollout__samples_per_prompt": 1},
            "rollout.samples_per_prompt (1): ppo.advantage: rloo compares the samples of a prompt. "
            "Set rollout.samples_per_prompt to 2 or more.",
        ),
        (
            {"ppo__advantage": "pass_at_k", "ppo__pass_k": 9, "rollout__samples_per_prompt": 8},
            "ppo.pass_k (9): the best of this many samples counts, but "
            "rollout.samples_per_prompt is 8. Set ppo.pass_k to at most 8.",
        ),
        (
            {"ppo__advantage": "grpo", "ppo__pass_k": 2},
            "ppo.pass_k (2): has no effect, because ppo.advantage is grpo.",
        ),
        (
            {"ppo__advantage": "maxrl", "ppo__kl__coef": 0.1},
            "ppo.kl.placement (reward): the KL may lower a score below 0, but ppo.advantage: maxrl "
            "divides by a group's mean score, so scores must be at least 0.",
        ),
        (
            {
                "ppo__advantage": "maxrl",
                "ppo__kl__coef": 0.0,
                "ppo__shaping__overlong_buffer_tokens": 5,
            },
            "ppo.shaping.overlong_buffer_tokens (5): may lower a score below 0",
        ),
        (
            {"ppo__advantage": "gdpo", "ppo__kl__coef": 0.0},
            "ppo.part_weights (None): ppo.advantage: gdpo trains on the parts of the score. Set it "
            "to their names and weights, such as {correct: 1, format: 0.5}.",
        ),
        (
            {"ppo__advantage": "gdpo", "ppo__part_weights": {"right": 1.0}},
            "ppo.kl.placement (reward): the KL would change the score",
        ),
        (
            {
                **{"ppo__advantage": "gdpo", "ppo__part_weights": {"right": 1.0}},
                **{"ppo__kl__coef": 0.0, "ppo__shaping__clip_low": 0.0},
            },
            "ppo.shaping.clip_low (0.0): changes the score, but ppo.advantage: gdpo",
        ),
        (
            {
                **{"ppo__advantage": "gdpo", "ppo__part_weights": {"model_0": 1.0, "model_1": 1.0}},
                **{"ppo__kl__coef": 0.0, "model__reward": ["a", {"path": "b", "weight": -1}]},
            },
            "model.reward.1.weight (-1.0): weights the score, but ppo.advantage: gdpo",
        ),
        (
            {
                **{"ppo__advantage": "gdpo", "ppo__part_weights": {"model": 1.0}},
                **{"ppo__kl__coef": 0.0, "reward__weights__model": 2.0},
            },
            "reward.weights.model (2.0): weights the score, but ppo.advantage: gdpo",
        ),
        (
            {"ppo__part_weights": {"right": 1.0}},
            "ppo.part_weights ({'right': 1.0}): has no effect, because ppo.advantage is gae.",
        ),
        ({"ppo__part_weights": {"right": 0.0}}, "ppo.part_weights"),
        (
            {"ppo__advantage": "gigpo", "ppo__kl__coef": 0.0},
            "ppo.advantage (gigpo): compares the turns of episodes with an environment.",
        ),
        (
            {"ppo__advantage": "gigpo", "ppo__kl__coef": 0.1},
            "ppo.kl.placement (reward): the KL would enter the scores of episodes but not",
        ),
        (
            {"ppo__filter__enabled": True, "rollout__samples_per_prompt": 1},
            "rollout.samples_per_prompt (1): ppo.filter.enabled compares",
        ),
        (
            {"ppo__dual_clip": 3.0, "ppo__policy_loss": "cispo"},
            "ppo.dual_clip (3): has no effect, because ppo.policy_loss: cispo bounds the "
            "loss of negative advantages in its own way. Remove ppo.dual_clip, or set "
            "ppo.policy_loss to ppo or gspo or clip_cov.",
        ),
        (
            {"ppo__kl__placement": "loss"},
            "ppo.kl.estimator (k1): cannot be a loss term, its gradient is 0 in expectation. "
            "Set ppo.kl.estimator to k2 or k3, or ppo.kl.placement to reward.",
        ),
        *(
            (
                keys,
                f"ppo.kl.estimator ({kind}): cannot be a penalty in the reward, where only k1 "
                "has the KL's gradient. Set ppo.kl.estimator to k1, or ppo.kl.placement to loss.",
            )
            for kind, keys in (
                ("k2", {"ppo__kl__estimator": "k2"}),
                ("k3", {"ppo__kl__estimator": "k3"}),
                ("k3_st", {"ppo__kl__estimator": "k3_st"}),
                ("k3", {"ppo__preset": "grpo", "ppo__kl__placement": "reward"}),
            )
        ),
        (ADAPTIVE, "ppo.kl.target (null): ppo.kl.controller: adaptive needs it."),
        ({**ADAPTIVE, "ppo__kl__target": 1.0}, "ppo.kl.horizon (null): "),
        ({**ADAPTIVE, "ppo__kl__target": 0.0}, "ppo.kl.target (0.0): must be greater than 0."),
        (
            {"ppo__kl__horizon": 9.0},
            "ppo.kl.horizon (9): has no effect, because ppo.kl.controller is fixed.",
        ),
        (
            {
                **ADAPTIVE,
                "ppo__kl__target": 1.0,
                "ppo__kl__horizon": 9999.0,
                "ppo__kl__coef": 0.0,
            },
            "ppo.kl.coef (0.0): would stay 0",
        ),
        (
            {**ADAPTIVE, "ppo__kl__target": 1.0, "ppo__kl__horizon": 25.6},
            "ppo.kl.horizon (25.6): must be above 0.2 x the responses of a step (128), or the "
            "coefficient could turn negative. Set ppo.kl.horizon to 128 or more.",
        ),
        (
            {"ppo__correction__kind": "tis", "rollout__top_p": 0.9},
            "ppo.correction.kind (tis): compares the engine's log-probs with the learner's, "
            "but rollout.top_p (0.9) truncates the engine's distribution. Set rollout.top_p to "
            "1, or ppo.correction.kind to none.",
        ),
        (
            {"ppo__old_log_probs": "engine", "rollout__top_p": 0.9},
            "ppo.old_log_probs (engine): compares the engine's log-probs with the learner's, "
            "but rollout.top_p (0.9) truncates the engine's distribution. Set rollout.top_p to "
            "1, or ppo.old_log_probs to learner.",
        ),
        (
            {"ppo__old_log_probs": "engine", "ppo__correction__kind": "tis"},
            "ppo.correction.kind (tis): compares the learner's log-probs before the update "
            "with the engine's, but with ppo.old_log_probs: engine they are not computed, "
            "because the ratio in the loss corrects the difference. Set ppo.old_log_probs to "
            "learner, or ppo.correction.kind to none.",
        ),
        (
            {"ppo__correction__token_veto": 1e-4, "rollout__top_p": 0.9},
            "ppo.correction.token_veto (0.0001): compares the engine's log-probs with the "
            "learner's, but rollout.top_p (0.9) truncates the engine's distribution. Set "
            "rollout.top_p to 1, or ppo.correction.token_veto to null.",
        ),
        (
            {"ppo__correction__kind": "tis", "rollout__top_k": 20},
            "ppo.correction.kind (tis): compares the engine's log-probs with the learner's, "
            "but rollout.top_k (20) truncates the engine's distribution. Set rollout.top_k to "
            "null, or ppo.correction.kind to none.",
        ),
        (
            {"ppo__correction__kind": "mis", "rollout__min_p": 0.1},
            "ppo.correction.kind (mis): compares the engine's log-probs with the learner's, "
            "but rollout.min_p (0.1) truncates the engine's distribution. Set rollout.min_p to "
            "0, or ppo.correction.kind to none.",
        ),
        ({"rollout__top_k": 0}, "rollout.top_k (0): must be greater than or equal to 1."),
        ({"rollout__min_p": 1.1}, "rollout.min_p (1.1): must be less than or equal to 1."),
        ({"rollout__stop": ["Q:", ""]}, "rollout.stop.1 (''): "),
        (
            {"ppo__correction__kind": "tis", "ppo__correction__low": 0.5},
            "ppo.correction.low (0.5): is used by icepop, mis, not by ppo.correction.kind: "
            "tis. Remove it, or choose a kind that uses it.",
        ),
        (
            {"ppo__correction__kind": "sequence_tis", "ppo__correction__high": 2.0},
            "ppo.correction.high (2.0): is used by icepop, mis, not by ppo.correction.kind: "
            "sequence_tis. Set ppo.correction.cap instead, or choose a kind that uses it.",
        ),
        (
            {"ppo__correction__kind": "icepop", "ppo__correction__cap": 2.0},
            "ppo.correction.cap (2.0): is used by tis, sequence_tis, geometric_tis, mis, not by",
        ),
        ({"ppo__correction__cap": 2.0}, "ppo.correction.cap (2.0): is used by tis"),
        (
            {"ppo__correction__kind": "icepop", "ppo__correction__mask_ratio": "product"},
            "ppo.correction.mask_ratio (product): is used by mis, not by",
        ),
        (
            {"ppo__correction__token_veto": 1.0},
            "ppo.correction.token_veto (1.0): must be less than 1. Set ppo.correction.token_veto",
        ),
        (
            {"ppo__shaping__truncated_score": 0.0, "ppo__shaping__truncated_scale": 0.5},
            "ppo.shaping.truncated_score (0): replaces what ppo.shaping.truncated_scale (0.5)",
        ),
        (
            {"ppo__shaping__clip_low": 1.0, "ppo__shaping__clip_high": 0.0},
            "ppo.shaping.clip_low (1): must be below clip_high (0)",
        ),
        (
            {"ppo__shaping__overlong_buffer_tokens": 65},
            "ppo.shaping.overlong_buffer_tokens (65): must be at most rollout.max_new_tokens (64).",
        ),
        (
            {"ppo__filter__low": 1.0, "ppo__filter__high": 1.0},
            "ppo.filter.low (1): must be below high (1)",
        ),
        (
            {"ppo__advantage": "grpo", "ppo__critic_warmup_steps": 3},
            "ppo.critic_warmup_steps (3): ppo.advantage: grpo has no critic.",
        ),
        (
            {"ppo__advantage": "grpo", "ppo__bootstrap_truncated": True},
            "ppo.bootstrap_truncated (True): ppo.advantage: grpo has no critic.",
        ),
        ({"ppo__preset": "gppo"}, "ppo.preset ('gppo'): must be"),
        (
            {"ppo__preset": "grpo", "ppo__gae_lambda": 0.9},
            "ppo.gae_lambda (0.9): has no effect, because ppo.advantage: grpo has no critic. "
            "Remove ppo.gae_lambda, or set ppo.advantage to gae.",
        ),
        (
            {"ppo__advantage": "grpo", "ppo__gae_lambda": "adaptive"},
            "ppo.gae_lambda (adaptive): has no effect, because ppo.advantage: grpo has no critic. ",
        ),
        (
            {"ppo__advantage": "rloo", "ppo__critic_lambda": 1.0},
            "ppo.critic_lambda (1): has no effect, because ppo.advantage: rloo has no critic. ",
        ),
        (
            {"ppo__lambda_alpha": 0.1},
            "ppo.lambda_alpha (0.1): has no effect, because ppo.gae_lambda is not adaptive. "
            "Remove ppo.lambda_alpha, or set ppo.gae_lambda to adaptive.",
        ),
        ({"ppo__gae_lambda": "auto"}, "ppo.gae_lambda ('auto'): must be"),
        ({"ppo__gae_lambda": 1.5}, "ppo.gae_lambda (1.5): must be"),
        ({"ppo__advantage": "rloo", "ppo__value_clip": 0.5}, "ppo.value_clip (0.5): has no effect"),
        (
            {"ppo__policy_loss": "cispo", "ppo__clip_low": 0.1},
            "ppo.clip_low (0.1): has no effect, because ppo.policy_loss: cispo has no such clip.",
        ),
        (
            {"ppo__policy_loss": "vespo", "ppo__clip_low": 0.1},
            "ppo.clip_low (0.1): has no effect, because ppo.policy_loss: vespo has no such clip.",
        ),
        ({"ppo__policy_loss": "sapo", "ppo__clip_high": 0.1}, "ppo.clip_high (0.1): has no effect"),
        (
            {"ppo__policy_loss": "kl_cov", "ppo__clip_low": 0.1},
            "ppo.clip_low (0.1): has no effect",
        ),
        (
            {"ppo__policy_loss": "gmpo", "ppo__dual_clip": 3.0},
            "ppo.dual_clip (3): has no effect, because ppo.policy_loss: gmpo bounds",
        ),
        (
            {"ppo__cispo_low": 0.1},
            "ppo.cispo_low (0.1): has no effect, because ppo.policy_loss: ppo has no such "
            "clip. Remove ppo.cispo_low, or set ppo.policy_loss to cispo.",
        ),
        (
            {"ppo__policy_loss": "kl_cov", "ppo__covariance__low": 0.1},
            "ppo.covariance.low (0.1): has no effect, because ppo.policy_loss is kl_cov. Remove "
            "ppo.covariance.low, or set ppo.policy_loss to clip_cov.",
        ),
        (
            {"ppo__covariance__fraction": 0.1},
            "ppo.covariance.fraction (0.1): has no effect, because ppo.policy_loss is ppo. ",
        ),
        (
            {"ppo__policy_loss": "clip_cov", "ppo__covariance__penalty": 0.1},
            "ppo.covariance.penalty (0.1): has no effect, because ppo.policy_loss is clip_cov. ",
        ),
        (
            {"ppo__policy_loss": "clip_cov", "ppo__covariance__low": 5.0},
            "ppo.covariance.low (5): must be below high (5)",
        ),
        (
            {"ppo__nll_min_score": 0.5},
            "ppo.nll_min_score (0.5): has no effect, because ppo.nll_coef is 0. Remove "
            "ppo.nll_min_score, or set ppo.nll_coef.",
        ),
        (
            {"ppo__entropy_delta": 0.5},
            "ppo.entropy_delta (0.5): has no effect, because ppo.entropy_target is null. ",
        ),
        ({"ppo__entropy_target": 0.0}, "ppo.entropy_target (0.0): must be greater than 0."),
        ({"ppo__advantage_clip": 0.0}, "ppo.advantage_clip (0.0): must be greater than 0."),
        (
            {"ppo__kl__importance_weights": True},
            "ppo.kl.importance_weights (True): has no effect, because ppo.kl.placement is "
            "reward. Remove ppo.kl.importance_weights, or set ppo.kl.placement to loss.",
        ),
        (
            {
                **{"ppo__kl__placement": "loss", "ppo__kl__estimator": "k2"},
                **{"ppo__kl__coef": 0.0, "ppo__kl__importance_weights": True},
            },
            "ppo.kl.importance_weights (True): has no effect, because ppo.kl.coef is 0. Remove "
            "ppo.kl.importance_weights, or set ppo.kl.coef above 0.",
        ),
        (
            {"ppo__policy_loss": "kl_cov", "ppo__minibatch_size": 128},
            "ppo.policy_loss (kl_cov): penalises changes of log-probs between the updates of a "
            "step, but a step has only one update (ppo.num_epochs 1, ppo.minibatch_size 128 of "
            "128 responses), and before it nothing has changed. Set ppo.minibatch_size lower, "
            "ppo.num_epochs to 2 or more, or ppo.policy_loss to clip_cov.",
        ),
        (
            {"ppo__discount_by": "turn", "ppo__advantage": "grpo"},
            "ppo.discount_by (turn): has no effect, because ppo.gamma is 1. Remove "
            "ppo.discount_by, or set ppo.gamma below 1.",
        ),
        (
            {"ppo__discount_by": "turn", "ppo__gae_lambda": 1.0},
            (
                "ppo.discount_by (turn): has no effect, because ppo.gamma is 1, and so are the "
                "lambdas. "
            ),
        ),
        (
            {"ppo__discount_by": "turn", "ppo__advantage": "own.py:mine", "ppo__gamma": 0.9},
            (
                "ppo.discount_by (turn): has no effect, because ppo.advantage: own.py:mine "
                "discounts by itself"
            ),
        ),
        (
            {"ppo__discount_by": "turn", "ppo__gae_lambda": "adaptive"},
            "ppo.gae_lambda (adaptive): depends on the number of tokens of a response, but "
            "ppo.discount_by: turn applies it to turns. Set ppo.gae_lambda to a number, or "
            "ppo.discount_by to token.",
        ),
        (
            {"ppo__mask_truncated": True, "ppo__bootstrap_truncated": True},
            "ppo.bootstrap_truncated (True): has no effect, because ppo.mask_truncated keeps",
        ),
        (
            {"ppo__preset": "vapo", "num_steps": 50},
            "ppo.critic_warmup_steps (50): leaves no step of num_steps (50) to the policy. Set "
            "num_steps to 51 or more, ppo.critic_warmup_steps lower, or learner.save_critic to "
            "true for a run that trains only its critic.",
        ),
        (
            {"ppo__filter__low": 0.1},
            "ppo.filter.low (0.1): has no effect, because ppo.filter.enabled is false.",
        ),
        (
            {"ppo__preset": "dapo", "ppo__filter__enabled": False, "ppo__filter__max_refills": 3},
            "ppo.filter.max_refills (3): has no effect",
        ),
        (
            {"ppo__shaping__overlong_factor": 0.5},
            "ppo.shaping.overlong_factor (0.5): has no effect, because "
            "ppo.shaping.overlong_buffer_tokens is null. Remove",
        ),
        (
            {"ppo__kl__coef": float("inf")},
            "ppo.kl.coef (inf): must be a finite number. Set ppo.kl.coef to an allowed value.",
        ),
        ({"ppo__shaping__clip_high": float("nan")}, "ppo.shaping.clip_high (nan): must be a fin"),
        ({"learner__policy_lr": float("inf")}, "learner.policy_lr (inf): must be a finite number."),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(keys, words):
    assert refused(**keys).startswith(f"run.yaml: {words}")


def test_a_penalty_on_change_is_taken_where_something_can_have_changed():
    kl_cov = {"ppo__policy_loss": "kl_cov", "ppo__minibatch_size": 128}
    for more in ({"ppo__num_epochs": 2}, {"ppo__old_log_probs": "engine"}):
        assert PPOConfig.parse(with_keys(**kl_cov, **more)).ppo.policy_loss == "kl_cov"
    clip_cov = kl_cov | {"ppo__policy_loss": "clip_cov"}
    assert PPOConfig.parse(with_keys(**clip_cov)).ppo.policy_loss == "clip_cov"


def test_a_turn_counts_where_a_lambda_of_the_critic_alone_is_below_one():
    section = PPOSection(discount_by="turn", gae_lambda=1.0, critic_lambda=0.9)
    assert section.discount_by == "turn"


# Presets


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resolved_preset_shows_every_value_and_loads_as_itself(preset):
    config = PPOConfig.parse(with_keys(ppo__preset=preset, num_steps=60))
    resolved = config.model_dump(mode="json")
    assert resolved["ppo"]["preset"] == preset
    assert PPOConfig.parse(resolved) == config


def test_what_a_preset_set_and_another_key_idles_is_no_mistake():
    for keys in (
        {"preset": "ppo", "advantage": "grpo"},
        {"preset": "gspo", "policy_loss": "cispo"},
    ):
        section = PPOSection.model_validate(keys)
        assert PPOSection.model_validate(section.model_dump()) == section


def test_the_presets_are_the_ones_that_can_be_chosen():
    assert set(PRESETS) == {
        "ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "dapo", "gspo",
        "gmpo", "cispo", "sapo", "vapo", "opo", "pass_at_k", "dppo", "vespo",
    }  # fmt: skip


KL_FREE = ("k1", "reward", 0.0)


@pytest.mark.parametrize(
    ("preset", "advantage", "policy_loss", "aggregation", "clips", "kl"),
    [
        ("ppo", "gae", "ppo", "token_mean", (0.2, 0.2), ("k1", "reward", 0.02)),
        ("grpo", "grpo", "ppo", "sequence_mean", (0.2, 0.2), ("k3", "loss", 0.04)),
        ("dr_grpo", "dr_grpo", "ppo", "constant", (0.2, 0.2), KL_FREE),
        ("rloo", "rloo", "ppo", "constant", (0.2, 0.2), ("k1", "reward", 0.01)),
        ("reinforce++", "reinforce", "ppo", "token_mean", (0.2, 0.2), ("k1", "reward", 0.01)),
        ("dapo", "grpo", "ppo", "token_mean", (0.2, 0.28), KL_FREE),
        ("gspo", "grpo", "gspo", "sequence_mean", (3e-4, 4e-4), KL_FREE),
        (
            *("reinforce++_baseline", "reinforce_baseline", "ppo", "token_mean"),
            *((0.2, 0.2), ("k2", "loss", 0.01)),
        ),
        (
            *("gmpo", "grpo", "gmpo", "sequence_mean"),
            *((1 - math.exp(-0.4), math.expm1(0.4)), KL_FREE),
        ),
        ("cispo", "grpo", "cispo", "token_mean", (0.2, 4.0), KL_FREE),
        ("sapo", "grpo", "sapo", "sequence_mean", (0.2, 0.2), KL_FREE),
        ("vapo", "gae", "ppo", "token_mean", (0.2, 0.28), KL_FREE),
        ("opo", "opo", "ppo", "token_mean", (0.2, 0.2), KL_FREE),
        ("pass_at_k", "pass_at_k", "ppo", "token_mean", (0.2, 0.28), KL_FREE),
        ("dppo", "dr_grpo", "dppo_tv", "constant", (0.15, 0.15), KL_FREE),
        ("vespo", "grpo", "vespo", "token_mean", (0.2, 0.2), KL_FREE),
    ],
)
def test_a_preset_is_the_published_combination_and_nothing_else(
    preset, advantage, policy_loss, aggregation, clips, kl
):
    estimator, placement, coef = kl
    published = {
        "preset": preset,
        "advantage": advantage,
        "policy_loss": policy_loss,
        "aggregation": aggregation,
        "clip_low": clips[0],
        "clip_high": clips[1],
        "kl.estimator": estimator,
        "kl.placement": placement,
        "kl.coef": coef,
    }
    if preset in ("dapo", "cispo"):
        published |= {"filter.enabled": True, "shaping.overlong_buffer_tokens": "auto"}
    if preset == "vapo":
        published |= {"gae_lambda": "adaptive", "critic_lambda": 1.0, "critic_warmup_steps": 50}
        published |= {"nll_coef": 0.1}
    if preset == "dppo":
        published |= {"old_log_probs": "engine"}
    usual = flatten(PPOSection().model_dump())
    assert usual["gamma"] == 1.0
    assert (usual["gae_lambda"], usual["value_clip"]) == (0.95, 0.2)
    assert (usual["lambda_alpha"], usual["nll_min_score"]) == (0.05, 1.0)
    assert flatten(PPOSection(preset=preset).model_dump()) == usual | published


def test_other_keys_win_over_the_preset_and_leave_the_rest_of_it():
    config = PPOConfig.parse(with_keys(ppo__preset="grpo", ppo__kl__coef=0.1, ppo__clip_high=0.5))
    assert (config.ppo.kl.coef, config.ppo.clip_high) == (0.1, 0.5)
    assert (config.ppo.kl.estimator, config.ppo.kl.placement) == ("k3", "loss")
    section = PPOSection(preset="grpo", kl=PPOSection().kl.__class__(coef=0.5))
    assert (section.kl.coef, section.kl.estimator) == (0.5, "k3")


def test_a_warming_critic_learns_by_lambda_one_unless_its_own_is_set():
    section = PPOSection(critic_warmup_steps=3)
    assert [section.critic_lambda_at(step) for step in (1, 3, 4)] == [1.0, 1.0, None]
    section = PPOSection(critic_warmup_steps=3, critic_lambda=0.9)
    assert [section.critic_lambda_at(step) for step in (1, 3, 4)] == [0.9, 0.9, 0.9]


def test_auto_is_a_fifth_of_the_longest_response():
    shaping = PPOSection(preset="dapo").shaping
    assert shaping.overlong_tokens(20480) == 4096
    assert shaping.overlong_tokens(4) == 1
    assert PPOSection().shaping.overlong_tokens(64) is None
