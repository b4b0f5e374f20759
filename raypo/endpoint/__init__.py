"""OpenAI's protocol for the policy, which agents ask in training."""
