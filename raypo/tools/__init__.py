"""Tools for agents: async functions that a model calls, and what they are run in."""
