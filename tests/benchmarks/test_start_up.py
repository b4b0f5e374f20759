"""What a fit pays before it learns: processor seconds by process, counted in `import torch`s.

That unit is measured in the same run, so that figures of different machines can be compared; they
are printed (`-s` shows them). What is asserted is that all the processes were seen.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.task import raypo, read_metrics, write_task

MARK = "RAYPO_TEST_COMMAND"
POLL_S = 0.25
ROLES = {
    "driver": r"raypo\.cli",
    "learner worker": r"RayTrainWorker",
    "engine": r"Engine",
    "reference": r"ReferenceModel",
    "Ray Train's controller": r"TrainController",
    "Ray Train's helpers": r"TrainStateActor|DatasetManager|PreemptionWatcher|PlacementGroupCl",
    "Ray": r"raylet|gcs_server|dashboard|agent|monitor|ray::IDLE|log_|default_worker",
}
"""Role -> what the command line of its processes has."""


def processor_seconds(code: str) -> float:
    """Of a fresh interpreter that runs `code`; the better of two."""
    times = []
    for _ in range(2):
        before = psutil.Process().cpu_times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = psutil.Process().cpu_times()
        times.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    return min(times)


@pytest.fixture(scope="module")
def torch_s() -> float:
    return processor_seconds("import torch")


def test_what_a_driver_imports(torch_s: float):
    driver = processor_seconds("import raypo.trainer")
    with_models = processor_seconds("import raypo.trainer, raypo.recipes.ppo")
    print(f"\nimport raypo.trainer: {driver / torch_s:.1f} import torch")
    print(f"  with the loop and its models: {with_models / torch_s:.1f}")


def test_who_works_until_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_s: float
):
    config = write_task(tmp_path)
    monkeypatch.setenv(MARK, str(tmp_path))
    started = time.monotonic()
    command = raypo("train", config, "num_steps=1", "eval.prompts=null")
    seconds: dict[int, tuple[str, float]] = {}
    while command.poll() is None and not read_metrics(tmp_path / "runs" / "tiny"):
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(tmp_path):
                    used = process.cpu_times()
                    seconds[process.pid] = (" ".join(process.cmdline()), used.user + used.system)
            except psutil.Error:  # it has just ended
                continue
        time.sleep(POLL_S)
    wall_s = time.monotonic() - started
    _, error = command.communicate(timeout=300)
    assert command.returncode == 0, error

    of_role = dict.fromkeys(ROLES, 0.0)
    for line, used in seconds.values():
        role = next((role for role, found in ROLES.items() if re.search(found, line)), "Ray")
        of_role[role] += used
    print(f"\nto the first step: {wall_s / torch_s:.0f} import torch of the clock; by process")
    for role, used in sorted(of_role.items(), key=lambda item: -item[1]):
        print(f"  {role:24} {used / torch_s:5.1f} import torch")
    assert all(of_role[role] > 0.0 for role in ("driver", "learner worker", "engine", "reference"))
