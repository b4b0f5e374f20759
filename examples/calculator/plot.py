"""The curves of a finished run: python -m examples.calculator.plot runs/calculator"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from raypo.storage.run_files import RunFiles

OUT = Path(__file__).parent / "curve.png"


def main(run: str) -> None:
    rows = RunFiles.at(run).metrics()
    held_out = [(0, rows[0]["eval/initial_score_mean"])]
    held_out += [(row["step"], row["eval/score_mean"]) for row in rows if "eval/score_mean" in row]
    figure, (score, calls) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    score.plot(*zip(*held_out, strict=True), "o-")
    score.set(xlabel="step", ylabel="score", ylim=(0, 1))
    for sign, task in (("*", "products"), ("+", "sums")):
        calls.plot(*zip(*share_that_calls(run, sign), strict=True), "o-", label=task)
    calls.set(xlabel="step", ylabel="share that calls the calculator", ylim=(-0.03, 1.03))
    calls.legend(loc="center right")
    figure.savefig(OUT, dpi=90)
    print(OUT)


def share_that_calls(run: str, sign: str) -> list[tuple[int, float]]:
    """Of the answers to held-out tasks with a sign, by step."""
    files = RunFiles.at(run)
    points = []
    for step in files.rollout_steps(held_out=True):
        rows = [row for row in files.rollouts(step, held_out=True) if sign in row["prompt"]]
        points.append((step, sum("<tool_call>" in row["response"] for row in rows) / len(rows)))
    return points


if __name__ == "__main__":
    main(*sys.argv[1:])
