import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.train import CheckpointConfig, RunConfig

from raypo.config.space import Domain
from raypo.storage.run_files import RunFiles
from raypo.tuning.population import (
    POINTER,
    copy_checkpoint,
    next_segment,
    remove_folder,
    take_along,
)
from raypo.tuning.schedule import inside


def pointer(folder: Path, trial: str) -> Any:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").write_text(f"of {trial}")
    content = {"trial": trial, "checkpoint": str(checkpoint), "known": {"kl/coef": 0.5}}
    (folder / POINTER).write_text(json.dumps(content))
    return tune.Checkpoint.from_directory(str(folder))


def test_another_trials_checkpoint_begins_a_segment_and_ones_own_goes_on(tmp_path: Path):
    files = RunFiles(str(tmp_path), "p-00001")
    files.folder.mkdir()
    assert (next_segment(files, None).number, next_segment(files, None).resume_from) == (0, None)

    copied = next_segment(files, pointer(tmp_path / "a", "p-00000"))
    assert copied.number == 1
    assert copied.known == {"kl/coef": 0.5}

    for own in (None, pointer(tmp_path / "b", "p-00001")):  # after a pause, or a kill
        assert next_segment(files, own) == dataclasses.replace(copied, known={})


def test_the_copied_checkpoint_is_the_trials_own_and_old_segments_go(tmp_path: Path):
    files = RunFiles(str(tmp_path), "p-00001")
    (files.folder / "segment_0" / "checkpoint_1").mkdir(parents=True)
    for number in (1, 2):
        source = tmp_path / str(number)
        copied = next_segment(files, pointer(source, "p-00000"))
        shutil.rmtree(source)
        assert copied.resume_from is not None
        assert (Path(copied.resume_from) / "run.json").read_text() == "of p-00000"
        assert Path(copied.location).is_relative_to(files.folder)
    names = {path.name for path in files.folder.iterdir() if path.is_dir()}
    assert names == {"segment_1", "segment_2"}


def test_what_the_driver_took_along_is_there_though_the_other_trial_has_deleted_it(tmp_path: Path):
    files = RunFiles(str(tmp_path), "p-00001")
    chosen = pointer(tmp_path / "a", "p-00000")
    taken = take_along(files, chosen)
    shutil.rmtree(tmp_path / "a" / "checkpoint")
    begun = next_segment(files, chosen)
    assert begun == taken
    assert begun.resume_from is not None
    assert (Path(begun.resume_from) / "run.json").read_text() == "of p-00000"

    again = pointer(tmp_path / "b", "p-00000")
    (tmp_path / "b" / "checkpoint" / "run.json").write_text("later")
    for _ in range(2):  # decided twice before the trial has started: the last one counts
        take_along(files, again)
    begun = next_segment(files, again)
    assert begun.resume_from is not None
    assert (Path(begun.resume_from) / "run.json").read_text() == "later"


def test_a_checkpoint_that_is_gone_cannot_be_taken(tmp_path: Path):
    gone = pointer(tmp_path / "a", "p-00000")
    shutil.rmtree(tmp_path / "a" / "checkpoint")
    with pytest.raises(OSError, match="checkpoint"):
        take_along(RunFiles(str(tmp_path), "p-00001"), gone)
    assert take_along(RunFiles(str(tmp_path), "p-00000"), gone) is None  # its own


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
    for _ in range(2):  # the second time there is nothing left
        remove_folder(f"{scheme}{tmp_path}/trial/segment_1")
        assert not target.exists()


def test_a_segment_has_a_folder_of_its_own_and_keeps_what_others_may_copy(tmp_path: Path):
    files = RunFiles(str(tmp_path), "p-00001")
    run = RunConfig(name="p-00001", checkpoint_config=CheckpointConfig(num_to_keep=2))
    made = next_segment(files, None).run_config(run)
    assert (made.name, made.storage_path) == ("segment_0", str(tmp_path / "p-00001"))
    assert made.checkpoint_config is not None
    assert made.checkpoint_config.num_to_keep == 3


@pytest.mark.parametrize(
    ("domain", "value", "nearest"),
    [
        (Domain("uniform", (0.0, 1.0)), 1.2, 1.0),
        (Domain("loguniform", (0.01, 1.0)), 0.008, 0.01),
        (Domain("randint", (1, 5)), 6, 4),
        (Domain("quniform", (0.1, 0.3, 0.05)), 0.24, 0.25),
        (Domain("choice", ("a", "b")), "b", "b"),
    ],
)
def test_perturbed_values_stay_in_the_space(domain: Domain, value: Any, nearest: Any):
    config = {"number": 1, "point": {"x": value}}
    assert inside({"x": domain}, config)["point"]["x"] == pytest.approx(nearest)
