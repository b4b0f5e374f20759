"""Each source's responses judged by its own function; in order, with the names of who failed."""

from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from raypo.config import ConfigError, EvalSection, RewardSection
from raypo.rewards.by_source import RewardBySource
from raypo.rewards.functions import evaluation_function, open_function
from raypo.rewards.scoring import RewardError, score
from tests.unit.rewards.test_scoring import rollout

SOURCE = """
def ones(rollouts):
    return [1.0] * len(rollouts)

async def twos(rollouts):
    return [{"score": 2.0, "part": 0.5}] * len(rollouts)

def breaks(rollouts):
    raise KeyError("answer")

def too_few(rollouts):
    return []
"""


@pytest.fixture
def judges(tmp_path: Path) -> str:
    path = tmp_path / "judges.py"
    path.write_text(SOURCE)
    return str(path)


def rollouts(*sources: str | None):
    return [replace(rollout(), data_source=s, sample_index=n) for n, s in enumerate(sources)]


MIXED = rollouts("a", "b", "a", "c", "b", None)


def threes(given):
    return [3.0] * len(given)


def test_every_rollout_is_judged_by_the_function_of_its_source(judges: str):
    function = RewardBySource({"a": f"{judges}:ones", "b": f"{judges}:twos"}, threes)
    assert score(function, MIXED) == [1.0, 2.0, 1.0, 3.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("breaks", "the reward function judges.py:breaks raised KeyError: 'answer' (for 2 "),
        ("too_few", "the reward function judges.py:too_few returned 0 scores for 2 rollouts"),
    ],
)
def test_the_function_that_fails_is_named(judges: str, name: str, told: str):
    function = RewardBySource({"a": f"{judges}:{name}"}, threes)
    with pytest.raises(RewardError) as error:
        score(function, MIXED)
    assert str(error.value).startswith(told)


def test_it_goes_to_other_processes(judges: str):
    function = RewardBySource({"a": f"{judges}:ones"}, f"{judges}:ones")
    assert cloudpickle.loads(cloudpickle.dumps(function))(MIXED) == [1.0] * 6


def test_what_is_wrong_with_one_of_them_is_told_when_it_is_opened(judges: str):
    with pytest.raises(ConfigError, match=r"data\.prompts\.function \(.*judges.py:one\)"):
        open_function(RewardSection(), None, {"a": f"{judges}:one"})


def test_held_out_sources_fall_back_on_the_functions_of_training(judges: str):
    training = open_function(
        RewardSection(function=f"{judges}:ones"), None, {"b": f"{judges}:twos"}
    )
    own = EvalSection.model_validate({"prompts": {"path": "c.csv", "function": f"{judges}:twos"}})
    function = evaluation_function(own, training)
    assert function is not None
    assert score(function, MIXED) == [1.0, 2.0, 1.0, 2.0, 2.0, 1.0]
    common = own.model_copy(update={"function": f"{judges}:ones"})
    function = evaluation_function(common, training)
    assert function is not None
    assert score(function, MIXED) == [1.0, 1.0, 1.0, 2.0, 1.0, 1.0]


def test_what_is_imported_does_not_count_against_the_time_of_a_call(tmp_path: Path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(2)\ndef ones(rollouts):\n    return [1.0]\n")
    section = RewardSection(processes=1, timeout_s=1.0)
    function = open_function(section, None, {"sums": f"{slow}:ones"})
    assert function is not None
    one = replace(rollout("1"), data_source="sums")
    assert score(function, [one]) == [1.0]
