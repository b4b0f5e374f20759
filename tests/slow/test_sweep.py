"""A sweep: trials that finish, are stopped and fail, and nothing that stays behind."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from raypo import PPOConfig, PPOTrainer
from raypo.config.paths import storage_path
from raypo.config.sweep import SweepConfig
from raypo.metrics.run_files import RunFiles
from tests.integration.task import numbers, read_metrics, write_task

RAYS_OWN = ("TrainStateActor", "_AutoscalingCoordinatorActor")
"""One each a cluster, for as long as it lives."""
DIGITS = "tests.integration.task:digit_share"


def write_sweep(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(f"name: {name}\nbase: {folder}/ppo.yaml\nstorage_path: {folder}/runs\n{text}")
    return path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    write_task(folder)
    (folder / "judges.py").write_text(
        "def nothing(rollouts):\n    return [0.0] * len(rollouts)\n\n"
        "def broken(rollouts):\n    raise KeyError('no such label')\n"
    )
    return folder


def alive() -> set[str]:
    """Actors that live and placement groups that are held."""
    import ray
    from ray.util.state import list_actors

    found = list_actors(filters=[("state", "!=", "DEAD")])
    actors = {f"{a.class_name} {a.actor_id}" for a in found if a.class_name not in RAYS_OWN}
    groups = ray.util.placement_group_table().values()
    held = {group["placement_group_id"] for group in groups if group["state"] != "REMOVED"}
    return actors | held


def wait_until_nothing_is_left(before: set[str]) -> None:
    deadline = time.monotonic() + 60
    while alive() - before and time.monotonic() < deadline:
        time.sleep(1)
    assert alive() - before == set()


@pytest.fixture(scope="module")
def three(task: Path, local_ray: None) -> SimpleNamespace:
    """One trial after the other: to the end, stopped as worse than the first, failing."""
    from raypo.tuning.sweep import run_sweep

    path = write_sweep(
        task,
        "three",
        f"""
space:
  reward.function: {{grid: [{DIGITS}, "{task}/judges.py:nothing", "{task}/judges.py:broken"]}}
overrides: {{eval.function: {DIGITS}}}
searcher: grid
metric: rollout/score_mean
constraint: kl/ref_response_mean <= 1000
scheduler: {{kind: asha, grace_steps: 2, reduction_factor: 2}}
max_concurrent: 1
""",
    )
    sweep = SweepConfig.load(path)
    files = RunFiles(storage_path(sweep), sweep.name)
    before = alive()
    outcome = run_sweep(sweep, sweep.base_config(), files)
    wait_until_nothing_is_left(before)
    return SimpleNamespace(outcome=outcome, files=files, folder=files.folder)


def test_a_trial_finishes_a_worse_one_is_stopped_and_a_broken_one_fails(three: SimpleNamespace):
    finished, stopped, failed = three.outcome.records
    assert (finished.status, finished.step) == ("finished", 4)
    assert (stopped.status, stopped.step) == ("stopped", 2)
    assert failed.status == "failed"
    assert "no such label" in failed.error
    assert three.outcome.status == "finished"
    assert three.outcome.best == finished
    assert finished.device_s == pytest.approx(finished.seconds)  # one core
    assert 0.0 < stopped.device_s < finished.device_s


def test_best_yaml_runs_and_reproduces_its_trial(three: SimpleNamespace):
    best = PPOConfig.load(three.folder / "best.yaml")
    PPOTrainer(best).fit()
    again = read_metrics(Path(best.storage_path) / "three-best")
    assert numbers(again) == numbers(read_metrics(three.folder / "trials" / "three-00000"))


def test_the_page_of_a_sweep_says_who_won(three: SimpleNamespace):
    from raypo.tuning.report import is_sweep, load_sweep, sweep_page

    assert is_sweep(RunFiles.at(str(three.folder)))
    html = sweep_page(load_sweep(RunFiles.at(str(three.folder)))).html()
    assert "three-00001" in html
    assert "is best" in html
