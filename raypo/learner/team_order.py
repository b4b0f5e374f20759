"""Patch of DeepSpeed 0.19 for ZeRO-3 with separate workers for policy and critic.

DeepSpeed records the order in which a model runs its modules, and checks that all workers of the
default group have the same order. Policy and critic have different orders, so this check fails if
separate workers train them. The patch limits the check to workers of the same model. A test fails
once DeepSpeed does so itself.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def compare_within(group: Any) -> None:
    """Make DeepSpeed compare the order of modules only within a worker's own team."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    def assert_same(order: list[int]) -> None:
        orders: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(orders, order, group=group)
        if any(each != order for each in orders):
            raise RuntimeError(
                f"workers run the modules of one model in different orders: {orders}"
            )

    coordinator.assert_ints_same_as_other_ranks = assert_same
