"""`raypo init` gives what the hand-written ports have, and names what it leaves out."""

import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import examples.ports.trl_grpo as port
from raypo.config import ConfigError, PPOConfig
from raypo.config.base import nested
from raypo.config.presets import PRESETS
from raypo.config.recipe_config import RECIPES
from raypo.translation.reading import read_command, read_script
from raypo.translation.run_file import translate

PORTS = Path(__file__).parents[3] / "examples/ports"
TRL = port.__doc__ or ""


def command_in(file: str) -> str:
    """The command in the comments at a port's top."""
    lines = (PORTS / file).read_text().splitlines()
    return "\n".join(line.removeprefix("#") for line in lines[2:] if line.startswith("#"))


def config_of(text: str, tmp_path: Path) -> PPOConfig:
    text = text.replace("num_steps: TODO", "num_steps: 40")
    (tmp_path / "run.yaml").write_text(text.replace("warmup_steps: TODO", "warmup_steps: 1"))
    return PPOConfig.load(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("project", "file", "by_hand"),
    [
        # The port uses the preset and its clip; verl's dual clip has no effect there.
        ("verl", "verl_grpo.yaml", {"ppo.preset", "ppo.dual_clip", "data.label_key"}),
        ("OpenRLHF", "openrlhf_ppo.yaml", {"name", "num_steps", "data.max_prompt_tokens"}),
    ],
)
def test_a_command_becomes_the_port_that_was_written_by_hand(
    project: str, file: str, by_hand: set[str], tmp_path: Path
):
    text = translate(project, read_command(command_in(file), project))
    differing = config_of(text, tmp_path).differences(PPOConfig.load(PORTS / file))
    keys = {each.partition(":")[0] for each in differing}
    assert keys == by_hand | {
        "data.prompts",
        "reward.function",
        *(["eval.prompts"] * ("verl" in file)),
    }
    if project == "verl":
        assert "function: rewards.py:compute_score # custom_reward_function" in text
    else:
        assert "# - reward.remote_url (reward_func.py): reward.url. A server." in text


def test_a_script_of_trl_becomes_its_port(tmp_path: Path):
    script = TRL.partition("(one process):\n\n")[2]
    recipe, given = read_script(re.sub("^    ", "", script, flags=re.MULTILINE))
    config = config_of(translate("TRL", given, recipe), tmp_path)
    assert (config.name, config.model.policy) == ("ported-trl", "runs/quickstart-sft/policy")
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (32, 4)
    assert (config.ppo.minibatch_size, config.num_steps) == (128, 10)
    assert (config.ppo.preset, config.ppo.kl.coef) == ("grpo", 0.04)
    assert config.learner.policy_lr == 3e-4
    with patch.object(port, "GRPOTrainer") as trainer:
        port.main()
    by_hand = trainer.call_args.kwargs
    values = {"model.policy": by_hand["model"], "ppo.preset": "grpo", "data.prompts": "x"}
    values |= by_hand["args"]
    differing = config.differences(PPOConfig.parse(nested(values)))
    keys = {each.partition(":")[0] for each in differing}
    assert keys == {"data.prompts", "data.max_prompt_tokens", "reward.function"}


LORA = "LoraConfig(r=4)"


def trl(arguments: str, more: str = "") -> str:
    recipe, given = read_script(f"GRPOTrainer('m', f, args=GRPOConfig({arguments}){more})")
    return translate("TRL", given, recipe)


def test_defaults_of_trl_and_peft_that_change_what_is_learned_are_written(tmp_path: Path):
    text = trl("use_vllm=True", f", peft_config={LORA}")
    config = config_of(text, tmp_path)
    correction, lora = config.ppo.correction, config.model.lora
    assert (correction.kind, correction.cap) == ("sequence_tis", 3.0)
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules) == (4, 8, ("q_proj", "v_proj"))
    assert "# - vllm_importance_sampling_mode (sequence_mask, TRL's default): TRL drops" in text
    assert "# - target_modules (None): peft chooses by the architecture" in text
    exact = config_of(
        trl("use_vllm=True, vllm_importance_sampling_mode='token_mask'"), tmp_path
    ).ppo.correction
    assert (exact.kind, exact.low, exact.high) == ("icepop", 0.0, 3.0)
    for off in ("", "use_vllm=True, vllm_importance_sampling_correction=False"):
        assert config_of(trl(off), tmp_path).ppo.correction.kind == "none"
    cut = trl("use_vllm=True, top_p=0.9")
    assert "vllm_importance_sampling_mode with use_vllm: ppo.correction.kind (sequence_tis)" in cut
    unknown = trl("", ", peft_config=get_peft_config(a)")
    assert "# - peft_config (get_peft_config(a)): model.lora." in unknown


