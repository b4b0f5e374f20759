"""Reward functions: found, loaded, called, checked."""

from raypo.rewards.loader import check_function, load_function
from raypo.rewards.scoring import RewardError, RewardFunction, score

__all__ = [
    "RewardError",
    "RewardFunction",
    "check_function",
    "load_function",
    "score",
]
