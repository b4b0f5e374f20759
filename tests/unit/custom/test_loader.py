import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raypo.config import ConfigError
from raypo.custom.loader import check_function, load_function
from raypo.rewards.scoring import RewardError, function_name, score
from raypo.rewards.verifiers import exact_match
from tests.unit.rewards.test_scoring import ROLLOUTS

GOOD = "def score(rollouts):\n    return [1.0 for _ in rollouts]\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(call, spec, **options):
    with pytest.raises(ConfigError) as error:
        call(spec, **options)
    return str(error.value)


@pytest.fixture(params=[check_function, load_function])
def find(request):
    return request.param


# What both say


def test_a_function_of_a_file_is_found(tmp_path):
    spec = f"{write(tmp_path / 'rewards.py', GOOD)}:score"
    check_function(spec)
    assert load_function(spec).__name__ == "score"


def test_a_function_of_a_module_is_found():
    check_function("raypo.rewards.verifiers:exact_match")
    assert load_function("raypo.rewards.verifiers:exact_match") is exact_match


@pytest.mark.parametrize(
    "spec", ["", "score", "rewards.py", ":score", "rewards.py:", "a b:c", "a:b-c"]
)
def test_a_malformed_name(find, spec):
    assert refused(find, spec) == (
        f"reward.function ({spec}): a function is named file.py:name or package.module:name. "
        "Write it like rewards.py:score."
    )


def test_messages_name_the_key(find):
    assert refused(find, "score", key="eval.function").startswith("eval.function (score): ")


def test_a_missing_file(tmp_path, find):
    path = tmp_path / "none.py"
    assert refused(find, f"{path}:score") == (
        f"reward.function ({path}:score): there is no file {path}. Correct the path; a relative "
        "path starts at the folder in which raypo is started."
    )


def test_a_missing_name_and_the_nearest(tmp_path, find):
    path = write(tmp_path / "near.py", GOOD)
    assert refused(find, f"{path}:scores") == (
        f"reward.function ({path}:scores): {path} defines no scores. Did you mean score?"
    )
    assert refused(find, f"{path}:zzz") == (
        f"reward.function ({path}:zzz): {path} defines no zzz. "
        "Define it there, or correct reward.function."
    )


@pytest.mark.parametrize(
    "parameters", ["()", "(prompt, response)", "(rollouts, *, scale)", "(a, b='x', *, c, d=None)"]
)
def test_what_cannot_be_called_with_the_rollouts_alone(tmp_path, find, parameters):
    path = write(tmp_path / "rewards.py", f"def score{parameters}: ...")
    assert refused(find, f"{path}:score") == (
        f"reward.function ({path}:score): it is called with one argument, a list of rollouts, "
        f"but it has the parameters {parameters}. Give a function like def score(rollouts): ..."
    )


def test_what_a_decorator_makes_of_it_is_left_to_the_import(tmp_path):
    text = "def call(function): return lambda rollouts: function()\n@call\ndef score(): return []\n"
    spec = f"{write(tmp_path / 'rewards.py', text)}:score"
    check_function(spec)
    assert load_function(spec)([]) == []


# What the static check says


@pytest.mark.parametrize(
    "text",
    [
        "async def score(rollouts): ...",
        "def score(rollouts, scale=1.0, *, offset=0.0): ...",
        "def score(*args): ...",
        "score = lambda rollouts: []",
        "score: object = make()",
        "a, (score, b) = make()",
        "from elsewhere import judge as score",
        "from elsewhere import *",
        "def __getattr__(name): ...",
        "if fast:\n    from a import score\nelse:\n    def score(rollouts): ...",
        "try:\n    from a import score\nexcept ImportError:\n    score = None",
        "try:\n    pass\nexcept ImportError:\n    def score(rollouts): ...",
    ],
)
def test_every_way_to_define_a_name_at_the_top_is_seen(tmp_path, text):
    check_function(f"{write(tmp_path / 'rewards.py', text)}:score")


