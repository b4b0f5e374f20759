"""Distillation: the policy learns a teacher's token distributions.

The responses are the policy's own samples (on-policy), given texts (off-policy), or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from raypo.config import DistillationConfig, ResponsesSection, source_name
from raypo.data.examples import load_examples
from raypo.data.item_store import ItemStore
from raypo.data.mixing import mix_of
from raypo.data.stream import ShuffledStream
from raypo.learner.distillation_task import DistillationTask
from raypo.models.loading import Limits, stop_token_ids
from raypo.models.lora import load_policy
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import is_trainable
from raypo.run.online_inputs import OnlineInputs
from raypo.run.rounds_run import Place, RoundsRecipe, place
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.serving.frozen import Ids
from raypo.types import Example, ScoredRollout, Taught


class DistillationRecipe(RoundsRecipe[DistillationConfig, Taught]):
    """Learns a teacher's distributions of the policy's samples, of given texts, or of both."""

    def __init__(self, run: Run[DistillationConfig], inputs: OnlineInputs) -> None:
        """Read the texts."""
        super().__init__(run, inputs)
        config, data, tokenizer = run.config, run.config.data, inputs.tokenizer
        self._vocabulary = len(tokenizer)
        # Texts to learn off-policy, each with the name of its source. None if all are sampled.
        self.texts: ShuffledStream[tuple[str, Example]] | None = None
        if data.response_key is not None:
            section = ResponsesSection.model_validate(data.model_dump())
            policy = config.model.policy
            stop = stop_token_ids(policy, tokenizer)
            loaded = load_examples(section, tokenizer, stop)
            rows = ((text.prompt_ids, text.response_ids) for text in loaded.items)
            Limits.of(policy).check(rows, tokenizer, key="data.prompts")
            for note in loaded.notes("data.prompts"):
                self.run.tell.message(note)
            mix = mix_of(data, loaded.sizes, config.rollout.prompts_per_step)
            names = chain.from_iterable(
                repeat(source_name(source), size)
                for source, size in zip(data.prompts, loaded.sizes, strict=True)
            )
            named = ItemStore(zip(names, loaded.items, strict=True))
            self.texts = ShuffledStream(named, seed=config.seed, mix=mix)

    def make_task(self) -> DistillationTask:
        """Load the student, which learns the teacher's distributions."""
        config = self.run.config
        return DistillationTask(
            load_policy(config.model), config.distillation, vocabulary=self._vocabulary
        )

    @property
    def prompts_per_round(self) -> int:
        """Number of prompts per round that the policy answers; the rest of a round are texts."""
        return self.run.config.prompts_answered

    def scorer(self, services: Services) -> Scorer:
        """Return the scorer without reference: `select` asks teachers for whole distributions."""
        return replace(super().scorer(services), reference=None)

    def select(
        self, scored: Sequence[ScoredRollout], services: Services, step: int
    ) -> tuple[dict[Place, Taught], dict[str, float]]:
        """Return this worker's responses and its share of the texts, with teacher log-probs."""
        teacher_of = self.run.config.teacher_of
        pupils: dict[str, dict[Place, Ids]] = {path: {} for path in teacher_of.values()}
        for each in scored:
            if is_trainable(each):
                rollout = each.rollout
                found = pupils[teacher_of[str(rollout.data_source)]]
                found[place(each)] = rollout.prompt_ids, rollout.response_ids
        if self.texts is not None:
            rollout = self.run.config.rollout
            count = rollout.prompts_per_step - self.run.config.prompts_answered
            drawn = self.texts.take(count * rollout.samples_per_prompt)
            for position, (source, text) in drawn[self.run.workers.rank :: self.run.workers.count]:
                # Texts belong to no group. -1 keeps their keys apart from those of samples.
                pupils[teacher_of[source]][-1, position] = text.prompt_ids, text.response_ids
        wanted = self.run.config.distillation.top_k
        count = min(wanted or self._vocabulary, self._vocabulary)
        asked = []
        for role, path in self.run.config.references.items():
            if found := pupils[path]:
                teacher, sequences = services.references[role], list(found.values())
                answer = teacher.top_log_probs(sequences, count, self._vocabulary)
                asked.append((found, answer))
        return {
            where: Taught(*sequence, *opinion)
            for found, answer in asked
            for (where, sequence), opinion in zip(found.items(), answer.result(), strict=True)
        }, {}

    def describe(self, scored: list[ScoredRollout]) -> dict[str, float]:
        """Return lengths of all workers' rollouts, and their scores if a reward is configured."""
        metrics = super().describe(scored)
        inputs, models = self.inputs, self.run.config.model.reward
        if inputs.reward_function or inputs.reward_servers or models:
            return metrics
        of_scores = ("rollout/score_", "rollout/zero_variance_fraction")
        return {name: value for name, value in metrics.items() if not name.startswith(of_scores)}

    def state_dict(self) -> dict[str, Any]:
        """Return the data cursor of the texts."""
        return {"texts": self.texts.state_dict() if self.texts else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        if self.texts:
            self.texts.load_state_dict(state["texts"])
