import math

import pytest

from raypo.config import ConfigError, StopSection
from raypo.run.watched import Watched, best_in_words, check_measured, of_its_kind, reason_to_stop


def after(values: list[float], rules: StopSection) -> tuple[Watched, str | None]:
    """A metric that was measured before the first update and after each of some steps."""
    watched = Watched(rules.metric, rules.mode, rules.min_change)
    for step, value in enumerate(values):
        watched = watched.seen(step, {rules.metric: value})
    return watched, reason_to_stop(watched, rules)


def test_a_run_is_done_once_its_metric_is_there():
    assert after([0.5, 0.89], StopSection(at=0.9))[1] is None
    assert after([0.5, 0.9], StopSection(at=0.9))[1] == (
        "eval/score_mean is 0.9, at least 0.9 (stop.at)"
    )
    loss = StopSection(metric="eval/loss", mode="min", at=0.3)
    assert after([0.9, 0.31], loss)[1] is None
    assert after([0.9, 0.2], loss)[1] == "eval/loss is 0.2, at most 0.3 (stop.at)"


def test_what_the_policy_was_before_the_first_update_ends_no_run():
    assert after([0.95], StopSection(at=0.9))[1] is None


def test_patience_counts_measurements_that_were_no_better():
    rules = StopSection(patience=2)
    assert after([0.5, 0.6, 0.6], rules)[1] is None  # as good is not better
    watched, reason = after([0.5, 0.6, 0.6, 0.1], rules)
    assert (watched.best, watched.best_step) == (0.6, 1)
    assert reason == (
        "eval/score_mean was not better than 0.6, of step 1, in 2 measurements (stop.patience)"
    )
    assert after([0.5, 0.6, 0.6, 0.7], rules)[1] is None


def test_a_change_that_is_too_small_is_no_better():
    slow = [0.0, 0.04, 0.08, 0.12]
    assert after(slow, StopSection(patience=3))[1] is None
    watched, reason = after(slow, StopSection(patience=2, min_change=0.1))
    assert watched.best == 0.12  # since the best that counted, it has changed enough
    assert reason is None
    assert after(slow[:3], StopSection(patience=2, min_change=0.1))[1] is not None


def test_steps_that_did_not_measure_it_count_for_nothing():
    watched = Watched("eval/score_mean", "max").seen(1, {"eval/score_mean": 0.5})
    assert watched.seen(2, {"rollout/score_mean": 1.0}) == watched
    assert watched.seen(2, {"eval/score_mean": math.nan}) == watched


def test_a_resumed_run_knows_its_best_unless_another_metric_is_meant():
    watched = Watched("eval/score_mean", "max").seen(3, {"eval/score_mean": 0.5})
    assert Watched("eval/score_mean", "max").restored(watched.state_dict()) == watched
    assert Watched("eval/loss", "min").restored(watched.state_dict()) == Watched("eval/loss", "min")
    assert Watched("eval/loss", "min").restored(None) == Watched("eval/loss", "min")


@pytest.mark.parametrize(
    ("best", "told"),
    [
        (0.6, "best: step 1, eval/score_mean 0.6, its models in best/ (0.531 before the first"),
        (0.0, "; no step was better than the 0.531 before the first update"),
    ],
)
def test_the_best_step_is_compared_with_the_start(best: float, told: str):
    metrics = {"step": 1, "eval/initial_score_mean": 0.531, "eval/score_mean": best}
    watched = Watched("eval/score_mean", "max").seen(1, metrics)
    assert told in best_in_words(watched, [metrics])


def test_a_metric_that_is_not_there_is_refused_where_it_could_be_known():
    metrics = {"eval/score_mean": 0.0, "eval/pass_at_1": 0.0, "rollout/score_mean": 0.0}
    there = of_its_kind("eval/score", metrics)
    assert there == ["eval/pass_at_1", "eval/score_mean"]
    with pytest.raises(ConfigError, match=r"\(eval/scores\): .* mean eval/score_mean\?"):
        check_measured("stop.metric", "eval/scores", there)
    with pytest.raises(ConfigError, match="There are eval/pass_at_1, eval/score_mean"):
        check_measured("stop.metric", "eval/x", there)
    # The critic's warm-up has no figures of the policy, for example.
    text = check_measured("stop.metric", "ppo/kl", ["ppo/value_loss"])
    assert text is not None
    assert check_measured("stop.metric", "ppo/value_loss", ["ppo/value_loss"]) is None
