"""Runs what the policy wrote in a sandbox, on inputs that no prompt shows the outputs of."""

import asyncio

from raypo import Rollout
from raypo.tools.sandbox import PythonSandbox

INPUTS = ((20, 9), (7, 30), (15, 15), (11, 4))
PROGRAM = """\
def f(a, b): return {body}
for a, b in {inputs}:
    print(f(a, b))
"""
_printed: dict[str, list[str]] = {}
"""Of each program that has been run, what it printed: most are written again and again."""


async def hidden_tests(rollouts: list[Rollout]) -> list[dict[str, float]]:
    """The share of right outputs; and whether all are (solved), and whether it ran at all (runs).

    A program prints what f gives, and that is compared here, outside: it knows no right output, and
    one that prints that it has passed, has not.
    """
    sandbox = PythonSandbox(time_limit_s=2)
    programs = {PROGRAM.format(body=r.response, inputs=INPUTS) for r in rollouts}

    async def run(program: str) -> None:
        ran = await sandbox.run(program)
        lines = ran.output.splitlines()
        _printed[program] = lines if ran.exit_code == 0 and len(lines) == len(INPUTS) else []

    await asyncio.gather(*(run(program) for program in programs - _printed.keys()))
    return [_judged(rollout) for rollout in rollouts]


def _judged(rollout: Rollout) -> dict[str, float]:
    printed = _printed[PROGRAM.format(body=rollout.response, inputs=INPUTS)]
    right = [told == str(test) for told, test in zip(printed, rollout.label, strict=False)]
    share = sum(right) / len(INPUTS)
    return {"score": share, "solved": float(share == 1.0), "runs": float(bool(printed))}
