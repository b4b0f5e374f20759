"""Prompt sets, training examples, and the order in which they are drawn."""
