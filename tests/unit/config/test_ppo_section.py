"""The `ppo` section: what is refused with which remedy, and the published presets."""

import math
import re
from typing import Literal, get_args, get_origin

import pytest

from raypo.config import PRESETS, PPOConfig, PPOSection, flatten
from raypo.config.ppo_section import ESTIMATORS, Preset
from raypo.ppo.surrogates import SURROGATES
from tests.unit.config.test_run_config import refused, with_keys

ADAPTIVE = {"ppo__kl__controller": "adaptive"}


def choices(section, key):
    """The names that a key takes, beside a function's path where it takes one."""
    annotation = section.model_fields[key].annotation
    named = [part for part in get_args(annotation) if get_origin(part) is Literal]
    return set(get_args(named[0] if named else annotation))


def test_the_choices_are_those_that_the_mathematics_has():
    fields = PPOSection().__class__
    assert choices(fields, "advantage") == set(ESTIMATORS)
    assert choices(fields, "policy_loss") == set(SURROGATES)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"ppo__advantage": "rloo", "rollout__samples_per_prompt": 1},
            "rollout.samples_per_prompt (1): ",
        ),
        (
            {"ppo__advantage": "pass_at_k", "ppo__pass_k": 9, "rollout__samples_per_prompt": 8},
            "ppo.pass_k (9): ",
        ),
        ({"ppo__advantage": "maxrl", "ppo__kl__coef": 0.1}, "ppo.kl.placement (reward): "),
        (
            {
                "ppo__advantage": "maxrl",
                "ppo__kl__coef": 0.0,
                "ppo__shaping__overlong_buffer_tokens": 5,
            },
            "ppo.shaping.overlong_buffer_tokens (5): ",
        ),
        ({"ppo__advantage": "gdpo", "ppo__kl__coef": 0.0}, "ppo.part_weights (None): "),
        (
            {"ppo__advantage": "gdpo", "ppo__part_weights": {"right": 1.0}},
            "ppo.kl.placement (reward): ",
        ),
        (
            {
                **{"ppo__advantage": "gdpo", "ppo__part_weights": {"model_0": 1.0, "model_1": 1.0}},
                **{"ppo__kl__coef": 0.0, "model__reward": ["a", {"path": "b", "weight": -1}]},
            },
            "model.reward.1.weight (-1): ",
        ),
        ({"ppo__advantage": "gigpo", "ppo__kl__coef": 0.0}, "ppo.advantage (gigpo): "),
        ({"ppo__advantage": "gigpo", "ppo__kl__coef": 0.1}, "ppo.kl.placement (reward): "),
        (
            {"ppo__filter__enabled": True, "rollout__samples_per_prompt": 1},
            "rollout.samples_per_prompt (1): ",
        ),
        ({"ppo__kl__placement": "loss"}, "ppo.kl.estimator (k1): "),
        ({"ppo__kl__estimator": "k2"}, "ppo.kl.estimator (k2): "),
        ({"ppo__preset": "grpo", "ppo__kl__placement": "reward"}, "ppo.kl.estimator (k3): "),
        (ADAPTIVE, "ppo.kl.target (null): "),
        ({**ADAPTIVE, "ppo__kl__target": 1.0}, "ppo.kl.horizon (null): "),
        (
            {
                **ADAPTIVE,
                "ppo__kl__target": 1.0,
                "ppo__kl__horizon": 9999.0,
                "ppo__kl__coef": 0.0,
            },
            "ppo.kl.coef (0.0): ",
        ),
        ({**ADAPTIVE, "ppo__kl__target": 1.0, "ppo__kl__horizon": 25.6}, "ppo.kl.horizon (25.6): "),
        ({"ppo__correction__kind": "tis", "rollout__top_p": 0.9}, "ppo.correction.kind (tis): "),
        ({"ppo__old_log_probs": "engine", "rollout__top_p": 0.9}, "ppo.old_log_probs (engine): "),
        (
            {"ppo__old_log_probs": "engine", "ppo__correction__kind": "tis"},
            "ppo.correction.kind (tis): ",
        ),
        (
            {"ppo__correction__token_veto": 1e-4, "rollout__top_p": 0.9},
            "ppo.correction.token_veto (0.0001): ",
        ),
        (
            {"ppo__old_log_probs": "engine", "ppo__top_entropy_fraction": 0.2},
            "ppo.top_entropy_fraction (0.2): ",
        ),
        (
            {"ppo__correction__off_policy_mask": 0.5, "rollout__top_p": 0.9},
            "ppo.correction.off_policy_mask (0.5): ",
        ),
        ({"ppo__correction__kind": "tis", "rollout__top_k": 20}, "ppo.correction.kind (tis): "),
        ({"ppo__correction__kind": "mis", "rollout__min_p": 0.1}, "ppo.correction.kind (mis): "),
        (
            {"model__head_dtype": "float32", "model__lora": {"target_modules": ["lm_head"]}},
            "model.lora.target_modules (lm_head): ",
        ),
        (
            {"rollout__engine__quantization": "fp8", "model__dtype": "bfloat16"},
            "rollout.engine.quantization (fp8): engine and learner then give other",
        ),
        (
            {"rollout__engine__quantization": "fp8", "ppo__correction__kind": "tis"},
            "rollout.engine.quantization (fp8): vLLM quantises bfloat16 weights",
        ),
        (
            {"rollout__engine__kv_cache_dtype": "fp8", "model__dtype": "bfloat16"},
            "rollout.engine.kv_cache_dtype (fp8): engine and learner then give other",
        ),
        (
            {"rollout__engine__kv_cache_dtype": "fp8", "ppo__correction__kind": "tis"},
            "rollout.engine.kv_cache_dtype (fp8): vLLM quantises bfloat16 weights",
        ),
        (
            {"rollout__engine__speculation": {"kind": "model"}},
            "rollout.engine.speculation.model (None): ",
        ),
        (
            {"rollout__engine__speculation": {"kind": "ngram"}, "rollout__top_p": 0.9},
            "rollout.top_p (0.9): ",
        ),
        (
            {"rollout__engine__speculation": {"kind": "ngram"}, "rollout__router_replay": "engine"},
            "rollout.router_replay (engine): is untested, and so refused, with ",
        ),
        (
            {
                "rollout__engine__speculation": {"kind": "ngram"},
                "model__lora": {"rank": 4, "push": "adapter"},
            },
            "rollout.engine.speculation.kind (ngram): is untested, and so refused, with ",
        ),
        (
            {"ppo__shaping__clip_low": 1.0, "ppo__shaping__clip_high": 0.0},
            "ppo.shaping.clip_low (1): ",
        ),
        ({"ppo__shaping__overlong_buffer_tokens": 65}, "ppo.shaping.overlong_buffer_tokens (65): "),
        ({"ppo__filter__low": 1.0, "ppo__filter__high": 1.0}, "ppo.filter.low (1): "),
        (
            {"ppo__advantage": "grpo", "ppo__critic_warmup_steps": 3},
            "ppo.critic_warmup_steps (3): ",
        ),
        ({"ppo__policy_loss": "clip_cov", "ppo__covariance__low": 5.0}, "ppo.covariance.low (5): "),
        ({"ppo__policy_loss": "kl_cov", "ppo__minibatch_size": 128}, "ppo.policy_loss (kl_cov): "),
        ({"ppo__discount_by": "turn", "ppo__advantage": "grpo"}, "ppo.discount_by (turn): "),
        ({"ppo__discount_by": "turn", "ppo__gae_lambda": 1.0}, "ppo.discount_by (turn): "),
        (
            {"ppo__discount_by": "turn", "ppo__gae_lambda": "adaptive"},
            "ppo.gae_lambda (adaptive): ",
        ),
        ({"ppo__preset": "vapo", "num_steps": 50}, "ppo.critic_warmup_steps (50): "),
        ({"ppo__kl__coef": float("inf")}, "ppo.kl.coef (inf): "),
        ({"ppo__shaping__clip_high": float("nan")}, "ppo.shaping.clip_high (nan): "),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(keys, words):
    message = refused(**keys)
    assert message.startswith(f"run.yaml: {words}")
    assert re.search(r"\. (Set|Remove|Lower|Did you mean) .*[.?]$", message)


