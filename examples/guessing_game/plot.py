"""The curves of two finished runs, with the answers and without.

python -m examples.guessing_game.plot runs/guessing-game runs/without-answers
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from raypo.storage.run_files import RunFiles

OUT = Path(__file__).parent / "curve.png"
BOUNDS = {"halving what is left": 7 / 8, "at most, unless answers are read": 3 / 8}


def main(*runs: str) -> None:
    figure, score = plt.subplots(figsize=(6, 3), layout="constrained")
    for run, label in zip(runs, ("with answers", "without answers"), strict=True):
        rows = RunFiles.at(run).metrics()
        held_out = [(0, rows[0]["eval/initial_score_mean"])]
        held_out += [
            (row["step"], row["eval/score_mean"]) for row in rows if "eval/score_mean" in row
        ]
        score.plot(*zip(*held_out, strict=True), "o-", label=label)
    for words, bound in BOUNDS.items():
        score.axhline(bound, color="gray", linewidth=0.8, linestyle="--")
        score.text(0, bound + 0.01, words, fontsize=8, color="gray")
    score.set(xlabel="step", ylabel="share of games won", ylim=(0, 1))
    score.legend(loc="center right")
    figure.savefig(OUT, dpi=90)
    print(OUT)


if __name__ == "__main__":
    main(*sys.argv[1:])
