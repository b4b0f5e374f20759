"""The curve of a finished run: python -m examples.smollm2_judge.plot runs/smollm2-judge"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from raypo.storage.run_files import RunFiles

OUT = Path(__file__).parent / "curve.png"


def main(run: str) -> None:
    rows = RunFiles.at(run).metrics()
    steps = [row["step"] for row in rows]
    figure, (grade, kl) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    grade.plot(steps, [row["rollout/score_mean"] for row in rows])
    grade.set(xlabel="step", ylabel="the judge's grade, 0 to 1")
    kl.plot(steps, [row["kl/ref_response_mean"] for row in rows])
    kl.set(xlabel="step", ylabel="KL to the start, nats per response")
    figure.savefig(OUT, dpi=90)
    print(OUT)


if __name__ == "__main__":
    main(*sys.argv[1:])
