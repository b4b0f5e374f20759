import sys

import pytest

from raypo.config import ConfigError
from raypo.custom.loader import load_function, source_files
from raypo.rewards.scoring import RewardError, function_name, score
from tests.unit.rewards.test_scoring import ROLLOUTS

GOOD = "def score(rollouts):\n    return [1.0 for _ in rollouts]\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(spec, **options):
    with pytest.raises(ConfigError) as error:
        load_function(spec, **options)
    return str(error.value)


@pytest.mark.parametrize(
    "spec", ["", "score", "rewards.py", ":score", "rewards.py:", "a b:c", "a:b-c"]
)
def test_a_malformed_name(spec):
    assert refusal(spec) == (
        f"reward.function ({spec}): a function is named file.py:name or package.module:name. "
        "Write it like rewards.py:score."
    )


def test_a_missing_file(tmp_path):
    path = tmp_path / "none.py"
    assert refusal(f"{path}:score") == (
        f"reward.function ({path}:score): there is no file {path}. Correct the path; a relative "
        "path starts at the folder in which raypo is started."
    )


def test_a_missing_name_and_the_nearest(tmp_path):
    path = write(tmp_path / "near.py", GOOD)
    assert refusal(f"{path}:scores") == (
        f"reward.function ({path}:scores): {path} defines no scores. Did you mean score?"
    )
    assert refusal(f"{path}:zzz") == (
        f"reward.function ({path}:zzz): {path} defines no zzz. "
        "Define it there, or correct reward.function."
    )


@pytest.mark.parametrize(
    "parameters", ["()", "(prompt, response)", "(rollouts, *, scale)", "(a, b='x', *, c, d=None)"]
)
def test_what_cannot_be_called_with_the_rollouts_alone(tmp_path, parameters):
    path = write(tmp_path / "rewards.py", f"def score{parameters}: ...")
    assert refusal(f"{path}:score") == (
        f"reward.function ({path}:score): it is called with one argument, a list of rollouts, "
        f"but it has the parameters {parameters}. Give a function like def score(rollouts): ..."
    )


def test_a_file_with_a_syntax_error_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "broken.py", "x = 1\ndef score(rollouts)\n")
    assert refusal(f"{path}:score") == (
        f"reward.function ({path}:score): {path} cannot be imported: SyntaxError: expected ':' "
        "(broken.py, line 2). Correct it, or install what it needs on every node."
    )


@pytest.mark.parametrize(
    "module", ["no_such_module", "json.no_such_module", "math.pi", "__main__.x"]
)
def test_a_missing_module(module):
    assert refusal(f"{module}:score") == (
        f"reward.function ({module}:score): there is no module {module}. Install it, put its "
        f"folder on PYTHONPATH, or give the file: path/to/{module.split('.')[-1]}.py:name."
    )


def test_a_compiled_function_without_a_signature_is_accepted():
    assert load_function("math:hypot")


def test_a_file_is_imported_once_a_process(tmp_path):
    path = write(tmp_path / "a-b.c" / "rewards.py", "model = object()\n" + GOOD)

    first, second = (load_function(f"{path}:score") for _ in range(2))

    assert first([None, None]) == [1.0, 1.0]
    assert first is second


def test_paths_that_differ_in_punctuation_are_two_files(tmp_path):
    names = ("my-task/reward.py", "my_task/reward.py", "my_task_reward.py")
    paths = [write(tmp_path / name, f"def score(r): return {i}") for i, name in enumerate(names)]
    assert [load_function(f"{path}:score")([]) for path in paths] == [0, 1, 2]


def test_a_file_may_import_its_neighbours_and_hold_dataclasses(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path / "neighbour_of_rewards.py", "WEIGHT = 2.0")
    path = write(
        tmp_path / "rewards.py",
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour_of_rewards import WEIGHT\n"
        "@dataclass\nclass Judge:\n    weight: float\n"
        "    def __call__(self, rollouts): return [self.weight for _ in rollouts]\n"
        "judge = Judge(WEIGHT)\n",
    )
    assert load_function(f"{path}:judge")([None]) == [2.0]


