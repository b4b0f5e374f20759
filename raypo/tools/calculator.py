"""Calculator tool: arithmetic without executing the model's code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from raypo.tools.calls import ToolError

MAX_CHARS = 1000
MAX_BITS = 4096
"""Maximum size of an integer in bits, also in intermediate results."""


def _round(number: float, digits: int = 0) -> float:
    if abs(digits) > MAX_BITS:  # Python computes a power of ten for it
        raise ToolError("a number is too large")
    return round(number, digits) if digits else round(number)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "floor", "ceil", "gcd")
} | {"abs": abs, "round": _round, "min": min, "max": max}
_CONSTANTS = {"pi": math.pi, "e": math.e}


async def calculator(expression: str) -> str:
    """Works out an arithmetic expression and returns the number.

    Args:
        expression: Numbers, + - * / // % **, parentheses, pi, e, and the functions abs, round, min,
            max, sqrt, exp, log, log2, log10, sin, cos, tan, floor, ceil, gcd.

    Raises:
        ToolError: the expression is invalid, or has no result.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"an expression has at most {MAX_CHARS} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
        return str(value) if isinstance(value, int) else f"{value:.15g}"
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"this is not an arithmetic expression: {expression:.100}") from None
    except OverflowError:
        raise ToolError("a number is too large") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(str(error)) from None


def _evaluate(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.Name(id=name) if name in _CONSTANTS:
            value = _CONSTANTS[name]
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in _UNARY:
            value = _UNARY[type(operation)](_evaluate(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            value = _apply_binary(type(operation), _evaluate(left), _evaluate(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            value = _FUNCTIONS[name](*map(_evaluate, arguments))
        case _:
            raise ToolError(f"the calculator does not know: {ast.unparse(node):.100}")
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if not isinstance(value, int) and not math.isfinite(value):  # 1e400, which Python reads as inf
        raise ToolError("a number is too large")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("a number is too large")
    return value


def _apply_binary(operation: type[ast.operator], left: float, right: float) -> Any:
    are_integers = isinstance(left, int) and isinstance(right, int)
    is_power = operation is ast.Pow and are_integers and abs(left) > 1
    if is_power and int(left).bit_length() * abs(right) > 2 * MAX_BITS:
        raise ToolError("a number is too large")
    return _BINARY[operation](left, right)
