"""Records the golden figures anew: python -m tests.golden.renew"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.golden import recorded

RENEWED_BY = "python -m tests.golden.renew"
UPDATE_TOLERANCES = {"*": (5e-6, 1e-8)}  # 2.4e-6 between a processor without and with AVX
RUN_TOLERANCES = {
    "*": (1e-3, 1e-5),
    "ppo/clip_fraction": (0.0, 0.02),  # of some 200 tokens, a few may lie at the edge
}


def write(path: Path, about: str, tolerances: dict[str, Any], values: dict[str, Any]) -> None:
    content = {
        "about": about,
        "renewed_by": RENEWED_BY,
        "tolerances": tolerances,  # name -> relative, absolute
        **values,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{path}: {', '.join(values)}")


def main() -> None:
    import torch

    torch.set_num_threads(min(2, torch.get_num_threads()))
    write(
        recorded.LEARNER_STEP,
        "Figures of one update in float64 on rollouts made by hand; see tests/golden/recorded.py.",
        UPDATE_TOLERANCES,
        recorded.learner_steps(),
    )
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # workers import the tests' reward
    from raypo.cluster.connect import connect
    from raypo.config import ClusterSection
    from tests.integration.task import write_task

    connect(ClusterSection())
    with tempfile.TemporaryDirectory() as folder:
        task = write_task(Path(folder))
        write(
            recorded.RUNS,
            "The first two steps of two tiny runs; see tests/golden/recorded.py.",
            RUN_TOLERANCES,
            {name: recorded.run(task, name) for name in recorded.OVERRIDES},
        )


if __name__ == "__main__":
    main()
