"""What speaks OpenAI's protocol for the policy: `raypo serve`, and agents of others in training."""
