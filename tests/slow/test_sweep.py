"""A sweep: trials that finish, are stopped and fail, and nothing that stays behind."""

import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypo import PPOConfig, PPOTrainer
from raypo.config.sweep_config import SweepConfig
from raypo.storage.run_files import RunFiles
from tests.integration.task import (
    kill_train_workers,
    numbers,
    on_a_cluster,
    own_ray,
    raypo,
    read_metrics,
    write_task,
)
from tests.integration.test_command import TIMEOUT_S, wait_for_steps

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


def all_actors(**which: Any) -> list[Any]:
    """What Ray's state says of its actors, which Ray does not type."""
    from ray.util.state import list_actors

    return list_actors(own_ray(), **which)


def actors() -> dict[str, str]:
    """Class of each actor that this Ray has had."""

    return {each.actor_id: each.class_name for each in all_actors(limit=1000)}


def alive() -> set[str]:
    """Actors that live and placement groups that are held."""
    import ray

    found = all_actors(filters=[("state", "!=", "DEAD")])
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
    from raypo.tuning.sweep_file import run_sweep

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
    files = RunFiles(sweep.storage_path, sweep.name)
    before, known = alive(), set(actors())
    outcome = run_sweep(sweep, sweep.base_config(), files)
    wait_until_nothing_is_left(before)
    started = Counter(kind for actor, kind in actors().items() if actor not in known)
    return SimpleNamespace(outcome=outcome, files=files, folder=files.folder, started=started)


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


def test_what_trials_can_share_was_started_once(three: SimpleNamespace):
    """Engine and reference; the trials' process too, also where it was taken from one."""
    assert [three.started[kind] for kind in ("Engine", "ReferenceModel", "ImplicitFunc")] == [1] * 3
    assert three.started["RayTrainWorker"] == 3
    assert three.started["TrainController"] == 0


def test_on_cpus_a_batch_is_judged_at_once_by_what_trials_share(three: SimpleNamespace):
    """It has no cores of its own: asked prompt by prompt, it took ten times as long."""
    (timeline,) = three.folder.glob("trials/*-00000/timeline/worker_0.jsonl")
    for line in timeline.read_text().splitlines():
        asked = [who for who, what, *_ in json.loads(line)["spans"] if what == "log_probs"]
        assert asked == ["raypo:three-shared:reference:0"]


def test_best_yaml_runs_and_reproduces_its_trial(three: SimpleNamespace):
    """Alone, with an engine and a reference of its own."""
    best = PPOConfig.load(three.folder / "best.yaml")
    PPOTrainer(best).fit()
    again = read_metrics(Path(best.storage_path) / "three-best")
    assert numbers(again) == numbers(read_metrics(three.folder / "trials" / "three-00000"))


def test_the_page_of_a_sweep_says_who_won(three: SimpleNamespace):
    from raypo.tuning.sweep_page import load_sweep, sweep_page

    sweep = load_sweep(RunFiles.at(str(three.folder)))
    assert sweep is not None
    html = sweep_page(sweep).html()
    assert "three-00001" in html
    assert "is first: training score" in html
    assert "no other trial has a comparable score at that step" in html


def test_a_trial_that_loses_its_worker_goes_on_where_the_base_allows_it(
    three: SimpleNamespace, task: Path, local_ray: None
):
    from raypo.tuning.sweep_file import run_sweep

    path = write_sweep(
        task,
        "lost",
        f"""
space: {{reward.function: {{grid: [{DIGITS}]}}}}
overrides: {{eval.function: {DIGITS}, max_failures: 1}}
searcher: grid
metric: rollout/score_mean
""",
    )
    sweep = SweepConfig.load(path)
    files = RunFiles(sweep.storage_path, sweep.name)
    trial = files.folder / "trials" / "lost-00000"

    def kill() -> None:
        while len(read_metrics(trial)) < 3:
            time.sleep(0.02)
        kill_train_workers()

    before, known = alive(), set(actors())
    threading.Thread(target=kill, daemon=True).start()
    outcome = run_sweep(sweep, sweep.base_config(), files)
    wait_until_nothing_is_left(before)
    started = Counter(kind for actor, kind in actors().items() if actor not in known)
    assert started["RayTrainWorker"] == 2
    assert [record.status for record in outcome.records] == ["finished"]
    assert numbers(read_metrics(trial)) == numbers(
        read_metrics(three.folder / "trials" / "three-00000")
    )


