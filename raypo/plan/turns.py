"""Who holds how much of a shared GPU in each phase of a step: `raypo.run.phases` in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from raypo.plan.estimate import LEARNER, Role

PHASES = ("start", "evaluate", "update", "push", "probe", "generate", "score")
"""evaluate and update are both the learner's phase there."""


def worst_turn(roles: Sequence[Role]) -> tuple[int, str]:
    """Bytes of a GPU whose processes take turns, at their worst phase, and which it is."""
    return max((sum(_present(role, phase) for role in roles), phase) for phase in PHASES)


def most_away(roles: Sequence[Role]) -> tuple[int, str]:
    """Bytes of RAM for what has left the GPUs, in the phase in which that is most."""
    return max((sum(_away(role, phase) for role in roles), phase) for phase in PHASES)


def _present(role: Role, phase: str) -> int:
    memory, runtime = role.memory, role.memory.held["runtime"]
    if role.name == LEARNER:
        if phase in ("evaluate", "update"):
            return memory.steady + memory.added(phase)
        if phase == "push":
            return runtime + _policy(role) + memory.host.get("push bucket", 0)
        if phase == "probe":
            return runtime + _policy(role) + memory.added("evaluate")
        return runtime
    if role.name == "engine":
        if phase in ("start", "probe", "generate"):
            return memory.steady
        return runtime + (memory.held["weights"] if phase == "push" else 0)
    if phase in ("start", "score"):
        return memory.steady + memory.added(phase)
    return runtime


def _away(role: Role, phase: str) -> int:
    """What it will need again; keys and values of an engine that sleeps are thrown away."""
    memory = role.memory
    if role.name == LEARNER:
        if phase in ("start", "evaluate", "update"):
            return 0
        movable = memory.steady - memory.held["runtime"]
        return movable - (_policy(role) if phase in ("push", "probe") else 0)
    here = ("start", "push", "probe", "generate") if role.name == "engine" else ("start", "score")
    return 0 if phase in here else memory.held["weights"]


def _policy(role: Role) -> int:
    return role.memory.held.get("policy weights", 0)