@pytest.mark.parametrize(
    ("given", "loss", "aggregation", "high"),
    [
        ("", "ppo", "token_mean", 0.2),
        ("loss_type='dapo', epsilon_high=0.28, epsilon=0.2", "ppo", "token_mean", 0.28),
        ("loss_type='sapo'", "sapo", "sequence_mean", 0.2),
        ("loss_type='cispo', epsilon_high=5.0", "cispo", "token_mean", 4.0),
    ],
)
def test_a_loss_of_trl_brings_nothing_else_of_its_paper(
    given: str, loss: str, aggregation: str, high: float, tmp_path: Path
):
    ppo = config_of(trl(given), tmp_path).ppo
    assert (ppo.preset, ppo.policy_loss, ppo.aggregation) == ("grpo", loss, aggregation)
    assert (ppo.clip_high, ppo.kl.coef, ppo.kl.placement) == (high, 0.0, "loss")
    assert not ppo.filter.enabled
    assert ppo.shaping.overlong_buffer_tokens is None


def test_counts_of_steps_are_copied_where_an_update_is_a_step(tmp_path: Path):
    counts = "save_steps=20, eval_steps=5, eval_strategy='steps', max_steps=64, warmup_ratio=0.1"
    config = config_of(trl(counts), tmp_path)
    assert (config.checkpoint.every, config.eval.every) == (20, 5)
    text = trl("logging_steps=1, log_completions=True, eval_strategy='steps', vllm_mode='colocate'")
    (line,) = [each for each in text.splitlines() if "Needs nothing here:" in each]
    assert "eval_strategy (steps), vllm_mode (colocate), logging_steps (1), log_completions" in line
    assert "# - eval_strategy (epoch): Set `eval.prompts`" in trl("eval_strategy='epoch'")
    assert config.learner.lr_warmup_steps == 7
    text = trl(f"{counts}, num_iterations=2")
    config = config_of(text, tmp_path)
    assert (config.num_steps, config.learner.lr_warmup_steps) == (32, 4)
    assert "# - save_steps (20): checkpoint.every." in text
    assert "# - warmup_ratio (0.1): learner.lr_warmup_steps." in trl("warmup_ratio=0.1")


def test_the_data_type_and_the_loggers_are_copied(tmp_path: Path):
    config = config_of(trl("bf16=True, report_to=['wandb', 'tensorboard']"), tmp_path)
    assert (config.model.dtype, config.logging.tensorboard) == ("bfloat16", True)
    assert config.logging.wandb is not None
    assert not config_of(trl("report_to='none'"), tmp_path).logging.tensorboard
    assert "# - report_to (comet_ml): logging.wandb." in trl("report_to='comet_ml'")


def test_several_reward_functions_get_a_function_that_adds_them():
    recipe, given = read_script(
        "GRPOTrainer('m', [right, short], args=GRPOConfig(reward_weights=[1.0, 0.2]))"
    )
    (line,) = [each for each in translate("TRL", given, recipe).splitlines() if "_funcs" in each]
    made: dict[str, Any] = {
        "right": lambda completions, answer: list(map(float, map(str.__eq__, completions, answer))),
        "short": lambda completions, **columns: [-float(len(each)) for each in completions],
    }
    exec(line[line.index("def reward(") :], made)
    assert made["reward"](completions=["7", "12"], answer=["7", "8"]) == [
        {"score": 0.8, "right": 1.0, "short": -1.0},
        {"score": -0.4, "right": 0.0, "short": -2.0},
    ]


