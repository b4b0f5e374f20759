"""A reward model from pairs of responses: a Hugging Face sequence classifier with one label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from raypo.cluster.messenger import MonitorClient
from raypo.collectives import Workers
from raypo.config import RewardModelConfig
from raypo.data.examples import load_pairs
from raypo.learner.tasks import PairTask
from raypo.models.loading import load_reward_model, load_tokenizer, stop_token_ids
from raypo.models.lora import add_adapter
from raypo.recipes.from_examples import examples_loop
from raypo.run.examples_run import ExamplesRun, stream_of
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles
from raypo.types import Pair


def reward_model_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """A whole reward-model run on one learner worker; `ray.train` calls it on each.

    Args:
        setup: `config.model_dump()` of a RewardModelConfig.

    Returns:
        `{"status": "finished" | "interrupted", "step": the last step that is done}`.
    """
    return examples_loop(setup, RewardModelRun)


@dataclass
class RewardModelRun(ExamplesRun[RewardModelConfig, Pair]):
    """One worker's view of a reward-model run."""

    @classmethod
    def prepare(
        cls,
        config: RewardModelConfig,
        runtime: Runtime,
        workers: Workers,
        files: RunFiles,
        tell: MonitorClient,
    ) -> Self:
        """The run with its pairs read."""
        tokenizer = load_tokenizer(config.model.policy)
        end = stop_token_ids(config.model.policy, tokenizer)[0]
        loaded = load_pairs(config.data, tokenizer, end)
        held_out: list[Pair] = []
        if config.eval.prompts:
            section = config.data.model_copy(update={"prompts": config.eval.prompts})
            held_out = load_pairs(section, tokenizer, end, key="eval.prompts").items
        stream = stream_of(loaded, config, tell)
        return cls(config, runtime, workers, files, tell, tokenizer, stream, held_out)

    def make_task(self) -> PairTask:
        """The policy's backbone with a new score head, or the classifier that it is already."""
        section = self.config.model
        model = load_reward_model(section.policy, dtype=section.dtype, attention=section.attention)
        model = add_adapter(model, section.lora)
        # Plain transformers looks for the padding id; where that is the end it would hide the end.
        padding, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        model.config.pad_token_id = None if padding == end else padding
        return PairTask(model, centering_coef=self.config.reward_model.centering_coef)
