"""What a run will need and where it will lie, computed without starting anything."""

from raypo.plan.hardware import Node, parse_cluster, this_machine
from raypo.plan.plan import Plan, make_plan

__all__ = ["Node", "Plan", "make_plan", "parse_cluster", "this_machine"]
