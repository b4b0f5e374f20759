"""Who counts the failures of a run where Ray's own count is lost with Ray Train's controller."""

from __future__ import annotations

from ray.exceptions import ActorUnavailableError

from raypo.cluster.actors import is_lost_actor


def is_lost_controller(error: BaseException) -> bool:
    """Whether what `TorchTrainer.fit` raises says that the process of its controller ended.

    The controller's own code may fail with such an error of another actor, and its start may fail:
    neither would go better under another controller.
    """
    may_live = isinstance(error, ActorUnavailableError)
    failed_to_start = getattr(error, "actor_init_failed", False)
    return is_lost_actor(error) and not may_live and not failed_to_start


def failures_left(max_failures: int, failures: int) -> int | None:
    """How many more failures a run may have after some; None: it has had one too many.

    Args:
        max_failures: As Ray's FailureConfig says it; -1: any number, which is also what is left.
        failures: Lost workers and controllers so far.
    """
    if max_failures == -1:
        return -1
    left = max_failures - failures
    return left if left >= 0 else None


def advice(max_failures: int) -> str:
    """What to do where the run cannot go on by itself."""
    return (
        f"max_failures ({max_failures}): the process of Ray Train's controller ended, and the run "
        "either had as many failures as it may have or had not begun. Start it again: it goes on "
        "from its last checkpoint. With a higher max_failures it does so by itself."
    )
