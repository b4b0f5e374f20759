# ruff: noqa: RUF001
"""Ready-made verifiers on the answers that data sets and models write."""

import math
import sys
import time
from datetime import date
from decimal import Decimal

import numpy as np
import pytest

from raypo.config import ConfigError, DataSection
from raypo.custom.loader import load_function
from raypo.data.rows import read_rows
from raypo.rewards.verifiers import (
    answer_format,
    contains_answer,
    exact_match,
    final_answer,
    graded_number_answer,
    number_answer,
    thinking_format,
)
from raypo.types import Rollout

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 24"
MATH = r"Halving gives $\frac{48}{2}$, so the answer is $\boxed{\frac{48}{2}}$."


def rollout(response: str, label: object = "24", prompt: str = "?") -> Rollout:
    return Rollout(
        prompt=prompt,
        response=response,
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.zeros(1, np.int32),
        log_probs=np.zeros(1, np.float32),
        response_mask=np.ones(1, bool),
        label=label,
        prompt_index=7,
        sample_index=0,
        finish_reason="stop",
        weight_version=0,
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (GSM8K, "24"),
        (MATH, r"\frac{48}{2}"),
        (r"first \boxed{1}, then \boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        ("#### 3\n#### 4 clips\nand more", "4 clips"),
        (r"\boxed{2} #### 3", "2"),
        (r"\boxed{2", ""),
        (r"\boxed {2} or \fbox{3}", "3"),
        (r"so $\boxed 2$", "2"),
        ("it is 24", None),
        ("####", None),
    ],
)
def test_a_solution_gives_its_answer_in_a_box_or_behind_four_marks(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("#### 24", 1.0),
        ("#### 24.0", 1.0),
        ("#### $24", 1.0),
        (r"\boxed{24}", 1.0),
        ("that makes 24.", 1.0),
        ("24, or rather 25", 0.0),
        ("24 #### 25", 0.0),
        ("#### -24", 0.0),
        ("#### none", 0.0),
        ("", 0.0),
    ],
)
def test_a_number_is_right_whatever_it_is_written_like(response, score):
    assert number_answer([rollout(response, GSM8K)]) == [score]


def test_exact_match_looks_past_white_space_only():
    responses = [("4", "4"), (" 4\n", "4"), ("4", 4), ("4.", "4"), ("a", "A"), ("", "4")]
    assert exact_match([rollout(*pair) for pair in responses]) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("label", "response", "score"),
    [
        ("1234", "#### 1,234", 1.0),
        ("-5", r"\boxed{-5}", 1.0),
        ("12", r"3 * 4 = 12, and 12 * 2 is \boxed{2", 0.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("1/3", "0.333333", 0.0),
        ("3", r"\boxed{2, 3}", 0.0),
        ("3", "#### 3 of 5", 0.0),
        ("24", r"#### 24 (that is \frac{48}{2})", 1.0),
        ("24", "24\n\nStep 3.14.15", 1.0),
    ],
)
def test_the_answer_is_a_number_and_no_part_of_a_formula(label, response, score):
    assert number_answer([rollout(response, label)]) == [score]


@pytest.mark.parametrize(
    ("label", "response", "score"),
    [
        ("12", "it is 12.", 1.0),
        ("12", "112", 0.0),
        ("12", "12.5", 0.0),
        ("2", "1/2", 0.0),
        ("-5", "it is −5.", 1.0),
        ("42", "答案是42。", 1.0),
        ("0135", "135", 0.0),
        ("0135", "5031=0135", 1.0),
        ("Paris", "in paris.", 1.0),
        ("Paris", "Parisian", 0.0),
        ("北京", "是北京。", 1.0),
    ],
)
def test_a_label_is_contained_where_it_stands_by_itself(label, response, score):
    assert contains_answer([rollout(response, label)]) == [score]


def test_a_label_that_is_no_number_is_an_error_with_the_verifier_that_reads_it():
    with pytest.raises(ValueError, match=r"row 7 is not a number: 'x\^2'.*math_answer"):
        number_answer([rollout("1", "x^2")])


