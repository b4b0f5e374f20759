"""`raypo init` gives what the hand-written ports have, and names what it leaves out."""

import re
from pathlib import Path

import pytest

import examples.ports.trl_grpo
from raypo.config import ConfigError, PPOConfig
from raypo.config.translation import read_command, read_script, translate

PORTS = Path(__file__).parents[3] / "examples/ports"
TRL = examples.ports.trl_grpo.__doc__ or ""


def command_in(file: str) -> str:
    """The command in the comments at a port's top."""
    lines = (PORTS / file).read_text().splitlines()
    return "\n".join(line.removeprefix("#") for line in lines[2:] if line.startswith("#"))


def config_of(text: str, tmp_path: Path) -> PPOConfig:
    (tmp_path / "run.yaml").write_text(text)
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
    assert re.search(r"# - \S+(remote_url|reward_function.path) \(\S+\): reward\.", text)


def test_a_script_of_trl_becomes_its_port(tmp_path: Path):
    script = TRL.partition("(one process):\n\n")[2]
    recipe, given = read_script(re.sub("^    ", "", script, flags=re.MULTILINE))
    config = config_of(translate("TRL", given, recipe), tmp_path)
    assert (config.name, config.model.policy) == ("ported-trl", "runs/quickstart-sft/policy")
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (32, 4)
    assert (config.ppo.minibatch_size, config.num_steps) == (128, 10)
    assert (config.ppo.preset, config.ppo.kl.coef) == ("grpo", 0.04)
    assert config.learner.policy_lr == 3e-4


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
    assert "# - use_vllm (True): Responses are always sampled by vLLM." in text
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
    assert "clip_high: 0.28 # actor.eps_clip_low_high" in text
    assert "samples_per_prompt: 1" not in text
    assert "policy: TODO # set this" in text


def test_a_name_that_raypo_refuses_is_left_to_be_set():
    recipe, given = read_script("GRPOTrainer('m', f, args=GRPOConfig(output_dir='runs/a b'))")
    text = translate("TRL", given, recipe)
    assert "# - output_dir: name ('a b'): " in text
    assert "name: TODO # set this" in text


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
    for key in ("prompts_per_step", "minibatch_size", "num_steps"):
        assert f"{key}: " not in text.partition("\nname:")[2]


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
    assert not re.search("^num_steps", text, re.MULTILINE)


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
