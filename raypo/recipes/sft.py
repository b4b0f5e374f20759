"""Supervised fine-tuning (SFT): a policy learns the responses of examples."""

from __future__ import annotations

from raypo.config import SFTConfig
from raypo.data.examples import load_examples
from raypo.learner.tasks import ResponseTask
from raypo.models.lora import load_policy
from raypo.run.examples_run import PolicyExamplesRecipe, Reader
from raypo.types import Example


class SFTRecipe(PolicyExamplesRecipe[SFTConfig, Example]):
    """SFT recipe: the policy learns the responses of examples."""

    @classmethod
    def reader(cls, config: SFTConfig) -> Reader[Example]:
        """Return the loader of prompts with responses."""
        return load_examples

    def make_task(self) -> ResponseTask:
        """Load the policy, which learns the responses."""
        return ResponseTask(load_policy(self.run.config.model))
