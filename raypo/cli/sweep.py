"""`raypo sweep`: many runs over the keys of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.status import exit_status


@exit_status()
def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value, like num_samples=16 or overrides.num_steps=8"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print trials, resources and concurrency; start nothing."),
    ] = False,
) -> None:
    """Search the keys of a run config with Ray Tune."""
    from raypo.checks import check_inputs
    from raypo.config import ConfigError
    from raypo.config.sweep import SweepConfig

    config = SweepConfig.load(file, overrides)
    base = config.base_config()
    check_inputs(base)
    if not dry_run:
        raise ConfigError("sweep: running one lands with the next change. Add --dry-run.")
    if dry_run:
        from raypo.tuning.cluster import find_nodes
        from raypo.tuning.plan import describe, plan_sweep

        nodes, use_gpu = find_nodes(base)
        for line in describe(config, plan_sweep(config, base, nodes, use_gpu=use_gpu)):
            typer.echo(line)
