"""Direct preference optimisation: a policy learns from preferences, without a reward model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from raypo.cluster.messenger import MonitorClient
from raypo.collectives import Workers
from raypo.config import DPOConfig
from raypo.data.examples import LoadedExamples, load_pairs, load_verdicts
from raypo.learner.preference_tasks import PreferenceTask, VerdictTask
from raypo.learner.supervised import SupervisedLearner
from raypo.models.loading import load_causal_lm, load_tokenizer, stop_token_ids
from raypo.models.lora import add_adapter
from raypo.recipes.from_examples import examples_loop
from raypo.run.examples_run import PolicyExamplesRun, stream_of
from raypo.run.reference import with_references
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles


def dpo_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """A whole run on preferences on one learner worker; `ray.train` calls it on each.

    Args:
        setup: `config.model_dump()` of a DPOConfig.

    Returns:
        `{"status": "finished" | "interrupted", "step": the last step that is done}`.
    """
    return examples_loop(setup, DPORun)


@dataclass
class DPORun(PolicyExamplesRun[DPOConfig, Any]):
    """One worker's view of a run on preferences: pairs, or verdicts where the loss is kto."""

    @classmethod
    def prepare(
        cls,
        config: DPOConfig,
        runtime: Runtime,
        workers: Workers,
        files: RunFiles,
        tell: MonitorClient,
    ) -> Self:
        """The run with its preferences read and its function loaded."""
        tokenizer = load_tokenizer(config.model.policy)
        end = stop_token_ids(config.model.policy, tokenizer)[0]
        load = load_verdicts if config.dpo.loss == "kto" else load_pairs
        section = config.data.model_copy(update={"label_key": None})  # for eval.function alone
        loaded: LoadedExamples[Any] = load(section, tokenizer, end)
        held_out: list[Any] = []
        if config.eval.pairs:
            section = section.model_copy(update={"prompts": config.eval.pairs})
            held_out = list(load(section, tokenizer, end, key="eval.pairs").items)
        stream = stream_of(loaded, config, tell)
        return cls(config, runtime, workers, files, tell, tokenizer, stream, held_out)

    def make_task(self) -> PreferenceTask | VerdictTask:
        """The causal language model."""
        model = add_adapter(self._load(self.config.model.policy), self.config.model.lora)
        kind = VerdictTask if self.config.dpo.loss == "kto" else PreferenceTask
        return kind(model, self.config.dpo)

    def before_restoring(self, learner: SupervisedLearner[Any]) -> None:
        """Give each preference what the reference says of it, unless its row has that."""
        config = self.config
        if not config.dpo.needs_reference or config.data.ref_chosen_key:
            return
        self.tell.phase("asking the reference")
        items = list(self.stream.items)
        drawn = list(range(len(items)))
        goes_on = config.from_checkpoint or self.runtime.resume_from
        if goes_on is None:  # else its cursor may stand anywhere
            draws = self.stream.of(drawn).take(config.num_steps * config.learner.batch_size)
            drawn = list(dict.fromkeys(place for _, place in draws))
        named = config.model.reference
        asked = with_references(
            [*(items[place] for place in drawn), *self.held_out],
            learner,
            other=None if named is None else self._load(named),
            name=f"{named or config.model.policy} {config.model.dtype}",
            files=self.files,
            workers=self.workers,
        )
        for place, item in zip(drawn, asked, strict=False):
            items[place] = item
        self.stream = self.stream.of(items)
        self.held_out = asked[len(drawn) :]

    def _load(self, path: str) -> Any:
        section = self.config.model
        return load_causal_lm(path, dtype=section.dtype, attention=section.attention)