def test_ctrl_c_leaves_nothing_behind(task: Path, local_ray: None):
    """While one trial steps and another one starts."""
    from raypo.tuning.sweep_file import run_sweep

    path = write_sweep(
        task,
        "pressed",
        """
space: {seed: {grid: [1, 2, 3]}}
overrides: {num_steps: 1000}
searcher: grid
metric: rollout/score_mean
max_concurrent: 2
""",
    )
    sweep = SweepConfig.load(path)
    files = RunFiles(sweep.storage_path, sweep.name)

    def press() -> None:
        while not read_metrics(files.folder / "trials" / "pressed-00000"):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    before = alive()
    threading.Thread(target=press, daemon=True).start()
    outcome = run_sweep(sweep, sweep.base_config(), files)
    wait_until_nothing_is_left(before)
    assert outcome.status == "interrupted"
    assert {record.status for record in outcome.records} == {"interrupted"}


def test_a_sweep_whose_driver_is_killed_goes_on_with_the_same_command(
    three: SimpleNamespace, task: Path
):
    path = write_sweep(
        task,
        "killed",
        f"""
space:
  reward.function: {{grid: [{DIGITS}, "{task}/judges.py:nothing"]}}
overrides: {{eval.function: {DIGITS}}}
searcher: grid
metric: rollout/score_mean
""",
    )
    folder = task / "runs" / "killed"
    command = raypo("sweep", path)
    wait_for_steps(command, folder / "trials" / "killed-00000", 3)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()

    command = raypo("sweep", path)
    out, error = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 0, error
    assert "0 trials are done, 2 had started and are resumed" in out
    first, second = (folder / "trials" / f"killed-0000{number}" for number in range(2))
    assert numbers(read_metrics(first)) == numbers(
        read_metrics(three.folder / "trials" / "three-00000")
    )
    assert [row["step"] for row in read_metrics(second)] == [1, 2, 3, 4]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["trials"]["finished"] == summary["num_trials"] == 2

    again = raypo("sweep", path)
    out, error = again.communicate(timeout=60)
    assert again.returncode == 0, error
    assert "killed is finished" in out


def test_a_population_goes_on_from_copies_of_its_best(task: Path, local_ray: None):
    """Two trials at a time; the one with the larger coefficient is the worse one by definition."""
    from raypo.tuning.sweep_file import run_sweep

    path = write_sweep(
        task,
        "copies",
        """
space: {ppo.kl.coef: {grid: [0.01, 0.5]}}
overrides: {num_steps: 8, checkpoint.every: 2}
searcher: grid
metric: kl/coef
mode: min
scheduler: {kind: pbt, perturb_every: 2, quantile: 0.5}
""",
    )
    sweep = SweepConfig.load(path)
    files = RunFiles(sweep.storage_path, sweep.name)
    before = alive()
    outcome = run_sweep(sweep, sweep.base_config(), files)
    wait_until_nothing_is_left(before)
    assert [record.status for record in outcome.records] == ["finished", "finished"]

    good, copy = (files.folder / "trials" / record.name for record in outcome.records)
    segment = json.loads((copy / "segment.json").read_text())
    assert segment["number"] == 3, "it was the worse one at steps 2, 4 and 6"
    assert [path.name for path in copy.glob("segment_*")] == ["segment_3"]
    step = json.loads(Path(segment["resume_from"], "run.json").read_text())["step"]
    assert step == 6
    rows = {folder: {row["step"]: row for row in read_metrics(folder)} for folder in (good, copy)}
    assert list(rows[copy]) == list(range(1, 9))
    assert numbers([rows[copy][step]]) == numbers([rows[good][step]])
    for name in ("rollout/score_mean", "kl/ref_response_mean", "rollout/response_tokens_mean"):
        for later in range(step + 1, min(step + 2, 9)):  # same weights, same prompts, same seeds
            assert rows[copy][later][name] == rows[good][later][name], name


def grow(config: dict[str, Any]) -> None:
    """Of a population: what it is worth is its value; the worst one is the fastest."""
    from ray import tune

    from raypo.tuning.goal import VALUE

    given, x = tune.get_checkpoint(), config["x"]
    done = json.loads(Path(given.path, "step.json").read_text()) if given else 0
    for step in range(done + 1, 7):
        time.sleep(x / 2)
        if x == 0.5 and step == 4:  # when the others wait for it already
            time.sleep(2)
            raise ValueError("it fails")
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "step.json").write_text(str(step))
            kept = tune.Checkpoint.from_directory(folder)
            tune.report({"step": step, VALUE: x}, checkpoint=kept)


