import math
import time
from typing import Any

import pytest

from raypo.health.rules import Watch, findings
from tests.recorded_run import metrics


def rows(steps: int = 12, **changes: Any) -> list[dict[str, Any]]:
    return [{"step": step, **metrics(step, **changes)} for step in range(1, steps + 1)]


def test_a_run_that_goes_well_has_no_warning():
    assert findings(rows(40)) == []


@pytest.mark.parametrize(
    ("rule", "changes", "key"),
    [
        ("kl_runaway", {"kl/ref_mean": 0.6}, "ppo.kl.coef"),
        ("kl_runaway", {"kl/ref_response_mean": 80.0}, "ppo.kl.coef"),
        ("learning_rate_high", {"ppo/clip_fraction": 0.4}, "learner.policy_lr"),
        ("engine_mismatch", {"mismatch/kl": 0.05}, "ppo.correction.kind"),
        (
            "off_policy_drift",
            {"mismatch/kl": 0.05, "rollout/staleness_mean": 1.5},
            "ppo.correction.kind",
        ),
        ("correction_drops", {"mismatch/dropped_fraction": 0.9}, "ppo.correction.low"),
        ("truncation_bias", {"rollout/truncated_fraction": 0.48}, "rollout.max_new_tokens"),
        ("slow_reward", {"time/score_s": 4.0, "time/step_s": 6.0}, "reward.processes"),
        ("skipped_updates", {"ppo/skipped_updates": 2.0}, "learner.policy_lr"),
    ],
)
def test_what_is_off_is_told_once_with_a_key_that_helps(rule: str, changes: dict, key: str):
    start = {"kl/ref_mean": 0.0, "kl/ref_response_mean": 0.0}
    first, *others = rows(12, **changes)
    found = findings([first | start, *others])
    assert [finding.rule for finding in found] == [rule]
    assert key in found[0].remedy


def test_a_run_that_starts_away_from_its_reference_has_not_drifted():
    """`model.reference` may be another model than the policy."""
    assert findings(rows(12, **{"kl/ref_mean": 0.8, "kl/ref_response_mean": 90.0})) == []


def test_an_update_is_all_that_runs_on_examples_have_to_do():
    """Seconds of a step of the quickstart's reward model, ten times as long."""
    took = {"time/update_s": 1.6, "time/held_out_s": 0.02, "time/report_s": 0.01}
    each = [{"step": step, "train/loss": 1.0 / step, **took} for step in range(1, 30)]
    assert findings(each, {"recipe": "reward_model"}) == []


def test_updates_that_were_skipped_are_told_in_every_recipe():
    skipped = {"train/loss": 1.0, "train/skipped_updates": 1.0}
    (finding,) = findings([{"step": 1, **skipped}])
    assert finding.text.startswith("1 update was skipped")
    assert "learner.lr" in finding.remedy


def test_a_remedy_is_not_what_the_config_has_already():
    config = {"ppo": {"advantage": "grpo", "correction": {"kind": "tis"}}}
    config["ppo"] |= {"kl": {"controller": "adaptive"}, "filter": {"enabled": True}}
    off = {"mismatch/kl": 0.05, "rollout/zero_variance_fraction": 0.8, "kl/ref_mean": 0.9}
    first, *others = rows(12, **off)
    remedies = [f.remedy for f in findings([first | {"kl/ref_mean": 0.0}, *others], config)]
    assert len(remedies) == 3
    for key in ("ppo.correction.kind", "controller: adaptive", "ppo.filter.enabled"):
        assert not any(key in remedy for remedy in remedies)
    assert any("ppo.kl.target" in remedy for remedy in remedies)


def test_a_mismatch_that_comes_from_truncated_sampling_is_told_so():
    config = {"rollout": {"top_p": 0.9, "top_k": None, "min_p": 0.1}}
    (finding,) = findings(rows(12, **{"mismatch/kl": 0.05}), config)
    assert "Remove top_p and min_p from rollout" in finding.remedy


def dying(scores: list[float], **changes: Any) -> list[str]:
    """Rules that a run breaks whose held-out score starts at 0.531 and is measured each step."""
    each = rows(len(scores), **{"rollout/score_mean": 0.5, **changes})
    each[0]["eval/initial_score_mean"] = 0.531
    for row, score in zip(each, scores, strict=True):
        row["eval/score_mean"] = score
    return [finding.rule for finding in findings(each)]


def test_a_policy_that_dies_is_told_at_the_first_evaluation_that_shows_it():
    assert dying([0.0]) == ["policy_dies"]
    assert dying([0.5, 0.55, 0.0]) == ["policy_dies"]
    assert dying([0.3, 0.25]) == ["policy_dies"]


