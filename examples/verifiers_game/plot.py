"""The curve of a finished run: python -m examples.verifiers_game.plot runs/verifiers-game"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from raypo.storage.run_files import RunFiles

OUT = Path(__file__).parent / "curve.png"
NAMES = {"reward/found": "numbers found", "reward/numbers": "guesses that are numbers"}


def main(run: str) -> None:
    rows = RunFiles.at(run).metrics()
    figure, share = plt.subplots(figsize=(6, 3), layout="constrained")
    for name, label in NAMES.items():
        share.plot([row["step"] for row in rows], [row[name] for row in rows], label=label)
    for words, bound in {"halving what is left": 7 / 8, "without reading answers": 3 / 8}.items():
        share.axhline(bound, color="gray", linewidth=0.8, linestyle="--")
        share.text(0, bound + 0.01, words, fontsize=8, color="gray")
    share.set(xlabel="step", ylabel="share", ylim=(0, 1.05))
    share.legend(loc="lower right")
    figure.savefig(OUT, dpi=90)
    print(OUT)


if __name__ == "__main__":
    main(*sys.argv[1:])
