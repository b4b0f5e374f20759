"""Supervised fine-tuning: a policy learns the responses of examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from raypo.cluster.messenger import MonitorClient
from raypo.collectives import Workers
from raypo.config import SFTConfig
from raypo.data.examples import load_examples
from raypo.learner.tasks import ResponseTask
from raypo.models.loading import load_causal_lm, load_tokenizer, stop_token_ids
from raypo.models.lora import add_adapter
from raypo.recipes.from_examples import examples_loop
from raypo.run.examples_run import PolicyExamplesRun, stream_of
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles
from raypo.types import Example


def sft_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """A whole supervised fine-tuning run on one learner worker; `ray.train` calls it on each.

    Args:
        setup: `config.model_dump()` of an SFTConfig.

    Returns:
        `{"status": "finished" | "interrupted", "step": the last step that is done}`.
    """
    return examples_loop(setup, SFTRun)


@dataclass
class SFTRun(PolicyExamplesRun[SFTConfig, Example]):
    """One worker's view of a supervised fine-tuning run."""

    @classmethod
    def prepare(
        cls,
        config: SFTConfig,
        runtime: Runtime,
        workers: Workers,
        files: RunFiles,
        tell: MonitorClient,
    ) -> Self:
        """The run with its examples read and its function loaded."""
        tokenizer = load_tokenizer(config.model.policy)
        end = stop_token_ids(config.model.policy, tokenizer)[0]
        loaded = load_examples(config.data, tokenizer, end)
        held_out: list[Example] = []
        if config.eval.prompts:
            section = config.data.model_copy(update={"prompts": config.eval.prompts})
            held_out = load_examples(section, tokenizer, end, key="eval.prompts").items
        stream = stream_of(loaded, config, tell)
        return cls(config, runtime, workers, files, tell, tokenizer, stream, held_out)

    def make_task(self) -> ResponseTask:
        """The causal language model."""
        section = self.config.model
        model = load_causal_lm(section.policy, dtype=section.dtype, attention=section.attention)
        return ResponseTask(add_adapter(model, section.lora))
