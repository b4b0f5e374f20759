"""A seeded sample of the table of docs/reliability.md: two cells of it, in a short run each.

The whole table is `tests/slow/test_killed_roles.py`. `FAULT_SEED` chooses other cells.
"""

from __future__ import annotations

import os
import random
from itertools import product
from pathlib import Path

from tests.slow.killed_roles import PHASES
from tests.slow.test_ahead_matrix import ray_of_six
from tests.slow.test_killed_roles import ROLES, dedicated_keys, outcome, phases_of_kills, train

__all__ = ["ray_of_six"]

NUM_CELLS = 2


def test_a_role_that_is_killed_in_a_phase_changes_no_figure(
    ray_of_six: None, task: Path, tmp_path: Path
):
    seed = int(os.environ.get("FAULT_SEED", "58"))
    cells = random.Random(seed).sample(list(product(ROLES, PHASES)), NUM_CELLS)
    keys = dedicated_keys(task, tmp_path) | {"num_steps": 2}
    undisturbed = outcome(train(task, keys, "undisturbed-sample"))
    for role, phase in cells:
        keys["callbacks"] = ["tests.slow.killed_roles:between"]
        folder = train(task, keys, f"{role}.{phase}")
        assert phases_of_kills(folder) == [phase]
        assert outcome(folder) == undisturbed, (role, phase)
