"""The quickstart's task and reward; training itself is the integration tests' business."""

import random
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.quickstart.make_models import (
    answer_of,
    draw_examples,
    encode,
    make_policy,
    make_tokenizer,
    write_jsonl,
)
from examples.quickstart.reward import exact
from raypo import PPOConfig, Rollout
from raypo.data.prompts import peek

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def rollout(response: str, label: str) -> Rollout:
    return Rollout(
        prompt="5031=",
        response=response,
        prompt_ids=np.zeros(5, np.int32),
        response_ids=np.zeros(5, np.int32),
        log_probs=np.zeros(5, np.float32),
        response_mask=np.ones(5, bool),
        label=label,
        prompt_index=0,
        sample_index=0,
        finish_reason="stop",
        weight_version=0,
    )


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

    ids = encode(tokenizer, [("5031=", "0135")])[0].tolist()

    assert len(ids) == 10
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "5031=0135"


def test_policy_has_heads_that_vllm_takes_on_cpu():
    policy = make_policy(make_tokenizer())

    assert policy.config.hidden_size // policy.config.num_attention_heads == 32
    assert policy.generation_config.eos_token_id == policy.config.eos_token_id


def test_run_config_is_valid_and_fits_the_task(tmp_path):
    config = PPOConfig.load(QUICKSTART / "ppo.yaml")
    write_jsonl(tmp_path / "prompts.jsonl", [("5031=", "0135")])
    answer_tokens = len("0135") + 1

    peek([str(tmp_path / "prompts.jsonl")], config.data.prompt_key, config.data.label_key)

    assert config.rollout.max_new_tokens >= answer_tokens
    assert config.data.max_prompt_tokens >= len("5031=")
    assert config.rollout.temperature == 1.0
    assert config.eval.temperature in (None, 1.0)
    assert config.learner.cpus_per_worker == 2


@pytest.mark.parametrize("example", ["train.py", "bare_loop.py"])
def test_python_examples_import_public_names_only(example):
    lines = (QUICKSTART / example).read_text().splitlines()

    imports = [line for line in lines if line.startswith(("from raypo", "import raypo"))]

    assert imports
    assert all(line.startswith(("from raypo import ", "import raypo")) for line in imports)
