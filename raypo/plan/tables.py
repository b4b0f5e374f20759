"""Tables of a plan for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from raypo.cluster.hardware import GB
from raypo.cluster.placement import format_resources
from raypo.plan.estimate import Role
from raypo.plan.fit import DeviceLoad, Plan
from raypo.plan.times import StepTime


def tables(plan: Plan) -> Iterator[Table]:
    """Yield tables of bundles, of memory by role and phase, of devices, and of ways to shard."""
    yield _bundles(plan)
    yield _roles(plan.roles)
    yield _loads(plan.loads)
    yield _choices(plan)


def times(step: StepTime, changes: Sequence[tuple[str, float]]) -> Table:
    """Return a table of a step's phases and their limits, with the keys that would save most."""
    title = (
        f"A step of {step.responses:,} responses of maximum length "
        "(measured runs on one GPU: within a factor of 1.5)"
    )
    table = _table(title, "phase", "limited by", right="seconds")
    table.add_column("moved by each device, GB", justify="right")
    for phase in step.phases:
        table.add_row(phase.phase, phase.limit, f"{phase.seconds:.3g}", gb(int(phase.moved)))
    how = "longer of rollouts and update" if step.is_ahead else "sum of all phases"
    table.add_row("step", how, f"{step.seconds:.3g}", "", style="bold")
    faster = "; ".join(f"{change}: {seconds:.3g} s" for change, seconds in changes)
    longest = step.longest
    table.caption = f"Longest: {longest.phase}, limited by {longest.limit}. " + (
        f"Faster with one key: {faster}."
        if faster
        else "No single key saves 3 %: use more devices."
    )
    table.caption_justify = "left"
    return table


def gb(size: int) -> str:
    """Format bytes as GB (1e9 bytes)."""
    return f"{size / GB:.2f}" if size >= GB // 100 else "<0.01"


def _bundles(plan: Plan) -> Table:
    table = _table("Placement", "group", "bundle", "node", "resources", "roles", "device")
    for placed in plan.bundles:
        table.add_row(
            placed.group,
            str(placed.index),
            plan.nodes[placed.node].name,
            format_resources(placed.bundle.resources),
            ", ".join(placed.roles),
            placed.devices,
        )
    return table


def _roles(roles: list[Role]) -> Table:
    table = _table("Memory of one process, GB", "role", "when", "what", right="GB")
    for role in roles:
        memory, name = role.memory, role.name
        for what, size in memory.held.items():
            table.add_row(name, "always", what, gb(size))
            name = ""
        for phase, parts in memory.phases.items():
            for what, size in parts.items():
                table.add_row("", phase, what, gb(size))
        for what, size in memory.host.items():
            table.add_row("", "in RAM", what, gb(size))
        table.add_row("", "", "largest sum", gb(memory.peak), style="bold", end_section=True)
    return table


def _loads(loads: list[DeviceLoad]) -> Table:
    table = _table("Peak memory of each device", "device", "phase", right="needs GB")
    table.add_column("has GB", justify="right")
    table.add_column("")
    for load in loads:
        has = "not stated" if load.available is None else gb(load.available)
        table.add_row(load.name, load.phase, gb(load.needed), has, _verdict(load))
    return table


def _choices(plan: Plan) -> Table:
    title = "learner.zero_stage and off-loading (learner.deepspeed)"
    table = _table(title, "stage", right="fullest device GB")
    table.add_column("fullest node RAM GB", justify="right")
    table.add_column("")
    for choice in plan.choices:
        mark = " <- this run" if choice.is_chosen else ""
        verdict = _verdict(choice.device, choice.host)
        table.add_row(
            str(choice.sharding), gb(choice.device.needed), gb(choice.host.needed), verdict + mark
        )
    return table


def _verdict(*loads: DeviceLoad) -> str:
    """Return the verdict on some loads: whether all of them fit."""
    if not all(load.fits for load in loads):
        return "too much"
    return "not checked" if any(load.available is None for load in loads) else "fits"


def _table(title: str, *columns: str, right: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    for column in columns:
        table.add_column(column)
    if right:
        table.add_column(right, justify="right")
    return table
