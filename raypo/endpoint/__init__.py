"""OpenAI-compatible endpoint of the policy, for agents in training."""
