"""A calculator in the middle of the model's text.

    ... the 3 boxes hold <calc>3 * 14</calc> ──► <result>42</result> ──► and the answer is ... <end>
        └ sampled, up to the stop string         └ tokenised, masked      └ sampled

The model is told how to use it by the data or by data.system_prompt. What it says after its newest
result is scored by the reward functions.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from rollout_worker.environments.base import EnvironmentTask, Sample, TranscriptFull

OPEN, CLOSE = "<calc>", "</calc>"
LONGEST = 200
"""Characters of an expression."""
DEEPEST = 30
LARGEST = 1e100
"""Results beyond this are refused: what people calculate is smaller, and big ones take for ever."""

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class BadExpression(Exception):
    """The message is what the model is told."""


async def calculator(task: EnvironmentTask, sample: Sample) -> None:
    """Answers every ``<calc>...</calc>`` until the model ends a turn without one."""
    turn = await sample(task.prompt, stop=[CLOSE])
    try:
        while turn.stop == CLOSE:
            turn = await sample(f"<result>{answer(turn.text)}</result>", stop=[CLOSE])
    except TranscriptFull:
        # Scored as it stands: it has no answer.
        pass


def answer(text: str) -> str:
    """Result of the expression that ``text`` ends with, or what is wrong with it."""
    _, found, expression = text.rpartition(OPEN)
    if not found:
        return f"error: no {OPEN}"
    try:
        return show(evaluate(expression))
    except BadExpression as error:
        return f"error: {error}"


def evaluate(expression: str) -> Number:
    """Arithmetic on numbers: + - * / // % ** and brackets. Raises BadExpression.

    Names, calls and everything else that Python knows are refused; nothing is ever executed.
    """
    text = expression.strip().replace("^", "**")
    if len(text) > LONGEST:
        raise BadExpression("too long")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadExpression("not an expression") from None
    return _value(tree.body, 0)


def show(value: Number) -> str:
    """Whole numbers without a point, others with up to 10 digits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _value(node: ast.expr, depth: int) -> Number:
    if depth > DEEPEST:
        raise BadExpression("too many brackets")
    match node:
        case ast.Constant(value=bool()):
            raise BadExpression("not a number")
        case ast.Constant(value=int() | float() as number):
            return _checked(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, depth + 1))
        case ast.BinOp(left=left, op=op, right=right):
            return _combined(op, _value(left, depth + 1), _value(right, depth + 1))
    raise BadExpression("only numbers and + - * / // % ** are known")


def _combined(op: ast.operator, left: Number, right: Number) -> Number:
    try:
        if isinstance(op, ast.Pow):
            return _power(left, right)
        if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](left, right))
    except ZeroDivisionError:
        raise BadExpression("division by zero") from None
    except OverflowError:
        raise BadExpression("too large") from None
    raise BadExpression("only + - * / // % ** are known")


def _power(base: Number, exponent: Number) -> Number:
    # Decided before it is computed: integers have no end.
    if base and exponent > 0 and exponent * math.log10(abs(base)) > math.log10(LARGEST):
        raise BadExpression("too large")
    if abs(exponent) > 10_000:
        raise BadExpression("too large")
    return _checked(base**exponent)


def _checked(value: Number | complex) -> Number:
    if isinstance(value, complex):
        raise BadExpression("not a real number")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadExpression("not a finite number")
    if abs(value) > LARGEST:
        raise BadExpression("too large")
    return value