def test_what_is_not_copied_is_named_with_its_reason():
    script = """
from trl import GRPOConfig, GRPOTrainer
from datasets import load_dataset
DATA = load_dataset("openai/gsm8k", "main", split="train")
GRPOTrainer("m", judge, args=GRPOConfig(use_vllm=True, max_steps=64, learning_rate=rate(),
    num_iterations=2, steps_per_generation=4, loss_type="dr_grpo", optim="muon"),
    train_dataset=DATA)
"""
    recipe, given = read_script(script)
    text = translate("TRL", given, recipe)
    assert "# Needs nothing here: use_vllm (True)." in text
    assert "# - learning_rate (rate()): learner.policy_lr." in text
    assert "# - optim (muon): No counterpart is known." in text
    assert "# - reward_funcs (judge): reward.function." in text
    assert "num_steps: 8 # max_steps" in text  # 64 updates, 4 x 2 of them a generation
    assert "aggregation: constant # loss_type" in text
    assert "  - path: openai/gsm8k\n    config: main\n    split: train\n" in text


def test_a_value_that_raypo_refuses_is_left_out_with_its_reason():
    flags = "--n_samples_per_prompt 1 --advantage_estimator rloo --eps_clip_low_high 0.2 0.28"
    text = translate("OpenRLHF", read_command(flags, "OpenRLHF"))
    assert "# - n_samples_per_prompt: rollout.samples_per_prompt (1): ppo.advantage: rloo" in text
    assert "clip_high: 0.28 # eps_clip_low_high" in text
    assert "samples_per_prompt: 1" not in text
    assert "policy: TODO # a folder or a hub id" in text


def test_a_name_that_raypo_refuses_is_left_to_be_set():
    recipe, given = read_script("GRPOTrainer('m', f, args=GRPOConfig(output_dir='runs/a b'))")
    text = translate("TRL", given, recipe)
    assert "# - output_dir: name ('a b'): " in text
    assert "name: TODO # the run's folder is storage_path/name" in text


def test_verl_without_a_kl_has_none_here(tmp_path: Path):
    command = "N=8\nM=$N\nrun algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$M"
    config = config_of(translate("verl", read_command(command, "verl")), tmp_path)
    assert config.ppo.kl.coef == 0
    assert config.ppo.minibatch_size == 256 * 8
    assert config.rollout.max_new_tokens == 512


def test_what_only_the_shell_knows_is_a_note():
    command = """run actor_rollout_ref.rollout.n=$N data.train_batch_size=$((2 * N)) \\
        actor_rollout_ref.actor.ppo_mini_batch_size=${M} trainer.total_training_steps=7"""
    text = translate("verl", read_command(command, "verl"))
    assert "# - actor_rollout_ref.rollout.n ($N): rollout.samples_per_prompt." in text
    assert "# - actor_rollout_ref.actor.ppo_mini_batch_size (${M}): ppo.minibatch_size." in text
    assert "# - data.train_batch_size ($((2*N))): rollout.prompts_per_step." in text
    for key in ("prompts_per_step", "samples_per_prompt", "minibatch_size"):
        assert f"\n  {key}: " not in text, "neither a default nor computed from one"
    assert "num_steps: 7 # trainer.total_training_steps" in text


def test_a_script_whose_batch_is_not_known_gets_no_batch_from_a_default():
    recipe, given = read_script(
        "GRPOTrainer('m', f, args=GRPOConfig(per_device_train_batch_size=args.size, max_steps=8))"
    )
    text = translate("TRL", given, recipe)
    assert "# - per_device_train_batch_size (args.size): " in text
    for key in ("prompts_per_step", "minibatch_size"):
        assert f"{key}: " not in text.partition("\nname:")[2]
    assert "\nnum_steps: TODO # rows / rollout.prompts_per_step prompts x 3 of num_train" in text


def test_variables_of_a_command_may_have_defaults_and_use_others():
    given = read_command(
        """NODES=${NODES:-16}
        MODEL=${MODEL:-"${HOME}/a model"}
        run trainer.nnodes="${NODES}" actor_rollout_ref.model.path="$MODEL" a.b=${C-3}""",
        "verl",
    )
    assert given == {
        "trainer.nnodes": 16,
        "actor_rollout_ref.model.path": f"{Path.home()}/a model",
        "a.b": 3,
    }


@pytest.mark.parametrize(
    ("project", "given"),
    [
        ("TRL", read_script("GRPOTrainer('m', greeting='a\\nnum_steps: 3')")[1]),
        ("verl", read_command("run trainer.experiment='a\nnum_steps: 3'", "verl")),
    ],
)
def test_a_value_of_several_lines_stays_in_its_comment(project: str, given: dict[str, object]):
    text = translate(project, given)
    assert "(a num_steps: 3): " in text
    assert not re.search("^num_steps: 3", text, re.MULTILINE)


