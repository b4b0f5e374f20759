"""Figures of several sources together."""

from raypo.rollout.standalone_evaluation import joined


def test_a_part_that_one_source_lacks_is_the_mean_of_those_that_have_it():
    whole = joined(
        {
            "a": {"eval/prompts": 1.0, "eval/failed": 1.0, "eval/score_mean": 0.0},
            "b": {
                "eval/prompts": 3.0,
                "eval/failed": 2.0,
                "eval/score_mean": 1.0,
                "eval/reward/format": 0.5,
            },
        }
    )
    assert whole == {
        "eval/prompts": 4.0,
        "eval/failed": 3.0,
        "eval/score_mean": 0.75,
        "eval/reward/format": 0.5,
    }
