"""`raypo show`: print samples of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from raypo.cli.exit_status import exit_status


@exit_status()
def show(
    run: Annotated[str, typer.Argument(help="Folder or URI of a run, which may still be active.")],
    step: Annotated[int | None, typer.Option(help="Step to print. Default: the last one.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many samples.")] = 5,
    best: Annotated[bool, typer.Option("--best", help="Highest scores first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest scores first.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="Longest responses first.")] = False,
) -> None:
    """Print samples of a step: prompt, response, score, advantage, KL."""
    from raypo.config import ConfigError
    from raypo.extras import require

    require("report", "raypo show")
    from raypo.report.terminal import ORDERS, print_samples
    from raypo.storage.run_files import RunFiles

    is_requested = {"best": best, "worst": worst, "longest": longest}
    orders = [name for name in ORDERS if is_requested.get(name)]
    if len(orders) > 1:
        raise ConfigError(f"--{orders[0]} and --{orders[1]}: only one order is possible. Omit one.")
    files = RunFiles.at(run)
    steps = files.rollout_steps()
    if not steps:
        raise ConfigError(
            f"RUN ({run}): this folder has no rollouts. Give the folder of a PPO run, "
            "<storage_path>/<name>, after its first step."
        )
    if step is not None and step not in steps:
        raise ConfigError(
            f"--step ({step}): there are no rollouts of this step. The run has steps {steps[0]} "
            f"to {steps[-1]}; choose one of those."
        )
    print_samples(files, steps[-1] if step is None else step, orders[0] if orders else None, count)
