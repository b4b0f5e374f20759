import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune
from ray.train import CheckpointConfig, RunConfig
from ray.tune.search import Searcher, SearchGenerator

from raypo.config import ConfigError
from raypo.config.space import Domain
from raypo.storage.checkpoints import SEGMENT, find_checkpoint
from raypo.storage.run_files import RunFiles
from raypo.tuning.population import Population, Segment, clamp_to_domains, copy_checkpoint
from raypo.tuning.sweep_file import last_comparison


def files_of(folder: Path, name: str) -> RunFiles:
    files = RunFiles(str(folder), name)
    files.folder.mkdir()
    return files


def pointer(folder: Path, files: RunFiles, segment: Segment) -> Any:
    """As Tune hands it on: to a checkpoint of a trial."""
    folder.mkdir()
    checkpoint = files.folder / segment.folder / "checkpoint_2"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "run.json").write_text(f"of {files.name}")
    at = segment.at("bucket/checkpoint_2", {"step": 2, "kl/coef": 0.5}, files)
    (folder / SEGMENT).write_text(json.dumps(vars(at)))
    return tune.Checkpoint.from_directory(str(folder))


def test_another_trials_checkpoint_begins_a_segment_and_ones_own_goes_on(tmp_path: Path):
    good, copy = files_of(tmp_path, "p-00000"), files_of(tmp_path, "p-00001")
    first = Segment.last(copy)
    assert (first.number, first.resume_from, first.known) == (0, None, {})
    (copy.folder / "segment_0" / "checkpoint_1").mkdir(parents=True)

    begun = first.next(pointer(tmp_path / "a", good, Segment.last(good)), copy)
    assert (begun.trial, begun.number) == ("p-00001", 1)
    assert begun.resume_from == begun.checkpoint == f"{tmp_path}/p-00001/segment_1/copied"
    assert begun.known == {"step": 2, "kl/coef": 0.5}
    assert Segment.last(copy) == begun, "it goes on there after a kill"
    assert not (copy.folder / "segment_0").exists()

    own = pointer(tmp_path / "b", copy, begun)
    later = Segment.last(copy)
    assert later.next(own, copy) == later == Segment.last(copy)
    assert later.checkpoint == f"{tmp_path}/p-00001/segment_1/checkpoint_2"
    assert later.resume_from == begun.resume_from


def test_a_run_may_begin_with_the_last_checkpoint_of_a_trial(tmp_path: Path):
    good, copy = files_of(tmp_path, "p-00000"), files_of(tmp_path, "p-00001")
    first = Segment.last(good)
    first.write(good)
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        find_checkpoint(good.location)
    begun = Segment.last(copy).next(pointer(tmp_path / "a", good, first), copy)
    for files, name in ((good, "segment_0/checkpoint_2"), (copy, "segment_1/copied")):
        assert find_checkpoint(files.location) == f"{files.location}/{name}"
        assert find_checkpoint(f"file://{files.location}") == f"file://{files.location}/{name}"
    assert begun.checkpoint == find_checkpoint(copy.location)
    moved = copy.folder.rename(tmp_path / "moved")
    assert find_checkpoint(str(moved)) == f"{moved}/segment_1/copied"


def test_the_copied_checkpoint_is_the_trials_own_and_what_it_made_before_goes(tmp_path: Path):
    good, copy = files_of(tmp_path, "p-00000"), files_of(tmp_path, "p-00001")
    (copy.folder / "segment_1" / "copied").mkdir(parents=True)  # of an attempt that was killed
    for number in (1, 2):
        begun = Segment.last(copy).next(
            pointer(tmp_path / str(number), good, Segment(good.name)), copy
        )
        shutil.rmtree(good.folder / "segment_0")
        assert begun.resume_from is not None
        assert Path(begun.resume_from, "run.json").read_text() == "of p-00000"
        names = [path.name for path in copy.folder.iterdir() if path.is_dir()]
        assert names == [f"segment_{number}"]


def test_a_trial_keeps_what_it_has_where_the_checkpoint_to_copy_is_gone(tmp_path: Path):
    good, copy = files_of(tmp_path, "p-00000"), files_of(tmp_path, "p-00001")
    (copy.folder / "segment_0" / "checkpoint_1").mkdir(parents=True)
    gone = pointer(tmp_path / "a", good, Segment(good.name))
    shutil.rmtree(good.folder / "segment_0")
    before = Segment.last(copy)
    with pytest.raises(OSError, match="checkpoint_2"):
        before.next(gone, copy)
    assert Segment.last(copy) == before
    assert (copy.folder / "segment_0" / "checkpoint_1").is_dir()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_checkpoint_is_copied_whole_by_path_and_by_uri(tmp_path: Path, scheme: str):
    (tmp_path / "source" / "optimizer").mkdir(parents=True)
    (tmp_path / "source" / "run.json").write_text("{}")
    (tmp_path / "source" / "optimizer" / "rank_0.pt").write_bytes(b"state")
    target = tmp_path / "trial" / "segment_1" / "copied"
    copy_checkpoint(f"{scheme}{tmp_path}/source", f"{scheme}{target}")
    shutil.rmtree(tmp_path / "source")
    assert (target / "run.json").read_text() == "{}"
    assert (target / "optimizer" / "rank_0.pt").read_bytes() == b"state"


