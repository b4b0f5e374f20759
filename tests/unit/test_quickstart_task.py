"""The quickstart's task, pairs and conditions; training itself is the slow tests' business."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from examples.quickstart.demo import Pipeline, conditions, table, values_of
from examples.quickstart.make_data import (
    answer_of,
    draw_examples,
    make_data,
    make_policy,
    make_tokenizer,
)
from examples.quickstart.make_pairs import make_pairs, pairs_of, sample
from examples.quickstart.reward import exact
from raypo import PPOConfig, RewardModelConfig, Rollout, SFTConfig
from raypo.config.sweep_config import SweepConfig
from raypo.data.prompts import peek
from tests.rollouts import plain_rollout

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart"
ANSWER_TOKENS = len("0135") + 1


def rollout(response: str, label: str) -> Rollout:
    return plain_rollout(5, 5, prompt="5031=", response=response, label=label)


def test_answer_is_the_digits_in_order():
    assert answer_of("5031=") == "0135"
    assert answer_of("9900=") == "0099"


def test_examples_differ_and_leave_out_the_held_out_ones():
    held_out = draw_examples(random.Random(0), 100, without=set())
    prompts = {prompt for prompt, _ in held_out}

    train = draw_examples(random.Random(0), 1000, without=prompts)

    assert len(dict(train)) == 1000
    assert not prompts & dict(train).keys()
    assert all(len(prompt) == 5 and answer_of(prompt) == answer for prompt, answer in train)


def test_exact_rewards_the_answer_alone():
    responses = ["0135", "0153", "01355", "", " 0135"]

    assert exact([rollout(r, "0135") for r in responses]) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_tokenizer_round_trips_and_adds_nothing(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    ids = tokenizer("5031=0135<eos>").input_ids

    assert len(ids) == 10
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "5031=0135"


def test_policy_has_heads_that_vllm_takes_on_cpu():
    policy = make_policy(make_tokenizer())

    assert policy.config.hidden_size // policy.config.num_attention_heads == 32
    assert policy.generation_config.eos_token_id == policy.config.eos_token_id


def test_data_is_whole_and_made_once(tmp_path):
    folder = tmp_path / "data"

    make_data(folder)
    (folder / "prompts.jsonl").write_text("mine\n")
    make_data(folder)

    assert (folder / "base" / "model.safetensors").exists()
    assert json.loads((folder / "eval.jsonl").read_text().splitlines()[0]).keys() == {
        "prompt",
        "answer",
    }
    assert (folder / "prompts.jsonl").read_text() == "mine\n"


def test_pairs_are_different_wrong_answers_against_a_right_one():
    example = ("31=", "13")

    pairs = list(pairs_of(example, ["31", "13", "31", "11", "13", "33", "3"]))

    assert pairs == [
        {"prompt": "31=", "chosen": "13", "rejected": rejected} for rejected in ("31", "11", "33")
    ]
    assert not list(pairs_of(example, ["31", "11"]))
    assert not list(pairs_of(example, ["13", "13"]))


def test_samples_are_the_responses_of_each_prompt_in_order():
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    policy: Any = make_policy(tokenizer).eval()

    responses = sample(policy, tokenizer, ["5031=", "9900="], num_samples=3)

    assert [len(of_prompt) for of_prompt in responses] == [3, 3]
    assert all("5031=" not in text and "<" not in text for text in responses[0])


def test_pairs_come_from_both_files_and_what_is_there_stays(tmp_path):
    base, data = tmp_path / "base", tmp_path / "data"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(base)
    make_policy(tokenizer).save_pretrained(base)
    data.mkdir()
    (data / "prompts.jsonl").write_text('{"prompt": "5031=", "answer": "0135"}\n')
    (data / "eval.jsonl").write_text('{"prompt": "9900=", "answer": "0099"}\n')
    (data / "eval_pairs.jsonl").write_text("mine\n")

    make_pairs(data, base, num_samples=2)

    assert (data / "pairs.jsonl").exists()
    assert (data / "eval_pairs.jsonl").read_text() == "mine\n"


def figures(name: str, *values: float) -> list[dict[str, float]]:
    """Rows of a run: the first value was measured before the first update."""
    rows = [{"step": step, name: value} for step, value in enumerate(values[1:], 1)]
    rows[0][name.replace("eval/", "eval/initial_")] = values[0]
    return rows


def judged(*, sft: float = 0.4, accuracy: float = 0.99, gain: float = 0.3, kl: float = 1.0):
    ppo = figures("eval/score_mean", sft, sft + gain)
    ppo[0] |= {"rollout/score_mean": -1.0}
    ppo.append({"step": 2, "rollout/score_mean": 1.0, "kl/ref_response_mean": kl})
    return conditions(
        figures("eval/score_mean", 0.0, 0.1, sft - 0.02, sft, sft),
        figures("eval/accuracy", 0.5, accuracy),
        ppo,
    )


def test_conditions_hold_where_all_is_well():
    results = judged()

    assert all(result.is_met for result in results)
    assert "40.0% -> 70.0% (+30.0)" in table(results)
    assert "FAILED" not in table(results)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sft": 0.2}, "SFT answers"),
        ({"accuracy": 0.96}, "reward model orders"),
        ({"gain": 0.19}, "PPO raises the verifier's"),
        ({"kl": 9.0}, "KL to the SFT policy"),
    ],
)
def test_each_condition_can_fail(change, words):
    missed = [result for result in judged(**change) if not result.is_met]

    assert [result.name.startswith(words) for result in missed] == [True]
    assert table(missed).startswith("FAILED")


def test_sft_that_still_learns_is_not_flat():
    results = conditions(
        figures("eval/score_mean", 0.0, 0.1, 0.2, 0.3, 0.4),
        figures("eval/accuracy", 0.5, 0.99),
        [
            {"step": 1, "rollout/score_mean": 0.0, "eval/initial_score_mean": 0.4},
            {"step": 2, "rollout/score_mean": 1.0, "eval/score_mean": 0.9},
            {"step": 3, "rollout/score_mean": 1.0, "kl/ref_response_mean": 1.0},
        ],
    )

    assert [result.is_met for result in results] == [True, False, True, True, True, True]


def test_values_start_before_the_first_update():
    assert values_of(figures("eval/score_mean", 0.1, 0.2, 0.3), "eval/score_mean") == [
        0.1,
        0.2,
        0.3,
    ]
    assert values_of([{"step": 1, "loss": 2.0}], "loss") == [2.0]


def test_run_configs_fit_the_task_and_each_other(tmp_path):
    sft = SFTConfig.load(QUICKSTART / "sft.yaml")
    reward_model = RewardModelConfig.load(QUICKSTART / "reward_model.yaml")
    ppo = PPOConfig.load(QUICKSTART / "ppo.yaml")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "5031=", "answer": "0135"}\n')

    peek(ppo.data.model_copy(update={"prompts": (str(path),)}))

    assert sft.data.max_response_tokens >= ANSWER_TOKENS
    assert ppo.rollout.max_new_tokens >= ANSWER_TOKENS
    assert ppo.data.max_prompt_tokens >= len("5031=")
    assert reward_model.data.max_response_tokens > ppo.rollout.max_new_tokens
    assert ppo.rollout.temperature == 1.0
    assert ppo.eval.temperature in (None, 1.0)
    assert reward_model.model.policy == ppo.model.policy == f"runs/{sft.name}/policy"
    assert ppo.model.critic == f"runs/{reward_model.name}/reward_model"


def test_pipeline_of_seed_0_is_what_the_files_say():
    pipeline, named = Pipeline.of_seed(0), Path(os.path.relpath(QUICKSTART))

    assert pipeline.sft_config() == SFTConfig.load(named / "sft.yaml")
    assert pipeline.reward_model_config() == RewardModelConfig.load(named / "reward_model.yaml")
    assert pipeline.ppo_config() == PPOConfig.load(named / "ppo.yaml")


@pytest.mark.parametrize("file", sorted((EXAMPLES.parent / "sweeps").glob("*.yaml")), ids=str)
def test_sweeps_run_as_they_are_after_the_demo(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Every model of a trial is one that a stage of the demo writes."""
    monkeypatch.chdir(EXAMPLES.parent)
    pipeline = Pipeline.of_seed(0)
    rewards = (pipeline.reward_model_config(), pipeline.hasty_reward_model_config())
    written = {f"runs/{each.name}/reward_model" for each in rewards}
    for _, trial in SweepConfig.load(file).trials():
        assert isinstance(trial, PPOConfig)
        assert trial.model.policy == f"{pipeline.sft}/policy"
        assert {trial.model.critic, *(each.path for each in trial.model.reward or ())} <= written


def test_pipelines_of_other_seeds_have_folders_of_their_own():
    first, second = Pipeline.of_seed(1).ppo_config(), Pipeline.of_seed(2).ppo_config()

    assert first.seed == 1
    assert first.storage_path != second.storage_path
    assert first.model.policy.startswith(first.storage_path)
    assert first.data.prompts != second.data.prompts


@pytest.mark.parametrize("example", ["verifiable_reward/train.py", "quickstart/bare_loop.py"])
def test_python_examples_import_public_names_only(example):
    lines = (EXAMPLES / example).read_text().splitlines()

    imports = [line for line in lines if line.startswith(("from raypo", "import raypo"))]

    assert imports
    assert all(line.startswith(("from raypo import ", "import raypo")) for line in imports)


def test_verifiable_reward_config_is_valid():
    config = PPOConfig.load(EXAMPLES / "verifiable_reward" / "ppo.yaml")

    assert config.model.reward is None
    assert config.reward.function
