"""The quickstart's verifier."""

from raypo import Rollout


def exact(rollouts: list[Rollout]) -> list[float]:
    """1 for the right answer and nothing else, 0 otherwise."""
    return [float(rollout.response == rollout.label) for rollout in rollouts]
