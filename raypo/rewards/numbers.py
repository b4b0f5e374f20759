# ruff: noqa: RUF001, RUF002  (signs and digits of all scripts are what this file reads)
r"""Find the numbers that stand alone in a text, and read their exact values.

A number is an optional sign, an optional currency, digits (thousands in groups of three), decimals,
an exponent and a percent sign, or a fraction of two such numbers. Percent signs and currencies do
not change the value: `50%` is 50.

| text | its number |
|---|---|
| `42`, `+42`, `42.0`, `$42`, `42 €`, `42%`, `**42**`, `\text{42}` | 42 |
| `-5`, `−5`, `-$5`, `$-5` | -5 |
| `1,234.5`, `1{,}234.5`, `1.2345e3`, `1.2345 \times 10^{3}` | 1234.5 |
| `.5`, `1/2`, `\frac{1}{2}`, `\frac12`; `1 1/2` | 0.5; 1.5 |
| `答案是42。`, `x=42`, `42 apples`, `42km`, `42 - a lot`, `$42/hour` | 42 |
| `1,2,3`, `1.2.3`, `12:30`, `2024-01-05`, `1/2/3`, `1 000` | none: neither one number nor several |
| `x^2`, `\sqrt{2}`, `\frac{2}{x}`, `x2`, `2x`, `2xy`, `f(2)`, `2(x+1)` | none: part of a formula |
| `10-7`, `10 - 7`, `2*3`, `2 \cdot 3` | none: operands. `10 - 7 = 3` has the number 3 |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 1000
"""Maximum length of a number in characters, and maximum exponent of 10. Larger numbers are not
parsed, because the cost would be unbounded."""

# Scripts that write words without spaces between them: their letters do not extend a number.
_NO_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
)
WORD = rf"(?:(?![{_NO_SPACES}])\w)"
"""Pattern of a character that extends the word or number next to it."""
_LETTER = rf"(?:(?![{_NO_SPACES}])[^\W\d_])"
_OPERATOR = r"[-+*/^×·÷]"
_COMMAND = (  # a LaTeX command that takes the text next to it as an operand
    r"\\(?!(?:approx|because|colon|equiv|geq?|geqslant|gg|gt|iff|implies|in|leq?|leqslant|ll|lt|neq?|"
    r"q?quad|[Rr]ightarrow|longrightarrow|sim|simeq|therefore|to)(?![a-zA-Z]))[a-zA-Z]+"
)

_CURRENCY = r"(?:(?:US|CA|AU|NZ|HK|[ACRS])?\\?\$|[€£¥₹])"
_GROUP = r"(?:,|\{,\}|\\,|[\u00a0\u2009\u202f])"
_DECIMAL = (
    rf"(?:(?:[0-9]{{1,3}}(?:{_GROUP}[0-9]{{3}})+|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+|[ ]?(?:×|\*|\\times|\\cdot)[ ]?10\^(?:\{[-+]?[0-9]+\}|[-+]?[0-9]+))?"
)
_PART = rf"(?:\{{\s?([-+]?{_DECIMAL})\s?\}}|([0-9]))"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?){_CURRENCY}?(?P<inner_sign>[-+]?)
    (?P<digits>(?:(?P<whole>[0-9]+)(?:[ ](?=[0-9]+/)|[ ]?(?=\\[dt]?frac)))?
        (?:\\[dt]?frac\s?{_PART}\s?{_PART}
        |(?P<top>{_DECIMAL})(?:[ ]?/[ ]?(?P<bottom>{_DECIMAL}))?))
    (?:[ ]?(?:\\?%|[€£¥₹]))?""",
    re.VERBOSE,
)
_OPERAND_BEFORE = re.compile(
    rf"""(?:{WORD}\.?|[0-9][,:]                # x2, No.5, 1,2, 12:30
    |(?:{WORD}|[)\]}}%!]){_OPERATOR}{{1,3}}     # 10-7
    |[\^√]|(?<!\\)\{{|{WORD}[(\[])\Z           # x^2, {{2}}, f(2)""",
    re.VERBOSE,
)
_OPERAND_BEFORE_SPACE = re.compile(
    rf"""(?:(?:[0-9)\]}}%]|(?<!{_LETTER}){_LETTER})[ \t]+{_OPERATOR}{{1,2}}  # 10 - 7
    |[0-9](?:[ \t]+x)?|[\^√]|(?<!\\)\{{|{_COMMAND})[ \t]+\Z                  # 1 000, 2 x 3""",
    re.VERBOSE,
)
_UNIT = (  # may follow a number without a space; other letters there are factors, as in 2xy
    r"(?:[kcmµ]m|[km]g|lbs?|oz|ft|yds?|mi|ml|km/h|kph|mph|hrs?|mins?|secs?|ms|[ap]m|[kMG]Hz|[kMGT]B|"
    r"kW|kWh)"
)
_OPERAND_BEHIND = re.compile(
    rf"""(?!{_UNIT}(?:[\s.,;:!?)\]}}*]|\Z)){WORD}|[.,:][0-9]|[ \t]*\^|[({{}}\[!√]
    |(?!/{_LETTER}{{2}}){_OPERATOR}+(?:{WORD}|[({{√]|\\[a-zA-Z]|\$[0-9])
    |(?![ \t]+-{{1,2}}[ \t]+(?:a|I)[ \t]+{_LETTER}{{2}})  # a dash before a word: 42 - a lot
    [ \t]+{_OPERATOR}{{1,2}}[ \t]+(?:[0-9(√$]|\\[a-zA-Z]|{_LETTER}(?!{_LETTER}))
    |[ \t]+(?:x[ \t]+)?[-+]?\.?[0-9]
    |[ \t]*{_COMMAND}""",
    re.VERBOSE,
)
_CONTEXT = 32
"""Number of characters that are examined before a number that follows a space."""
_WRAPPED = re.compile(
    r"\\(text\w*|math(?:bf|rm|it|sf)|boldsymbol|bm|boxed|fbox|emph|underline)\s?\{([^{}]*)\}"
)
_SAME = str.maketrans("−–‐‑－﹣＋，．：％／０１２３４５６７８９", "------+,.:%/0123456789")


