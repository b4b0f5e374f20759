"""One config colocated and dedicated, on a cluster of three nodes, with losses on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.integration.task import REPOSITORY, numbers, read_metrics


def test_a_dedicated_run_on_three_nodes_that_loses_engine_and_worker_has_the_same_numbers(
    first: SimpleNamespace, task: Path
):
    """The same config colocated and dedicated; what the driver started outlives the worker."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.on_a_cluster", "ppo", str(task)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["return"] == {"status": "finished", "step": 4}
    assert told["killed"] == 1
    before, after = told["reference_pids"]
    assert before == after
    assert numbers(read_metrics(task.parent / "runs" / "dedicated")) == numbers(first.metrics)
