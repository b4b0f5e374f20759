"""`raypo init` gives what the hand-written ports have, and names what it leaves out."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypo.config import ConfigError, PPOConfig
from raypo.config.presets import PRESETS
from raypo.config.recipe_config import RECIPES
from raypo.translation.foreign_arguments import defaults_of
from raypo.translation.foreign_settings import RECIPES as RECIPES_OF_TRL
from raypo.translation.foreign_settings import read_source, trl_source
from raypo.translation.run_file import run_file, translate

PORTS = Path(__file__).parents[3] / "examples/ports"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GROUPS = f"algorithm.adv_estimator=grpo {ROLLOUT}.n=8"


def translated(command: str) -> str:
    return run_file(translate(read_source(command)))


def trl(kind: str = "GRPOConfig", without: tuple[str, ...] = (), **fields: Any) -> str:
    """Translate the JSON that a config of TRL with these fields writes, made by one process."""
    values: dict[str, Any] = defaults_of("TRL", kind) | {"output_dir": "o/r"} | fields
    if kind in ("GRPOConfig", "RLOOConfig") and values["generation_batch_size"] is None:
        values["steps_per_generation"] = (
            values["steps_per_generation"] or values["gradient_accumulation_steps"]
        )
        values["generation_batch_size"] = (
            values["per_device_train_batch_size"] * values["steps_per_generation"]
        )
    values = {name: value for name, value in values.items() if name not in without}
    return run_file(translate(trl_source(values, "args.json")))


def todo(text: str) -> set[str]:
    """Keys that are TODO."""
    part = text.partition("TODO below")[2].partition("# Changes what")[0]
    return set(re.findall(r"^# - ([\w.]+):", part, re.MULTILINE))


def notes(text: str) -> str:
    return (
        text.partition("# Changes what")[2]
        .partition("# Concerns memory")[0]
        .partition("# Needs")[0]
    )


def config_of(text: str, tmp_path: Path, **values: str) -> Any:
    """The config, with values for the keys that are TODO."""
    usual = {"num_steps": 40, "lr_warmup_steps": 1, "max_prompt_tokens": 8, "max_new_tokens": 6}
    usual |= {"policy": "m", "prompts": "p.jsonl", "name": "n", "function": "f.py:f", "coef": 0.1}
    usual |= {"aggregation": "token_mean", "gae_lambda": 1, "value_clip": 0.5}
    usual |= {"part_weights": "{a: 1}", "batch_size": 8, "prompts_per_step": 8, "kind": "none"}
    usual |= values
    text = re.sub(r"^(\s*(\w+)): TODO", lambda m: f"{m[1]}: {usual[m[2]]}", text, flags=re.M)
    (tmp_path / "run.yaml").write_text(text)
    recipe = re.search(r"^recipe: (\w+)", text, re.MULTILINE)
    return RECIPES[recipe[1] if recipe else "ppo"].load(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("file", "by_hand"),
    [
        # The port uses the preset and its clip; verl's dual clip has no effect there.
        ("verl_grpo.yaml", {"ppo.preset", "ppo.dual_clip", "data.label_key", "eval.prompts"}),
        ("openrlhf_ppo.yaml", {"name"}),
    ],
)
def test_a_command_becomes_the_port_that_was_written_by_hand(
    file: str, by_hand: set[str], tmp_path: Path
):
    lines = (PORTS / file).read_text().splitlines()
    command = "\n".join(line.removeprefix("#").strip() for line in lines[2:] if line[0] == "#")
    text = translated(command)
    config = config_of(text, tmp_path, num_steps="10")
    keys = {each.partition(":")[0] for each in config.differences(PPOConfig.load(PORTS / file))}
    assert keys == by_hand | {"data.prompts", "reward.function"}
    assert "num_steps" in todo(text), "the rows, and so the epochs, are not known"


def test_a_config_of_trl_becomes_its_port(tmp_path: Path):
    text = trl(
        **{"output_dir": "runs/ported-trl", "num_generations": 4, "beta": 0.04, "max_steps": 10},
        **{"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4},
        **{"max_completion_length": 6, "learning_rate": 3e-4},
    )
    config = config_of(text, tmp_path)
    assert (config.name, config.storage_path) == ("ported-trl", "runs")
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (32, 4)
    assert (config.ppo.minibatch_size, config.num_steps) == (128, 10)
    assert (config.ppo.preset, config.ppo.kl.coef) == ("grpo", 0.04)
    assert config.ppo.kl.importance_weights, "TRL's default, use_bias_correction_kl"
    assert config.learner.policy_lr == 3e-4
    assert todo(text) == {"model.policy", "data.prompts", "reward.function", *LENGTH}
    assert "TRL started on more processes" in notes(text)


LENGTH = {"data.max_prompt_tokens"}


def test_rloo_of_trl(tmp_path: Path):
    batch: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_steps": 9,
    }
    text = trl("RLOOConfig", **batch, max_completion_length=500, reward_clip_range=[-1.0, 2.0])
    config = config_of(text, tmp_path)
    ppo = config.ppo
    assert (ppo.advantage, ppo.policy_loss, ppo.aggregation) == ("rloo", "ppo", "constant")
    assert (ppo.kl.coef, ppo.kl.estimator, ppo.kl.placement) == (0.05, "k1", "reward")
    assert (ppo.shaping.clip_low, ppo.shaping.clip_high) == (-1.0, 2.0)
    assert config.learner.max_grad_norm == 1.0 / 500, "raypo's loss is divided by 500"
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (16, 2)
    assert not {key for key in todo(text) if key.startswith("ppo.")}
    # Only from the second update on, ratios are not 1.
    assert "ppo.policy_loss" in todo(trl("RLOOConfig", **batch, num_iterations=2))
    assert "ppo.advantage" in todo(trl("RLOOConfig", **batch, normalize_advantages=True))


@pytest.mark.parametrize("kind", RECIPES_OF_TRL)
def test_fields_at_their_defaults_are_not_reported(kind: str):
    text = trl(kind)
    names = set(defaults_of("TRL", kind))
    names -= {"generation_batch_size", "steps_per_generation", "max_length"}  # of this config
    reported = re.findall(r"^# - (\w+) \(", text, re.MULTILINE)
    assert not names & set(reported)
    assert "# Concerns memory" not in text


@pytest.mark.parametrize("kind", RECIPES_OF_TRL)
def test_every_other_field_is_used_or_named(kind: str):
    """A value that no field has by default leaves a trace in the file, or is refused."""
    skipped = {"hub_token", "trackio_space_id", "pad_token", "eos_token", "accelerator_config"}
    skipped |= {"steps_per_generation", "pad_to_multiple_of", "logging_steps"}
    for name, default in defaults_of("TRL", kind).items():
        if name in skipped or isinstance(default, list):
            continue
        value: Any = "odd" if default is None or isinstance(default, str) else default + 3
        value = (not default) if isinstance(default, bool) else value
        if name in ("learning_rate", "adam_beta1", "adam_beta2", "top_p", "epsilon", "min_p"):
            value = 0.125
        if name in ("generation_batch_size", "vllm_max_model_length", "eval_steps", "top_k"):
            value = 4096
        if default is None and name.startswith(("lr_scheduler_kw", "vllm_importance", "epsilon_h")):
            value = {"a": 1} if "kwargs" in name else 7.0
        if default is None and name in ("max_length", "delta"):
            value = 3
        try:
            text = trl(kind, **{name: value})
        except ConfigError as error:
            assert name in str(error)  # noqa: PT017 - some are refused
            continue
        assert re.search(rf"\b{name}\b(?!'s default)", text), f"{name} ({value}) left no trace"


@pytest.mark.parametrize("kind", RECIPES_OF_TRL)
def test_the_defaults_are_those_of_the_installed_trl(kind: str):
    """If this fails, a new version is installed: `python -m scripts.foreign_defaults`."""
    module = pytest.importorskip("trl", reason="TRL is not installed")
    from scripts.foreign_defaults import defaults_of_trl

    table, ours = defaults_of_trl(), defaults_of("TRL", kind)
    installed = table["common"] | table[kind]
    assert {each.name for each in dataclasses.fields(getattr(module, kind))} == installed.keys()
    # An older transformers has fewer fields.
    assert {name: value for name, value in installed.items() if ours.get(name, ...) != value} == {}


def test_masks_and_the_head_of_trl(tmp_path: Path):
    config = config_of(
        trl(
            use_vllm=True,
            off_policy_mask_threshold=0.5,
            top_entropy_quantile=0.2,
            cast_lm_head_to_fp32=True,
        ),
        tmp_path,
    )
    assert config.ppo.correction.off_policy_mask == 0.5
    assert config.ppo.top_entropy_fraction == 0.2
    assert config.model.head_dtype == "float32"


def test_the_correction_of_trl_is_on_by_default(tmp_path: Path):
    correction = config_of(trl(use_vllm=True), tmp_path).ppo.correction
    assert (correction.kind, correction.cap) == ("sequence_tis", 3.0)
    assert "vllm_importance_sampling_mode (sequence_mask): " in notes(trl(use_vllm=True))
    exact = trl(use_vllm=True, vllm_importance_sampling_mode="token_mask")
    correction = config_of(exact, tmp_path).ppo.correction
    assert (correction.kind, correction.low, correction.high) == ("icepop", 0.0, 3.0)
    off = trl(use_vllm=True, vllm_importance_sampling_correction=False)
    assert config_of(off, tmp_path).ppo.correction.kind == "none"
    old = trl(use_vllm=True, without=("vllm_importance_sampling_correction",))
    assert config_of(old, tmp_path).ppo.correction.kind == "none"


@pytest.mark.parametrize(
    ("given", "loss", "aggregation", "high"),
    [
        ({}, "ppo", "token_mean", 0.2),
        ({"loss_type": "dapo", "epsilon_high": 0.28}, "ppo", "token_mean", 0.28),
        ({"loss_type": "sapo"}, "sapo", "sequence_mean", 0.2),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", "token_mean", 4.0),
        ({"importance_sampling_level": "sequence"}, "gspo", "token_mean", 0.2),
    ],
)
def test_a_loss_of_trl_brings_nothing_else_of_its_paper(
    given: dict[str, Any], loss: str, aggregation: str, high: float, tmp_path: Path
):
    ppo = config_of(trl(**given), tmp_path).ppo
    assert (ppo.preset, ppo.policy_loss, ppo.aggregation) == ("grpo", loss, aggregation)
    assert (ppo.clip_high, ppo.kl.coef, ppo.kl.placement) == (high, 0.0, "loss")
    assert not ppo.filter.enabled
    assert ppo.shaping.overlong_buffer_tokens is None


def test_what_trl_has_and_raypo_lacks_is_todo():
    assert "ppo.advantage" in todo(trl(scale_rewards="batch"))
    assert {"ppo.aggregation", "ppo.policy_loss"} <= todo(trl(loss_type="luspo"))
    assert "learner.lr_schedule" in todo(trl(lr_scheduler_type="polynomial"))
    assert "ppo.aggregation" in todo(trl(without=("loss_type",))), "another version's loss"
    assert "ppo.part_weights" in todo(trl(multi_objective_aggregation="normalize_then_sum"))
    assert "advantage: gdpo #" in trl(multi_objective_aggregation="normalize_then_sum")
    with pytest.raises(ConfigError, match=r"loss_type \(dft\): "):
        trl("SFTConfig", loss_type="dft")


def test_prompts_of_trl_have_no_limit_and_none_is_skipped():
    assert "  too_long: error #" in trl()
    assert "  max_prompt_tokens: 3584 #" in trl(vllm_max_model_length=4096)
    text = trl(vllm_max_model_length=4096, max_completion_length=96)
    assert "  max_prompt_tokens: 4000 #" in text
    assert "  max_new_tokens: 96 # max_completion_length\n" in text
    text = trl(max_prompt_length=100)
    assert "  max_prompt_tokens: 100 #" in text
    assert "max_prompt_length (100): TRL cuts longer prompts" in notes(text)


def test_batches_of_trl_count_the_processes_of_the_config(tmp_path: Path):
    text = trl(generation_batch_size=256, steps_per_generation=4, max_steps=8)  # 8 x 4 x 8
    config = config_of(text, tmp_path)
    assert (config.rollout.prompts_per_step, config.ppo.minibatch_size) == (32, 64)
    assert config.num_steps == 2
    assert "of 8 processes in this config" in text
    text = trl(num_generations=16, per_device_train_batch_size=1, gradient_accumulation_steps=12)
    assert "rollout.prompts_per_step" in todo(text)
    assert "learner.batch_size" in todo(trl("SFTConfig"))


def test_steps_of_trl_are_steps_of_raypo(tmp_path: Path):
    given: Any = {"max_steps": 64, "save_steps": 20, "eval_strategy": "steps", "eval_steps": 5}
    config = config_of(trl(**given, warmup_steps=0.1), tmp_path)
    assert (config.checkpoint.every, config.learner.lr_warmup_steps) == (20, 7)
    text = trl(**given, num_iterations=2, warmup_steps=8)
    config = config_of(text, tmp_path)
    assert (config.num_steps, config.learner.lr_warmup_steps) == (32, 4)


@pytest.mark.parametrize(
    ("kind", "rate"), [("SFTConfig", 2e-5), ("DPOConfig", 1e-6), ("RewardConfig", 1e-4)]
)
def test_examples_get_the_defaults_of_their_own_config(kind: str, rate: float, tmp_path: Path):
    config = config_of(trl(kind), tmp_path)
    assert (config.learner.lr, config.num_epochs) == (rate, 3)
    assert config.data.max_response_tokens == 1024
    assert config_of(trl(kind, max_steps=7), tmp_path).num_steps == 7


def test_dpo_of_trl(tmp_path: Path):
    text = trl("DPOConfig", beta=0.2, loss_type=["ipo"])
    assert (config_of(text, tmp_path).dpo.beta, config_of(text, tmp_path).dpo.loss) == (0.2, "ipo")
    assert "dpo.loss" in todo(trl("DPOConfig", loss_type=["sigmoid", "sft"]))


def test_verl_without_a_kl_has_none_here(tmp_path: Path):
    config = config_of(translated(GROUPS), tmp_path)
    assert config.ppo.kl.coef == 0
    assert config.ppo.minibatch_size == 256 * 8
    assert config.rollout.max_new_tokens == 512


def test_a_kl_of_an_older_verl_in_the_reward_is_not_lost(tmp_path: Path):
    text = translated(f"{GROUPS} algorithm.kl_ctrl.kl_coef=0.02")
    assert "ppo.kl.coef" in todo(text)
    assert "# - ppo.kl.coef: 0.02 of algorithm.kl_ctrl.kl_coef, in the reward, if verl is" in text
    file = tmp_path / "verl.yaml"
    file.write_text(
        "algorithm: {adv_estimator: gae, kl_ctrl: {kl_coef: 0.02}}\nactor_rollout_ref: {a: 1}\n"
    )
    kl = config_of(translated(str(file)), tmp_path).ppo.kl
    assert (kl.coef, kl.placement) == (0.02, "reward"), "of a config without use_kl_in_reward"


def test_a_value_that_could_not_be_resolved_is_todo(tmp_path: Path):
    file = tmp_path / "verl.yaml"
    file.write_text(
        "algorithm: {adv_estimator: gae}\ndata: {train_batch_size: '${x:1}'}\n"
        "actor_rollout_ref: {actor: {optim: {lr: '${y:2}'}}}\n"
        "reward: {custom_reward_function: {path: '${z:3}', name: f}}\n"
    )
    text = translated(str(file))
    expected = {"rollout.prompts_per_step", "learner.policy_lr", "reward.function"}
    assert expected <= todo(text)


@pytest.mark.parametrize("estimator", ["remax", "gpg", "mine"])
def test_an_unknown_estimator_is_refused(estimator: str):
    with pytest.raises(ConfigError, match=rf"algorithm.adv_estimator \({estimator}\): has no coun"):
        translated(f"algorithm.adv_estimator={estimator}")
    with pytest.raises(ConfigError, match=rf"advantage_estimator \({estimator}\): has no counter"):
        translated(f"--advantage_estimator {estimator}")


def test_an_unknown_loss_or_mean_is_todo():
    text = translated(f"{GROUPS} {ACTOR}.policy_loss.loss_mode=gpg {ACTOR}.loss_agg_mode=token-sum")
    assert {"ppo.policy_loss", "ppo.aggregation"} <= todo(text)


def test_gdpo_of_verl_has_its_parts(tmp_path: Path):
    command = f"algorithm.adv_estimator=gdpo {ROLLOUT}.n=4"
    keys = "algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1,2]"
    ppo = config_of(translated(f"{command} {keys}"), tmp_path).ppo
    assert (ppo.advantage, ppo.part_weights) == ("gdpo", {"a": 1, "b": 2})
    assert "ppo.part_weights" in todo(translated(command))
    assert "advantage: gdpo #" in translated(command)


def test_a_refusal_has_only_numbers_of_the_input():
    text = translated(f"algorithm.adv_estimator=rloo {ROLLOUT}.n=1 data.train_batch_size=1024")
    assert "rollout.samples_per_prompt" in todo(text)
    text = translated(f"{GROUPS} data.train_batch_size=100 {ACTOR}.ppo_mini_batch_size=64")
    line = next(each for each in text.splitlines() if "ppo.minibatch_size (512)" in each)
    assert "800" in line


def test_verl_stops_at_the_smaller_number_of_steps(tmp_path: Path):
    pq.write_table(pa.table({"prompt": ["a"] * 64}), tmp_path / "p.parquet")
    files = f"data.train_files={tmp_path}/p.parquet data.train_batch_size=8"
    sizes = f"{files} {ACTOR}.ppo_mini_batch_size=8 trainer.total_epochs=2"
    for steps, expected in ((100, 16), (5, 5)):
        text = translated(f"{GROUPS} {sizes} trainer.total_training_steps={steps}")
        assert f"num_steps: {expected} #" in text
    text = translated(f"{GROUPS} trainer.total_training_steps=7")
    assert "num_steps: TODO # the smaller of 7 of trainer.total_training_steps and of rows" in text


def test_a_filter_of_verl_without_a_limit_has_none(tmp_path: Path):
    group = "algorithm.filter_groups"
    for given, refills in (("0", 1_000_000), ("10", 9)):
        text = translated(f"{GROUPS} {group}.enable=True {group}.max_num_gen_batches={given}")
        assert config_of(text, tmp_path).ppo.filter.max_refills == refills


@pytest.mark.parametrize("section", ["reward_model.model.path", "reward.reward_model.model_path"])
def test_a_reward_model_of_verl_is_the_only_reward(section: str):
    enable = f"{section.partition('.model')[0]}.enable=True"
    text = translated(f"{GROUPS} {section}=org/rm {enable}")
    assert "  reward: org/rm #" in text
    assert "function:" not in text
    assert "  reward: org/rm #" not in translated(f"{GROUPS} {section}=org/rm"), "not enabled"


def test_keys_of_verl_with_a_counterpart_get_it(tmp_path: Path):
    text = translated(
        f"{GROUPS} {ACTOR}.optim.betas=[0.9,0.95] {ACTOR}.optim.warmup_style=cosine "
        f"{ACTOR}.optim.min_lr_ratio=0.1 {ACTOR}.optim.lr_warmup_steps=10 "
        f"{ACTOR}.policy_loss.loss_mode=kl_cov {ACTOR}.policy_loss.kl_cov_ratio=0.002 "
        f"{ACTOR}.ppo_epochs=2 actor_rollout_ref.model.lora_rank=8 "
        "actor_rollout_ref.model.target_modules=[q_proj] reward_model.overlong_buffer.enable=True "
        "reward_model.overlong_buffer.len=128 reward_model.overlong_buffer.penalty_factor=0.5 "
        "data.apply_chat_template_kwargs.enable_thinking=False"
    )
    config = config_of(text, tmp_path)
    learner, shaping = config.learner, config.ppo.shaping
    assert (learner.adam_betas, learner.lr_schedule) == ((0.9, 0.95), "cosine")
    assert (learner.lr_floor, learner.lr_warmup_steps) == (0.1, 10)
    assert config.ppo.covariance.fraction == 0.002
    assert (config.model.lora.rank, config.model.lora.target_modules) == (8, ("q_proj",))
    assert (shaping.overlong_buffer_tokens, shaping.overlong_factor) == (128, 0.5)
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    assert "No counterpart is known" not in text


def test_turns_of_verl_are_no_run_of_single_responses():
    turns = f"{ROLLOUT}.multi_turn"
    text = translated(f"{GROUPS} {turns}.enable=True data.max_response_length=700")
    assert {"rollout.environment", "rollout.max_turns"} <= todo(text)
    assert "  max_episode_tokens: 700 #" in text
    assert "  max_turns: 5 #" in translated(
        f"{GROUPS} {turns}.enable=True {turns}.max_assistant_turns=5"
    )
    loop = f"{ROLLOUT}.agent.default_agent_loop=tool_agent"
    assert "rollout.environment" in todo(translated(f"{GROUPS} {loop}"))
    assert "environment" not in translated(f"{GROUPS} {turns}.max_assistant_turns=5")
    unused = "data.tool_config_path=tools.yaml"
    assert "rollout.environment" not in todo(translated(f"{GROUPS} {unused}"))
    text = translated(f"{GROUPS} {turns}.enable=True {unused}")
    assert "multi_turn.enable True" in text


def test_a_value_of_policy_and_critic_is_kept(tmp_path: Path):
    decay = "optim.weight_decay=0.01"
    text = translated(f"algorithm.adv_estimator=gae {ACTOR}.{decay} critic.{decay}")
    assert config_of(text, tmp_path).learner.weight_decay == 0.01
    assert f"  weight_decay: 0.01 # {ACTOR}.optim.weight_decay\n" in text


def test_what_concerns_memory_stands_apart():
    text = translated(
        f"{GROUPS} {ACTOR}.fsdp_config.param_offload=True {ROLLOUT}.max_num_seqs=9 "
        f"{ACTOR}.freeze_vision_tower=True"
    )
    assert f"{ACTOR}.freeze_vision_tower (True): model.freeze. true: `[vision]`" in notes(text)
    assert "offload" not in notes(text)
    assert "freeze" not in notes(translated(GROUPS))
    (line,) = [each for each in text.splitlines() if "Concerns memory" in each]
    assert f"{ACTOR}.fsdp_config.param_offload (True), {ROLLOUT}.max_num_seqs (9)" in line


def test_a_resolved_config_of_verl_says_the_same_as_its_command(tmp_path: Path):
    from omegaconf import OmegaConf

    from raypo.config.base import nested

    command = f"{GROUPS} {ACTOR}.use_kl_loss=True {ACTOR}.fsdp_config.param_offload=True"
    values = defaults_of("verl") | dict(read_source(command).arguments)
    values.pop("version")
    OmegaConf.save(OmegaConf.create(nested(values)), tmp_path / "verl.yaml")
    assert translated(str(tmp_path / "verl.yaml")) == translated(command)


@pytest.mark.parametrize(
    ("loss", "here", "low", "high"),
    [
        ("gspo", "gspo", 0.3, 0.4),
        ("geo_mean", "gmpo", 1 - math.exp(-0.3), math.exp(0.4) - 1),
        ("sapo", "sapo", 0.2, 0.2),  # has no clip
    ],
)
def test_losses_of_verl_that_are_means_over_sequences_stay_so(
    loss: str, here: str, low: float, high: float, tmp_path: Path
):
    text = translated(
        f"{GROUPS} {ACTOR}.policy_loss.loss_mode={loss} {ACTOR}.loss_agg_mode=token-mean "
        f"{ACTOR}.clip_ratio_low=0.3 {ACTOR}.clip_ratio_high=0.4"
    )
    ppo = config_of(text, tmp_path).ppo
    assert (ppo.policy_loss, ppo.aggregation, ppo.dual_clip) == (here, "sequence_mean", None)
    assert (ppo.clip_low, ppo.clip_high) == (pytest.approx(low), pytest.approx(high))
    text = translated(f"{GROUPS} {ACTOR}.policy_loss.loss_mode={loss} {ACTOR}.use_kl_loss=True")
    assert "loss_agg_mode's default (token-mean): verl's KL in the loss has" in notes(text)


def test_the_clip_of_verls_gmpo_is_the_presets():
    text = translated(
        f"{GROUPS} {ACTOR}.policy_loss.loss_mode=geo_mean {ACTOR}.clip_ratio_low=0.4 "
        f"{ACTOR}.clip_ratio_high=0.4"
    )
    for key in ("clip_low", "clip_high"):
        assert f"  {key}: {PRESETS['gmpo'][key]} #" in text


def test_the_clip_of_verl_for_one_side_wins_in_any_order(tmp_path: Path):
    given = [f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio=0.2"]
    for order in (given, given[::-1]):
        ppo = config_of(translated(f"{GROUPS} {' '.join(order)}"), tmp_path).ppo
        assert (ppo.clip_low, ppo.clip_high) == (0.2, 0.28)
    text = translated(f"{GROUPS} {ACTOR}.clip_ratio=0.3")
    assert config_of(text, tmp_path).ppo.clip_low == 0.3
    assert f"{ACTOR}.clip_ratio (0.3): verl since 0.4 uses it only for a bound" in notes(text)
    text = translated(f"{GROUPS} {ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=0.9")
    assert config_of(text, tmp_path).ppo.cispo_low == 0.9


@pytest.mark.parametrize(
    ("kind", "here"),
    [("k3", "k3"), ("mse", "k2"), ("low_var_kl+", "k3_st"), ("k3+", "k3_st"), ("kl+", "k2")],
)
def test_a_kl_in_the_loss_of_verl_has_its_estimator_here(kind: str, here: str, tmp_path: Path):
    text = translated(f"{GROUPS} {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type={kind}")
    kl = config_of(text, tmp_path).ppo.kl
    assert (kl.placement, kl.estimator) == ("loss", here)


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "full"])
def test_a_kl_in_the_loss_of_verl_that_raypo_lacks_is_todo(kind: str):
    text = translated(f"{GROUPS} {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type={kind}")
    assert "ppo.kl.estimator" in todo(text)


def test_a_second_kl_of_verl_is_a_note():
    text = translated(f"{GROUPS} {ACTOR}.use_kl_loss=True algorithm.use_kl_in_reward=True")
    assert "algorithm.use_kl_in_reward (True): ppo.kl.placement. verl has a " in notes(text)


def test_max_samples_of_openrlhf_is_a_limit(tmp_path: Path):
    pq.write_table(pa.table({"input": list("abcdefgh")}), tmp_path / "p.parquet")
    flags = f"--prompt_data {tmp_path}/p.parquet --rollout_batch_size 2 --max_samples"
    assert "num_steps: 4 # 8 rows // 2 prompts" in translated(f"{flags} 100")
    text = translated(f"{flags} 6")
    assert "num_steps: 3 # 6 rows // 2 prompts" in text
    assert "ppo.minibatch_size" in todo(text), "128 is no part of 2 responses"
    assert "max_samples (6): data.prompts. It is a limit" in notes(text)
    text = translated("--prompt_data a/b --max_samples 100000")
    assert "num_steps: TODO # min(rows, 100000) // 1024 prompts x 1 of" in text


def test_lengths_of_openrlhf_that_it_shares_are_todo(tmp_path: Path):
    text = translated("--actor.adam.lr 1e-6 --data.max_len 4096")
    assert {"rollout.max_new_tokens", "data.max_prompt_tokens"} <= todo(text)
    text = translated("--prompt_max_len 100 --generate_max_len 50")
    config = config_of(text, tmp_path)
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens) == (100, 50)
    text = translated("--data.max_len 150 --rollout.max_new_tokens 50")
    assert config_of(text, tmp_path).data.max_prompt_tokens == 100


def test_a_server_of_openrlhf_is_the_only_reward(tmp_path: Path):
    text = translated("--remote_rm_url http://a:1/s,http://b:1/s --reward_pretrain org/r")
    config = config_of(text, tmp_path)
    assert config.reward.url == ("http://a:1/s", "http://b:1/s")
    assert config.model.reward is None
    assert config.reward.function is None
    assert "remote_rm_url (http://a:1/s,http://b:1/s): reward.url. A server" in notes(text)


def test_an_agent_of_openrlhf_replaces_the_reward_url():
    text = translated(
        "--agent_func_path agent.py --remote_rm_url reward.py --advantage_estimator group_norm "
        "--n_samples_per_prompt 4 --init_kl_coef 0.001"
    )
    assert {"rollout.agent", "ppo.kl.placement"} <= todo(text), "no KL in an episode's score here"
    assert "reward.function" not in text
    assert "remote_rm_url (reward.py)" in text.partition("# Needs nothing here")[2]


def test_defaults_that_openrlhf_changed_are_todo_where_its_version_is_not_known(tmp_path: Path):
    changed = {"ppo.aggregation", "ppo.gae_lambda", "ppo.value_clip"}
    assert changed <= todo(translated("--pretrain m --reward_pretrain r"))
    text = translated("--pretrain m --lambd 0.95 --value_clip 0.2 --rollout_batch_size 128")
    assert todo(text) & changed == {"ppo.aggregation"}
    text = translated("--actor.model_name_or_path m --rollout.batch_size 128")
    assert not todo(text) & changed, "dotted names are of 0.11"
    config = config_of(text, tmp_path)
    values = config.ppo.aggregation, config.ppo.gae_lambda, config.ppo.value_clip
    assert values == ("token_mean", 1.0, 0.5)
    assert "with the defaults of its version 0.11" in text


def test_means_and_corrections_of_openrlhf(tmp_path: Path):
    level = "--algo.advantage.is_correction_level"
    batch = "--rollout.batch_size 128"
    text = translated(
        f"{batch} {level} token --algo.advantage.is_correction_threshold 0.4 3 "
        "--actor.loss_agg_mode seq-mean-token-mean"
    )
    config = config_of(text, tmp_path)
    correction = config.ppo.correction
    assert (correction.kind, correction.low, correction.high) == ("icepop", 0.4, 3.0)
    assert config.ppo.aggregation == "sequence_mean"
    assert "ppo.correction.kind" in todo(translated(f"{batch} {level} seq"))
    assert config_of(translated(batch), tmp_path).ppo.correction.kind == "none"


def test_a_word_of_openrlhf_is_text_where_it_is_no_number(tmp_path: Path):
    config = config_of(translated("--prompt_data {your_data} --rollout_batch_size 128"), tmp_path)
    assert config.data.prompts == ("{your_data}",)


def test_keys_of_openrlhf_with_a_counterpart_get_it(tmp_path: Path):
    text = translated(
        "--prompt_data org/a,org/b --prompt_data_probs 0.25,0.75 --reward_pretrain org/r "
        "--advantage_estimator group_norm --n_samples_per_prompt 4 --use_kl_loss --kl_estimator k3 "
        "--eps_clip_low_high 0.1 0.28 --eps_clip 0.2 --policy_loss_type gspo --dynamic_filtering "
        "--dynamic_filtering_reward_range 0.1 0.9 --overlong_buffer_len 64 --async_train"
    )
    config = config_of(text, tmp_path, max_new_tokens="100")
    assert [each.weight for each in config.data.prompts] == [0.25, 0.75]
    assert (config.ppo.clip_low, config.ppo.clip_high) == (0.1, 0.28)
    assert (config.ppo.policy_loss, config.ppo.aggregation) == ("gspo", "sequence_mean")
    filtering = config.ppo.filter
    assert (filtering.enabled, filtering.low, filtering.high) == (True, 0.1, 0.9)
    assert (config.ppo.advantage, config.ppo.kl.placement) == ("grpo", "loss")
    assert config.ppo.shaping.overlong_buffer_tokens == 64
    assert (config.rollout.mode, config.placement.mode) == ("async", "dedicated")
    assert "No counterpart is known" not in text
    assert "ppo.kl.estimator" in todo(translated("--use_kl_loss --pretrain m"))
    assert "ppo.correction.kind" in todo(translated("--enable_vllm_is_correction --pretrain m"))
    # cosine_with_restarts is no cosine of raypo.
    assert "learner.lr_schedule" in todo(translated("--lr_scheduler cosine_with_restarts"))


def test_an_argument_that_is_not_known_is_named():
    assert "future.key (3): No counterpart is known." in notes(translated(f"{GROUPS} future.key=3"))
    assert "future (3): No counterpart is known." in notes(translated("--future 3"))
    assert "future (3): No counterpart is known." in notes(translated(f"{GROUPS} +future=3"))


def test_notes_on_what_matters_most_come_first():
    text = translated(f"{GROUPS} data.sampler=a {ACTOR}.loss_scale=2 reward.sandbox=b")
    names = re.findall(r"^# - ([\w.]+) \(", notes(text), re.MULTILINE)
    assert names == [f"{ACTOR}.loss_scale", "reward.sandbox", "data.sampler"]


def test_a_value_of_several_lines_stays_in_its_comment():
    text = translated(f"{GROUPS} 'trainer.experiment=a\nnum_steps: 3'")
    assert "(a num_steps: 3): " in text
    assert not re.search("^num_steps: 3", text, re.MULTILINE)


def test_a_file_with_todos_is_refused_with_all_of_them(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(translated(GROUPS))
    with pytest.raises(ConfigError) as error:
        PPOConfig.load(file)
    assert all(key in str(error.value) for key in todo(file.read_text()))


def test_a_secret_is_not_written():
    text = translated("--pretrain m --use_wandb 0123456789abcdef --advantage_estimator gae")
    assert "0123456789abcdef" not in text


@pytest.mark.parametrize(
    ("command", "frozen"),
    [
        (f"{GROUPS} data.image_key=images", f"{ACTOR}.freeze_vision_tower"),
        ("--algo.advantage.estimator rloo --data.image_key images", "actor.freeze_visual_encoder"),
    ],
)
def test_a_column_of_images_is_kept_and_a_trained_vision_tower_told(command: str, frozen: str):
    """Even if they are the other project's defaults."""
    option = f"{frozen}=" if "=" in command else f"--{frozen} "
    text = translated(command)
    assert "image_key: images" in text
    assert f"{frozen}'s default (False): model.freeze. raypo does not train" in notes(text)
    given = translated(f"{command} {option}false")
    assert f"{frozen} (False): model.freeze. raypo does not train" in notes(given)
    for silent in (f"{command} {option}true", GROUPS):
        assert "raypo does not train" not in translated(silent)
