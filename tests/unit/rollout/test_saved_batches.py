"""Batches that were sampled ahead are read back unchanged, and their file executes nothing."""

import pickle
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from raypo.rollout.saved_batches import read_batches, write_batches
from raypo.rollout.step_batch import StepBatch
from raypo.types import Episode, Images, Prompt, Rollout, ToolUse
from tests.unit.rollout.test_controller import Run
from tests.unit.rollout.test_step_batch import rollout

PROMPTS = [
    Prompt(index, f"{index}?", np.array([5], np.int32), label=label, row={"answer": label})
    for index, label in ((0, "zero"), (3, 3), (4, np.arange(2)))  # the rows between are skipped
]


def assert_equal(one: Rollout, other: Rollout) -> None:
    for field in fields(Rollout):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert (left.dtype, left.tolist()) == (right.dtype, right.tolist()), field.name
        elif field.name == "score" and np.isnan(left):
            assert np.isnan(right)
        else:
            assert left == right, field.name


def test_batches_are_read_as_they_were_written(tmp_path: Path):
    plain = replace(rollout(7, 0), prompt_index=3, label=3, row={"answer": 3}, score=0.1)
    episode = Episode(
        score=float(np.float32(0.3)),
        num_turns=2,
        environment_s=0.5,
        metrics={"moves": float(np.float32(3.5))},
        tool_uses=(ToolUse("sql", 0.1, "no such table", 1), ToolUse("", 0.0)),
    )
    whole = replace(
        rollout(7, 1, tokens=5),
        prompt="\ud800 and 😀",
        prompt_index=4,
        messages=[{"role": "user", "content": "hi"}],
        data_source="sums",
        label=PROMPTS[2].label,
        row=PROMPTS[2].row,
        episode=episode,
        row_index=1,
        turn_rewards=np.array([0, 0.1, 0, 0, 1], np.float32),
        turn_index=np.array([0, 0, -1, 1, 1], np.int32),
        ref_log_probs=np.full(5, -0.1, np.float32),
        log_probs=np.array([-0.1, -np.inf, -1e-30, 0, -2], np.float32),
        later_versions=((2, 1), (4, 2)),
        scores_by_source={"format": 0.1 + 0.2, "length": float("inf")},
        minibatch=2,
    )
    empty = replace(rollout(8, 0, tokens=0), label="zero", row={"answer": "zero"})
    batches = {
        3: StepBatch([plain, whole], [whole], 1, {"rollout/samples_sampled": 2.0}),
        4: StepBatch([empty], [], 0, {}),
        5: StepBatch([], [], 4, {}),
    }
    write_batches(tmp_path / "x.npz", batches, {"stream": {"position": 9}})
    read, state = read_batches(tmp_path / "x.npz", PROMPTS)
    assert state == {"stream": {"position": 9}}
    assert list(read) == [3, 4, 5]
    for step, batch in batches.items():
        other = read[step]
        assert (other.missing_groups, other.metrics) == (batch.missing_groups, batch.metrics)
        for left, right in zip(batch.scored, other.scored, strict=True):
            assert_equal(left, right)
        assert [batch.scored.index(each) for each in batch.trained] == [
            other.scored.index(each) for each in other.trained
        ]


def test_rollouts_of_a_row_that_is_gone_have_no_label(tmp_path: Path):
    batches = {
        1: StepBatch([replace(rollout(0, 0), prompt_index=index) for index in (2, 9)], [], 0, {})
    }
    write_batches(tmp_path / "x.npz", batches, {})
    read, _ = read_batches(tmp_path / "x.npz", PROMPTS)
    assert [(each.label, each.row) for each in read[1].scored] == [(None, {})] * 2


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["rollouts_ahead.npz", "rollouts_ahead_0.pkl"])
@pytest.mark.parametrize("is_array", [True, False])
def test_a_checkpoint_that_someone_else_has_written_executes_nothing(
    tmp_path: Path, name: str, is_array: bool
):
    payload, marker = Payload(tmp_path / "executed"), tmp_path / "executed"
    with (tmp_path / name).open("wb") as file:
        if is_array:
            np.savez(file, json=np.array([payload], dtype=object))
        else:
            pickle.dump(payload, file)
    assert pickle.loads(pickle.dumps(payload)) is None  # it works
    marker.unlink()
    run = Run(max_staleness=1)
    with suppress(ValueError):
        run.controller.restore(tmp_path)
    assert not marker.exists()


def test_rollouts_of_a_prompt_share_its_images_again(tmp_path: Path):
    class Reads(list):
        def __getitem__(self, place):
            prompt = super().__getitem__(place)
            return replace(prompt, images=Images((b"file",), {}, 5, f"{prompt.index}"))

    scored = [
        replace(rollout(7, n), prompt_index=3, images=Reads(PROMPTS)[1].images) for n in (0, 1)
    ]
    write_batches(tmp_path / "batches.npz", {1: StepBatch(scored, scored, 0, {})}, {})
    assert b"file" not in (tmp_path / "batches.npz").read_bytes()
    batches, _ = read_batches(tmp_path / "batches.npz", Reads(PROMPTS))
    one, other = batches[1].scored
    assert one.images is not None
    assert one.images.digest == "3"
    assert one.images is other.images