@pytest.mark.parametrize(("keep", "expected"), [(1, 2), (5, 5), (None, None)])
def test_a_segment_has_a_folder_of_its_own_and_keeps_what_others_may_begin_with(
    tmp_path: Path, keep: int | None, expected: int | None
):
    files = files_of(tmp_path, "p-00001")
    run = RunConfig(name="p-00001", checkpoint_config=CheckpointConfig(num_to_keep=keep))
    made = Segment.last(files).run_config(run, files)
    assert (made.name, made.storage_path) == ("segment_0", str(tmp_path / "p-00001"))
    assert made.checkpoint_config is not None
    assert made.checkpoint_config.num_to_keep == expected


class RunningTrial:
    """As much of a Tune trial as pbt looks at before it copies any."""

    status, experiment_tag = "RUNNING", ""

    def __init__(self) -> None:
        self.config = {"x": 1}
        keeps_all = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None))
        self.run_metadata = SimpleNamespace(checkpoint_manager=keeps_all)

    def is_finished(self) -> bool:
        return False


def judge_of(trials: list[Any], **changes: Any) -> tuple[Population, Any]:
    """Compares every 2 of 6 steps and copies nobody; with a controller of these trials."""
    mutations: Any = {"x": [1, 2]}
    judge = Population(
        every=2,
        num_steps=6,
        seed=0,
        hyperparam_mutations=mutations,
        quantile_fraction=0.0,
        time_attr="step",
        metric="v",
        mode="max",
        **changes,
    )
    controller = SimpleNamespace(
        search_alg=SearchGenerator(Searcher(metric="v", mode="max")),
        get_trials=lambda: trials,
        get_live_trials=lambda: set(trials),
    )
    for trial in trials:
        judge.on_trial_add(controller, trial)  # pyright: ignore[reportArgumentType]
    return judge, controller


def test_trials_wait_where_they_are_compared_and_at_their_end_for_nobody():
    first, second = trials = [RunningTrial(), RunningTrial()]
    judge, controller = judge_of(trials)

    def decide(trial: Any, step: int) -> str:
        return judge.on_trial_result(controller, trial, {"step": step, "v": 0.5})

    assert [decide(first, step) for step in (1, 2)] == ["CONTINUE", "PAUSE"]
    first.status = "PAUSED"
    assert judge.choose_trial_to_run(controller) is None, "it waits for the second one"
    assert decide(second, 2) == "PAUSE"
    second.status = "PAUSED"
    assert judge.choose_trial_to_run(controller) in trials
    assert decide(first, 6) == "CONTINUE"


def test_a_population_that_goes_on_is_compared_where_its_first_trials_waited():
    ahead, behind = trials = [RunningTrial(), RunningTrial()]
    judge, controller = judge_of(trials, last_comparison=2)

    def decide(trial: Any, step: int) -> str:
        return judge.on_trial_result(controller, trial, {"step": step, "v": 0.5})

    assert decide(ahead, 4) == "PAUSE"
    ahead.status = "PAUSED"
    assert [decide(behind, step) for step in (2, 3)] == ["CONTINUE"] * 2
    assert judge.choose_trial_to_run(controller) is None
    assert decide(behind, 4) == "PAUSE"
    assert judge.choose_trial_to_run(controller) is ahead


def test_a_comparison_that_an_earlier_attempt_has_made_is_not_made_again(tmp_path: Path):
    """The driver was killed at step 3, after one has copied the other at step 2."""
    good, copy = files_of(tmp_path, "p-00000"), files_of(tmp_path, "p-00001")
    at_2 = pointer(tmp_path / "a", good, Segment.last(good))
    assert last_comparison([good, copy]) == 0, "both wait at step 2"
    Segment.last(good).next(at_2, good)
    assert last_comparison([good, copy]) == 2
    Segment.last(copy).next(at_2, copy)
    assert last_comparison([good, copy]) == 2

    trials = [RunningTrial(), RunningTrial()]
    judge, controller = judge_of(trials, last_comparison=2)

    def decide(trial: Any, step: int) -> str:
        return judge.on_trial_result(controller, trial, {"step": step, "v": 0.5})

    assert [decide(trial, 2) for trial in trials] == ["CONTINUE"] * 2
    assert [decide(trial, 4) for trial in trials] == ["PAUSE"] * 2


@pytest.mark.parametrize(
    ("domain", "value", "nearest"),
    [
        (Domain("uniform", (0.0, 1.0)), 1.2, 1.0),
        (Domain("loguniform", (0.01, 1.0)), 0.008, 0.01),
        (Domain("randint", (1, 5)), 6, 4),
        (Domain("choice", ("a", "b")), "b", "b"),
    ],
)
def test_perturbed_values_stay_in_the_space(domain: Domain, value: Any, nearest: Any):
    assert clamp_to_domains({"x": domain}, {"x": value}) == {"x": nearest}