class Number(NamedTuple):
    """A number found in a text."""

    text: str
    """The number as written, without currency, percent sign and plus."""
    value: Fraction


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is exactly one number, else None."""
    text = _plain(text).strip().removesuffix(".").strip()
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(opening) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    match = _NUMBER.fullmatch(text)
    return _value(match) if match else None


def numbers_in(text: str) -> Iterator[Number]:
    """Yield the numbers that stand alone in a text, the last one first."""
    text = _plain(text)
    for match in reversed(list(_NUMBER.finditer(text))):
        if _follows_operand(text, match.start()) or _OPERAND_BEHIND.match(text, match.end()):
            continue
        if (value := _value(match)) is not None:
            sign = "-" if "-" in (match["sign"], match["inner_sign"]) else ""
            yield Number(sign + match["digits"], value)


def _follows_operand(text: str, start: int) -> bool:
    if text[start - 1 : start] in (" ", "\t"):
        before = text[max(0, start - _CONTEXT) : start]
        return _OPERAND_BEFORE_SPACE.search(before) is not None
    return _OPERAND_BEFORE.search(text[max(0, start - 5) : start]) is not None


def _plain(text: str) -> str:
    """Return a text with ASCII digits and signs, without LaTeX that only changes its appearance."""
    text = text.translate(_SAME)
    if "\\" in text:
        text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", text)
        text = re.sub(r"\^\s?(?:\\circ|\{\s?\\circ\s?\})|\\degree(?![a-zA-Z])", "°", text)
        for _ in range(3):  # wrappers may be nested
            text = _WRAPPED.sub(_unwrapped, text)
    return re.sub(r"([=(<>≈][ \t]*[-+])[ \t]+(?=[0-9.$\\])", r"\1", text)  # "= - 5"


def _unwrapped(wrapped: re.Match[str]) -> str:
    name, inner = wrapped.groups()
    # Keep a word or unit apart from its number, as in 5\text{cm}.
    is_word = re.match(rf"\s*{_LETTER}(?:{_LETTER}|\Z)", inner)
    is_word = is_word and (name == "text" or len(inner) > 1)
    return f" {inner} " if is_word else inner


def _value(match: re.Match[str]) -> Fraction | None:
    signs = match["sign"] + match["inner_sign"]
    if len(signs) > 1 or len(match[0]) > MAX_DIGITS:
        return None
    if match["top"] is not None:
        top, bottom = match["top"], match["bottom"] or "1"
    else:
        top, bottom = (part for part in match.groups()[4:8] if part is not None)
    parts = [_decimal(part) for part in (match["whole"] or "0", top, bottom)]
    if None in parts or not parts[2]:
        return None
    whole, numerator, denominator = (part or Fraction(0) for part in parts)
    value = whole + numerator / denominator
    return -value if signs == "-" else value


def _decimal(text: str) -> Fraction | None:
    mantissa, mark, exponent = re.sub(
        r"[ ]?(?:×|\*|\\times|\\cdot)[ ]?10\^\{?([-+]?[0-9]+)\}?", r"e\1", text.lower()
    ).partition("e")
    if mark and (len(exponent) > 6 or abs(int(exponent)) > MAX_DIGITS):
        return None
    return Fraction(re.sub(_GROUP, "", mantissa)) * Fraction(10) ** int(exponent or 0)
