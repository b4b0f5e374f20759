"""What stands between two turns: once tokenised, whatever a template makes of earlier turns."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from raypo.data.turns import TurnTokens
from tests.chat_templates import CHAT_TEMPLATES
from tests.tiny import tiny_tokenizer

END = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def text_between(tokenizer, reply: str, observation, *, chat: bool = True) -> str:
    ids = np.array(tokenizer(reply, add_special_tokens=False)["input_ids"])
    return tokenizer.decode(TurnTokens(tokenizer, [END]).between(ids, observation, chat=chat))


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


def test_a_cut_off_turn_is_ended_by_the_template(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATES["ends turns with the stop token"]
    assert text_between(tokenizer, "y", "a").startswith("<eos>\n<bos>user\n")
    assert text_between(tokenizer, "y<eos>", "a").startswith("\n<bos>user\n")


def test_ids_stay_as_they_are(tokenizer):
    turns = TurnTokens(tokenizer, [END])
    assert turns.between(np.array([5]), [7, 8], chat=True).tolist() == [7, 8]
    text, ids = turns.first(np.array([9, 10]), chat=True)
    assert (tokenizer.decode([9, 10]), [9, 10]) == (text, ids.tolist())


@pytest.mark.parametrize("wrong", [3, object(), [{"role": "user"}], [1.5], [True]])
def test_what_is_no_observation_is_told(tokenizer, wrong):
    with pytest.raises(ValueError, match="an observation is a text"):
        TurnTokens(tokenizer, [END]).between(np.array([5]), wrong, chat=True)


def test_chat_messages_need_a_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        text_between(tokenizer, "yo", {"role": "user", "content": "and?"}, chat=False)