def test_a_command_with_an_open_quotation_is_refused():
    with pytest.raises(ConfigError, match=r"--from-verl: .*No closing quotation"):
        read_command("run a.b=3  # don't", "verl")


def test_a_script_of_dpo_is_a_dpo_run():
    recipe, given = read_script(
        "trl.DPOTrainer(model, args=trl.DPOConfig(beta=0.2, loss_type='ipo'))"
    )
    text = translate("TRL", given, recipe)
    assert "recipe: dpo" in text
    assert "beta: 0.2 # beta" in text
    assert "loss: ipo # loss_type" in text


@pytest.mark.parametrize("script", ["x = 1", "def ("])
def test_a_script_without_a_trainer_is_refused(script: str):
    with pytest.raises(ConfigError, match="--from-trl: "):
        read_script(script)


def translated(command: str) -> str:
    return translate("verl", read_command(command, "verl"))


@pytest.mark.parametrize("section", ["", "reward."])
def test_a_compute_score_of_verl_is_the_reward_function(section: str):
    path = f"{section}custom_reward_function.path=my/score.py"
    assert "function: my/score.py:compute_score # custom" in translated(path)
    both = f"{path} {section}custom_reward_function.name=judge"
    text = translated(both)
    assert "function: my/score.py:judge # custom" in text
    assert "label_key" not in text
    assert "- reward.function" not in text


def test_required_keys_without_a_value_come_first_and_are_refused_until_they_are_set(
    tmp_path: Path,
):
    text = translated("trainer.total_epochs=15 data.train_batch_size=512 data.shuffle=False")
    lines = text.splitlines()
    assert lines[1] == "# REQUIRED, TODO below:"
    first = lines[2 : lines.index("# Left to you:")]
    keys = [line.removeprefix("# - ").partition(":")[0] for line in first]
    assert set(keys) == {"reward.function", "name", "model.policy", "data.prompts", "num_steps"}
    assert "num_steps: TODO # rows / 512 prompts x 15 of trainer.total_epochs" in text
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"num_steps \('TODO'\)"):
        PPOConfig.load(tmp_path / "run.yaml")


def test_steps_are_counted_in_parquet_files(tmp_path: Path):
    files = [str(tmp_path / f"{number}.parquet") for number in range(2)]
    for file in files:
        pq.write_table(pa.table({"prompt": ["1+1="] * 30}), file)
    batch = "data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=16"
    text = translated(f'data.train_files="{files}" {batch} trainer.total_epochs=5')
    assert "num_steps: 15 # 60 rows // 16 prompts x 5 of trainer.total_epochs" in text
    text = translated(f"data.train_files={files[0]} {batch}")
    assert "num_steps: 30 # 30 rows // 16 prompts x 30 of trainer.total_epochs" in text


def test_what_is_given_stays_even_if_it_is_the_default_here():
    text = translated("actor_rollout_ref.actor.optim.lr=1e-6 data.filter_overlong_prompts=True")
    assert "policy_lr: 1.0e-06 # actor_rollout_ref.actor.optim.lr" in text
    assert "too_long: skip # data.filter_overlong_prompts" in text
    assert "clip_low" not in text


def test_what_needs_nothing_is_one_line():
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    given = {
        f"{actor}.ppo_micro_batch_size_per_gpu": 4,
        f"{rollout}.name": "vllm",
        f"{actor}.fsdp_config.param_offload": False,
    }
    text = translated(" ".join(f"{name}={value}" for name, value in given.items()))
    shown = ", ".join(f"{name} ({value})" for name, value in given.items())
    assert f"# Needs nothing here: {shown}." in text
    assert "# Left to you:" not in text
    text = translated(f"{actor}.fsdp_config.param_offload=True trainer.unheard_of=1")
    assert "param_offload (True): true: `learner.deepspeed" in text
    assert "# - trainer.unheard_of (1): No counterpart is known." in text


