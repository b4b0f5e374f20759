"""The core runs without the packages of the extras, and what needs one names the extra."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from raypo import extras
from raypo.config import ConfigError
from raypo.extras import EXTRAS, require

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CORE = """
import builtins, importlib, pkgutil

real = builtins.__import__

def without_extras(name, globals=None, *arguments, **named):
    caller = (globals or {{}}).get("__name__", "")
    assert not (caller.startswith("raypo.") and name.partition(".")[0] in {absent}), (caller, name)
    return real(name, globals, *arguments, **named)

builtins.__import__ = without_extras
names = "checks cli config custom learner metrics recipes rewards.functions rollout.episodes run "
names += "storage tracking trainer tuning.tuner"
for name in names.split():
    module = importlib.import_module(f"raypo.{{name}}")
    for each in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if each.name != "__main__":
            importlib.import_module(f"{{module.__name__}}.{{each.name}}")
"""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", each)[0] for each in requirements}


def test_the_core_is_small_and_extras_are_those_of_the_project():
    assert len(PROJECT["dependencies"]) <= 15
    for extra, packages in EXTRAS.items():
        required = PROJECT["optional-dependencies"][extra]
        if "raypo[report]" in required:
            required = required + PROJECT["optional-dependencies"]["report"]
        assert names(required) - {"raypo", "ray"} == set(packages), extra
        assert not set(packages) & names(PROJECT["dependencies"])


def test_training_imports_no_package_of_an_extra():
    absent = sorted(package for packages in EXTRAS.values() for package in packages)
    program = [sys.executable, "-c", CORE.format(absent=absent)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "tenacity" else object())
    require("report", "raypo report")
    with pytest.raises(ConfigError) as error:
        require("serve", "reward.url (http://x)")
    assert str(error.value) == (
        "reward.url (http://x): needs the package tenacity, which is not installed. "
        "pip install 'raypo[serve]' on every node."
    )


def test_the_version_is_one_everywhere():
    import raypo

    citation = (REPOSITORY / "CITATION.cff").read_text()
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert PROJECT["version"] == raypo.__version__
    assert f"version: {raypo.__version__}\n" in citation
    assert re.findall(r"^## (\d+\.\d+\.\d+)", changes, re.MULTILINE)[0] == raypo.__version__
