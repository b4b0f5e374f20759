"""The curve of a finished run: python -m examples.code.plot runs/code"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from raypo.storage.run_files import RunFiles

OUT = Path(__file__).parent / "curve.png"
LABELS = {"runs": "runs", "solved": "passes all hidden tests"}


def main(run: str) -> None:
    rows = RunFiles.at(run).metrics()
    figure, share = plt.subplots(figsize=(6, 3), layout="constrained")
    for part, label in LABELS.items():
        held_out = [(0, rows[0][f"eval/initial_reward/{part}"])]
        held_out += [
            (row["step"], row[f"eval/reward/{part}"]) for row in rows if "eval/score_mean" in row
        ]
        share.plot(*zip(*held_out, strict=True), "o-", label=label)
    share.set(xlabel="step", ylabel="share of programs, held-out tasks", ylim=(0, 1.03))
    share.legend(loc="lower right")
    figure.savefig(OUT, dpi=90)
    print(OUT)


if __name__ == "__main__":
    main(*sys.argv[1:])