def test_a_population_is_compared_at_the_same_step_and_does_not_wait_for_failed_trials(
    tmp_path: Path, local_ray: None
):
    from ray import tune

    from raypo.tuning.goal import VALUE
    from raypo.tuning.population import Population

    def tried() -> dict[int, list[float]]:
        class Values(tune.Callback):
            def __init__(self) -> None:
                self.of: dict[int, list[float]] = {}

            def on_trial_result(
                self, iteration: int, trials: list[Any], trial: Any, result: dict, **_: Any
            ) -> None:
                number = int(str(trial).rpartition("_")[2])
                self.of.setdefault(number, []).append(result[VALUE])

        values = Values()
        tune.Tuner(
            tune.with_resources(grow, {"memory": 1}),
            param_space={"x": tune.grid_search([0.1, 0.8, 0.5])},
            tune_config=tune.TuneConfig(
                scheduler=Population(
                    every=2,
                    num_steps=6,
                    seed=0,
                    time_attr="step",
                    metric=VALUE,
                    mode="max",
                    hyperparam_mutations={"x": tune.uniform(0.0, 1.0)},
                )
            ),
            run_config=tune.RunConfig(storage_path=str(tmp_path), callbacks=[values], verbose=0),
        ).fit()
        return values.of

    first = tried()
    assert first[2] == [0.5] * 3
    assert first[1] == [0.8] * 6
    assert first[0][:2] == [0.1, 0.1]
    assert len(first[0]) == 6
    assert min(first[0][2:]) > 0.1, "it begins again with values near the best one's"
    assert tried() == first


def test_trials_that_sample_ahead_have_engines_of_their_own_and_leave_nothing(task: Path):
    """Two at a time on two nodes; interrupted and gone on with, the third one fails."""
    path = write_sweep(
        task,
        "ahead",
        f"""
space:
  reward.function: {{grid: [{DIGITS}, "{task}/judges.py:nothing", "{task}/judges.py:broken"]}}
overrides:
  num_steps: 40
  eval: {{function: {DIGITS}, every: 20}}
  placement.mode: {{engine: dedicated}}
  rollout: {{mode: async, max_staleness: 1, max_new_tokens: 64}}
searcher: grid
metric: rollout/score_mean
""",
    )
    found = on_a_cluster("sweep", str(path))
    for trial in ("ahead-00000", "ahead-00001"):
        assert f"raypo:{trial}:engine:0" in found["held"]
        assert f"raypo:{trial}:dedicated" in found["held"]
    assert found["interrupted"] == ["interrupted"] * 2
    assert found["resumed"] == ["finished", "finished", "failed"]
    assert found["interrupted_left"] == found["resumed_left"] == []
    for trial in ("ahead-00000", "ahead-00001"):
        rows = read_metrics(task / "runs" / "ahead" / "trials" / trial)
        assert [row["step"] for row in rows] == list(range(1, 41))
        assert {row["rollout/staleness_max"] for row in rows} <= {0.0, 1.0}
        assert rows[-1]["rollout/staleness_max"] == 1.0


def test_adapters_of_trials_at_a_time_live_in_one_engine(task: Path, local_ray: None):
    """Each trial says to the digit what it says alone, with an engine of its own."""

    from raypo.tuning.sweep_file import run_sweep

    path = write_sweep(
        task,
        "adapters",
        """
space: {learner.policy_lr: {grid: [1.0e-2, 2.0e-2, 3.0e-2]}}
overrides: {num_steps: 3, model.lora: {rank: 4, push: adapter}}
searcher: grid
metric: rollout/score_mean
max_concurrent: 2
""",
    )
    sweep = SweepConfig.load(path)
    base, files = sweep.base_config(), RunFiles(sweep.storage_path, sweep.name)
    before = alive()
    outcome = run_sweep(sweep, base, files)
    wait_until_nothing_is_left(before)
    assert [record.status for record in outcome.records] == ["finished"] * 3
    engines = all_actors(filters=[("class_name", "=", "Engine")], limit=1000)
    names = [actor["name"] for actor in engines if "adapters" in actor["name"]]
    assert names == ["raypo:adapters-shared:engine:0"]

    last = outcome.records[-1]
    values: Any = base.model_dump() | {"name": "alone-adapter"}
    values["learner"]["policy_lr"] = 3e-2
    PPOTrainer(PPOConfig.parse(values)).fit()
    alone = read_metrics(Path(base.storage_path) / "alone-adapter")
    trial = read_metrics(files.folder / "trials" / last.name)
    assert numbers(alone) == numbers(trial)
