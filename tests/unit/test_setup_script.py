"""`make setup` with stand-ins for Python and uv: what is made anew, and when."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
case "$*" in
    *bin/python{*) echo "$STAND_INS/python3.11" ;;
    *print\\(sys.base_prefix\\)*) echo /usr ;;
    *"-m venv --clear "*)
        echo cleared
        rm -rf "$4" && mkdir -p "$4/bin" && cp "$STAND_INS/python3.11" "$4/bin/python"
        cp "$STAND_INS/uv" "$4/bin/uv" ;;
    *"pip config"*) exit 1 ;;
esac
"""
UV = """#!/bin/bash
[ -z "${NO_NETWORK:-}" ] && echo "installed ${*: -1}"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    names = ("overrides-cpu.txt", "overrides-oldest.txt", "setup.sh", "torchvision_schemas.py")
    for name in (*(f"scripts/{name}" for name in names), "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for name in ("constraints.txt", "constraints-gpu.txt", "constraints-oldest.txt"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "stand_ins").mkdir()
    for name, text in (("python3.11", PYTHON), ("uv", UV), ("g++", "#!/bin/bash\n")):
        path = tmp_path / "stand_ins" / name
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def set_up(tree: Path, device: str, **more: str) -> list[str]:
    programs = tree / "stand_ins"
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "STAND_INS": str(programs),
        "PYTHON": "python3.11",
        "RAYPO_DEVICE": device,
        **more,
    }
    done = subprocess.run(
        [tree / "scripts" / "setup.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in done.stdout.splitlines() if not line.startswith("raypo set-up")]


def test_another_device_begins_with_an_empty_environment(tree: Path):
    """uv would keep a torch of CPUs beside CUDA's vLLM, and both vLLMs in one folder."""
    assert set_up(tree, "cpu") == ["cleared", "installed .[cpu,dev]"]
    assert set_up(tree, "cpu") == []
    assert set_up(tree, "gpu") == ["cleared", "installed .[gpu,dev]"]
    assert set_up(tree, "gpu") == []


def test_the_oldest_set_has_an_environment_of_its_own(tree: Path):
    assert set_up(tree, "cpu") == ["cleared", "installed .[cpu,dev]"]
    assert set_up(tree, "oldest") == ["cleared", "installed .[cpu,dev]"]
    assert set_up(tree, "cpu") == set_up(tree, "oldest") == []
    assert (tree / ".venv-oldest" / "bin" / "uv").is_file()


def test_what_was_not_finished_goes_on_where_it_was(tree: Path):
    assert set_up(tree, "cpu", NO_NETWORK="1") == ["cleared"]
    assert set_up(tree, "cpu") == ["installed .[cpu,dev]"]
    assert set_up(tree, "gpu", NO_NETWORK="1") == ["cleared"]
    assert set_up(tree, "cpu") == ["cleared", "installed .[cpu,dev]"]


def test_new_pins_are_installed_over_the_old_ones(tree: Path):
    set_up(tree, "cpu")
    with (tree / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert set_up(tree, "cpu") == ["installed .[cpu,dev]"]