def test_keys_of_verl_that_are_computed():
    rollout = "actor_rollout_ref.rollout"
    text = translated(
        f"+{rollout}.top_p=0.9 {rollout}.top_k=-1 data.seed=7 data.truncation=error "
        "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False "
        f'{rollout}.n=5 trainer.logger=\'["console","wandb","swanlab"]\' '
        "trainer.project_name=mine trainer.experiment_name=first"
    )
    for line in (
        f"top_p: 0.9 # {rollout}.top_p",
        "seed: 7 # data.seed",
        "too_long: error # data.truncation",
        "advantage: dr_grpo # algorithm.norm_adv_by_std_in_grpo",
        "project: mine # trainer.project_name",
        "name: first # trainer.experiment_name",
        "# - trainer.logger (swanlab): No counterpart is known.",
    ):
        assert f"{line}\n" in text
    assert "top_k" not in text
    assert "Did you mean" not in text
    assert "too_long: error # data.truncation's default\n" in translated(f"{rollout}.n=2")


def test_epochs_that_only_the_shell_knows_are_left_to_be_set():
    text = translated("trainer.total_epochs=$E")
    assert "# - trainer.total_epochs ($E): num_steps." in text
    assert "num_steps: TODO # rows / 1024 prompts x trainer.total_epochs\n" in text


FLAT = """ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"pip": []}' \\
    -- python3 -m openrlhf.cli.train_ppo_ray --pretrain org/policy --reward_pretrain org/reward \\
    --save_path /ckpt/first --ckpt_path /ckpt/state --save_hf_ckpt --prompt_data org/prompts \\
    --prompt_max_len 1024 --generate_max_len 512 --rollout_batch_size 1024 """


def openrlhf(flags: str) -> str:
    return translate("OpenRLHF", read_command(FLAT + flags, "OpenRLHF"))


def test_flat_flags_of_openrlhf_are_kept_over_its_defaults(tmp_path: Path):
    text = openrlhf(
        "--value_clip 0.2 --seed 7 --temperature 0.7 --l2 0.01 --gamma 0.9 --dual_clip 4 "
        "--vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.6 --save_steps 20 "
        "--lr_scheduler constant --reward_clip_range -5 5 --label_key answer --bf16 "
        "--save_value_network --kl_target 6 --lora_rank 16 --lora_alpha 16 "
        "--freezing_actor_steps 5 --actor_num_nodes 2 --actor_num_gpus_per_node 8"
    )
    config = config_of(text, tmp_path)
    ppo, learner, engine = config.ppo, config.learner, config.rollout.engine
    assert (ppo.value_clip, ppo.gamma, ppo.dual_clip, ppo.critic_warmup_steps) == (0.2, 0.9, 4, 5)
    assert (config.seed, config.rollout.temperature, learner.weight_decay) == (7, 0.7, 0.01)
    assert (engine.tensor_parallel, engine.gpu_memory_fraction) == (2, 0.6)
    assert (config.checkpoint.every, config.data.label_key) == (20, "answer")
    assert (ppo.shaping.clip_low, ppo.shaping.clip_high) == (-5, 5)
    assert (learner.lr_schedule, learner.lr_warmup_steps, learner.lr_floor) == ("constant", 0, 0)
    assert (ppo.kl.controller, ppo.kl.target, learner.save_critic) == ("adaptive", 6, True)
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (16, 16)
    assert config.model.dtype == "bfloat16"
    assert (config.name, config.storage_path) == ("first", "/ckpt")
    assert "value_clip: 0.2 # value_clip\n" in text
    assert "TRL" not in text
    assert "peft" not in text


def test_flags_of_openrlhf_that_need_nothing_are_one_line_and_no_secret_is_written():
    text = openrlhf(
        "--ref_num_nodes 1 --reward_num_gpus_per_node 8 --critic_num_nodes 1 --packing_samples "
        "--colocate_all_models --micro_train_batch_size 8 --enforce_eager --vllm_enable_sleep "
        "--deepspeed_enable_sleep --logging_steps 1 --eval_steps -1 --use_wandb s3cret"
    )
    (line,) = [each for each in text.splitlines() if each.startswith("# Needs nothing here:")]
    for name in ("ref_num_nodes", "reward_num_gpus_per_node", "critic_num_nodes", "enforce_eager"):
        assert f"{name} (" in line
    for name in ("eval_steps (-1)", "save_hf_ckpt (True)", "ckpt_path (/ckpt/state)"):
        assert name in line
    assert not re.search("address|runtime-env|python3|s3cret", text)
    assert "project: openrlhf_train_ppo # use_wandb" in text
    assert "project: mine # use_wandb" in openrlhf("--use_wandb $TOKEN --wandb_project mine")


