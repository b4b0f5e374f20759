import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raypo.config import EvalSection, RewardSection
from raypo.rewards.functions import OneAtATime, TimedReward, evaluation_function, open_function
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
        score(TimedReward(hangs, timeout_s=0.2), TWO)
    assert time.monotonic() - begin < 5.0
    assert str(caught.value).startswith(
        f"reward.timeout_s (0.2): {__name__}.hangs gave no answer in time for 2 rollouts."
    )


def test_answers_and_errors_are_those_of_the_function_itself():
    assert score(TimedReward(later, timeout_s=60.0), TWO) == [1.0, 2.0]
    told = "raised TimeoutError: the service did (for 2 rollouts)"
    with pytest.raises(RewardError) as caught:
        score(TimedReward(broken, timeout_s=60.0), TWO)
    assert f"the reward function {__name__}.broken {told}" in str(caught.value)


def test_a_function_in_the_worker_has_a_limit_unless_it_is_taken_away():
    limited = open_function(RewardSection(), later, {})
    assert isinstance(limited, OneAtATime)
    assert isinstance(limited.function, TimedReward)
    unlimited = open_function(RewardSection(timeout_s=None), later, {})
    assert isinstance(unlimited, OneAtATime)
    assert unlimited.function is later
    held_out = EvalSection(function=f"{__name__}:hangs", timeout_s=0.2)
    function = evaluation_function(held_out, None)
    assert function is not None
    with pytest.raises(RewardError, match=r"eval\.timeout_s \(0\.2\): .*hangs gave no answer"):
        score(function, TWO)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_training_and_evaluation_never_call_the_users_functions_at_the_same_time(
    timeout_s: float | None,
):
    """The next batch's samples are judged while held-out ones are."""
    at_work, most, by_source = [0], [0], {"a": f"{__name__}:later"}

    def counts(rollouts: list) -> list[float]:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        time.sleep(0.02)
        at_work[0] -= 1
        return [1.0] * len(rollouts)

    training = open_function(RewardSection(timeout_s=timeout_s), counts, {})
    section = EvalSection.model_validate({"prompts": {"path": "c.csv"}, "timeout_s": timeout_s})
    held_out = evaluation_function(section, training)
    other = evaluation_function(
        EvalSection.model_validate(
            {"prompts": {"path": "c.csv", "function": by_source["a"]}, "timeout_s": timeout_s}
        ),
        training,
    )
    functions = [each for each in (training, held_out, other) if each is not None] * 2
    assert len(functions) == 6
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda each: score(each, TWO), functions))
    assert most == [1]
