"""Classes by their import path."""

import pytest

from raypo.config import ConfigError
from raypo.custom.loader import load_class
from raypo.rollout.interface import ENVIRONMENT

KEY = "rollout.environment"
GOOD = """
class Guess:
    def __init__(self, most=6): self.most = most
    async def reset(self, prompt, label): ...
    async def step(self, action, *, loud=False): ...
"""


def refusal(folder, source: str, name: str = "Guess", **arguments: int) -> str:
    path = folder / f"guess_{abs(hash(source))}.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as error:
        load_class(f"{path}:{name}", ENVIRONMENT, arguments, key=KEY)
    return str(error.value).replace(str(path), "guess.py")


def test_what_is_an_environment(tmp_path):
    path = tmp_path / "guess.py"
    path.write_text(GOOD)
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
def test_a_class_without_the_methods_is_refused(tmp_path, source, problem):
    assert problem in refusal(tmp_path, source)


def test_wrong_arguments_of_the_constructor_are_refused(tmp_path):
    text = refusal(tmp_path, GOOD, least=1)
    assert "rollout.environment_args ({'least': 1}): " in text
    assert "got an unexpected keyword argument 'least'" in text
    assert "Its parameters are (most=6)" in text
    dataclass = (
        "import dataclasses\n@dataclasses.dataclass\nclass Guess:\n    least: int\n"
        "    async def reset(self, prompt, label): ...\n    async def step(self, action): ...\n"
    )
    assert "missing a required argument: 'least'" in refusal(tmp_path, dataclass)
