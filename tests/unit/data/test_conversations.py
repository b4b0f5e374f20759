"""Conversations of several turns: which tokens are learned, by the template or by its prefixes."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from raypo.config import ConfigError, ResponsesSection
from raypo.data.examples import load_examples
from raypo.types import Example
from tests.tiny import tiny_tokenizer

END = (2,)
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]
WITH_END = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}<eos>{% else %}{{ m.content }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))


def loaded(tmp_path, tokenizer, *rows: Any, **keys: Any) -> Sequence[Example]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    values = {"prompts": str(path), "messages_key": "messages"} | keys
    return load_examples(ResponsesSection.model_validate(values), tokenizer, END).items


def told(tokenizer, example: Example) -> tuple[str, str]:
    """The prompt, and the response with what is not learned as dots."""
    learned = [True] * len(example.response_ids) if example.mask is None else example.mask
    tokens = [tokenizer.decode([each]) for each in example.response_ids.tolist()]
    shown = [token if kept else "." for token, kept in zip(tokens, learned, strict=True)]
    return tokenizer.decode(example.prompt_ids.tolist()), "".join(shown)


def test_both_ways_to_tell_agree_to_the_token(tmp_path, tokenizer):
    examples = []
    others_end = MARKED.replace("{% else %}{{ m.content }}", "{% else %}{{ m.content }}<eos>")
    for template in (WITH_END, others_end):
        tokenizer.chat_template = template
        (example,) = loaded(tmp_path, tokenizer, CHAT)
        arrays = (example.prompt_ids, example.response_ids, example.mask)
        examples.append([array.tolist() for array in arrays if array is not None])
    assert examples[0] == examples[1]


def test_a_template_without_an_end_gets_one_behind_the_last_answer(tmp_path, tokenizer):
    (example,) = loaded(tmp_path, tokenizer, CHAT)
    prompt, response = told(tokenizer, example)
    assert prompt == "system: be kind\nuser: hi\nassistant: "
    assert response == "yo\n" + "." * len("user: 1+1?\nassistant: ") + "2\n<eos>"


@pytest.mark.parametrize(
    "row", ["text", CHAT[:2], [CHAT[2]], [CHAT[2], CHAT[1]]], ids=["text", "-", "alone", "first"]
)
def test_rows_without_an_answer_are_refused(tmp_path, tokenizer, row):
    with pytest.raises(ConfigError, match=r"data.messages_key \(messages\).*rows.jsonl:1"):
        loaded(tmp_path, tokenizer, row)


def test_long_conversations_are_skipped_or_refused(tmp_path, tokenizer):
    keys = {"max_prompt_tokens": 20, "max_response_tokens": 20}
    assert len(loaded(tmp_path, tokenizer, CHAT, CHAT[1:3], **keys)) == 1
    with pytest.raises(ConfigError, match="max_response_tokens to at least"):
        loaded(tmp_path, tokenizer, CHAT, too_long="error", **keys)
    with pytest.raises(ConfigError, match="all 1 conversations"):
        loaded(tmp_path, tokenizer, CHAT, **keys)