def test_ratios_to_the_engine_need_no_correction_of_fp8():
    keys = {"rollout__engine__quantization": "fp8", "model__dtype": "bfloat16"}
    config = PPOConfig.parse(with_keys(**keys, ppo__old_log_probs="engine"))
    assert config.rollout.engine.quantization == "fp8"


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
        config = PPOConfig.parse(with_keys(ppo=keys))
        assert PPOConfig.parse(config.model_dump()) == config


KL_FREE = ("k1", "reward", 0.0)
CLIPS = (0.2, 0.2)
PUBLISHED = {
    "ppo": ("gae", "ppo", "token_mean", CLIPS, ("k1", "reward", 0.02)),
    "grpo": ("grpo", "ppo", "sequence_mean", CLIPS, ("k3", "loss", 0.04)),
    "dr_grpo": ("dr_grpo", "ppo", "constant", CLIPS, KL_FREE),
    "rloo": ("rloo", "ppo", "constant", CLIPS, ("k1", "reward", 0.01)),
    "reinforce++": ("reinforce", "ppo", "token_mean", CLIPS, ("k1", "reward", 0.01)),
    "reinforce++_baseline": (
        *("reinforce_baseline", "ppo", "token_mean", CLIPS, ("k2", "loss", 0.01)),
    ),
    "dapo": ("grpo", "ppo", "token_mean", (0.2, 0.28), KL_FREE),
    "gspo": ("grpo", "gspo", "sequence_mean", (3e-4, 4e-4), KL_FREE),
    "gmpo": ("grpo", "gmpo", "sequence_mean", (1 - math.exp(-0.4), math.expm1(0.4)), KL_FREE),
    "cispo": ("grpo", "cispo", "token_mean", (0.2, 4.0), KL_FREE),
    "sapo": ("grpo", "sapo", "sequence_mean", CLIPS, KL_FREE),
    "vapo": ("gae", "ppo", "token_mean", (0.2, 0.28), KL_FREE),
    "opo": ("opo", "ppo", "token_mean", CLIPS, KL_FREE),
    "pass_at_k": ("pass_at_k", "ppo", "token_mean", (0.2, 0.28), KL_FREE),
    "dppo": ("dr_grpo", "dppo_tv", "constant", (0.15, 0.15), KL_FREE),
    "vespo": ("grpo", "vespo", "token_mean", CLIPS, KL_FREE),
}


@pytest.mark.parametrize("preset", get_args(Preset))
def test_a_preset_is_the_published_combination_and_nothing_else(preset):
    advantage, policy_loss, aggregation, clips, kl = PUBLISHED[preset]
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
    assert (usual["num_epochs"], usual["entropy_coef"], usual["pass_k"]) == (1, 0.0, 4)
    assert usual["shaping.overlong_factor"] == 1.0
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
