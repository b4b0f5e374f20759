"""Runs what the policy wrote in a sandbox, on inputs that no prompt shows the outputs of."""

import asyncio

from raypo import Rollout
from raypo.tools.sandbox import PythonSandbox

PROGRAM = """\
def f(a, b): return {body}
for a, b in {inputs}:
    print(f(a, b))
"""
LIMIT_S = 2.0
"""Of a program, on the clock."""
_known: dict[str, list[str]] = {}
"""Of each program that has come to its end, what it printed: most are written again and again."""


async def hidden_tests(rollouts: list[Rollout]) -> list[dict[str, float]]:
    """The share of right outputs; and whether all are (solved), and whether it ran at all (runs).

    A label is a list of tests: a, b, and what f gives for them.
    A program prints what f gives, and that is compared here, outside: it knows no right output, and
    one that prints that it has passed, has not.
    """
    sandbox, late = PythonSandbox(time_limit_s=LIMIT_S), {}

    async def run(program: str) -> None:
        ran = await sandbox.run(program)
        printed = ran.output.splitlines() if ran.exit_code == 0 else []
        by_itself = ran.exit_code is not None and ran.exit_code >= 0
        (_known if by_itself else late)[program] = printed  # a busy machine may be why it is late

    programs = {_program(rollout) for rollout in rollouts}
    await asyncio.gather(*(run(program) for program in programs - _known.keys()))
    return [_judged(rollout, {**_known, **late}) for rollout in rollouts]


def _program(rollout: Rollout) -> str:
    return PROGRAM.format(body=rollout.response, inputs=[[a, b] for a, b, _ in rollout.label])


def _judged(rollout: Rollout, by_program: dict[str, list[str]]) -> dict[str, float]:
    printed = by_program[_program(rollout)]
    runs = len(printed) == len(rollout.label)
    right = [told == str(test[2]) for told, test in zip(printed, rollout.label, strict=False)]
    share = sum(right) / len(right) if runs else 0.0
    return {"score": share, "solved": float(share == 1.0), "runs": float(runs)}
