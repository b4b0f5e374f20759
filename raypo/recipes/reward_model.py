"""Reward-model training on pairs of responses.

The model is a Hugging Face sequence classifier with one label.
"""

from __future__ import annotations

from raypo.config import RewardModelConfig
from raypo.data.examples import load_pairs
from raypo.learner.tasks import PairTask
from raypo.models.loading import load_reward_model, stop_token_ids
from raypo.models.lora import add_adapter
from raypo.run.examples_run import ExamplesRecipe, Reader
from raypo.types import Pair


class RewardModelRecipe(ExamplesRecipe[RewardModelConfig, Pair]):
    """Reward-model recipe: the model learns to score chosen responses above rejected ones."""

    @classmethod
    def reader(cls, config: RewardModelConfig) -> Reader[Pair]:
        """Return the loader of pairs."""
        return load_pairs

    def make_task(self) -> PairTask:
        """Load `model.policy` as a classifier, with a new score head if it has none."""
        section = self.run.config.model
        model = load_reward_model(
            section.policy, dtype=section.dtype, attention=section.attention, new_head=True
        )
        model = add_adapter(model, section.lora)
        # transformers finds the last token of a row by the padding id. If that id also ends
        # responses, it would skip the end of the response.
        padding = self.tokenizer.pad_token_id
        ends = (self.tokenizer.eos_token_id, *stop_token_ids(section.policy, self.tokenizer))
        for config in (model.config, model.config.get_text_config()):  # the head reads the latter
            config.pad_token_id = None if padding in ends else padding
        return PairTask(model, centering_coef=self.run.config.reward_model.centering_coef)
