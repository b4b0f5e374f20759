"""Reward functions: found, loaded, called, checked."""