def test_what_only_the_shell_knows_of_openrlhf_is_a_note():
    text = openrlhf("--rollout_batch_size $B --lr_warmup_ratio $W --max_samples $N --seed $S")
    for name in ("rollout_batch_size ($B)", "lr_warmup_ratio ($W)", "max_samples ($N)"):
        assert f"# - {name}: " in text
    assert "# - num_steps: rows / rollout.prompts_per_step x 1 of train.num_episodes" in text
    assert "# - lr_warmup_ratio (some): learner.lr" in openrlhf("--lr_warmup_ratio some")


def test_defaults_of_openrlhf_that_change_what_is_learned_are_written(tmp_path: Path):
    text = openrlhf("--max_samples 100000 --num_episodes 2 --adam_offload")
    config = config_of(text, tmp_path)
    learner = config.learner
    assert (config.num_steps, learner.lr_warmup_steps) == (194, 6)
    assert (learner.lr_schedule, learner.lr_floor) == ("cosine", 0.1)
    assert (config.ppo.shaping.clip_low, config.ppo.shaping.clip_high) == (-10, 10)
    assert learner.deepspeed == {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert "split: train[:100000]" in text
    assert "num_steps: 194 # 100000 rows of max_samples // 1024 prompts x 2 of num_episodes" in text
    unknown = openrlhf("--lr_warmup_ratio 0.1")
    assert "# - num_steps: rows / 1024 prompts x 1 of train.num_episodes's default" in unknown
    assert "# - learner.lr_warmup_steps: 0.1 of num_steps, lr_warmup_ratio" in unknown
    assert "  lr_warmup_steps: TODO" in unknown


def test_several_sources_and_reward_models_of_openrlhf_and_what_follows_the_command(tmp_path: Path):
    text = openrlhf(
        "--prompt_data org/a,org/b --prompt_data_probs 0.25,0.75 --reward_pretrain org/r,org/s "
        "--advantage_estimator rloo --n_samples_per_prompt 4 --reward_clip_range -5 5 "
        "2>&1 | tee log"
    )
    config = config_of(text, tmp_path)
    assert [getattr(each, "weight", None) for each in config.data.prompts] == [0.25, 0.75]
    assert [each.path for each in config.model.reward or ()] == ["org/r", "org/s"]
    assert config.ppo.shaping.clip_high is None
    assert "# - reward_clip_range ([-5, 5]): ppo.shaping.clip_low and ppo.shaping.clip_high" in text
    with pytest.raises(ConfigError, match=r"train_dpo\): only commands of train_ppo_ray"):
        read_command("python3 -m openrlhf.cli.train_dpo --pretrain m", "OpenRLHF")


def test_the_rows_of_a_file_limit_max_samples(tmp_path: Path):
    pq.write_table(pa.table({"input": list("abcdefgh")}), tmp_path / "p.parquet")
    flags = f"--prompt_data {tmp_path}/p.parquet --rollout_batch_size 2 --max_samples"
    assert "num_steps: 4 # 8 rows // 2 prompts" in openrlhf(f"{flags} 100")
    text = openrlhf(f"{flags} 6")
    assert "# - train.batch_size's default (128): ppo.minibatch_size is 2. It must" in text
    assert "num_steps: 3 # 6 rows // 2 prompts" in text
    assert "# - max_samples (6): shorten the files of data.prompts by hand" in text


def test_a_transport_of_openrlhf_that_colocated_engines_lack_is_auto(tmp_path: Path):
    text = openrlhf("--vllm_sync_backend nccl --colocate_all_models")
    engine = config_of(text, tmp_path).rollout.engine
    assert engine.resolved_transport(colocated=True, use_gpu=True) == "ipc"
    assert "transport: auto # vllm_sync_backend" in text
    assert "# - vllm_sync_backend (nccl): rollout.engine.transport is auto" in text


def test_servers_and_the_normalization_of_openrlhf_say_how_they_differ(tmp_path: Path):
    text = openrlhf("--remote_rm_url http://a:1/score,http://b:1/score --normalize_reward")
    config = config_of(text, tmp_path)
    assert config.reward.url == ("http://a:1/score", "http://b:1/score")
    assert config.ppo.shaping.normalize
    assert "# - remote_rm_url: reward.url. A server. OpenRLHF posts `query`" in text
    assert "# - normalize_reward: ppo.shaping.normalize. OpenRLHF subtracts the fixed" in text


ACTOR = "actor_rollout_ref.actor"
GROUPS = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"


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
    assert f"loss_agg_mode (token-mean), {loss}" in text, "needs nothing here"
    text = translated(f"{GROUPS} {ACTOR}.policy_loss.loss_mode={loss} {ACTOR}.use_kl_loss=True")
    assert f"# - {ACTOR}.loss_agg_mode (token-mean): verl's KL in the loss has this mean" in text


def test_the_clip_of_verls_gmpo_is_the_presets():
    text = translated(
        f"{ACTOR}.policy_loss.loss_mode=geo_mean {ACTOR}.clip_ratio_low=0.4 "
        f"{ACTOR}.clip_ratio_high=0.4"
    )
    for key in ("clip_low", "clip_high"):
        assert f"  {key}: {PRESETS['gmpo'][key]} #" in text


def test_the_lower_bound_of_verls_cispo_has_its_key(tmp_path: Path):
    text = translated(f"{GROUPS} {ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=0.9")
    assert config_of(text, tmp_path).ppo.cispo_low == 0.9


def test_the_clip_of_verl_for_one_side_wins_in_any_order(tmp_path: Path):
    given = [f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio=0.2"]
    for order in (given, given[::-1]):
        ppo = config_of(translated(" ".join(order)), tmp_path).ppo
        assert (ppo.clip_low, ppo.clip_high) == (0.2, 0.28)
    text = translated(f"{' '.join(given)} {ACTOR}.clip_ratio_low=null")
    assert config_of(text, tmp_path).ppo.clip_low == 0.2
    text = translated(f"{ACTOR}.clip_ratio=0.3")
    assert config_of(text, tmp_path).ppo.clip_low == 0.3
    assert f"# - {ACTOR}.clip_ratio (0.3): verl uses it only for a bound" in text


def test_the_clips_of_openrlhf_for_each_side_win_in_any_order(tmp_path: Path):
    given = ["--eps_clip_low_high 0.1 0.28", "--eps_clip 0.2"]
    for order in (given, given[::-1]):
        text = openrlhf(" ".join(order))
        ppo = config_of(text, tmp_path).ppo
        assert (ppo.clip_low, ppo.clip_high) == (0.1, 0.28)
        assert "eps_clip (0.2)" in text, "needs nothing here"


def test_gspo_of_openrlhf_is_a_mean_over_sequences(tmp_path: Path):
    ppo = config_of(openrlhf("--policy_loss_type gspo"), tmp_path).ppo
    assert (ppo.policy_loss, ppo.aggregation) == ("gspo", "sequence_mean")


@pytest.mark.parametrize(("kind", "rate"), [("SFT", 2e-5), ("DPO", 1e-6), ("Reward", 1e-4)])
def test_examples_get_the_defaults_of_their_own_trainer(kind: str, rate: float, tmp_path: Path):
    recipe, given = read_script(f"{kind}Trainer('m', args={kind}Config(output_dir='o/r'))")
    (tmp_path / "run.yaml").write_text(translate("TRL", given, recipe))
    config = RECIPES[recipe].load(tmp_path / "run.yaml")
    assert vars(config)["learner"].lr == rate
    assert vars(config)["data"].max_response_tokens == 1024, "not GRPO's 512"
    recipe, given = read_script(f"{kind}Trainer('m', args={kind}Config(learning_rate=3e-5))")
    assert "  lr: 3.0e-05 # learning_rate\n" in translate("TRL", given, recipe)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_the_length_of_completions_limits_the_responses_of_the_examples(kind: str):
    recipe, given = read_script(f"{kind}Trainer('m', args={kind}Config(max_completion_length=99))")
    text = translate("TRL", given, recipe)
    assert "  max_response_tokens: 99 # max_completion_length\n" in text
    assert "max_new_tokens" not in text
    assert "  max_new_tokens: 99 # max_completion" in trl("max_completion_length=99")


@pytest.mark.parametrize(
    ("kind", "key"), [("DPO", "pairs"), ("Reward", "prompts"), ("SFT", "prompts")]
)
def test_held_out_examples_are_in_the_key_that_the_recipe_measures(
    kind: str, key: str, tmp_path: Path
):
    recipe, given = read_script(f"{kind}Trainer('m', train_dataset='t', eval_dataset='a/b')")
    (tmp_path / "run.yaml").write_text(translate("TRL", given | {"output_dir": "o/r"}, recipe))
    evaluation = vars(RECIPES[recipe].load(tmp_path / "run.yaml"))["eval"]
    assert getattr(evaluation, key) == ("a/b",)
    assert kind != "DPO" or evaluation.prompts is None


def test_a_generation_of_trl_counts_all_processes(tmp_path: Path):
    given = "generation_batch_size=64, per_device_train_batch_size=8, num_iterations=2, "
    text = trl(f"{given}max_steps=400, warmup_steps=20, save_steps=50")
    config = config_of(text, tmp_path)
    assert (config.rollout.prompts_per_step, config.ppo.minibatch_size) == (8, 8)
    assert "# - ppo.minibatch_size: these count one process." in text
    total = "400 of max_steps / (64 of generation_batch_size / (8 x processes) x 2 of num_iter"
    assert f"# - num_steps: {total}" in text
    assert f"num_steps: TODO # {total}" in text
    for name in ("warmup_steps (20)", "save_steps (50)"):
        assert f"# - {name}: " in text, "their unit is not known"
    assert "x 3 of num_train_epochs" in trl(given), "the rows, not the processes"
    assert "  prompts_per_step: " not in trl("generation_batch_size=size")


def test_a_batch_of_one_process_may_be_a_part_of_a_group():
    given = "num_generations=16, per_device_train_batch_size=1, gradient_accumulation_steps=12"
    text = trl(given)
    total = "12 responses x processes / 16 of num_generations"
    assert f"# - rollout.prompts_per_step: {total}\n" in text
    assert f"  prompts_per_step: TODO # {total}\n" in text
    assert "# - ppo.minibatch_size: these count one process." in text
    assert "num_steps: TODO # rows / rollout.prompts_per_step x 3 of num_train_epochs" in text
    text = trl("num_generations=16, generation_batch_size=40")
    assert "  prompts_per_step: TODO # 40 responses / 16 of num_generations\n" in text


@pytest.mark.parametrize(
    ("kind", "here"),
    [("k3", "k3"), ("mse", "k2"), ("low_var_kl+", "k3_st"), ("k3+", "k3_st"), ("kl+", "k2")],
)
def test_a_kl_in_the_loss_of_verl_has_its_estimator_here(kind: str, here: str, tmp_path: Path):
    text = translated(f"{GROUPS} {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type={kind}")
    kl = config_of(text, tmp_path).ppo.kl
    assert (kl.placement, kl.estimator) == ("loss", here)


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "full"])
def test_a_kl_in_the_loss_of_verl_that_raypo_lacks_is_left_to_be_set(kind: str, tmp_path: Path):
    text = translated(f"{GROUPS} {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type={kind}")
    assert f"# - ppo.kl.estimator: {ACTOR}.kl_loss_type {kind} " in text
    assert "    estimator: TODO # " in text
    assert "    placement: loss # " in text
    with pytest.raises(ConfigError, match=r"ppo\.kl\.estimator \('TODO'\)"):
        config_of(text, tmp_path)


