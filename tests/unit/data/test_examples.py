import json
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from raypo.config import ConfigError, PairsSection, PreferencesSection, ResponsesSection
from raypo.data.examples import load_examples, load_pairs, load_verdicts
from tests.tiny import tiny_tokenizer

END = (2,)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


Section = TypeVar("Section", bound=BaseModel)


def section_of(kind: type[Section], prompts: str, **values: Any) -> Section:
    return kind.model_validate({"prompts": prompts} | values)


def text(tokenizer, ids) -> str:
    return tokenizer.decode(ids.tolist())


@pytest.mark.parametrize("behind", ["<eos>\n", "<eos><pad>", "<eos>\n<pad> <eos>\n\n"])
def test_white_space_and_further_ends_behind_the_end_are_left_out(tmp_path, tokenizer, behind):
    """As `apply_chat_template` writes answers."""
    chat, answer = [{"role": "user", "content": "hi"}], f"a {behind}"
    said = [*chat, {"role": "assistant", "content": answer}]
    rows = [{"prompt": each, "response": answer, "chat": said} for each in ("q", chat)]
    path = write(tmp_path / "a.jsonl", *rows)
    ends = (tokenizer.convert_tokens_to_ids("<pad>"), *END)
    plain, of_chat = load_examples(section_of(ResponsesSection, path), tokenizer, ends).items
    assert text(tokenizer, plain.response_ids) == "a <eos>"
    assert text(tokenizer, of_chat.response_ids) == "a \n<eos>"
    values = section_of(ResponsesSection, path, messages_key="chat")
    whole, _ = load_examples(values, tokenizer, ends).items
    assert text(tokenizer, whole.response_ids) == "a \n<eos>"


def test_empty_responses_are_not_learned_but_counted(tmp_path, tokenizer):
    rows = [{"prompt": "q", "response": each} for each in ("a", "", " \n", "<eos>")]
    path = write(tmp_path / "a.jsonl", *rows)
    loaded = load_examples(section_of(ResponsesSection, path), tokenizer, END)
    assert (len(loaded.items), loaded.num_unusable) == (1, 3)
    (told,) = loaded.notes("data.prompts")
    assert told == (
        "3 of the 4 rows of data.prompts have equal responses, an empty one or none to learn and "
        "are skipped"
    )
    path = write(tmp_path / "b.jsonl", *rows[1:])
    with pytest.raises(
        ConfigError, match=r"3 rows have equal responses or an empty .* Look at response\."
    ):
        load_examples(section_of(ResponsesSection, path), tokenizer, END)


def test_empty_answers_of_conversations_are_not_learned_but_counted(tmp_path, tokenizer):
    user = {"role": "user", "content": "hi"}
    rows = [
        {"chat": [user, {"role": "assistant", "content": answer}]} for answer in ("a", "", "<eos>")
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    loaded = load_examples(section_of(ResponsesSection, path, messages_key="chat"), tokenizer, END)
    assert (len(loaded.items), loaded.num_unusable) == (1, 2)
    path = write(tmp_path / "b.jsonl", *rows[1:])
    with pytest.raises(ConfigError, match="2 conversations have only empty answers"):
        load_examples(section_of(ResponsesSection, path, messages_key="chat"), tokenizer, END)


def test_verdicts_and_margins_of_a_csv_file_are_read_from_its_texts(tmp_path, tokenizer):
    path = tmp_path / "rows.csv"
    path.write_text(
        "prompt,response,chosen,rejected,good,by\nq,a,a,b,True,2.5\nr,b,a,b,0,-1\n",
    )
    section = section_of(PairsSection, str(path), margin_key="by")
    assert [pair.margin for pair in load_pairs(section, tokenizer, END).items] == [2.5, -1.0]
    judged = section_of(PreferencesSection, str(path), desirable_key="good")
    loaded = load_verdicts(judged, tokenizer, END)
    assert [verdict.is_desirable for verdict in loaded.items] == [True, False]


def test_long_rows_are_skipped_and_counted_or_refused(tmp_path, tokenizer):
    rows = [{"prompt": "q", "response": "abcd"}, {"prompt": "q", "response": "a"}]
    path = write(tmp_path / "a.jsonl", *rows)
    loaded = load_examples(
        section_of(ResponsesSection, path, max_response_tokens=4), tokenizer, END
    )
    assert (len(loaded.items), loaded.num_skipped) == (1, 1)
    (told,) = loaded.notes("eval.prompts")
    assert told.startswith("1 of the 2 rows of eval.prompts have a prompt longer than")
    strict = section_of(ResponsesSection, path, max_response_tokens=4, too_long="error")
    with pytest.raises(ConfigError, match=r"max_response_tokens to at least 5"):
        load_examples(strict, tokenizer, END)
    with pytest.raises(ConfigError, match="all 2 rows"):
        load_examples(section_of(ResponsesSection, path, max_response_tokens=1), tokenizer, END)