def test_a_name_inside_a_function_is_not_at_the_top(tmp_path):
    path = write(tmp_path / "inner.py", "def outer():\n    def score(rollouts): ...\n")
    assert "defines no score" in refused(check_function, f"{path}:score")


def test_what_is_no_python_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "broken.py", "x = 1\ndef score(rollouts)\n")
    assert refused(check_function, f"{path}:score") == (
        f"reward.function ({path}:score): {path}, line 2 is not Python: expected ':'. "
        "Correct the file."
    )


@pytest.mark.parametrize(
    "module", ["no_such_module", "json.no_such_module", "math.pi", "__main__.x"]
)
def test_a_missing_module(module):
    assert refused(check_function, f"{module}:score") == (
        f"reward.function ({module}:score): there is no module {module}. Install it, put its "
        f"folder on PYTHONPATH, or give the file: path/to/{module.split('.')[-1]}.py:name."
    )


def test_a_compiled_module_is_left_to_its_import():
    check_function("math:fsum")


def test_nothing_of_the_users_is_imported_by_the_check(tmp_path, monkeypatch):
    write(tmp_path / "heavy_package" / "__init__.py", "raise RuntimeError('imported')")
    write(tmp_path / "heavy_package" / "sub" / "__init__.py", "raise RuntimeError('imported')")
    write(
        tmp_path / "heavy_package" / "sub" / "rewards.py", "raise RuntimeError('imported')\n" + GOOD
    )
    monkeypatch.syspath_prepend(tmp_path)

    check_function("heavy_package.sub.rewards:score")
    check_function(f"{tmp_path}/heavy_package/sub/rewards.py:score")

    assert "heavy_package" not in sys.modules


def test_the_check_imports_nothing_heavy():
    code = (
        "import sys\nfrom raypo.custom.loader import check_function\n"
        "check_function('raypo.rewards.verifiers:exact_match')\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Loading


def test_a_file_is_imported_once_a_process(tmp_path):
    path = write(tmp_path / "a-b.c" / "rewards.py", "model = object()\n" + GOOD)

    first, second = (load_function(f"{path}:score") for _ in range(2))

    assert first([None, None]) == [1.0, 1.0]
    assert first is second


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    paths = [
        write(tmp_path / folder / "rewards.py", f"def score(r): return {i}")
        for i, folder in enumerate("ab")
    ]
    assert [load_function(f"{path}:score")([]) for path in paths] == [0, 1]


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
    ("text", "what", "calls"),
    [
        ("score = 3", "of type int", [load_function]),
        ("class score: ...", "a class", [check_function, load_function]),
    ],
)
def test_what_is_no_function(tmp_path, text, what, calls):
    path = write(tmp_path / "rewards.py", text)
    for call in calls:
        assert refused(call, f"{path}:score") == (
            f"reward.function ({path}:score): it is {what}, not a function. Give a function, or "
            "an object with __call__, that takes a list of rollouts."
        )


def test_a_module_in_nested_folders_without_init_files_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "spread" / "deep").mkdir(parents=True)
    (tmp_path / "spread" / "deep" / "judge.py").write_text("def score(rollouts): return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_function("spread.deep.judge:score")
    with pytest.raises(ConfigError, match="defines no scare"):
        check_function("spread.deep.judge:scare")


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
    check_function(spec)
    function = load_function(spec)
    assert function_name(function) == f"rewards.py:{called}"
    assert score(function, ROLLOUTS) == [0.0, 2.0, 4.0, 6.0]
    with pytest.raises(RewardError, match=f"rewards.py:{called} raised AttributeError"):
        score(function, [None])  # type: ignore[list-item]


def test_an_object_of_a_module_has_its_class_for_a_name():
    callable_enough: Any = Counter("a")
    assert function_name(callable_enough) == "collections.Counter"


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
