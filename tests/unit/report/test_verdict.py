"""What the report says of runs of each kind, most of them as they were measured."""

from pathlib import Path
from typing import Any

import pytest

from raypo.report import run_page as run_page_module
from raypo.report import verdict
from raypo.report.page import Words
from raypo.report.run_page import load_run, run_page
from raypo.report.verdict import learned
from raypo.storage.rollout_table import rollout_table
from raypo.storage.run_files import RunFiles
from tests.recorded_run import write_recorded

PPO, SFT, REWARD_MODEL = "quickstart", "quickstart-sft", "quickstart-reward-model"
HELD, GAMED = "kl_coef-00005", "kl_coef-00007"


@pytest.fixture(autouse=True)
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a page's time; test_run_page.py looks at the charts."""
    monkeypatch.setattr(run_page_module, "PLOTS", {})
    monkeypatch.setattr(run_page_module, "_scores", lambda *_: [])


def said(*folders: Path) -> str:
    """The paragraphs under Result."""
    page = run_page([load_run(str(folder)) for folder in folders], with_samples=False)
    (result,) = [section for section in page.sections if section.title == "Result"]
    return " ".join(block.text for block in result.blocks if isinstance(block, Words))


def scored(folder: Path, scores: list[float]) -> Path:
    """A run without held-out prompts."""
    files = RunFiles(str(folder), "scored")
    files.write_config({"name": "scored"})
    for step, score in enumerate(scores, start=1):
        files.append_metrics(step, {"rollout/score_mean": score})
    return files.folder


def test_what_became_of_the_samples_is_said_where_not_all_were_trained(tmp_path: Path):
    def ran(name: str, **counts: float) -> str:
        files = RunFiles(str(tmp_path), name)
        files.write_config({"name": name})
        row = {f"rollout/samples_{key}": count for key, count in counts.items()}
        files.append_metrics(1, row | {"rollout/score_mean": 0.5})
        return said(files.folder)

    some = ran("some", asked=3200, trained=3000, filtered=100, dropped=36, carried=64)
    assert (
        "Of 3,200 samples 3,000 were trained, 100 left out by the filter, 36 dropped as too old, "
        "64 sampled or in flight for a step that was never trained." in some
    )
    assert "samples" not in ran("all", asked=32, trained=32, carried=0)


def test_the_quickstart_learned(tmp_path: Path):
    words = said(write_recorded(tmp_path, PPO))
    assert "The run finished: 40 steps in " in words
    assert (
        "It learned. The held-out score rose from 0.478 to 0.836 (95 % interval of the change "
        "+0.317 to +0.400; 204 prompts better, 12 worse, of 256)." in words
    )


def test_the_console_gets_the_sentences_on_learning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = RunFiles.at(str(write_recorded(tmp_path, PPO)))
    assert learned(files).startswith("It learned. The held-out score rose from 0.478 to 0.836")
    monkeypatch.setattr(verdict, "find_spec", lambda name: None)
    assert learned(files) == ""


def test_a_run_that_is_held_to_its_reference_shows_no_clear_change(tmp_path: Path):
    """A trial of the KL sweep with a coefficient of 3: what it trains on rose all the same."""
    words = said(write_recorded(tmp_path, HELD))
    assert (
        "No clear change. The held-out score rose from 0.478 to 0.498 by step 10 (95 % interval "
        "of the change -0.004 to +0.045; 63 prompts better, 38 worse, of 256). The training score "
        "rose from -0.174 to 0.229 (95 % interval of the change +0.25 to +0.55; means of the first "
        "and of the last 5 steps)." in words
    )


@pytest.mark.parametrize(
    ("held_out", "trend"),
    [
        (
            {0: 0, 10: 10, 20: 40},
            "still rising from step 10 to 20 and was best at step 20 (0.836).",
        ),
        ({0: 0, 10: 40, 20: 40}, "was flat from step 10 to 20 and was best at step 10 (0.836)."),
        ({0: 0, 10: 40, 20: 10}, "was falling from step 10 to 20 and was best at step 10 (0.836)."),
        ({0: 40, 10: 10, 20: 0}, "to 20 and was best before the first update (0.836)."),
    ],
)
def test_the_trend_of_the_last_third(tmp_path: Path, held_out: dict[int, int], trend: str):
    words = said(write_recorded(tmp_path, PPO, held_out=held_out))
    assert trend in words


def test_a_held_out_score_that_falls_while_training_rises_is_gaming(tmp_path: Path):
    """A trial of the KL sweep with a coefficient of 0.001: a hasty reward model trains, the
    verifier judges.
    """
    words = said(write_recorded(tmp_path, GAMED))
    assert (
        "It games its reward: the held-out score fell from 0.478 to 0.266 (95 % interval of the "
        "change -0.253 to -0.171; 34 prompts better, 143 worse, of 256), while the training score "
        "rose from -0.058 to 0.604 (95 % interval of the change +0.36 to +0.97; means of the first "
        "and of the last 5 steps)." in words
    )
    same: dict[str, Any] = {"reward": {"function": "some.py:exact"}, "eval": {}, "model": {}}
    overfit = said(write_recorded(tmp_path / "same", PPO, held_out={0: 40, 40: 0}, **same))
    assert "It fits only its training prompts: the held-out score fell" in overfit
    assert "games" not in overfit


