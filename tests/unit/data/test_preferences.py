"""Pairs and verdicts from files: what is read, what is skipped and counted, what is refused."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from raypo.config import ConfigError, PreferencesSection
from raypo.data.examples import load_pairs, load_verdicts
from tests.tiny import tiny_tokenizer

END = (2,)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def section_of(tmp_path, *rows: dict[str, Any], **keys: Any) -> PreferencesSection:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreferencesSection.model_validate({"prompts": str(path)} | keys)


def text(tokenizer, ids) -> str:
    return tokenizer.decode(ids.tolist())


def test_equal_and_empty_pairs_are_skipped_and_counted(tmp_path, tokenizer):
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"prompt": "q", "chosen": "a", "rejected": "a<eos>"},
        {"prompt": "q", "chosen": "", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": ""},
    ]
    loaded = load_pairs(section_of(tmp_path, *rows), tokenizer, END)
    assert (len(loaded.items), loaded.num_skipped, loaded.num_unusable) == (1, 0, 4)
    with pytest.raises(ConfigError, match="4 rows have equal responses or an empty one"):
        load_pairs(section_of(tmp_path, *rows[1:]), tokenizer, END)


def test_a_row_may_bring_what_the_reference_says(tmp_path, tokenizer):
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "good": -1.5, "bad": -2}
    keys = {"ref_chosen_key": "good", "ref_rejected_key": "bad"}
    (pair,) = load_pairs(section_of(tmp_path, row, **keys), tokenizer, END).items
    assert pair.ref_log_probs == (-1.5, -2.0)
    with pytest.raises(
        ConfigError, match=r"data.ref_rejected_key \(bad\).*must be a finite number"
    ):
        load_pairs(section_of(tmp_path, row | {"bad": "much"}, **keys), tokenizer, END)
    with pytest.raises(ConfigError, match=r"data.ref_chosen_key \(good\).*1.5 there.*at most 0"):
        load_pairs(section_of(tmp_path, row | {"good": 1.5}, **keys), tokenizer, END)


def test_verdicts_are_compared_with_the_next_response_to_another_prompt(tmp_path, tokenizer):
    rows = [
        {"prompt": "p", "response": "a", "ok": True},
        {"prompt": "p", "response": "b", "ok": False},
        {"prompt": "q", "response": "c", "ok": 1},
        {"prompt": "p", "response": "d", "ok": 0},
    ]
    section = section_of(tmp_path, *rows, desirable_key="ok")
    items = load_verdicts(section, tokenizer, END).items
    assert [item.is_desirable for item in items] == [True, False, True, False]
    others = [text(tokenizer, item.other_ids) for item in items]
    assert others == ["c<eos>", "c<eos>", "d<eos>", "c<eos>"]


def test_pairs_are_two_verdicts_each(tmp_path, tokenizer):
    rows = [{"prompt": p, "chosen": f"{p}1", "rejected": f"{p}0"} for p in "pq"]
    items = load_verdicts(section_of(tmp_path, *rows), tokenizer, END).items
    told = [(text(tokenizer, item.response_ids), item.is_desirable) for item in items]
    assert told == [("p1<eos>", True), ("p0<eos>", False), ("q1<eos>", True), ("q0<eos>", False)]
    assert [text(tokenizer, item.other_ids) for item in items] == ["q1<eos>"] * 2 + ["p1<eos>"] * 2


def test_verdicts_on_one_prompt_and_verdicts_that_are_none_are_refused(tmp_path, tokenizer):
    rows = [{"prompt": "p", "response": r, "ok": True} for r in "ab"]
    with pytest.raises(ConfigError, match="all 2 responses answer one prompt"):
        load_verdicts(section_of(tmp_path, *rows, desirable_key="ok"), tokenizer, END)
    wrong = section_of(tmp_path, rows[0] | {"ok": "good"}, desirable_key="ok")
    with pytest.raises(ConfigError, match=r"data.desirable_key \(ok\).*true or false"):
        load_verdicts(wrong, tokenizer, END)
