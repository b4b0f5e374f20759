"""Reward functions: found, loaded, called, checked."""

from raypo.rewards.loader import absolute_spec, check_function, load_function
from raypo.rewards.scoring import RewardError, RewardFunction, score

__all__ = [
    "RewardError",
    "RewardFunction",
    "absolute_spec",
    "check_function",
    "load_function",
    "score",
]
