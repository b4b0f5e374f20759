"""Adds the page api.md to the site: every public name of `raypo`, from its docstring."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

import raypo


def on_files(files: Files, config: Any) -> Files:
    """Add the page; mkdocs calls this."""
    parts = ["# API\n\nThe public names of the package `raypo`.\n"]
    parts += [f"::: {home}.{name}\n" for name, home in sorted(raypo._HOME_OF.items())]
    files.append(File.generated(config, "api.md", content="\n".join(parts)))
    return files
