"""`raypo timeline`: write a trace of the activity of each worker and replica."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.exit_status import exit_status


@exit_status()
def timeline(
    run: Annotated[str, typer.Argument(help="Folder or URI of a run, which may still be active.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write. Default: timeline.json in the run folder."),
    ] = None,
) -> None:
    """Write a trace of phases and calls by worker and replica, for ui.perfetto.dev."""
    from raypo.config import ConfigError
    from raypo.storage.run_files import RunFiles
    from raypo.tracking.trace import trace

    files = RunFiles.at(run)
    if not files.timeline():
        raise ConfigError(
            f"RUN ({run}): this folder has no timeline. Give the folder of a run, "
            "<storage_path>/<name>, after its first step."
        )
    path = out or (Path() if "://" in run else files.folder) / "timeline.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(files)))
    typer.echo(f"raypo: {path}; open it at https://ui.perfetto.dev or in chrome://tracing.")
