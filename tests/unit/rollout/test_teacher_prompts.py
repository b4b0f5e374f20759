"""Prompts of a teacher that knows more than the policy."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from raypo.config import ConfigError, DistillationSection
from raypo.rollout.teacher_prompts import (
    solution,
    success,
    teacher_prompts,
    tokenised_prompt,
    with_solution,
)
from raypo.types import Rollout
from tests.tiny import tiny_tokenizer
from tests.unit.run.test_rejection_sampling import scored


def chat(*messages: tuple[str, str]) -> Rollout:
    made = scored(0, 0, 1.0)
    said = [{"role": role, "content": text} for role, text in messages]
    return replace(made, messages=said)


def test_each_sample_is_shown_another_one_that_passes():
    samples = [
        scored(0, number, score) for number, score in enumerate([0.2, 1.0, float("nan"), 3.0])
    ]
    shown = [prompt and str(prompt).split("\n\n")[1] for prompt in success(samples)]
    assert shown == ["0.1", "0.3", "0.1", "0.1"]
    assert success(samples[:1]) == [None]
    assert success(samples[1:2]) == [None]


def test_the_solution_is_the_label():
    assert solution([scored(0, 0, 0.0)]) == ["A correct solution is:\n\n7\n\nprompt 0"]


def test_in_a_chat_the_solution_is_in_the_users_last_message():
    before = chat(("system", "s"), ("user", "2+2?"), ("assistant", "It is"))
    shown = with_solution(before, "4")
    assert isinstance(shown, list)
    assert [each["role"] for each in shown] == ["system", "user", "assistant"]
    assert shown[1]["content"].startswith("2+2?\n\nA correct solution is:\n\n4")
    assert before.messages is not None
    assert before.messages[1]["content"] == "2+2?"  # a copy was changed
    alone = with_solution(chat(("system", "s")), "4")
    assert isinstance(alone, list)
    assert [each["role"] for each in alone] == ["system", "user"]


def test_prompts_are_tokenised_as_those_of_the_policy(tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    text = tokenised_prompt(tokenizer, "2+2=")
    assert tokenizer.decode(text, skip_special_tokens=True) == "2+2="
    said = tokenised_prompt(tokenizer, [{"role": "user", "content": "2+2?"}])
    assert tokenizer.decode(said) == "user: 2+2?\nassistant: "
    with pytest.raises(ConfigError, match=r"distillation\.teacher_prompt: returned 5"):
        tokenised_prompt(tokenizer, 5)  # type: ignore[arg-type]


def test_a_function_of_the_users_own(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(
        "def hints(samples):\n    return [f'hint {s.sample_index}' for s in samples]\n"
        "def few(samples):\n    return samples[1:]\n"
    )
    hints, few = (
        teacher_prompts(DistillationSection(teacher_prompt=f"{file}:{name}"))
        for name in ("hints", "few")
    )
    assert hints is not None
    assert few is not None
    samples = [scored(0, 0, 0.0), scored(0, 1, 0.0)]
    assert hints(samples) == ["hint 0", "hint 1"]
    with pytest.raises(ValueError, match="returned 1 prompts for 2 samples"):
        few(samples)
    assert teacher_prompts(DistillationSection()) is None
