"""Distillation: the policy learns a teacher's token distributions.

The responses are the policy's own samples (on-policy), given texts (off-policy), or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np

from raypo.config import DistillationConfig, ResponsesSection, source_name
from raypo.data.examples import load_examples
from raypo.data.item_store import ItemStore
from raypo.data.mixing import mix_of
from raypo.data.stream import ShuffledStream
from raypo.data.tokenised_rows import chat_format
from raypo.learner.distillation_task import DistillationTask
from raypo.learner.supervised import SupervisedLearner
from raypo.models.loading import Limits, stop_token_ids
from raypo.models.lora import load_policy
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import is_trainable
from raypo.rollout.teacher_prompts import teacher_prompts, tokenised_prompt
from raypo.run.online_inputs import OnlineInputs
from raypo.run.rounds_run import Place, RoundsRecipe, learnable, place
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.types import Example, Rollout, Taught


def untaught_of(item: Rollout | Example) -> Taught:
    """Return an item without teacher log-probs; a teacher adds them later."""
    nothing = np.zeros((len(item.response_ids), 0))
    none_yet = nothing.astype(np.float32), nothing.astype(np.int32)
    return Taught(item.prompt_ids, item.response_ids, *none_yet)


def read_by_teacher(item: Taught) -> np.ndarray:
    """Return the prompt with which the teacher reads the response, int32 [P]."""
    return item.prompt_ids if item.teacher_prompt_ids is None else item.teacher_prompt_ids


class DistillationRecipe(RoundsRecipe[DistillationConfig, Taught]):
    """Distillation recipe: the policy learns a teacher's distributions.

    They are computed on the policy's own samples or on given texts.
    """

    def __init__(self, run: Run[DistillationConfig], inputs: OnlineInputs) -> None:
        """Load the given texts, if the config has any."""
        super().__init__(run, inputs)
        config, data, tokenizer = run.config, run.config.data, inputs.tokenizer
        self.teacher_prompts = teacher_prompts(config.distillation)
        self._vocabulary = len(tokenizer)
        # Texts to learn off-policy, each with the name of its source. None if the policy samples
        # all responses.
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

    def scorer(self, scorer: Scorer) -> Scorer:
        """Return the scorer without reference models: `select` asks teachers for distributions."""
        return replace(super().scorer(scorer), reference=None)

    def select(
        self, scored: Sequence[Rollout], services: Services, step: int
    ) -> tuple[dict[Place, Taught], dict[str, float]]:
        """Return the samples and texts of a round, with teacher log-probs, and metrics.

        If the policy is its own teacher, `prepare_items` adds the teacher log-probs.
        """
        teacher_of = self.run.config.teacher_of
        sampled, metrics = self._sampled(scored)
        if metrics.get("selection/responses") == 0:
            self.run.tell.message(
                f"round {step}: no sample has a prompt for its teacher, so nothing is learned"
            )
        if not teacher_of:
            return {place(each): untaught for each, untaught in sampled}, metrics
        pupils: dict[str, dict[Place, Taught]] = {path: {} for path in teacher_of.values()}
        for each, untaught in sampled:
            pupils[teacher_of[str(each.data_source)]][place(each)] = untaught
        if self.texts is not None:
            rollout = self.run.config.rollout
            count = rollout.prompts_per_step - self.run.config.prompts_answered
            for position, (source, text) in self.texts.take(count * rollout.samples_per_prompt):
                # Texts belong to no group. -1 keeps their keys apart from those of samples.
                pupils[teacher_of[source]][-1, position] = untaught_of(text)
        wanted = self.run.config.distillation.top_k
        count = min(wanted or self._vocabulary, self._vocabulary)
        asked = []
        for role, path in self.run.config.references.items():
            if found := pupils[path]:
                teacher = services.references[role]
                sequences = [(read_by_teacher(each), each.response_ids) for each in found.values()]
                answer = teacher.top_log_probs(sequences, count, self._vocabulary)
                asked.append((found, answer))
        return {
            where: replace(untaught, teacher_log_probs=log_probs, teacher_ids=ids)
            for found, answer in asked
            for (where, untaught), (log_probs, ids) in zip(
                found.items(), answer.result(), strict=True
            )
        }, metrics

    def prepare_items(
        self, items: dict[Place, Taught], learner: SupervisedLearner[Taught], services: Services
    ) -> dict[Place, Taught]:
        """Add teacher log-probs computed by the policy, if it is its own teacher."""
        if self.run.config.teacher_of:
            return items
        task = learner.task
        assert isinstance(task, DistillationTask)

        def opinions(untaught: list[Taught]) -> list[tuple[np.ndarray, np.ndarray]]:
            read = [replace(item, prompt_ids=read_by_teacher(item)) for item in untaught]
            return learner.asked(read, task.top_log_probs)

        return {
            where: replace(items[where], teacher_log_probs=log_probs, teacher_ids=ids)
            for where, (log_probs, ids) in self.computed(items, opinions).items()
        }

    def _sampled(
        self, scored: Sequence[Rollout]
    ) -> tuple[list[tuple[Rollout, Taught]], dict[str, float]]:
        """Return the samples to learn, with their teacher prompts, and metrics that count them."""
        if self.teacher_prompts is None:
            usable = [each for each in scored if is_trainable(each)]
            return [(each, untaught_of(each)) for each in usable], {}
        sampled: list[tuple[Rollout, Taught]] = []
        chat = chat_format(self.run.config.data)
        most, too_long = self.run.config.distillation.max_teacher_prompt_tokens, 0
        for group in learnable(scored):
            for each, prompt in zip(group, self.teacher_prompts(group), strict=True):
                if prompt is None:
                    continue
                ids = tokenised_prompt(self.inputs.tokenizer, prompt, chat)
                if len(ids) > most:
                    too_long += 1
                else:
                    untaught = replace(untaught_of(each), teacher_prompt_ids=ids)
                    sampled.append((each, untaught))
        return sampled, {
            "selection/responses": float(len(sampled)),
            "selection/prompts_too_long": float(too_long),
        }

    def described(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a round's samples, without scores if no reward is configured."""
        if self.inputs.has_function or self.run.config.judges:
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
