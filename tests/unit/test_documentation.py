"""README and docs agree with the program; what they tell a user to run is run in other tiers."""

import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

import raypo.cli
from raypo import Rollout
from raypo.config import RECIPES, parse_run_config
from raypo.config.base import read_yaml
from raypo.config.fields import known_keys
from raypo.config.migration import counterparts
from raypo.config.sweep_config import SweepConfig
from scripts import metrics_table, migration_tables, rules_table
from scripts.config_reference import PAGE, page
from tests.documentation import (
    LANGUAGES,
    REPOSITORY,
    Block,
    blocks,
    pages,
    prose,
)

PATHS = r"(?:examples|raypo|scripts|sweeps|tests|docs)/[\w./-]*\w/?"
MADE = tuple(f"examples/{name}/data" for name in ("arithmetic", "quickstart", "smollm2_positive"))
"""Folders that examples write."""
ROOTS = (*RECIPES.values(), SweepConfig)
BASES = {
    "ppo": "examples/quickstart/ppo.yaml",
    "sft": "examples/quickstart/sft.yaml",
    "reward_model": "examples/quickstart/reward_model.yaml",
    "dpo": "examples/quickstart/dpo.yaml",
    "rejection_sampling": "examples/quickstart/rejection_sampling.yaml",
    "iterative_dpo": "examples/quickstart/iterative_dpo.yaml",
    "distillation": "examples/quickstart/distillation.yaml",
}


def test_the_configuration_page_is_what_the_classes_say():
    assert PAGE.read_text() == page(), "Write it anew: make docs"


def test_the_table_of_metrics_is_what_the_catalogue_says():
    text = metrics_table.PAGE.read_text()
    assert text == metrics_table.with_metrics(text), "Write it anew: make docs"


def test_the_table_of_rules_is_what_their_docstrings_say():
    text = rules_table.PAGE.read_text()
    assert text == rules_table.with_rules(text), "Write it anew: make docs"


def test_the_tables_of_other_projects_keys_are_what_the_config_says():
    text = migration_tables.PAGE.read_text()
    assert text == migration_tables.with_tables(text), "Write it anew: make docs"


def test_every_block_is_of_a_language_that_a_test_knows():
    for block in blocks():
        assert block.language in LANGUAGES, f"{block.where}: name one of {LANGUAGES}"


def test_the_notebook_is_stored_without_outputs_and_its_links_lead_somewhere():
    """A slow test runs it."""
    file = REPOSITORY / "examples/notebook/first_run.ipynb"
    cells = json.loads(file.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    text = "".join("".join(cell["source"]) for cell in cells if cell not in code)
    links = re.findall(r"\]\(([^)#]+)", text)
    assert links
    assert all((file.parent / link).exists() for link in links)


def test_bash_blocks_are_bash():
    bash = shutil.which("bash")
    assert bash is not None
    every = "\n".join(block.text for block in blocks("bash"))
    done = subprocess.run([bash, "-n"], input=every, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.where)
def test_yaml_blocks_are_what_the_config_classes_take(block: Block, monkeypatch: Any):
    """Whole files as they are, parts of one on top of the quickstart's file of the same recipe."""
    monkeypatch.chdir(REPOSITORY)
    values = yaml.safe_load(block.text)
    if "space" in values:
        SweepConfig.parse(values, origin=block.where).base_config()
        return
    if "name" not in values:
        below: Any = read_yaml(Path(BASES[values.get("recipe", "ppo")]), ())
        values = merged(below, values)
    parse_run_config(values, origin=block.where)


def merged(below: Any, above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        nests = isinstance(under, dict) and isinstance(value, dict)
        result[key] = merged(under, value) if nests else value
    return result


@pytest.mark.parametrize("path", [p for p in pages() if p != PAGE], ids=lambda path: path.name)
def test_keys_that_a_page_names_exist(path: Path):
    known = {key for root in ROOTS for key in known_keys(root)}
    known |= {f"rollout.{field.name}" for field in fields(Rollout)}
    known |= {name for row in counterparts() for name in row.names}
    sections = {key.split(".")[0] for key in known if "." in key}
    for code in re.findall(r"`([^`\n]+)`", prose(path)):
        match = re.match(r"([a-z_]+(?:\.[a-z_]+)+)(?=$|[ :=])", code)
        if match is None or match[1].split(".")[0] not in sections:
            continue
        if not match[1].endswith((".py", ".yaml", ".sh", ".md", ".json", ".jsonl")):
            assert match[1] in known, f"{path.name}: there is no key {match[1]}"


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_raypo_commands_that_a_page_names_in_passing_exist(path: Path):
    program = typer.main.get_command(raypo.cli.app)
    assert isinstance(program, TyperGroup)
    for command, rest in re.findall(r"`raypo ([a-z-]+)([^`]*)`", prose(path)):
        assert command in program.commands, f"{path.name}: raypo {command}"
        options = {name for each in program.commands[command].params for name in each.opts}
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in options, f"{path.name}: raypo {command}{rest}"


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_links_and_files_that_a_page_names_exist(path: Path):
    text = prose(path)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{path.name}: {target}"
    for name in re.findall(rf"`({PATHS})`", text):
        assert name.startswith(MADE) or (REPOSITORY / name).exists(), f"{path.name}: {name}"
    if path.name == "architecture.md":  # it names modules as they lie in raypo/
        for name in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", text):
            lies_in = (REPOSITORY / "raypo" / name, REPOSITORY / name)
            assert any(each.exists() for each in lies_in), f"{path.name}: {name}"


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {word.replace(" ", "-") for word in words}
