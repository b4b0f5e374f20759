"""Names of other projects: each leads to keys that exist, and messages say their unit."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from raypo.config import ConfigError, DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from raypo.config.fields import known_keys
from raypo.config.migration import PROJECTS, counterparts, rows_of

ROOTS = (PPOConfig, SFTConfig, DPOConfig, RewardModelConfig)


def message(key: str, kind: Any = PPOConfig) -> str:
    base = {"name": "x", "model": {"policy": "m", "lora": {}}, "data": {"prompts": "p.jsonl"}}
    tree: Any = OmegaConf.create(base)
    OmegaConf.update(tree, key, 1, force_add=True)
    with pytest.raises(ConfigError) as error:
        kind.parse(OmegaConf.to_container(tree))
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "ours", "unit"),
    [
        ("num_generations", "rollout.samples_per_prompt", "Responses per prompt"),
        ("generation_batch_size", "rollout.prompts_per_step", "divide by `num_generations`"),
        ("per_device_train_batch_size", "ppo.minibatch_size", "per device"),
        (
            "ppo_mini_batch_size",
            "ppo.minibatch_size",
            "verl counts prompts, raypo counts responses",
        ),
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt", "Responses per prompt"),
        ("model.lora.r", "model.lora.rank", ""),
        ("lora_alpha", "model.lora.alpha", "alpha / rank"),
        ("epsilon", "ppo.clip_low and ppo.clip_high", ""),
    ],
)
def test_a_key_of_another_project_names_ours_and_its_unit(key: str, ours: str, unit: str):
    said = message(key)
    assert f"{key}: there is no such key. Set {ours} instead" in said
    assert unit in said


def test_the_recipe_decides_which_key_is_meant():
    assert "Set dpo.beta instead" in message("beta", DPOConfig)
    assert "Set learner.batch_size instead" in message("per_device_train_batch_size", SFTConfig)


def test_a_key_without_a_counterpart_says_why():
    assert "use_vllm: there is no such key. Remove it (use_vllm of TRL). Resp" in message(
        "use_vllm"
    )
    assert "no dropout" in message("lora_dropout")


def test_every_key_of_a_foreign_section_is_explained():
    foreign = {"actor_rollout_ref": {"actor": {"clip_ratio_c": 3.0}, "rollout": {"n": 8}}}
    with pytest.raises(ConfigError) as error:
        PPOConfig.parse({"name": "x", **foreign})
    said = str(error.value)
    assert "actor_rollout_ref.actor.clip_ratio_c: there is no such key. Set ppo.dual" in said
    assert "actor_rollout_ref.rollout.n: there is no such key. Set rollout.samp" in said


def test_every_row_leads_to_keys_that_a_run_file_has():
    accepted = {key for root in ROOTS for key in known_keys(root)}
    named = {key for row in counterparts() for keys in row.keys for key in keys}
    assert named - accepted == set()


def test_no_name_of_another_project_is_a_key_of_ours_with_another_meaning():
    """A run file that uses such a name would be accepted in silence."""
    accepted = {key for root in ROOTS for key in known_keys(root)}
    same = {
        (name, key)
        for row in counterparts()
        for name in row.names
        for keys in row.keys
        for key in keys
        if name in accepted and name != key
    }
    assert same == set()


def test_rows_without_a_key_have_a_reason_and_names_are_unique_in_a_project():
    for project in PROJECTS:
        names = [name for row in rows_of(project) for name in row.names]
        assert len(names) == len(set(names))
    assert all(row.keys or row.note for row in counterparts())