def test_one_poor_evaluation_is_chance():
    assert dying([0.3, 0.5, 0.3, 0.6]) == []


def test_a_policy_dies_by_the_spread_of_its_scores_on_any_scale():
    def of_rewards(scores: list[float], **held_out: float) -> list[str]:
        each = [
            {"step": step, "rollout/score_mean": score, "rollout/score_std": 4.0, **held_out}
            for step, score in enumerate(scores, start=1)
        ]
        return [finding.rule for finding in findings(each)]

    assert of_rewards([-2.0, -3.0, -9.0, -9.0, -9.0]) == ["policy_dies"]
    assert of_rewards([-2.0, -3.0, -3.5, -3.0, -3.5]) == []


def test_a_fine_tuning_whose_answers_become_wrong_is_told_its_own_key():
    (finding,) = findings(
        [{"step": 1, "train/loss": 1.0, "eval/initial_score_mean": 0.5, "eval/score_mean": 0.0}]
    )
    assert finding.rule == "policy_dies"
    assert "learner.lr" in finding.remedy


def test_a_held_out_score_that_only_trembles_is_no_fall():
    """A tenth of the scores' spread, at a gain of as much: 256 answers differ so by chance."""
    trembling = [0.30, 0.34, 0.30, 0.29, 0.31, 0.29]
    each = rows(24)
    each[0]["eval/initial_score_mean"] = 0.30
    for row in each:
        row |= {"eval/score_mean": trembling[row["step"] // 4 - 1]} if row["step"] % 4 == 0 else {}
    assert findings(each) == []


def test_the_spread_of_another_judge_does_not_hide_a_fall():
    """A reward model whose scores spread by 2.7 trains, a verifier of 0 or 1 judges."""
    gamed = rows(20, **{"rollout/score_std": 2.7})
    for row in gamed:
        if "eval/score_mean" in row and row["step"] > 8:
            row["eval/score_mean"] = 0.3
    assert [finding.rule for finding in findings(gamed)] == ["reward_gamed"]


def test_scores_below_zero_can_be_at_their_best_too():
    falling = rows(20)
    for row in falling:
        row["rollout/score_mean"] -= 2.0
        if "eval/score_mean" in row and row["step"] > 8:
            row["eval/score_mean"] = 0.3
    assert [finding.rule for finding in findings(falling)] == ["reward_gamed"]


def test_a_warning_has_the_step_when_it_was_first_so():
    later = rows(12)
    for row in later[5:]:
        row["ppo/clip_fraction"] = 0.5
    (finding,) = findings(later)
    assert finding.step == 8  # the third in a row
    assert finding.text.startswith("50% of the tokens are clipped")


def test_lengths_that_explode_and_that_collapse():
    growing = [{**row, "rollout/response_tokens_mean": 20.0 * 1.2 ** row["step"]} for row in rows()]
    assert findings(growing) == []  # the held-out score rises with it
    growing = [
        {name: value for name, value in row.items() if "eval" not in name} for row in growing
    ]
    assert [finding.rule for finding in findings(growing)] == ["length_drift"]
    assert "grown" in findings(growing)[0].text
    shrinking = [{**r, "rollout/response_tokens_mean": 60.0 / r["step"]} for r in rows()]
    assert "shrunk" in findings(shrinking)[0].text


def test_equal_groups_matter_where_advantages_compare_them():
    changes: dict[str, Any] = {"rollout/zero_variance_fraction": 0.8}
    equal = rows(12, **changes)
    assert findings(equal, {"ppo": {"advantage": "gae"}}) == []
    (finding,) = findings(equal, {"ppo": {"advantage": "grpo"}})
    assert finding.rule == "zero_variance_groups"


def test_a_held_out_score_that_falls_while_the_trained_one_rises():
    gamed = rows(20)
    for row in gamed:
        if "eval/score_mean" in row and row["step"] > 8:
            row["eval/score_mean"] = 0.3
    (finding,) = findings(gamed)
    assert finding.rule == "reward_gamed"
    assert finding.step == 16  # two evaluations


def test_entropy_that_is_gone():
    gone = [{**row, "ppo/entropy": math.exp(-row["step"])} for row in rows()]
    assert [finding.rule for finding in findings(gone)] == ["entropy_collapse"]


def test_entropy_falls_in_a_run_that_solves_its_task():
    solved = [{**row, "ppo/entropy": math.exp(-0.3 * row["step"])} for row in rows()]
    for row in solved:
        share = min(0.1 * row["step"], 0.9)
        row |= {"rollout/score_mean": share, "rollout/score_std": math.sqrt(share * (1 - share))}
    assert findings(solved) == []


def test_a_long_run_is_judged_in_seconds():
    """The report, the doctor and a resume judge all steps at once."""
    each = rows(2000, **{"ppo/policy_learning_rate": 1e-6, "ppo/policy_grad_norm": 1.0})
    start = time.process_time()
    findings(each)
    assert time.process_time() - start < 5.0


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "sapo", "dppo_kl", "task.py:loss"])
def test_only_clip_bounds_of_single_tokens_limit_the_drift(loss: str):
    behind = rows(12, **{"mismatch/kl": 0.001, "rollout/staleness_mean": 1.0})
    assert findings(behind, {"ppo": {"policy_loss": loss, "clip_low": 3e-4}}) == []
    (finding,) = findings(behind, {"ppo": {"policy_loss": "ppo", "clip_low": 0.03}})
    assert finding.rule == "off_policy_drift"


