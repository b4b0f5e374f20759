"""A checkpoint whose files are damaged is named, with what to do."""

from pathlib import Path

import pytest
import torch

from raypo.storage.checkpoints import DamagedCheckpointError, damage_named
from raypo.storage.run_files import RunFiles


def restore(directory: Path, files: RunFiles) -> None:
    with damage_named(directory, files):
        torch.load(directory / "learner_0.pt", weights_only=True)


@pytest.mark.parametrize("damage", ["cut short", "empty", "gone", "other bytes"])
def test_a_damaged_checkpoint_is_named_with_another_one_to_begin_with(tmp_path: Path, damage: str):
    files = RunFiles(str(tmp_path), "run")
    directory = files.folder / "checkpoint_2"
    for folder in (directory, files.folder / "checkpoint_1"):
        folder.mkdir(parents=True)
        torch.save({"layout": {}, "torch": torch.zeros(1000)}, folder / "learner_0.pt")
    restore(directory, files)

    state = directory / "learner_0.pt"
    whole = state.read_bytes()
    state.write_bytes(
        {"cut short": whole[: len(whole) // 2], "other bytes": b"x" * 99}.get(damage, b"")
    )
    if damage == "gone":
        state.unlink()
    with pytest.raises(DamagedCheckpointError) as caught:
        restore(directory, files)
    text = str(caught.value)
    assert text.startswith(f"{directory}: this checkpoint cannot be read, a file of it is missing")
    assert f"from_checkpoint: {files.location}/checkpoint_1" in text
    assert "--fresh" in text


def test_what_is_no_damage_is_raised_as_it_is(tmp_path: Path):
    files = RunFiles(str(tmp_path), "run")
    with pytest.raises(ValueError, match="other workers"), damage_named(tmp_path, files):
        raise ValueError("was saved with other workers")
    with pytest.raises(RuntimeError, match="CUDA out of memory"), damage_named(tmp_path, files):
        raise RuntimeError("CUDA out of memory")
