# ruff: noqa: RUF001
"""Numbers are parsed, and found only where they stand alone."""

import re
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypo.rewards import numbers
from raypo.rewards.numbers import numbers_in, parse_number

DECIMALS = st.decimals(min_value=-(10**12), max_value=10**12, places=3)


def table() -> list[tuple[str, str]]:
    """The texts of the module's table, and what it says of them."""
    rows = re.findall(r"^\| (`.*) \| (.*?) \|$", numbers.__doc__ or "", re.MULTILINE)
    return [(text, said) for texts, said in rows for text in re.findall("`(.*?)`", texts)]


@pytest.mark.parametrize(("text", "said"), table())
def test_the_table_of_the_module_is_true(text, said):
    values = [float(each.value) for each in numbers_in(text)]
    if text == "1 1/2":
        assert values == [1.5]
    elif said.startswith("none"):
        assert values == []
        assert parse_number(text) is None
    else:
        assert values == [float(said.partition(";")[0])]


@pytest.mark.parametrize(
    "text",
    ["1/0", "0/0", "--5", "nan", "inf", "", " ", "$", "-", ".", "1e999999999", "1" * 2000, "1_000"],
)
def test_what_is_no_number_is_none(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("GPT-4 says 5!", []),  # a factorial, where nothing says that it is prose
        ("90^\\circ", ["90"]),
        (r"5\text{cm}", ["5"]),
        (r"$\mathbf{-5}$", ["-5"]),
        ("x = - 5", ["-5"]),
        ("Total - 42", ["42"]),
        ("2 x 3 = 6", ["6"]),
        ("5 ** 42", []),
        (r"\left(42\right)", ["42"]),
        (r"x \approx 5", ["5"]),
        ("42-year-old", []),
        ("so...42", ["42"]),
        ("４２", ["42"]),
        ("US$5", ["5"]),
        (r"3\frac{1}{2}", [r"3\frac{1}{2}"]),
        (r"5\text{ cm}^2", ["5"]),
    ],
)
def test_a_number_stands_alone_where_nothing_takes_it_as_an_operand(text, found):
    assert [each.text for each in numbers_in(text)] == found


@settings(deadline=None)
@given(DECIMALS)
def test_a_decimal_is_read_exactly_however_it_is_written(number: Decimal):
    wanted = Fraction(number)
    for text in (
        f"{number}",
        f"{number:,}",
        f"{number:e}",
        f"{number}%",
        f"${number}$",
        f"({number})",
    ):
        assert [each.value for each in numbers_in(f"It is {text}.")] == [wanted], text
    assert parse_number(f"{number:,}") == parse_number(f"{number:e}") == wanted
    assert parse_number(f"{number}".replace("-", "−")) == wanted


@settings(deadline=None)
@given(
    st.integers(0, 99), st.sampled_from("+-*/^×"), st.integers(0, 99), st.sampled_from(["", " "])
)
def test_operands_do_not_stand_alone(left: int, operator: str, right: int, space: str):
    text = f"{left}{space}{operator}{space}{right}"
    values = [each.value for each in numbers_in(text)]
    assert values == ([Fraction(left, right)] if operator == "/" and right else [])


@settings(deadline=None)
@given(st.text(alphabet="0123456789.,-+/$%{}\\^ ex×fracboxed()\n", max_size=60))
def test_any_text_is_read_and_what_is_a_number_is_found_in_it(text: str):
    values = [each.value for each in numbers_in(text)]
    if (value := parse_number(text)) is not None:
        assert values == [value]


@pytest.mark.parametrize(
    "part", ["9", "1,", "1+", "1 ", "1e", "1/", "-", " ", r"\text{", "1,234", "(5"]
)
def test_hostile_texts_take_no_more_time_than_their_length(part):
    text = part * (20_000 // len(part))
    begin = time.perf_counter()
    list(numbers_in(text))
    assert time.perf_counter() - begin < 5  # a quadratic search takes minutes