def test_a_relative_path_is_taken_from_the_working_folder(tmp_path, monkeypatch):
    write(tmp_path / "rewards.py", GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_function("rewards.py:score")([None]) == [1.0]


def test_an_import_that_fails_keeps_its_error(tmp_path):
    path = write(tmp_path / "rewards.py", "import no_such_module\n" + GOOD)

    with pytest.raises(ConfigError) as error:
        load_function(f"{path}:score")

    assert str(error.value) == (
        f"reward.function ({path}:score): {path} cannot be imported: ModuleNotFoundError: No "
        f"module named 'no_such_module' (File \"{path}\", line 1, in <module>). Correct it, or "
        "install what it needs on every node."
    )
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    path.write_text(GOOD)
    load_function(f"{path}:score")  # nothing half imported is left


@pytest.mark.parametrize(
    ("text", "what"), [("score = 3", "of type int"), ("class score: ...", "a class")]
)
def test_a_value_that_is_no_function_is_refused(tmp_path, text, what):
    path = write(tmp_path / "rewards.py", text)
    assert refusal(f"{path}:score") == (
        f"reward.function ({path}:score): it is {what}, not a function. Give a function, or an "
        "object with __call__, that takes a list of rollouts."
    )


def test_the_file_of_a_module_is_found_without_importing_its_packages(tmp_path, monkeypatch):
    path = write(tmp_path / "namespace" / "package" / "deep" / "judge.py", GOOD)
    write(tmp_path / "namespace" / "package" / "__init__.py", "raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert source_files("namespace.package.deep.judge:score") == [path]
    assert source_files("namespace.package.other:score") == []
    assert source_files("math:fsum") == source_files("no_such_package.judge:score") == []


def test_messages_name_a_function_of_a_file_as_the_config_does(tmp_path):
    function = load_function(f"{write(tmp_path / 'rewards.py', GOOD)}:score")
    assert function_name(function) == "rewards.py:score"


OBJECTS = """
from functools import partial

class Judge:
    def __init__(self, scale): self.scale = scale
    def __call__(self, rollouts): return [self.scale * float(r.response) for r in rollouts]
    def method(self, rollouts): return self(rollouts)

class Shy(Judge):
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__

def scaled(rollouts, scale): return Judge(scale)(rollouts)

judge, shy = Judge(2.0), Shy(2.0)
method = judge.method
halved = partial(scaled, scale=2.0)
twice_partial = partial(partial(scaled), scale=2.0)
partial_of_an_object = partial(judge)
"""


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("judge", "Judge"),
        ("shy", "Shy"),
        ("method", "Judge.method"),
        ("halved", "scaled"),
        ("twice_partial", "scaled"),
        ("partial_of_an_object", "Judge"),
    ],
)
def test_what_is_called_like_a_function_scores_and_has_the_name_of_what_is_called(
    tmp_path, name, called
):
    spec = f"{write(tmp_path / 'rewards.py', OBJECTS)}:{name}"
    function = load_function(spec)
    assert function_name(function) == f"rewards.py:{called}"
    assert score(function, ROLLOUTS) == [0.0, 2.0, 4.0, 6.0]
    with pytest.raises(RewardError, match=f"rewards.py:{called} raised AttributeError"):
        score(function, [None])  # type: ignore[list-item]


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


def test_an_error_whose_text_fails_is_named_by_its_class():
    def fails(rollouts):
        raise Unspeakable

    with pytest.raises(RewardError, match=r"raised Unspeakable: its message is not available \("):
        score(fails, ROLLOUTS)


def test_an_answer_whose_text_fails_is_told_all_the_same():
    class Odd:
        def __repr__(self):
            raise RuntimeError("no text")

    with pytest.raises(RewardError, match=r"returned <.*Odd object at .*> \(Odd\) as score 0"):
        score(lambda rollouts: [Odd()] * 4, ROLLOUTS)
