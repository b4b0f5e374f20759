import math
from pathlib import Path

import pytest

from raypo.report.change import (
    change_over_steps,
    held_out_scores,
    paired_change,
    scores_by_prompt,
    t_quantile,
    unpaired_change,
)
from raypo.storage.rollout_table import rollout_table
from raypo.storage.run_files import RunFiles
from raypo.tuning.held_out import model_scores
from tests.recorded_run import rollout


def scores(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


@pytest.mark.parametrize(
    ("degrees", "tabulated"), [(4, 2.776), (9, 2.262), (30, 2.042), (255, 1.969), (1e9, 1.960)]
)
def test_the_quantile_is_that_of_the_tables(degrees: float, tabulated: float):
    assert t_quantile(degrees) == pytest.approx(tabulated, abs=1e-3)


def test_a_paired_interval_by_hand():
    """Of 16 prompts 12 gain 1, 4 lose 1: mean 0.5, variance 12/15, 2.131 * sqrt(0.8 / 16)."""
    before = scores(*[0.0] * 12, *[1.0] * 4)
    change = paired_change(before, {key: 1.0 - value for key, value in before.items()})
    assert change is not None
    assert (change.before, change.after, change.num_changed) == (0.25, 0.75, 16)
    assert change.margin == pytest.approx(2.1314 * math.sqrt(0.8 / 16), abs=1e-4)
    assert change.direction == 1
    assert change.words == (
        "95 % interval of the change +0.02 to +0.98; 12 prompts better, 4 worse, of 16"
    )


def test_few_prompts_and_few_that_changed_say_nothing():
    nine = scores(*[0.0] * 9)
    few = paired_change(nine, dict.fromkeys(nine, 1.0))
    assert few is not None
    assert (few.margin, few.direction) == (None, None)
    many = scores(*[0.0] * 1000)
    rare = paired_change(many, many | dict.fromkeys(range(9), 1.0))
    assert rare is not None
    assert rare.margin is not None
    assert rare.margin < 0.009  # a t interval would not hold 0
    assert rare.direction == 0
    none = paired_change(many, many)
    assert none is not None
    assert none.words.startswith("no value changed")
    assert paired_change(scores(1.0), {}) is None


def test_samples_of_a_prompt_are_one_unit():
    rows = [
        {"group_index": group, "prompt": "p", "score": score, "row_index": 0}
        for group, score in ((0, 0.0), (0, 1.0), (0, None), (1, 1.0), (2, None))
    ]
    assert scores_by_prompt(rows) == {(0, "p"): 0.5, (1, "p"): 1.0}


def test_conversations_of_an_episode_are_one_sample_of_one_prompt(tmp_path: Path):
    """Later conversations may have prompts of their own, and failed episodes may have more."""
    files = RunFiles.at(str(tmp_path / "run"))
    files.folder.mkdir()
    rows = [
        rollout(1, group, 0)
        | {"score": float(group % 2), "row_index": row}
        | {"prompt": f"critic {row} of task {group}" if row else f"task {group}"}
        | {"scores_by_source": {"model": float(group)}}
        for group in range(4)
        for row in range(4 - group)
    ]
    files.write_rollouts(0, rollout_table(rows), held_out=True)
    expected = {(group, f"task {group}"): group for group in range(4)}
    assert held_out_scores(files, 0) == {key: group % 2 for key, group in expected.items()}
    assert model_scores(files, 0, {"model": 1.0}) == expected


def test_a_welch_interval_by_hand():
    """Variances 1 and 3 over 4 and 4: standard error 1, degrees (1+3)^2 * 3 / (1+9) = 4.8."""
    change = unpaired_change((0.0, 1.0, 4.0), (2.0, 3.0, 4.0), "halves")
    assert change.margin == pytest.approx(2.602, abs=2e-3)
    assert change.direction == 0
    assert change.words == "95 % interval of the change -0.60 to +4.60; halves"


def test_of_many_steps_the_steps_are_the_units():
    def rows(scores: list[float]) -> list[dict[str, float]]:
        return [{"step": step, "score": score} for step, score in enumerate(scores, start=1)]

    rising = [0.1 * step + 0.05 * (-1) ** step for step in range(1, 31)]
    change = change_over_steps(rows(rising), "score")
    assert change is not None
    assert change.direction == 1
    assert change.basis == "means of the first and of the last 7 steps"
    still = change_over_steps(rows([(-1.0) ** step for step in range(1, 31)]), "score")
    assert still is not None
    assert still.direction == 0
    few = change_over_steps(rows(rising[:9]), "score")
    assert few is not None
    assert few.direction is None