def test_a_kl_in_the_loss_of_openrlhf_needs_an_estimator_for_it(tmp_path: Path):
    text = openrlhf("--use_kl_loss")
    assert "# - ppo.kl.estimator: algo.kl.estimator's default k1 has the gradient 0" in text
    assert "    estimator: TODO # " in text
    kl = config_of(openrlhf("--use_kl_loss --kl_estimator k3"), tmp_path).ppo.kl
    assert (kl.placement, kl.estimator) == ("loss", "k3")


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_prompts_that_verl_cuts_are_a_note(side: str):
    text = translated(f"data.truncation={side}")
    assert f"# - data.truncation ({side}): data.too_long. `error`. raypo never cuts" in text
    assert "truncation" not in translated(f"data.truncation={side} data.filter_overlong_prompts=1")


def test_a_second_kl_of_verl_is_a_note(tmp_path: Path):
    text = translated(f"{GROUPS} {ACTOR}.use_kl_loss=True algorithm.use_kl_in_reward=True")
    assert "# - algorithm.use_kl_in_reward (True): ppo.kl.placement. verl has a second KL" in text
    assert config_of(text, tmp_path).ppo.kl.placement == "loss"


def test_a_loss_of_sft_is_a_note():
    recipe, given = read_script("SFTTrainer('m', SFTConfig(loss_type='dft'))")
    assert "# - loss_type (dft): " in translate("TRL", given, recipe)