UNREADABLE = r"data\.label_key.* row 7 .*data\.label_key to the column"
JUDGES = [exact_match, contains_answer, number_answer, graded_number_answer]


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize(
    "label", [None, "", " \n", math.nan, Decimal("nan"), {"a": 1}, ["24"], b"24"]
)
def test_a_label_that_cannot_be_read_is_an_error_that_names_the_row(judge, label):
    with pytest.raises(ValueError, match=UNREADABLE):
        judge([rollout("24", label)])


@pytest.mark.parametrize("label", [24, 24.0, np.int64(24), np.float32(24), Decimal("24.0"), "24"])
def test_numbers_of_any_type_are_labels(label):
    assert number_answer([rollout("it is 24", label)]) == [1.0]


def test_dates_are_labels():
    assert exact_match([rollout("2026-11-26", date(2026, 11, 26))]) == [1.0]


def test_a_wrong_answer_in_form_gets_a_tenth():
    responses = [rollout("#### 24"), rollout("#### 25"), rollout("25")]
    assert graded_number_answer(responses) == [1.0, 0.1, 0.0]
    assert answer_format(responses) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>\n48/2\n</think>\n24", 1.0),
        ("<think>a</think>", 0.0),
        ("<think></think>24", 0.0),
        ("24", 0.0),
        ("<think>a</think><think>b</think>24", 0.0),
        ("so <think>a</think>24", 0.0),
        ("<think>\n\n</think>24", 0.0),
        ("a</think>24", 0.0),
    ],
)
def test_thinking_comes_once_and_before_an_answer(response, score):
    assert thinking_format([rollout(response)]) == [score]


def test_a_degenerate_response_takes_no_time():
    response = "<think>a</think>" + " " * 50_000
    begin = time.perf_counter()
    assert thinking_format([rollout(response)]) == [0.0]
    assert time.perf_counter() - begin < 1  # a quadratic pattern takes minutes


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("a</think>24", 1.0),
        ("<think>a</think>24", 0.0),
        ("a</think>", 0.0),
        ("24", 0.0),
        ("\n</think>24", 0.0),
    ],
)
def test_thinking_may_begin_in_the_prompt(response, score):
    asked = "<|im_start|>user\nThink first: <think> ... </think><|im_end|>\n<|im_start|>assistant\n"
    assert thinking_format([rollout(response, prompt=f"{asked}<think>\n")]) == [score]
    assert thinking_format([rollout(f"<think>{response}", prompt=asked)]) == [score]


