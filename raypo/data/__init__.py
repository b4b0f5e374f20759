"""Prompt sets and the order in which they are drawn."""
