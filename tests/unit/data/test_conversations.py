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
WITHOUT_EARLIER_ANSWERS = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}{{ m.role[0] }}:"
    "{{ m.content }}<eos>\n{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
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


@pytest.mark.parametrize("template", [WITH_END, MARKED], ids=["by prefixes", "marked"])
def test_every_turn_of_the_assistant_is_learned_with_its_end_and_nothing_else(
    tmp_path, tokenizer, template
):
    tokenizer.chat_template = template
    (example,) = loaded(tmp_path, tokenizer, CHAT)
    prompt, response = told(tokenizer, example)
    assert prompt.endswith("u:hi<eos>\na:") or prompt.endswith("u:hi\na:")
    assert response.startswith("yo<eos>.")
    assert response.endswith(".2<eos>")
    assert set(response[len("yo<eos>") : -len("2<eos>")]) == {"."}
    assert example.num_learned == 5


def test_both_ways_to_tell_agree_to_the_token(tmp_path, tokenizer):
    examples = []
    others_end = MARKED.replace("{% else %}{{ m.content }}", "{% else %}{{ m.content }}<eos>")
    for template in (WITH_END, others_end):
        tokenizer.chat_template = template
        (example,) = loaded(tmp_path, tokenizer, CHAT)
        examples.append([each.tolist() for each in vars(example).values()])
    assert examples[0] == examples[1]


def test_a_template_without_an_end_gets_one_behind_the_last_answer(tmp_path, tokenizer):
    (example,) = loaded(tmp_path, tokenizer, CHAT)
    prompt, response = told(tokenizer, example)
    assert prompt == "system: be kind\nuser: hi\nassistant: "
    assert response == "yo\n" + "." * len("user: 1+1?\nassistant: ") + "2\n<eos>"


def test_one_turn_is_what_prompt_and_response_give(tmp_path, tokenizer):
    (of_chat,) = loaded(tmp_path, tokenizer, CHAT[1:3])
    row = {"prompt": CHAT[1:2], "response": "yo"}
    path = tmp_path / "pair.jsonl"
    path.write_text(json.dumps(row) + "\n")
    section = ResponsesSection.model_validate({"prompts": str(path)})
    (of_columns,) = load_examples(section, tokenizer, END).items
    assert of_chat.prompt_ids.tolist() == of_columns.prompt_ids.tolist()
    assert of_chat.response_ids.tolist() == of_columns.response_ids.tolist()
    assert of_chat.mask is None


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path, tokenizer):
    tokenizer.chat_template = WITHOUT_EARLIER_ANSWERS
    with pytest.raises(
        ConfigError, match=r"renders differently when later turns follow.*generation"
    ):
        loaded(tmp_path, tokenizer, CHAT)
    assert len(loaded(tmp_path, tokenizer, CHAT[1:3])) == 1


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