@pytest.mark.parametrize(
    ("label", "response", "score"),
    [
        (MATH, "#### 24", 1.0),
        (r"\frac{1}{2}", r"so $\boxed{0.5}$", 1.0),
        (r"\frac{1}{2}", r"we get $x = \frac{2}{4}$", 1.0),
        ("(1,2]", r"\boxed{(1, 2]}", 1.0),
        ("(1,2]", r"\boxed{[1, 2]}", 0.0),
        (r"\{1,2\}", r"\boxed{\{2, 1\}}", 1.0),
        (r"3\text{ cm}", r"\boxed{3}", 1.0),
        ("50\\%", r"\boxed{\frac12}", 1.0),
        ("(x+1)^2", r"\boxed{x^2 + 2x + 1}", 1.0),
        ("24", "no idea", 0.0),
        ("Paris", r"\boxed{Pairs}", 0.0),
        ("Paris", r"\boxed{\text{paris}}", 1.0),
        ("New York, USA", r"\boxed{New York USA}", 0.0),
        ("a - b", r"\boxed{-b + a}", 1.0),
        ("xyz", r"\boxed{zyx}", 0.0),
        (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", 0.0),
        (r"\frac{1}{2^{99}}", r"\boxed{2^{-99}}", 1.0),
        (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", 0.0),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\boxed{\frac{1}{3 \cdot 2^{2006}}}", 0.0),
        ("1e-7", r"\boxed{2e-7}", 0.0),
        ("1000000", r"\boxed{1000000.5}", 0.0),
        (r"\frac13", r"\boxed{0.333333}", 1.0),
        (r"\frac13", r"\boxed{0.3333}", 0.0),
        ("5", r"\boxed{10^{10^{10}}}", 0.0),  # not written out
        (r"\frac12+\frac14", r"\boxed{0.75}", 1.0),
        (r"\frac12+\frac14", r"\boxed{0.7500001}", 0.0),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
        (r"\{10^{-7}\}", r"\boxed{\{2 \cdot 10^{-7}\}}", 0.0),
        (r"1, 2, \ldots, n", r"\boxed{1, 3, \ldots, 2n-1}", 0.0),
        ("12:00", r"\boxed{1:00}", 0.0),
        (r"1-\frac{1}{\mathrm{e}}", r"\boxed{1-\frac{1}{\mathrm{e}}}", 1.0),
    ],
)
def test_formulas_are_compared_as_mathematics(label, response, score):
    pytest.importorskip("math_verify")
    judge = load_function("raypo.rewards.math_verifiers:math_answer")
    assert judge([rollout(response, label)]) == [score]


@pytest.mark.parametrize("label", ["", math.nan, {"a": 1}, "We leave " + "the proof " * 8])
def test_a_label_that_is_no_formula_is_an_error_that_names_the_row(label):
    pytest.importorskip("math_verify")
    judge = load_function("raypo.rewards.math_verifiers:math_answer")
    with pytest.raises(ValueError, match=UNREADABLE):
        judge([rollout("24", label)])


def test_formulas_are_graded_too():
    pytest.importorskip("math_verify")
    judge = load_function("raypo.rewards.math_verifiers:graded_math_answer")
    answers = (r"\boxed{24}", r"\boxed{25}", "25")
    assert judge([rollout(answer) for answer in answers]) == [1.0, 0.1, 0.0]


def test_tasks_of_reasoning_gym_are_read_and_judged_by_their_own_verifier():
    pytest.importorskip("reasoning_gym")
    source = "reasoning_gym://chain_sum?size=3&max_terms=2"
    section = DataSection(prompts=(source,), label_key="entry")
    rows = [row.values for row in read_rows(section.prompts[0], key="data.prompts")]
    again = [row.values for row in read_rows(source, key="data.prompts")]
    assert rows == again
    assert len(rows) == 3
    judge = load_function("raypo.rewards.gym_verifiers:reasoning_gym_score")
    right = [rollout(f"#### {row['answer']}", row["entry"]) for row in rows]
    assert judge(right) == [1.0, 1.0, 1.0]
    assert judge([rollout("none of these", rows[0]["entry"])]) == [0.0]
    refusal = r"not an entry of reasoning-gym.*data\.label_key to entry"
    for label in ("24", {"metadata": None}, {"metadata": {"source_dataset": None}}):
        with pytest.raises(ValueError, match=refusal):
            judge([rollout("4", label)])


@pytest.mark.parametrize("source", ["reasoning_gym://chain_sm", "reasoning_gym://chain_sum?foo=1"])
def test_a_task_that_reasoning_gym_refuses_is_told(source):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=r"reasoning-gym refuses it: .*chain_sum\?size=2000"):
        list(read_rows(source, key="data.prompts"))


@pytest.mark.parametrize(
    ("package", "function"),
    [
        ("math_verify", "raypo.rewards.math_verifiers:math_answer"),
        ("reasoning_gym", "raypo.rewards.gym_verifiers:reasoning_gym_score"),
    ],
)
def test_a_missing_package_is_told_with_what_to_install(monkeypatch, package, function):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, function.partition(":")[0], raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'raypo\[math\]' on every node"):
        load_function(function)


def test_prompts_from_reasoning_gym_need_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"data\.prompts .*pip install 'raypo\[math\]'"):
        list(read_rows("reasoning_gym://chain_sum", key="data.prompts"))
