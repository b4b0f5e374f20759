from pathlib import Path
from typing import Any

import pytest

from raypo.config import ConfigError
from raypo.report.run_page import _tiles, load_run, run_page
from raypo.report.samples import choose, run_samples
from raypo.storage.run_files import RunFiles
from tests.recorded_run import page_data, rollout, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs"))


def page_text(*folders: Path) -> str:
    return run_page([load_run(str(folder)) for folder in folders]).html()


def titles(html: str) -> set[str]:
    return {part.partition('"')[0] for part in html.split('aria-label="')[1:]}


def test_the_page_says_in_words_how_the_run_went(run: Path):
    html = page_text(run)
    assert "The run finished: 12 steps in 2 min 47 s. It learned. The training score rose" in html
    assert (
        "The held-out score rose from 0.000 to 0.750 (3 prompts better, 0 worse, of 4: too few "
        "for an interval)." in html
    )
    assert "Starting and ending took 2 min 23 s, the steps 24 s. " in html
    assert "Speed: update bound, 50% of a step; learner.num_workers: 2" in html
    assert {"Score", "Score against KL", "Entropy", "Seconds by phase, all steps"} <= titles(html)


def test_the_score_curve_stands_directly_under_the_verdict(run: Path):
    result, *_ = run_page([load_run(str(run))], with_samples=False).sections
    kinds = [type(block).__name__ for block in result.blocks]
    assert kinds == ["Words", "Chart", "Words", "Tiles"]
    assert page_text(run).count('aria-label="Score"') == 1


def chart(html: str, title: str) -> dict:
    """The figure under a title."""
    name = (
        html.partition(f'role="img" aria-label="{title}"')[0].rpartition('id="')[2].partition('"')
    )
    return page_data(html)[name[0]]


def test_it_shows_the_same_held_out_prompts_before_and_after(run: Path):
    html = page_text(run)
    assert (
        "Held-out scores after step 12 compared with before the first update: 3 prompts better, "
        "0 worse, of 4." in html
    )
    assert "<td>held out 0</td><td>a</td><td>a=</td><td>0</td><td>a=</td><td>1</td>" in html


def test_another_judge_of_held_out_prompts_gets_an_axis_of_its_own(tmp_path: Path):
    folder = write_run(tmp_path)
    files = RunFiles.at(str(folder))
    judged = {
        "model": {"reward": [{"path": "runs/rm/reward_model", "weight": 1.0}]},
        "reward": {"function": None},
        "eval": {"function": "some/where.py:exact"},
    }
    files.write_config((files.config() or {}) | judged)
    html = page_text(folder)
    assert "It trained on the score of rm/reward_model; some/where.py:exact scores the" in html
    assert "Score" not in titles(html)
    held_out, trained = (
        {trace["name"] for trace in chart(html, title)["data"]}
        for title in ("Held-out score", "Training score")
    )
    assert held_out == {"held out", "at the start"}
    assert trained == {"trained on", "at the start"}


def test_what_it_cost_is_drawn(run: Path):
    html = page_text(run)
    (memory,) = chart(html, "Peak memory by role")["data"]
    assert dict(zip(memory["y"], memory["x"], strict=True)) == {"learner": 1.2, "engine": 1.62}
    (seconds,) = chart(html, "Seconds by phase, all steps")["data"]
    assert dict(zip(seconds["y"], seconds["x"], strict=True))["start and end"] == 143.0
    assert "Model FLOPs utilisation" not in titles(html)
    assert "model FLOPs utilisation (0.2, 0.3)" in html  # the same in every step


def test_the_page_loads_nothing(run: Path):
    html = page_text(run)
    outside_plotly = html.partition('id="packed-data"')[0]
    assert "default-src 'none'" in outside_plotly
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in outside_plotly, word
    assert len(html) < 3e6


def test_text_of_a_sample_cannot_end_the_script(run: Path):
    html = page_text(run)
    assert html.count("</script>") == 3
    samples = next(v for v in page_data(html).values() if isinstance(v, list))
    assert "prompt 0 </script>" in {sample["prompt"] for sample in samples}


def test_the_score_starts_before_the_first_update(run: Path):
    html = page_text(run)
    score = next(iter(page_data(html).values()))
    held_out = next(trace for trace in score["data"] if trace["name"] == "held out")
    assert held_out["x"] == [0, 4, 8, 12]
    assert held_out["y"][0] == 0.25
    dashed = next(t for t in score["data"] if t["name"] == "at the start")
    assert dashed["y"] == [0.25, 0.25]


def test_samples_have_their_tokens_with_advantages_and_changes(run: Path):
    samples = run_samples(RunFiles.at(str(run)), {})
    sample = next(each for each in samples if "held_out" not in each)
    assert "".join(sample["tokens"]).startswith(sample["response"])
    assert sample["tokens"][-1] == "<eos>"
    assert sample["advantages"] == [0.5, 0.1, -0.2]
    assert sample["changes"] == pytest.approx([0.3, -0.1, 0.0], abs=1e-6)


def test_chosen_samples_have_best_worst_longest_and_prompts_that_come_again():
    rows = [rollout(1, group, sample) for group in range(30) for sample in range(3)]
    rows[40] |= {"score": 9.0}
    rows[41] |= {"score": -9.0}
    rows[42] |= {"response_ids": [1] * 50}
    chosen = choose(rows, {29: 5}, count=12)
    assert len(chosen) == 12
    for row in (rows[40], rows[41], rows[42], *rows[87:]):
        assert [row] in chosen


def test_an_agents_episode_is_chosen_whole():
    rows = [rollout(1, 0, sample) for sample in range(9)]
    rows += [rollout(1, 1, 0) | {"score": 9.0, "row_index": number} for number in range(3)]
    (chosen,) = choose(rows, {}, count=1)
    assert chosen == rows[9:]


