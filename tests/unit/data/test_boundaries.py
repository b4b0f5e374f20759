"""Text and tokens where a prompt ends and a response begins."""

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from raypo.config import PairsSection, ResponsesSection
from raypo.data.examples import load_examples, load_pairs
from raypo.data.turns import TurnTokens
from raypo.serving.frozen import sequence_ids
from tests.tiny import tiny_tokenizer
from tests.unit.data.prompt_files import CHAT, refused, write

INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
TALK = [
    {"role": role, "content": text}
    for role, text in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
]


def sentencepiece(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes a space before what it is given, in the ways of Llama 2, Mistral."""
    words = dict.fromkeys(["▁", *string.digits, *string.ascii_letters, *string.punctuation, "\n"])
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *words])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    if kind == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        clean_up_tokenization_spaces=False, chat_template=INSTRUCT,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["first", "always", "never", "normalizer"])
def test_no_space_is_learned_that_stands_in_no_text(tmp_path, kind):
    """Learned tokens are those of the whole text, whose parts do not begin a text."""
    tokenizer = sentencepiece(kind)
    path = write(tmp_path / "a.jsonl", [{"prompt": "2+2=", "response": "4", "chat": TALK}])
    for keys, text in (({}, "2+2=4"), ({"messages_key": "chat"}, None)):
        values = ResponsesSection.model_validate({"prompts": path} | keys)
        (example,) = load_examples(values, tokenizer, (1,)).items
        text = text or str(tokenizer.apply_chat_template(TALK, tokenize=False))
        whole = tokenizer(text.removesuffix("</s>"), add_special_tokens=False)["input_ids"]
        assert [*example.prompt_ids, *example.response_ids] == [*whole, 1]
    between = TurnTokens(tokenizer, [1]).between(np.array([5]), "so", chat=False)
    assert tokenizer.convert_ids_to_tokens(between.tolist()) == ["s", "o"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path / "tokenizer"))


THINKS = (  # thoughts are opened for the model, and left out of what was said
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("chosen", ["<think>\nhm</think>yes", "hm</think>yes"])
def test_a_thought_that_the_prompt_opens_is_not_opened_again(tmp_path, tokenizer, chosen):
    tokenizer.chat_template = THINKS
    row = {"prompt": CHAT, "chosen": chosen, "rejected": "<think>\nno"}
    path = write(tmp_path / "a.jsonl", [row])
    (pair,) = load_pairs(PairsSection.model_validate({"prompts": path}), tokenizer, (2,)).items
    assert tokenizer.decode(pair.prompt_ids).endswith("<bos>assistant\n<think>\n")
    assert tokenizer.decode(pair.chosen_ids) == "hm</think>yes<eos>"
    assert tokenizer.decode(pair.rejected_ids) == "no<eos>"


def test_a_thought_that_the_prompt_opens_and_closes_is_followed_by_an_answer(tmp_path, tokenizer):
    tokenizer.chat_template = THINKS.replace("<think>\n{%", "<think>\n\n</think>\n\n{%")
    assert tokenizer.chat_template != THINKS
    path = write(tmp_path / "a.jsonl", [{"prompt": CHAT, "response": "It is 4."}])
    values = ResponsesSection.model_validate({"prompts": path})
    (example,) = load_examples(values, tokenizer, (2,)).items
    assert tokenizer.decode(example.prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(example.response_ids) == "It is 4.<eos>"


def test_an_answer_is_not_learned_as_a_thought(tmp_path, tokenizer):
    tokenizer.chat_template = THINKS
    path = write(tmp_path / "a.jsonl", [{"prompt": CHAT, "response": "yes"}])
    values = ResponsesSection.model_validate({"prompts": path})
    told = refused(load_examples, values, tokenizer, (2,))
    assert f"{path}:1 has a response that neither repeats nor closes <think>" in told


def test_a_marked_turn_ends_where_its_tag_ends(tmp_path):
    """Also where its last character is of no token: there transformers marks all that follows."""
    words = {word: i for i, word in enumerate(["<unk>", "<eos>", "U", "A", "hi", "yo"])}
    backend = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A {% generation %}{{ m.content }} "
        "{% endgeneration %}<eos> {% else %}U {{ m.content }} {% endif %}{% endfor %}"
    )
    chat = [*CHAT, {"role": "assistant", "content": "yo"}] * 2
    path = write(tmp_path / "a.jsonl", [{"chat": chat}])
    values = ResponsesSection.model_validate({"prompts": path, "messages_key": "chat"})
    (example,) = load_examples(values, tokenizer, (1,)).items
    assert tokenizer.decode(example.prompt_ids) == "U hi A"
    assert tokenizer.decode(example.response_ids) == "yo <eos> U hi A yo <eos>"
    assert example.mask is not None
    assert example.mask.tolist() == [True, True, False, False, False, True, True]


def test_a_reward_model_reads_no_end_between_prompt_and_response(tokenizer):
    """Its tokenizer has another vocabulary and puts its end behind each text."""
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )

    class Said:
        prompt, response, messages, finish_reason = "2+2=", "4", None, "stop"

    said: Any = Said()
    assert tokenizer.decode(sequence_ids(tokenizer, said)[0]) == "<bos>2+2=4<eos>"


def test_a_reward_model_reads_an_answer_that_the_prompt_began_as_one_message(tokenizer):
    begun = [*CHAT, {"role": "assistant", "content": "The sum"}]

    class Said:
        prompt, response, messages, finish_reason = "", " is 4", begun, "stop"

    said: Any = Said()
    read = tokenizer.decode(sequence_ids(tokenizer, said)[0])
    assert read == "user: hi\nassistant: The sum is 4\n"
