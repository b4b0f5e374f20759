"""`raypo plan`: predict a run's memory and time, and check if it fits, without starting it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypo.cli.exit_status import WRONG_INPUT, exit_status, tell

if TYPE_CHECKING:
    from raypo.cluster.hardware import Node
    from raypo.config import RecipeConfig

CLUSTER_HELP = (
    "The hardware. 8xH100,2 is two nodes with 8 GPUs each (8xGPU80G: any GPUs with 80 GB); "
    "4xCPU,16G is one node with 4 cores and 16 GB; + joins kinds of nodes. Default: the cluster "
    "at cluster.address or RAY_ADDRESS, else this machine."
)


@exit_status()
def plan(
    config: Annotated[Path, typer.Argument(help="A run config or a sweep file (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, like learner.zero_stage=3")
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help=CLUSTER_HELP)] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="Also find the longest response that fits.")
    ] = False,
) -> None:
    """Check a config, and print its bundles, devices, predicted memory and seconds per step.

    Seconds are predicted for known GPUs. On CPUs the plan is about memory only.

    Exit status 2 means that the run does not fit.
    """
    from raypo.checks.input_checks import check_inputs
    from raypo.checks.row_checks import check_prompt_lengths
    from raypo.config import OnlineConfig, parse_run_config
    from raypo.config.base import read_yaml
    from raypo.plan.fit import make_plan

    values = read_yaml(config, overrides or ())
    if "space" in values:
        print_sweep_plan(config, overrides, cluster)
        return
    run = parse_run_config(values, origin=str(config))
    nodes = _nodes(run, cluster)
    notes = check_inputs(run, on_this_machine=False)
    if isinstance(run, OnlineConfig):
        notes += check_prompt_lengths(run)
    run_plan = make_plan(run, nodes)

    from rich.console import Console

    from raypo.plan.tables import tables, times
    from raypo.plan.times import Rates, faster, step_time, updates_note

    console = Console()
    for table in tables(run_plan):
        console.print(table)
        console.print()
    if rates := Rates.of(run_plan):
        notes += updates_note(run_plan, rates)
        console.print(times(step_time(run_plan, rates), faster(run_plan)))
        console.print()
    if longest:
        notes += _lengths(run, nodes)
    for note in [*run_plan.notes, *notes]:
        console.print(f"Note: {note}.", highlight=False)
    if run_plan.fits:
        console.print(f"{run.name} fits.", style="green")
        return
    tell("\n".join(f"{config}: {problem}" for problem in run_plan.problems))
    raise typer.Exit(WRONG_INPUT)


def _lengths(run: Any, nodes: list[Node]) -> list[str]:
    """Return a note about the longest response that fits, and one about longer ones."""
    from raypo.plan.fit import flow
    from raypo.plan.longest import longer_with, longest_response

    tokens = longest_response(run, nodes)
    notes = [f"the longest response that fits has about {tokens:,} tokens"]
    for changes, longer in longer_with(run, nodes):
        keys = " and ".join(f"{key}={flow(value)}" for key, value in changes.items())
        notes.append(f"with {keys} it has about {longer:,}")
    return notes


def print_sweep_plan(file: Path, overrides: list[str] | None, cluster: str | None) -> None:
    """Print a sweep's trials, the resources of each trial, and their concurrency."""
    from raypo.checks.input_checks import check_inputs
    from raypo.cluster.placement import takes_gpus
    from raypo.config.sweep_config import SweepConfig
    from raypo.tuning.capacity import describe, plan_sweep
    from raypo.tuning.goal import check_metrics

    sweep = SweepConfig.load(file, overrides)
    base = sweep.base_config()
    check_metrics(sweep, base)
    notes = check_inputs(base, on_this_machine=False)
    nodes = [node.resources for node in _nodes(base, cluster)]
    plan = plan_sweep(sweep, base, nodes, use_gpu=takes_gpus(base, nodes))
    for line in describe(sweep, plan):
        typer.echo(line)
    for note in notes:
        typer.echo(f"Note: {note}.")


def _nodes(run: RecipeConfig, cluster: str | None) -> list[Node]:
    """Return the nodes of `--cluster`, else of the run's Ray cluster, else this machine."""
    import os

    from raypo.cluster.hardware import parse_cluster, this_machine

    if cluster is not None:
        return parse_cluster(cluster)
    if run.cluster.address or os.environ.get("RAY_ADDRESS"):
        from raypo.cluster.resources import cluster_nodes  # imports Ray

        return cluster_nodes(run.cluster)
    return this_machine()
