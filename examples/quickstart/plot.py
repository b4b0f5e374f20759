"""Draws what PPO does to the reward model's score, the verifier's and the KL: pipeline.png.

python -m examples.quickstart.plot [RUN ...]      default: runs/quickstart
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from .demo import read_metrics

FIGURE = Path(__file__).parent / "pipeline.png"


def held_out(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the evaluations, the one before the first update at step 0."""
    steps, values = [0], [rows[0][f"eval/initial_{name}"]]
    for row in rows:
        if f"eval/{name}" in row:
            steps.append(row["step"])
            values.append(row[f"eval/{name}"])
    return steps, values


def draw(runs: list[Path]) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for number, run in enumerate(runs):
        rows, color = read_metrics(run), f"C{number}"
        steps = [row["step"] for row in rows]
        left.plot(steps, [row["rollout/score_mean"] for row in rows], color=color, alpha=0.35)
        left.plot(*held_out(rows, "reward_model_mean"), "o-", color=color)
        dots, scores = held_out(rows, "score_mean")
        middle.plot(dots, [100 * score for score in scores], "o-", color=color, label=label(run))
        right.plot(steps, [row["kl/ref_response_mean"] for row in rows], color=color)
    left.set(xlabel="step", ylabel="score")
    left.set_title("reward model: held-out (dots), rollouts (pale)", fontsize=10)
    middle.set(xlabel="step", ylabel="answers right, %", ylim=(0, 100))
    middle.set_title("verifier, held-out prompts", fontsize=10)
    middle.legend(frameon=False, loc="lower right")
    right.set(xlabel="step", ylabel="nats per response", ylim=(0, None))
    right.set_title("KL to the SFT policy", fontsize=10)
    figure.savefig(FIGURE, dpi=150)
    print(FIGURE)


def label(run: Path) -> str:
    return run.parent.name.replace("_", " ") if run.parent.name.startswith("seed_") else "seed 0"


if __name__ == "__main__":
    draw([Path(argument) for argument in sys.argv[1:]] or [Path("runs/quickstart")])
