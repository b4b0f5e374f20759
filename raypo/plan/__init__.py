"""What a run will need and where it will lie, computed without starting anything."""

from raypo.plan.fit import Plan, make_plan
from raypo.plan.hardware import Node, parse_cluster, this_machine

__all__ = ["Node", "Plan", "make_plan", "parse_cluster", "this_machine"]
