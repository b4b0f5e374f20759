"""What stands between two turns: once tokenised, whatever a template makes of earlier turns."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from raypo.data.turns import TurnTokens
from tests.chat_templates import CHAT_TEMPLATES, MARKS, TOOL_TEMPLATES
from tests.tiny import tiny_tokenizer

END = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A tokenizer to which the marks of published templates are special tokens."""
    made = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("marked")))
    made.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return made


def text_between(
    tokenizer, reply: str, observation, *, chat: bool = True, ends: tuple[str, ...] = (), **keys
) -> str:
    ids = np.array(tokenizer(reply, add_special_tokens=False)["input_ids"])
    stop = [END, *tokenizer.convert_tokens_to_ids(list(ends))]
    between = TurnTokens(tokenizer, stop).between(ids, observation, chat=chat, **keys)
    return tokenizer.decode(between)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_chat_goes_on_as_its_template_writes_it(tokenizer, name):
    """From the last turn's end on: what templates make of earlier turns is not asked."""
    tokenizer.chat_template = CHAT_TEMPLATES[name]
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    more = {"role": "user", "content": "and?"}
    whole = tokenizer.apply_chat_template([*said, more], tokenize=False, add_generation_prompt=True)
    written = whole[whole.index("yo") + 2 :]

    assert text_between(tokenizer, "yo", more) == written
    after_its_end = written.split("<eos>", 1)[1] if "<eos>" in written else written
    assert text_between(tokenizer, "yo<eos>", more) == after_its_end


def test_a_text_is_the_users_message_in_a_chat_and_itself_elsewhere(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATES["plain"]
    assert text_between(tokenizer, "yo", "and?") == "\nuser: and?\nassistant: "
    assert text_between(tokenizer, "yo", "and?", chat=False) == "and?"


def test_ids_stay_as_they_are(tokenizer):
    turns = TurnTokens(tokenizer, [END])
    assert turns.between(np.array([5]), [7, 8], chat=True).tolist() == [7, 8]
    text, ids = turns.first(np.array([9, 10]), chat=True)
    assert (tokenizer.decode([9, 10]), [9, 10]) == (text, ids.tolist())


@pytest.mark.parametrize("wrong", [3, object(), [{"role": "user"}], [1.5], [True]])
def test_what_is_no_observation_is_told(tokenizer, wrong):
    with pytest.raises(ValueError, match="an observation must be a text"):
        TurnTokens(tokenizer, [END]).between(np.array([5]), wrong, chat=True)


def test_chat_messages_need_a_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        text_between(tokenizer, "yo", {"role": "user", "content": "and?"}, chat=False)


RESULT = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "abcdefghi"}
CALLS = [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {}}}]


@pytest.mark.parametrize(
    ("name", "reply", "follows"),
    [
        ("Hermes, Qwen", "<tool_call>{}</tool_call><eos>", "\n<bos>tool\n4<eos>\n<bos>assistant\n"),
        ("Hermes, Qwen", "y", "<eos>\n<bos>tool\n4<eos>\n<bos>assistant\n"),
        (
            "Mistral",
            "[TOOL_CALLS] []<eos>",
            '[TOOL_RESULTS] {"content": 4, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
        ),
        (
            "gpt-oss",
            "add<|message|>{}<|call|>",
            '<|start|>functions.add to=assistant<|message|>"4"<|end|><|start|>assistant',
        ),
        (
            "gpt-oss",
            "add<|message|>{}",  # cut off: the call is ended for it
            '<|call|><|start|>functions.add to=assistant<|message|>"4"<|end|><|start|>assistant',
        ),
        ("GLM", "<tool_call>add</tool_call><|observation|>", "\n4<|assistant|>\n"),
        ("GLM", "<tool_call>add</tool_call>", "<|observation|>\n4<|assistant|>\n"),
    ],
)
@pytest.mark.parametrize("calls", [(), CALLS])
def test_what_a_tool_answers_follows_as_the_template_writes_it(marked, name, reply, follows, calls):
    """Also in templates that refuse it where no call came before."""
    marked.chat_template = TOOL_TEMPLATES[name]
    ends = ("<|return|>", "<|call|>", "<|user|>", "<|observation|>")
    assert text_between(marked, reply, RESULT, ends=ends, calls=calls) == follows


def test_a_result_without_what_its_template_wants_is_told(marked):
    marked.chat_template = TOOL_TEMPLATES["Mistral"]
    with pytest.raises(Exception, match="ids have 9 characters"):
        text_between(marked, "y<eos>", {"role": "tool", "content": "4"})


@pytest.mark.parametrize(
    ("name", "reply", "follows"),
    [
        # what the template writes after it is of no turn that goes on
        ("ends the last turn only", "yo<eos>", " user: a assistant: "),
        ("GLM", "yo<|user|>", "\na<|assistant|>\n"),
        ("GLM", "yo", "<|user|>\na<|assistant|>\n"),
        # an end that the template only writes last is followed by the usual one
        ("gpt-oss", "yo<|return|>", "<|end|><|start|>user<|message|>a<|end|><|start|>assistant"),
    ],
)
def test_only_an_end_that_the_template_writes_here_too_is_left_out(marked, name, reply, follows):
    marked.chat_template = TOOL_TEMPLATES[name]
    assert text_between(marked, reply, "a", ends=("<|return|>", "<|user|>")) == follows


def test_a_turn_goes_on_where_a_template_without_marks_has_nothing_to_write(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert text_between(tokenizer, "yo<eos>", "") == ""


def test_a_template_that_leaves_out_what_was_said_is_told(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="leaves out what the assistant said"):
        text_between(tokenizer, "yo", "and?")


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_an_observation_may_contain_the_placeholder_of_the_reply(tokenizer, name):
    tokenizer.chat_template = CHAT_TEMPLATES[name]
    plain = text_between(tokenizer, "yo", {"role": "user", "content": "you wrote X, wrong"})
    same = {"role": "user", "content": "you wrote raypo-reply, wrong"}
    assert text_between(tokenizer, "yo", same) == plain.replace("X", "raypo-reply")
