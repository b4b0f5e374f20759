"""Responses of the models that people have: one end, learned, whatever template and file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypo.config import ConfigError, PairsSection, ResponsesSection
from raypo.data.examples import load_examples, load_pairs
from raypo.data.prompts import load_prompts
from raypo.data.turns import TurnTokens
from raypo.types import Example
from tests.chat_templates import FAMILIES, family_tokenizer, stop_ids
from tests.unit.data.prompt_files import save_to_disk, section, write

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yo"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 1}},
        }
    ],
}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "abcdefghi", "name": "add"}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.end_of_call]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {name: family_tokenizer(name, tmp_path_factory.mktemp("t")) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


def examples(tmp_path: Path, tokenizers, name, *rows: Any, **keys: Any) -> Sequence[Example]:
    path = write(tmp_path / f"rows{keys.pop('kind', '.jsonl')}", list(rows))
    section = ResponsesSection.model_validate({"prompts": path} | keys)
    tokenizer = tokenizers[name]
    return load_examples(section, tokenizer, stop_ids(name, tokenizer)).items


def shown(tokenizer, example: Example) -> tuple[str, str]:
    """The prompt, and the response with a dot for each token that is not learned."""
    mask = [True] * len(example.response_ids) if example.mask is None else example.mask
    tokens = [tokenizer.decode([each]) for each in example.response_ids.tolist()]
    learned = "".join(token if kept else "." for token, kept in zip(tokens, mask, strict=True))
    return tokenizer.decode(example.prompt_ids.tolist()), learned


def learned_ends(name: str, tokenizer, example: Example) -> list[str]:
    """The stop tokens among what is learned."""
    mask = [True] * len(example.response_ids) if example.mask is None else example.mask
    ids = example.response_ids[list(mask)].tolist()
    return [tokenizer.decode([each]) for each in ids if each in stop_ids(name, tokenizer)]


def test_a_response_ends_once_by_what_the_template_ends_it_with(tmp_path, tokenizers, name):
    tokenizer, family = tokenizers[name], FAMILIES[name]
    (example,) = examples(tmp_path, tokenizers, name, {"prompt": [USER], "response": "yo"})
    assert learned_ends(name, tokenizer, example) == [family.end]
    assert tokenizer.decode(example.response_ids).endswith(f"yo{family.end}")
    assert example.mask is None
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(example.prompt_ids) == prompt
    if family.bos:
        assert example.prompt_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_a_text_ends_once_by_the_tokenizers_end(tmp_path, tokenizers, name):
    tokenizer, family = tokenizers[name], FAMILIES[name]
    ends = ["", *family.stops]
    rows = [{"prompt": "1+1=", "response": f"2{end}"} for end in ends]
    found = examples(tmp_path, tokenizers, name, *rows)
    told = [tokenizer.decode(each.response_ids) for each in found]
    assert told == [f"2{end or family.eos}" for end in ends]
    begins = family.bos if family.adds_bos else ""
    assert tokenizer.decode(found[0].prompt_ids) == f"{begins}1+1="


@pytest.mark.parametrize("what", [ANSWER, CALL], ids=["answer", "call"])
def test_a_response_is_learned_as_the_conversation_is(tmp_path, tokenizers, name, what):
    """A message keeps its calls; what `messages_key` learns is what a response learns."""
    tokenizer, family = tokenizers[name], FAMILIES[name]
    if what is CALL and not family.end_of_call:
        pytest.skip("this family's template knows no tools")
    row = {"prompt": [USER], "response": [what], "chat": [USER, what]}
    (of_response,) = examples(tmp_path, tokenizers, name, row)
    (of_chat,) = examples(tmp_path, tokenizers, name, row, messages_key="chat")
    assert of_response.prompt_ids.tolist() == of_chat.prompt_ids.tolist()
    assert of_response.response_ids.tolist() == of_chat.response_ids.tolist()
    end = family.end_of_call if what is CALL else family.end
    assert learned_ends(name, tokenizer, of_response) == [end]
    assert int(of_response.response_ids[-1]) == tokenizer.convert_tokens_to_ids(end)
    if what is CALL:
        written = tokenizer.decode(of_response.response_ids)
        assert "add" in written
        assert '{"a": 1}' in written


def test_every_answer_of_a_conversation_is_learned_with_its_end(tmp_path, tokenizers, name):
    tokenizer, family = tokenizers[name], FAMILIES[name]
    chat = [
        USER,
        ANSWER,
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
    ]
    if family.rewrites:
        with pytest.raises(ConfigError, match="renders differently when later turns follow"):
            examples(tmp_path, tokenizers, name, {"chat": chat}, messages_key="chat")
        return
    (example,) = examples(tmp_path, tokenizers, name, {"chat": chat}, messages_key="chat")
    assert learned_ends(name, tokenizer, example) == [family.end] * 2
    _, learned = shown(tokenizer, example)
    first, _, second = learned.partition(".")
    assert first.strip() == f"yo{family.end}"
    assert second.strip(".").strip() == f"2{family.end}"


@pytest.mark.parametrize("name", ["Llama 3", "GLM 4", "Mistral"])
def test_calls_are_learned_with_their_end_and_results_are_not(tmp_path, tokenizers, name):
    tokenizer, family = tokenizers[name], FAMILIES[name]
    chat = [USER, CALL, RESULT, ANSWER]
    (example,) = examples(tmp_path, tokenizers, name, {"chat": chat}, messages_key="chat")
    assert learned_ends(name, tokenizer, example) == [family.end_of_call, family.end]
    _, learned = shown(tokenizer, example)
    assert "4" not in learned
    assert '{"a": 1}' in learned


def test_tags_that_leave_the_end_out_do_not_hide_it(tmp_path, tokenizers, name):
    """Each answer is learned with the stop token behind the tags, the last one always with one."""
    tokenizer, family = tokenizers[name], FAMILIES[name]
    marked = tokenizer.chat_template
    end = family.end if family.end != "<|user|>" else ""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A{% generation %}{{ m.content }}"
        f"{{% endgeneration %}}{end}{{% else %}}{'<|user|>' if not end else 'U'}{{{{ m.content }}}}"
        "{% endif %}{% endfor %}"
    )
    tokenizer.chat_template = template
    try:
        chat = [USER, ANSWER, USER, ANSWER]
        (example,) = examples(tmp_path, tokenizers, name, {"chat": chat}, messages_key="chat")
    finally:
        tokenizer.chat_template = marked
    _, learned = shown(tokenizer, example)
    assert learned.replace(".", "") == f"yo{family.end}yo{family.end}"


@pytest.mark.parametrize("tagged", ["{end}", "{end}{other}"])
def test_two_ends_are_never_learned(tmp_path, tokenizers, tagged):
    tokenizer = tokenizers["Gemma 3"]
    whole = tokenizer.chat_template
    ends = tagged.format(end="<end_of_turn>", other="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}" + ends + "{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    try:
        chat = [USER, ANSWER, USER, ANSWER]
        row = {"chat": chat, "prompt": [USER], "response": "yo"}
        (of_chat,) = examples(tmp_path, tokenizers, "Gemma 3", row, messages_key="chat")
        (of_response,) = examples(tmp_path, tokenizers, "Gemma 3", row)
    finally:
        tokenizer.chat_template = whole
    assert learned_ends("Gemma 3", tokenizer, of_chat) == ["<end_of_turn>"] * 2
    assert learned_ends("Gemma 3", tokenizer, of_response) == ["<end_of_turn>"]


def pairs(tmp_path, tokenizers, name, *rows, **keys):
    path = write(tmp_path / "pairs.jsonl", list(rows))
    section = PairsSection.model_validate({"prompts": path} | keys)
    return load_pairs(section, tokenizers[name], stop_ids(name, tokenizers[name]))


def test_both_responses_of_a_pair_end_once(tmp_path, tokenizers, name):
    tokenizer = tokenizers[name]
    row = {"prompt": [USER], "chosen": "yes", "rejected": [ANSWER]}
    (pair,) = pairs(tmp_path, tokenizers, name, row).items
    for ids in (pair.chosen_ids, pair.rejected_ids):
        example = Example(pair.prompt_ids, ids)
        assert learned_ends(name, tokenizer, example) == [FAMILIES[name].end]


@pytest.mark.parametrize("empty", ["", " ", [{"role": "assistant", "content": ""}], "{end}"])
def test_a_pair_with_an_empty_response_is_seen_as_such(tmp_path, tokenizers, name, empty):
    """Also where the template writes something around it, and whichever token ends it."""
    row = {"prompt": [USER], "chosen": "yes", "rejected": "no"}
    empty = FAMILIES[name].end if empty == "{end}" else empty
    loaded = pairs(tmp_path, tokenizers, name, row, row | {"rejected": empty})
    assert (len(loaded.items), loaded.num_unusable) == (1, 1)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_pairs_that_differ_in_their_calls_alone_are_not_equal(tmp_path, tokenizers, name):
    other = json.loads(json.dumps(CALL).replace('"a": 1', '"a": 2'))
    row = {"prompt": [USER], "chosen": [CALL], "rejected": [other]}
    loaded = pairs(tmp_path, tokenizers, name, row)
    assert (len(loaded.items), loaded.num_unusable) == (1, 0)


# Files


def kinds_of(tmp_path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    files = {kind: write(tmp_path / f"a{kind}", rows) for kind in (".jsonl", ".json", ".parquet")}
    return files | {"saved": save_to_disk(tmp_path / "set", rows)}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_chats_with_tools_have_the_same_tokens_in_every_kind_of_file(tmp_path, tokenizers, name):
    """Arrow gives each message the keys of all, each call the arguments of all, as nulls."""
    tokenizer = tokenizers[name]
    other = json.loads(json.dumps(CALL).replace('"a": 1', '"b": [2]'))
    rows = [
        {"chat": [USER, CALL, RESULT], "prompt": [USER], "response": [CALL]},
        {"chat": [USER, other, RESULT], "prompt": [USER, CALL, RESULT], "response": [ANSWER]},
        {"chat": [USER, ANSWER], "prompt": [USER], "response": [other]},
    ]
    told = set()
    for path in kinds_of(tmp_path, rows).values():
        ids = []
        for keys in ({},) if FAMILIES[name].rewrites else ({}, {"messages_key": "chat"}):
            values = ResponsesSection.model_validate({"prompts": path} | keys)
            items = load_examples(values, tokenizer, stop_ids(name, tokenizer)).items
            ids += [(*each.prompt_ids.tolist(), -1, *each.response_ids.tolist()) for each in items]
        assert len(ids) == (3 if FAMILIES[name].rewrites else 6)
        told.add(tuple(ids))
    assert len(told) == 1


def test_tools_have_the_same_tokens_in_every_kind_of_file(tmp_path, tokenizers):
    tokenizer = tokenizers["Llama 3"]
    plain = tokenizer.chat_template
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + plain

    def schema(name: str) -> dict[str, Any]:
        types = {"type": "object", "properties": {name: {"type": "integer"}}}
        return {"type": "function", "function": {"name": name, "parameters": types}}

    rows = [{"prompt": [USER], "tools": [schema("a")]}, {"prompt": [USER], "tools": [schema("b")]}]
    try:
        told = {
            tuple(
                each.text
                for each in load_prompts(section(path, tools_key="tools"), tokenizer).prompts
            )
            for path in kinds_of(tmp_path, rows).values()
        }
    finally:
        tokenizer.chat_template = plain
    ((first, second),) = told
    assert first.startswith(json.dumps(schema("a")))
    assert second.startswith(json.dumps(schema("b")))


# Special tokens that the tokenizer adds


@pytest.mark.parametrize("name", ["Llama 3", "Qwen 3", "Gemma 3"])
def test_a_tokenizer_that_adds_its_end_ends_no_prompt(tmp_path, name):
    tokenizer, family = family_tokenizer(name, tmp_path / "t", adds_eos=True), FAMILIES[name]
    begin = family.bos if family.adds_bos else ""
    assert tokenizer.decode(tokenizer("2+2=")["input_ids"]) == f"{begin}2+2={family.eos}"
    rows = [{"prompt": "2+2=", "response": "4"}, {"prompt": f"2+2={family.eos}", "response": "4"}]
    path = write(tmp_path / "rows.jsonl", rows)
    values = {"prompts": path, "special_tokens_in_text": "tokens"}
    values = ResponsesSection.model_validate(values)
    first, second = load_examples(values, tokenizer, stop_ids(name, tokenizer)).items
    assert tokenizer.decode(first.prompt_ids) == f"{begin}2+2="
    assert tokenizer.decode(first.response_ids) == f"4{family.eos}"
    assert tokenizer.decode(second.prompt_ids) == f"{begin}2+2={family.eos}", "written on purpose"


def test_a_text_that_a_template_has_written_has_one_beginning(tmp_path, tokenizers):
    tokenizer = tokenizers["Llama 3"]
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    path = write(tmp_path / "a.jsonl", [{"prompt": text}, {"prompt": "a"}])
    kept = section(path, special_tokens_in_text="tokens")
    written, plain = load_prompts(kept, tokenizer).prompts
    assert tokenizer.decode(written.token_ids) == text
    assert tokenizer.decode(plain.token_ids) == "<|begin_of_text|>a"


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_an_episode_has_the_tokens_of_its_conversation(tokenizers, name, is_cut_off):
    """A turn that the policy ended has one end; one that was cut off is ended by the template."""
    tokenizer, family = tokenizers[name], FAMILIES[name]
    turns = TurnTokens(tokenizer, stop_ids(name, tokenizer))
    _, first = turns.first([USER], chat=True)
    header = "\n" if name == "GLM 4" else "<|message|>" if name == "gpt-oss" else ""
    said = f"{header}yo{'' if is_cut_off else family.end}"
    reply = np.array(tokenizer(said, add_special_tokens=False)["input_ids"])
    between = turns.between(reply, "so?", chat=True)
    followed = [USER, ANSWER, {"role": "user", "content": "so?"}]
    whole = tokenizer.apply_chat_template(followed, tokenize=False, add_generation_prompt=True)
    if name == "Mistral":
        said = f" {said}"  # that the template writes it before an answer is not asked of the policy
    if name == "gpt-oss" and not is_cut_off:
        said = said.removesuffix(family.end)  # an answer that others follow has another end
        assert tokenizer.decode(between).startswith("<|end|>")
    assert tokenizer.decode(first) + said + tokenizer.decode(between) == whole
