"""Classes by their path: refused before anything starts, from their source where that tells."""

import pytest

from raypo.config import ConfigError
from raypo.custom.loader import check_class, load_class
from raypo.rollout.interface import ENVIRONMENT

KEY = "rollout.environment"
GOOD = """
class Guess:
    def __init__(self, most=6): self.most = most
    async def reset(self, prompt, label): ...
    async def step(self, action, *, loud=False): ...
"""


def refused(folder, source: str, check=check_class, arguments: dict | None = None) -> str:
    path = folder / f"{check.__name__}_{abs(hash(source))}.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as error:
        check(f"{path}:Guess", ENVIRONMENT, arguments or {}, key=KEY)
    return str(error.value).replace(str(path), "guess.py")


def test_what_is_an_environment(tmp_path):
    path = tmp_path / "guess.py"
    path.write_text(GOOD)
    check_class(f"{path}:Guess", ENVIRONMENT, {"most": 3}, key=KEY)
    assert load_class(f"{path}:Guess", ENVIRONMENT, {"most": 3}, key=KEY)().most == 3


WANTED = (
    "rollout.environment (guess.py:Guess): must be a class with reset(prompt, label), "
    "step(action), "
)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (GOOD.replace("class Guess", "class Guest"), "Did you mean Guest?"),
        ("def Guess(prompt, label): ...", WANTED + "but it is "),
        (GOOD.replace("step", "move"), WANTED + "but it has no step."),
        (GOOD.replace("self, prompt, label", "self, prompt"), "its reset has the parameters ("),
        (GOOD.replace("action, *", "action, more, *"), "its step has the parameters ("),
        (GOOD.replace("loud=False", "loud"), "its step has the parameters ("),
    ],
)
def test_what_is_none_is_told_from_its_source_and_when_it_is_loaded(tmp_path, source, problem):
    assert problem in refused(tmp_path, source)
    assert problem in refused(tmp_path, source, load_class)


def test_methods_of_a_base_class_count(tmp_path):
    path = tmp_path / "guess.py"
    path.write_text(GOOD + "\nclass Loud(Guess): ...\nclass Bare(Exception): ...\n")
    for name in ("Loud", "Bare"):
        check_class(f"{path}:{name}", ENVIRONMENT, {}, key=KEY)
    load_class(f"{path}:Loud", ENVIRONMENT, {}, key=KEY)
    with pytest.raises(ConfigError, match="it has no reset"):
        load_class(f"{path}:Bare", ENVIRONMENT, {}, key=KEY)


@pytest.mark.parametrize("check", [check_class, load_class])
def test_arguments_that_it_does_not_take(tmp_path, check):
    told = refused(tmp_path, GOOD, check, {"least": 1})
    assert "rollout.environment_args ({'least': 1}): " in told
    assert "got an unexpected keyword argument 'least'" in told
    assert "Its parameters are (most=" in told


OTHERS = """
import dataclasses

class Base:
    def __init__(self, least): ...
class Inherits(Base):
    async def reset(self, prompt, label): ...
    async def step(self, action): ...
@dataclasses.dataclass
class Data:
    least: int
    async def reset(self, prompt, label): ...
    async def step(self, action): ...
class Borrows:
    __init__ = Base.__init__
    async def reset(self, prompt, label): ...
    async def step(self, action): ...
class Bare:
    async def reset(self, prompt, label): ...
    async def step(self, action): ...
"""


def test_arguments_of_what_only_an_import_shows_are_left_to_it(tmp_path):
    path = tmp_path / "others.py"
    path.write_text(OTHERS)
    for name in ("Inherits", "Data", "Borrows"):
        check_class(f"{path}:{name}", ENVIRONMENT, {"least": 1}, key=KEY)
        load_class(f"{path}:{name}", ENVIRONMENT, {"least": 1}, key=KEY)
        with pytest.raises(ConfigError, match="missing a required argument: 'least'"):
            load_class(f"{path}:{name}", ENVIRONMENT, {"most": 1}, key=KEY)
    for check in (check_class, load_class):
        with pytest.raises(ConfigError, match="unexpected keyword argument 'least'"):
            check(f"{path}:Bare", ENVIRONMENT, {"least": 1}, key=KEY)
