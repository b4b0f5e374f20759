"""Tools for agents: async functions that a model can call, and the sandboxes that they run in."""