@pytest.mark.parametrize(("prompts", "found"), [(64, ["policy_dies"]), (8, [])])
def test_the_mean_of_a_few_prompts_falls_by_chance(prompts: int, found: list[str]):
    config = {"rollout": {"prompts_per_step": prompts}}
    each = [
        {"step": step, "rollout/score_mean": score, "rollout/score_std": 0.5}
        for step, score in enumerate([0.5, 0.2, 0.2, 0.2], start=1)
    ]
    assert [finding.rule for finding in findings(each, config)] == found


def test_a_few_groups_have_equal_scores_by_chance():
    equal = rows(11, **{"ppo/advantage_abs_mean": 0.0})
    assert findings(equal, {"rollout": {"prompts_per_step": 2}}) == []
    for prompts, steps in ((8, 3), (2, 12)):
        config = {"rollout": {"prompts_per_step": prompts}}
        found = findings(rows(12, **{"ppo/advantage_abs_mean": 0.0}), config)
        assert [(finding.rule, finding.step) for finding in found] == [("no_advantage", steps)]


def test_openings_of_texts_may_be_cut_off():
    cut = rows(8, **{"rollout/truncated_fraction": 1.0})
    assert findings(cut, {"data": {"label_key": None}}) == []
    for config in ({}, {"data": {"label_key": "label"}}):
        assert [finding.rule for finding in findings(cut, config)] == ["end_never_learned"]


@pytest.mark.parametrize(("tokens", "found"), [(1.0, ["memory_leak"]), (1.03, [])])
def test_memory_may_grow_with_the_responses(tokens: float, found: list[str]):
    each = rows(32)
    for row in each:
        row["perf/memory_learner_gb"] = 1.02 ** row["step"]
        row["rollout/response_tokens_mean"] = 20.0 * tokens ** row["step"]
    assert [finding.rule for finding in findings(each)] == found


@pytest.mark.parametrize(
    ("config", "has", "lacks"),
    [
        ({"reward": {"function": "f.py:f"}}, ["Set reward.processes", "rollout.mode"], ["devices"]),
        ({"reward": {"judge": {"path": "m"}}}, ["more devices", "rollout.mode"], ["processes"]),
        ({"reward": {"function": None}}, ["Set reward.processes"], ["devices"]),
        (
            {"recipe": "iterative_dpo", "model": {"reward": [{"path": "m"}]}},
            ["Give reward models"],
            ["processes", "rollout.mode"],
        ),
    ],
)
def test_the_remedy_of_slow_scores_is_that_of_their_source(config: dict, has, lacks):
    (finding,) = findings(rows(6, **{"time/score_s": 4.0, "time/step_s": 6.0}), config)
    assert all(part in finding.remedy for part in has)
    assert not any(part in finding.remedy for part in lacks)


@pytest.mark.parametrize(("evicted", "found"), [(40.0, ["kv_thrashing"]), (6.0, [])])
def test_requests_that_are_evicted_again_and_again(evicted: float, found: list[str]):
    each = rows(4, **{"perf/engine_preemptions": evicted, "rollout/samples_sampled": 64.0})
    assert [(finding.rule, finding.step) for finding in findings(each)] == [(f, 3) for f in found]


def test_runs_of_other_recipes_and_figures_that_are_missing_are_no_warning():
    watch = Watch()
    assert watch.add({"step": 1}) == []
    for step in range(2, 20):
        assert watch.add({"step": step, "train/loss": 2.0 / step, "eval/loss": math.nan}) == []