def test_three_steps_do_not_say_whether_it_learned(tmp_path: Path):
    """As a new user's first run measured them."""
    scores = [-0.708, -0.552, -0.602]
    words = said(scored(tmp_path, scores))
    assert (
        "Too little data to say whether it learned: the training score rose from -0.708 "
        "to -0.602 (step 1 against step 3: too few for an interval)." in words
    )
    assert "It learned" not in words
    one = said(scored(tmp_path / "one", scores[:1]))
    assert "was -0.708 in its only step, so it is unknown whether it learned." in one


def test_many_steps_without_held_out_prompts_are_judged_by_their_trend(tmp_path: Path):
    folder = write_recorded(tmp_path, PPO, steps=range(1, 41), held_out={0: 0})
    for row in folder.glob("rollouts/*"):
        row.unlink()
    words = said(folder)
    assert "It learned. The training score rose from" in words
    assert "means of the first and of the last 10 steps)" in words


def test_held_out_answers_of_few_prompts_leave_it_to_training(tmp_path: Path):
    folder = write_recorded(tmp_path, PPO)
    files = RunFiles.at(str(folder))
    for step in files.rollout_steps(held_out=True):
        rows = [row for row in files.rollouts(step, held_out=True) if row["group_index"] < 5]
        files.write_rollouts(
            step, rollout_table([{**row, "scores_by_source": {}} for row in rows]), held_out=True
        )
    words = said(folder)
    assert "It learned. The training score rose from" in words
    assert "of 5: too few for an interval)" in words


def test_supervised_runs_are_judged_by_training_and_told_as_they_were_measured(tmp_path: Path):
    sft = said(write_recorded(tmp_path, SFT))
    assert "It learned. The training loss fell from" in sft
    assert "The held-out loss fell from 2.673 to 0.167." in sft
    reward_model = said(write_recorded(tmp_path, REWARD_MODEL))
    assert "It learned. The training loss fell from" in reward_model
    assert "The held-out accuracy rose from 0.578 to 0.996." in reward_model
    for words in (sft, reward_model):
        assert "of the change -" in words
        assert "training score" not in words


def test_training_loss_that_falls_while_the_held_out_loss_rises(tmp_path: Path):
    files = RunFiles(str(tmp_path), "overfit")
    files.write_config({"name": "overfit", "recipe": "sft"})
    for step in range(1, 41):
        row = {"train/loss": 2.0 / step}
        row |= {"eval/initial_loss": 2.0} if step == 1 else {}
        files.append_metrics(step, row | ({"eval/loss": 2.0 + step / 40} if not step % 20 else {}))
    words = said(files.folder)
    assert "It learned only its training examples. The training loss fell" in words
    assert "The held-out loss rose from 2.000 to 3.000." in words


def test_how_a_run_ended_is_told_as_far_as_it_is_known(tmp_path: Path):
    stopped = write_recorded(tmp_path, PPO, steps=range(1, 12), held_out={0: 0, 10: 10})
    files = RunFiles.at(str(stopped))
    for status, words in (
        ("interrupted", "The run was stopped after 11 steps in "),
        ("failed", "The run failed after 11 steps in "),
    ):
        files.write_summary({"status": status, "recipe": "ppo", "wall_s": 99.0, "versions": {}})
        assert words in said(stopped)
        assert "It learned. The held-out score rose from 0.478 to 0." in said(stopped)
        assert "by step 10 (95 % interval" in said(stopped)
    files.write_summary({"status": "failed", "recipe": "ppo", "wall_s": 1.0, "versions": {}})
    assert "The run failed after 11 steps; its" in said(stopped)  # a second is of a part of them
    (stopped / "summary.json").unlink()
    assert "The run ended unexpectedly after 11 steps: its process is gone, or" in said(stopped)


def test_several_runs_are_compared_on_the_same_held_out_prompts(tmp_path: Path):
    good = write_recorded(tmp_path / "good", PPO)
    early = write_recorded(tmp_path / "early", PPO, held_out={0: 0, 40: 10})
    twin = write_recorded(tmp_path / "twin", PPO, held_out={0: 0, 40: 30})
    words = said(good, early)
    assert "is best: held-out score 0.836 at step 40, next" in words
    assert "95 % interval of the difference" in words
    assert "Which is best is not decided" in said(good, twin)
    other = write_recorded(tmp_path / "other", PPO, eval={"function": "else.py:judge"})
    assert "their held-out scores come from different functions" in said(good, other)
    none = write_recorded(tmp_path / "none", PPO, held_out={0: 0})
    assert "some have no held-out responses" in said(good, none)
