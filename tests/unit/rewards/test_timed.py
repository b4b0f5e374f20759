import threading
import time

import pytest

from raypo.config import EvalSection, RewardSection
from raypo.rewards.functions import TimedReward, evaluation_function, open_function
from raypo.rewards.scoring import RewardError, score
from tests.unit.rewards.test_by_source import rollout

TWO = [rollout("1"), rollout("2")]


def hangs(rollouts: list) -> list[float]:
    threading.Event().wait()
    return [1.0] * len(rollouts)


async def later(rollouts: list) -> list[float]:
    return [float(each.response) for each in rollouts]


def broken(rollouts: list) -> list[float]:
    raise TimeoutError("the service did")


def test_a_call_that_hangs_ends_in_an_error_that_names_the_function():
    begin = time.monotonic()
    with pytest.raises(RewardError) as caught:
        score(TimedReward(hangs, timeout_s=0.2), TWO, max_failed_fraction=0.0)
    assert time.monotonic() - begin < 5.0
    assert str(caught.value).startswith(
        f"reward.timeout_s (0.2): {__name__}.hangs gave no answer in time for 2 rollouts."
    )


def test_answers_and_errors_are_those_of_the_function_itself():
    assert score(TimedReward(later, timeout_s=60.0), TWO, max_failed_fraction=0.0) == [1.0, 2.0]
    told = "raised TimeoutError: the service did (for 2 rollouts)"
    with pytest.raises(RewardError) as caught:
        score(TimedReward(broken, timeout_s=60.0), TWO, max_failed_fraction=0.0)
    assert f"the reward function {__name__}.broken {told}" in str(caught.value)


def test_a_function_in_the_worker_has_a_limit_unless_it_is_taken_away():
    assert isinstance(open_function(RewardSection(), later, {}), TimedReward)
    assert open_function(RewardSection(timeout_s=None), later, {}) is later
    held_out = EvalSection(function=f"{__name__}:hangs", timeout_s=0.2)
    function = evaluation_function(held_out, None)
    assert function is not None
    with pytest.raises(RewardError, match=r"eval\.timeout_s \(0\.2\): .*hangs gave no answer"):
        score(function, TWO, max_failed_fraction=0.0)
