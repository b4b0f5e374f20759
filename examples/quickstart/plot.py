"""Draws the quickstart's learning curve and its KL into examples/quickstart/curve.png.

python examples/quickstart/plot.py [RUN ...]      default: runs/quickstart
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

FIGURE = Path(__file__).parent / "curve.png"


def read(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def held_out(rows: list[dict]) -> tuple[list[int], list[float]]:
    """Steps and percents of the evaluations, the one before the first update at step 0."""
    steps, scores = [0], [100 * rows[0]["eval/initial_score_mean"]]
    for row in rows:
        if "eval/score_mean" in row:
            steps.append(row["step"])
            scores.append(100 * row["eval/score_mean"])
    return steps, scores


def draw(runs: list[Path]) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for number, run in enumerate(runs):
        rows, color = read(run), f"C{number}"
        steps = [row["step"] for row in rows]
        left.plot(steps, [100 * r["rollout/score_mean"] for r in rows], color=color, alpha=0.35)
        left.plot(*held_out(rows), "o-", color=color, label=run.name)
        right.plot(steps, [r["kl/ref_response_mean"] for r in rows], color=color)
    left.set(xlabel="step", ylabel="answers right, %", ylim=(0, 100))
    left.set_title("held-out prompts (dots), rollouts (pale)", fontsize=10)
    left.legend(frameon=False, loc="lower right")
    right.set(xlabel="step", ylabel="nats a response", ylim=(0, None))
    right.set_title("KL to the policy before PPO", fontsize=10)
    figure.savefig(FIGURE, dpi=150)
    print(FIGURE)


if __name__ == "__main__":
    draw([Path(argument) for argument in sys.argv[1:]] or [Path("runs/quickstart")])
