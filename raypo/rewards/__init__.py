"""Reward functions: loading, calling and validation."""
