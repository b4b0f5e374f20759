"""`raypo plan`: what a run would need, and whether it fits; starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypo.cli.status import WRONG_INPUT, exit_status, tell

if TYPE_CHECKING:
    from raypo.config import PPOConfig
    from raypo.plan import Node

CLUSTER_HELP = (
    "The hardware: 8xGPU80G,2 is two nodes, each with 8 GPUs of 80 GB; 4xCPU,16G is one with 4 "
    "cores and 16 GB; kinds of nodes are joined by +. Left out: the cluster at cluster.address or "
    "RAY_ADDRESS, else this machine."
)


@exit_status()
def plan(
    config: Annotated[Path, typer.Argument(help="A run config (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, like learner.zero_stage=3")
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help=CLUSTER_HELP)] = None,
) -> None:
    """Check a config, print bundles, devices and predicted memory; status 2: it does not fit."""
    from raypo.checks import check_inputs
    from raypo.config import PPOConfig
    from raypo.plan import make_plan

    run = PPOConfig.load(config, overrides)
    nodes = _nodes(run, cluster)
    check_inputs(run, on_this_machine=False)
    made = make_plan(run, nodes)

    from rich.console import Console

    from raypo.plan.tables import tables

    console = Console()
    for table in tables(made):
        console.print(table)
        console.print()
    for note in made.notes:
        console.print(f"Note: {note}.", highlight=False)
    if made.fits:
        console.print(f"{run.name} fits.", style="green")
        return
    tell("\n".join(f"{config}: {problem}" for problem in made.problems))
    raise typer.Exit(WRONG_INPUT)


def _nodes(run: PPOConfig, cluster: str | None) -> list[Node]:
    """By the text, else by the cluster that the run would join, else this machine."""
    import os

    from raypo.plan import parse_cluster, this_machine

    if cluster is not None:
        return parse_cluster(cluster)
    if run.cluster.address or os.environ.get("RAY_ADDRESS"):
        from raypo.cluster.resources import cluster_nodes  # Ray from here on

        return cluster_nodes(run.cluster)
    return this_machine()
