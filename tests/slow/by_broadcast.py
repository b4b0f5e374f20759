"""Imported in a learner worker, it has weights pushed over gloo, as NCCL does it between GPUs."""

import ray

from raypo import Rollout
from raypo.config import InFlight
from raypo.run import weight_pusher
from raypo.weight_sync.broadcast import BroadcastTransport
from tests.integration.task import digit_share

opened: list[BroadcastTransport] = []
"""Of this process."""


def open_transport(*_: object, in_flight: InFlight | None, **__: object) -> BroadcastTransport:
    transport = BroadcastTransport(
        backend="gloo",
        device="cpu",
        host=ray.util.get_node_ip_address(),
        timeout_s=60.0,
        in_flight=in_flight,
        bucket_bytes=1 << 16,
    )
    opened.append(transport)
    return transport


weight_pusher.open_transport = open_transport


def score(rollouts: list[Rollout]) -> list[float | None]:
    """A reward function, for which workers import this module before they open a run."""
    assert opened, "this worker pushes by another transport"
    return [*digit_share(rollouts)]