def test_a_run_under_way_and_one_that_failed(tmp_path: Path):
    going = write_run(tmp_path, "going", steps=2, status=None)
    assert load_run(str(going)).status == "unfinished"
    with RunFiles.at(str(going)).lock():
        assert load_run(str(going)).status == "running"
        assert "The run is going on; 2 steps are done." in page_text(going)
    failed = write_run(tmp_path, "failed", steps=0, status="failed")
    assert "The run failed; no step ended." in page_text(failed)


def test_a_run_of_another_recipe_shows_what_it_has(tmp_path: Path):
    files = RunFiles(str(tmp_path), "sft")
    files.write_config({"name": "sft", "recipe": "sft"})
    for step in range(1, 6):
        row = {"train/loss": 3.0 / step, "time/update_s": 1.0, "time/step_s": 1.0}
        row |= {"train/learning_rate": 1e-8 / step, "train/grad_norm": 1.0 + step}
        files.append_metrics(step, row | ({"eval/loss": 2.0} if step == 5 else {}))
    html = page_text(tmp_path / "sft")
    drawn = {"Training loss", "Held-out loss", "Learning rate", "Gradient norms"}
    assert drawn <= titles(html)
    assert not {"Score", "Score against KL", "Entropy"} & titles(html)
    assert 'id="distance-from-the-reference"' not in html


def test_what_does_not_change_is_named_and_not_drawn(tmp_path: Path):
    """Plotly draws a constant on an axis from -1 to 1, and rounding as if it were a curve."""
    files = RunFiles(str(tmp_path), "run")
    files.write_config({"name": "run", "recipe": "ppo"})
    for step in range(1, 6):
        row = {
            "rollout/score_mean": 0.5,
            "ppo/clip_fraction": 0.25,
            "mismatch/kl": 1e-9 * (-1) ** step,
            "ppo/policy_learning_rate": 1e-6 * step,
            "reward/format": 0.1 * step,
            "reward/right_answer": 0.5,
        }
        files.append_metrics(step, row)
    html = page_text(tmp_path / "run")
    assert not {"Clipped tokens", "Engine against learner"} & titles(html)
    words = "they do not change: clipped tokens (0.25); engine against learner (0)."
    assert words in html
    assert {"Learning rate", "Parts of the score"} <= titles(html)
    names = {trace["name"] for trace in chart(html, "Parts of the score")["data"]}
    assert names == {"format", "right_answer"}
    assert chart(html, "Score")["layout"]["yaxis"]["range"] == [0.45, 0.55]


@pytest.mark.parametrize(("is_async", "newest"), [(True, [1.0, 0.5, 0.25]), (False, [0.0] * 3)])
def test_the_age_of_tokens_is_drawn_where_it_varies(
    tmp_path: Path, is_async: bool, newest: list[float]
):
    files = RunFiles(str(tmp_path), "run")
    files.write_config({"name": "run", "recipe": "ppo"})
    for step, share in enumerate(newest, start=1):
        shares = {"rollout/staleness_share_0": share, "rollout/staleness_share_1": 1.0 - share}
        files.append_metrics(step, {"rollout/score_mean": 0.5} | shares)
    assert ("Tokens by their age in updates" in titles(page_text(tmp_path / "run"))) == is_async


def test_several_runs_share_their_axes(run: Path, tmp_path: Path):
    changes: dict[str, Any] = {"rollout/score_mean": 0.5}
    other = write_run(tmp_path, "other", **changes)
    html = page_text(run, other)
    score = next(iter(page_data(html).values()))
    names = [trace["name"] for trace in score["data"]]
    assert "recorded, trained on" in names
    assert "other, held out" in names
    assert "<td>name</td><td>recorded</td><td>other</td>" in html


def test_warnings_stand_on_the_page_with_their_remedy(tmp_path: Path):
    changes: dict[str, Any] = {"ppo/clip_fraction": 0.5}
    html = page_text(write_run(tmp_path, **changes))
    assert "50% of the tokens are clipped" in html
    assert "Lower learner.policy_lr" in html


def test_a_folder_without_a_run_is_wrong_input(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"RUN \(.*\): there is no run.*<storage_path>/<name>"):
        load_run(str(tmp_path / "nothing"))


def test_a_card_of_seconds_shows_the_median_of_the_newest_steps():
    rows = [{"step": n, "time/step_s": 2.0} for n in range(1, 30)]
    tiles = _tiles([*rows, {"step": 30, "time/step_s": 90.0}])
    assert ("2", "median of 10 steps") in [tile[1:] for tile in tiles]


def test_cards_show_three_digits_shares_in_percent_and_the_step_of_the_earlier_value(run: Path):
    tiles = _tiles(load_run(str(run)).rows)
    labels = [label for label, *_ in tiles]
    assert labels[-2:] == ["response tokens per second", "seconds per step"]
    assert ("held-out score", "0.682", "was 0.25 at step 0") in tiles
    assert ("training score", "0.719", "was 0.292 at step 1") in tiles
    assert ("cut-off responses", "10 %", "was 10 % at step 1") in tiles


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.004617, "0.5 %"), (0.05348, "5.3 %"), (0.9996, "100 %"), (0.00004, "0.004 %"), (0, "0 %")],
)
def test_a_share_on_a_card(share: float, shown: str):
    rows = [{"step": 2, "ppo/clip_fraction": share}]
    assert _tiles(rows) == [("clipped tokens", shown, f"was {shown} at step 2")]


def test_a_card_of_cut_off_responses_only_if_there_are_some():
    assert _tiles([{"step": 1, "rollout/truncated_fraction": 0.0}]) == []
