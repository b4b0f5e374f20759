import pytest

from raypo.config import PPOConfig
from tests.unit.config.test_run_config import refused, with_keys

DEDICATED = {"placement__mode": {"engine": "dedicated"}}


@pytest.mark.parametrize(
    ("mode", "given", "staleness"),
    [("sync", "auto", 0), ("one_step_off", "auto", 1), ("async", "auto", 1), ("async", 4, 4)],
)
def test_the_mode_says_how_stale_a_response_may_be(mode, given, staleness):
    keys = {"rollout__mode": mode, "rollout__max_staleness": given}
    assert PPOConfig.parse(with_keys(**keys, **DEDICATED)).rollout.staleness == staleness


def test_engines_that_take_turns_with_the_learner_cannot_sample_beside_it():
    assert refused(rollout__mode="one_step_off") == (
        "run.yaml: rollout.mode (one_step_off): samples while the learner updates, and colocated "
        "engines take turns with it. Set placement.mode to dedicated (or to {engine: dedicated}), "
        "or rollout.mode to sync."
    )


def test_a_staleness_that_the_mode_cannot_have():
    assert "max_staleness (2): mode sync has 0. Set max_staleness to auto, or mode to async." in (
        refused(rollout__max_staleness=2)
    )
    told = refused(rollout__mode="one_step_off", rollout__max_staleness=0, **DEDICATED)
    assert "max_staleness (0): mode one_step_off has 1." in told
