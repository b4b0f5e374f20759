"""The curve of a finished run: python -m examples.smollm2_positive.plot runs/smollm2-positive"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from raypo.storage.run_files import RunFiles

OUT = Path(__file__).parent / "curve.png"


def main(run: str) -> None:
    rows = RunFiles.at(run).metrics()
    steps = [row["step"] for row in rows]
    held_out = [(0, rows[0]["eval/initial_score_mean"])]
    held_out += [(row["step"], row["eval/score_mean"]) for row in rows if "eval/score_mean" in row]
    figure, (score, kl) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    score.plot(steps, [row["rollout/score_mean"] for row in rows], label="training prompts")
    score.plot(*zip(*held_out, strict=True), "o-", label="held-out prompts")
    score.set(xlabel="step", ylabel="VADER compound score")
    score.legend()
    kl.plot(steps, [row["kl/ref_response_mean"] for row in rows])
    kl.set(xlabel="step", ylabel="KL to the start, nats per response")
    figure.savefig(OUT, dpi=90)
    print(OUT)


if __name__ == "__main__":
    main(*sys.argv[1:])
