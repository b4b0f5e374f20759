import json
from pathlib import Path

import pytest

from raypo.config import ConfigError
from raypo.metrics.report import load_run, run_page
from raypo.metrics.report.samples import choose, run_samples
from raypo.metrics.run_files import RunFiles
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
    assert "The run finished: 12 steps in 2 min 47 s. It learned." in html
    assert "The held-out score rose from 0.250 to 0.682." in html
    assert "Most of the time of its steps went into update 50% and generate 30%." in html
    assert {"Score", "Score against KL", "Entropy", "Seconds by phase, all steps"} <= titles(html)


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
    assert samples[0]["prompt"] == "prompt 0 </script>"


def test_the_score_starts_before_the_first_update(run: Path):
    html = page_text(run)
    score = next(iter(page_data(html).values()))
    held_out = next(trace for trace in score["data"] if trace["name"] == "held out")
    assert held_out["x"] == [0, 4, 8, 12]
    assert held_out["y"][0] == 0.25
    dashed = next(t for t in score["data"] if t["name"] == "before the first update")
    assert dashed["y"] == [0.25, 0.25]


def test_samples_have_their_tokens_with_advantages_and_changes(run: Path):
    sample = run_samples(RunFiles.at(str(run)), {})[0]
    assert "".join(sample["tokens"]).startswith(sample["response"])
    assert sample["tokens"][-1] == "<eos>"
    assert sample["advantages"] == [0.5, 0.1, -0.2]
    assert sample["changes"] == pytest.approx([0.3, -0.1, 0.0], abs=1e-6)


def test_without_a_tokenizer_samples_have_their_text(tmp_path: Path):
    folder = write_run(tmp_path)
    (folder / "policy" / "tokenizer.json").unlink()
    sample = run_samples(RunFiles.at(str(folder)), {})[0]
    assert "tokens" not in sample
    assert sample["response"]


def test_chosen_samples_have_best_worst_longest_and_prompts_that_come_again():
    rows = [rollout(1, group, sample) for group in range(30) for sample in range(3)]
    rows[40] |= {"score": 9.0}
    rows[41] |= {"score": -9.0}
    rows[42] |= {"response_ids": [1] * 50}
    chosen = choose(rows, {29: 5}, count=12)
    assert len(chosen) == 12
    for row in (rows[40], rows[41], rows[42], *rows[87:]):
        assert row in chosen


def test_a_run_under_way_and_one_that_failed(tmp_path: Path):
    going = write_run(tmp_path, "going", steps=2, status=None)
    assert load_run(str(going)).status == "unfinished"
    with RunFiles.at(str(going)).lock():
        assert load_run(str(going)).status == "running"
        assert "The run is going on; 2 steps are done." in page_text(going)
    failed = write_run(tmp_path, "failed", steps=0, status="failed")
    assert "The run is failed; no step ended." in page_text(failed)


def test_a_run_of_another_recipe_shows_what_it_has(tmp_path: Path):
    files = RunFiles(str(tmp_path), "sft")
    files.write_config({"name": "sft", "recipe": "sft"})
    for step in range(1, 6):
        row = {"train/loss": 3.0 / step, "time/update_s": 1.0, "time/step_s": 1.0}
        files.append_metrics(step, row | ({"eval/loss": 2.0} if step == 5 else {}))
    html = page_text(tmp_path / "sft")
    assert {"Training loss", "Held-out loss"} <= titles(html)
    assert not {"Score", "Score against KL", "Entropy"} & titles(html)
    assert 'id="distance-from-the-reference"' not in html


def test_several_runs_share_their_axes(run: Path, tmp_path: Path):
    other = write_run(tmp_path, "other", **{"rollout/score_mean": 0.5})
    html = page_text(run, other)
    score = next(iter(page_data(html).values()))
    names = [trace["name"] for trace in score["data"]]
    assert "recorded, trained on" in names
    assert "other, held out" in names
    assert "<td>name</td><td>recorded</td><td>other</td>" in html


def test_warnings_stand_on_the_page_with_their_remedy(tmp_path: Path):
    html = page_text(write_run(tmp_path, **{"ppo/clip_fraction": 0.5}))
    assert "50% of the tokens are clipped" in html
    assert "Lower learner.policy_lr" in html


def test_a_folder_without_a_run_is_wrong_input(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"RUN \(.*\): no run is there.*<storage_path>/<name>"):
        load_run(str(tmp_path / "nothing"))


def test_figures_that_are_not_finite_do_not_break_the_data(tmp_path: Path):
    html = page_text(write_run(tmp_path, **{"ppo/value_loss": float("nan")}))
    assert "NaN" not in json.dumps(page_data(html))
