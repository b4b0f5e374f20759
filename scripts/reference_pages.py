"""Adds to the site of docs/: the README as its index, the API page, and the files that pages link.

mkdocs calls these functions as hooks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import raypo

REPOSITORY = Path(__file__).parents[1]
GROUPS = {
    "Trainers": r"Trainer$",
    "Configs": r"Config$",
    "What your functions get": r"^(Rollout|StepView|Step.+|Token.*)$",
    "Environments and agents": r"^(Environment|Agent)$",
    "More": "",
}
"""Heading of the API page -> the names below it; each name is below the first that fits."""
BASES = {
    "Trainers": ("raypo.trainer.trainer.RecipeTrainer", ("__init__", "fit")),
    "Configs": ("raypo.config.base.RunFile", ("load", "parse", "to_yaml")),
}
"""Heading -> the class that all names below it share, and its methods that users call."""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the linked files at their places in the repository."""
    readme = (REPOSITORY / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "api.md", content=api()))
    pages = [readme, *(page.read_text() for page in (REPOSITORY / "docs").glob("*.md"))]
    links = {link for page in pages for link in re.findall(r"\]\((?:\.\./)?([^)#:]+)", page)}
    for link in sorted(links - {"README.md"}):
        if (REPOSITORY / link).is_file():
            path = str(REPOSITORY / link)
            files.append(File.generated(config, link, abs_src_path=path))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to the repository's files into those of the site; all pages are in one folder."""
    markdown = markdown.replace("](../README.md", "](index.md")
    markdown = re.sub(r"\]\(\.\./(?=[^)]*\.)", "](", markdown)
    # A site shows no folders.
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)?[\w/]+\)", r"\1", markdown)


def api() -> str:
    """Return the API page: every public name of `raypo`, from its docstring."""
    left = sorted(raypo._HOME_OF)
    keys = "The keys of configs are on the page [Configuration](configuration.md)."
    parts = [f"# API\n\nThe public names of the package `raypo`. {keys}"]
    for heading, pattern in GROUPS.items():
        parts.append(f"## {heading}")
        is_typed = heading in BASES
        if is_typed:
            base, methods = BASES[heading]
            parts.append(_entry(base, base.rpartition(".")[2], members=list(methods)))
        for name in [each for each in left if re.search(pattern, each)]:
            left.remove(name)
            members: Any = False if is_typed else None
            parts.append(_entry(f"{raypo._HOME_OF[name]}.{name}", name, members=members))
    return "\n\n".join(parts) + "\n"


def _entry(path: str, name: str, *, members: Any) -> str:
    options = [f"      heading: {name}", "      heading_level: 3"]
    options += [] if members is None else [f"      members: {members}"]
    filters = ["      filters: []"] if isinstance(members, list) else []
    return "\n".join([f"::: {path}", "    options:", *options, *filters])
