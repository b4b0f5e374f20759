import math

import pytest

from raypo.metrics.warnings import Watch, findings
from tests.recorded_run import metrics


def rows(steps: int = 12, **changes: float) -> list[dict[str, float]]:
    return [{"step": step, **metrics(step, **changes)} for step in range(1, steps + 1)]


def test_a_run_that_goes_well_has_no_warning():
    assert findings(rows(40)) == []


@pytest.mark.parametrize(
    ("rule", "changes", "key"),
    [
        ("kl_drift", {"kl/ref_mean": 0.6}, "ppo.kl.coef"),
        ("kl_drift", {"kl/ref_response_mean": 80.0}, "ppo.kl.coef"),
        ("clip_fraction", {"ppo/clip_fraction": 0.4}, "learner.policy_lr"),
        ("engine_mismatch", {"mismatch/kl": 0.05}, "ppo.correction.kind"),
        ("correction_drops", {"mismatch/dropped_fraction": 0.9}, "ppo.correction.low"),
        ("truncated", {"rollout/truncated_fraction": 0.9}, "rollout.max_new_tokens"),
        ("one_phase", {"time/generate_s": 20.0}, "rollout.engine.count"),
        ("skipped_updates", {"ppo/skipped_updates": 2.0}, "learner.policy_lr"),
    ],
)
def test_what_is_off_is_told_once_with_a_key_that_helps(rule: str, changes: dict, key: str):
    found = findings(rows(**changes))
    assert [finding.rule for finding in found] == [rule]
    assert key in found[0].remedy


def test_one_odd_step_says_nothing():
    odd = rows()
    odd[5]["ppo/clip_fraction"] = 0.9
    assert findings(odd) == []


def test_a_warning_has_the_step_when_it_was_first_so():
    later = rows(12)
    for row in later[5:]:
        row["ppo/clip_fraction"] = 0.5
    (finding,) = findings(later)
    assert finding.step == 8  # the third in a row
    assert str(finding).startswith("step 8: 50% of the tokens are clipped")


def test_lengths_that_explode_and_that_collapse():
    growing = [{**row, "rollout/response_tokens_mean": 20.0 * 1.2 ** row["step"]} for row in rows()]
    assert [finding.rule for finding in findings(growing)] == ["length"]
    assert "grown" in findings(growing)[0].text
    shrinking = [{**r, "rollout/response_tokens_mean": 60.0 / r["step"]} for r in rows()]
    assert "shrunk" in findings(shrinking)[0].text


def test_equal_groups_matter_where_advantages_compare_them():
    equal = rows(**{"rollout/zero_variance_fraction": 0.8})
    assert findings(equal, {"ppo": {"advantage": "gae"}}) == []
    (finding,) = findings(equal, {"ppo": {"advantage": "grpo"}})
    assert finding.rule == "zero_variance_groups"


def test_a_held_out_score_that_falls_while_the_trained_one_rises():
    gamed = rows(20)
    for row in gamed:
        if "eval/score_mean" in row and row["step"] > 8:
            row["eval/score_mean"] = 0.3
    (finding,) = findings(gamed)
    assert finding.rule == "held_out_falls"
    assert finding.step == 16  # two evaluations


def test_entropy_that_is_gone():
    gone = [{**row, "ppo/entropy": math.exp(-row["step"])} for row in rows()]
    assert [finding.rule for finding in findings(gone)] == ["entropy_collapse"]


def test_runs_of_other_recipes_and_figures_that_are_missing_are_no_warning():
    watch = Watch()
    assert watch.add({"step": 1}) == []
    for step in range(2, 20):
        assert watch.add({"step": step, "train/loss": 2.0 / step, "eval/loss": math.nan}) == []
