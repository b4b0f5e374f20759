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
from raypo.recipes.rounds import (
    RoundsRecipe,
    SampleKey,
    key_of,
    rounds_loop,
    trainable_groups,
)
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import is_trainable
from raypo.rollout.teacher_prompts import teacher_prompts, tokenised_prompt
from raypo.run.online_inputs import OnlineInputs
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.types import Example, Rollout, Taught


def train_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """Run distillation on one learner worker; Ray Train calls this on each of them."""
    return rounds_loop(setup, DistillationRecipe)


def without_teacher(item: Rollout | Example) -> Taught:
    """Convert a sample or text to an item without teacher log-probs, which are added later."""
    empty = np.zeros((len(item.response_ids), 0))
    log_probs, token_ids = empty.astype(np.float32), empty.astype(np.int32)
    return Taught(item.prompt_ids, item.response_ids, log_probs, token_ids)


def teacher_prompt_ids(item: Taught) -> np.ndarray:
    """Return the prompt that precedes the response in the teacher's input, int32 [P]."""
    return item.prompt_ids if item.teacher_prompt_ids is None else item.teacher_prompt_ids


def with_teacher(
    items: Mapping[SampleKey, Taught], top_tokens: Sequence[tuple[np.ndarray, np.ndarray]]
) -> dict[SampleKey, Taught]:
    """Return the items with the teacher's most likely tokens and their log-probs."""
    return {
        key: replace(item, teacher_log_probs=log_probs, teacher_ids=ids)
        for (key, item), (log_probs, ids) in zip(items.items(), top_tokens, strict=True)
    }


class DistillationRecipe(RoundsRecipe[DistillationConfig, Taught]):
    """Distillation recipe: the policy learns a teacher's token distributions.

    The distributions are computed on the policy's own samples or on given texts.
    """

    def __init__(
        self, run: Run[DistillationConfig], inputs: OnlineInputs, services: Services
    ) -> None:
        """Load the given texts, if the config names any."""
        super().__init__(run, inputs, services)
        config, data, tokenizer = run.config, run.config.data, inputs.tokenizer
        self.teacher_prompts = teacher_prompts(config.distillation)
        self._vocabulary = len(tokenizer)
        # Texts to learn off-policy, with the name of their source. None if the policy samples
        # all responses.
        self.texts: ShuffledStream[tuple[str, Example]] | None = None
        if data.response_key is not None:
            section = ResponsesSection.model_validate(data.model_dump())
            policy = config.model.policy
            stop_ids = stop_token_ids(policy, tokenizer)
            texts = load_examples(section, tokenizer, stop_ids)
            rows = ((text.prompt_ids, text.response_ids) for text in texts.items)
            Limits.of(policy).check(rows, tokenizer, key="data.prompts")
            for note in texts.notes("data.prompts"):
                self.run.tell.message(note)
            mix = mix_of(data, texts.sizes, config.rollout.prompts_per_step)
            names = chain.from_iterable(
                repeat(source_name(source), size)
                for source, size in zip(data.prompts, texts.sizes, strict=True)
            )
            named_texts = ItemStore(zip(names, texts.items, strict=True))
            self.texts = ShuffledStream(named_texts, seed=config.seed, mix=mix)

    def make_task(self) -> DistillationTask:
        """Load the student, which learns the teacher's distributions."""
        config = self.run.config
        return DistillationTask(
            load_policy(config.model), config.distillation, vocabulary=self._vocabulary
        )

    def scorer(self, scorer: Scorer) -> Scorer:
        """Return the scorer without a reference model, because `select` calls the teachers."""
        return replace(super().scorer(scorer), reference=None)

    def select(
        self, scored: Sequence[Rollout], step: int
    ) -> tuple[dict[SampleKey, Taught], dict[str, float]]:
        """Return the samples and texts of a round, with teacher log-probs, and metrics.

        If the policy is its own teacher, `prepare_items` adds the teacher log-probs.
        """
        config = self.run.config
        teacher_of = config.teacher_of
        samples, metrics = self._samples_to_learn(scored)
        if metrics.get("selection/responses") == 0:
            self.run.tell.message(
                f"round {step}: no sample has a prompt for its teacher, so nothing is learned"
            )
        if not teacher_of:
            return {key_of(sample): item for sample, item in samples}, metrics
        items: dict[str, dict[SampleKey, Taught]] = {path: {} for path in teacher_of.values()}
        for sample, item in samples:
            items[teacher_of[str(sample.data_source)]][key_of(sample)] = item
        if self.texts is not None:
            count = config.rollout.prompts_per_step - config.prompts_answered
            texts = self.texts.take(count * config.rollout.samples_per_prompt)
            for position, (source, text) in texts:
                # Texts belong to no group. -1 distinguishes their keys from the keys of samples.
                items[teacher_of[source]][-1, position] = without_teacher(text)
        count = min(config.distillation.top_k or self._vocabulary, self._vocabulary)
        calls = []
        for role, path in config.references.items():
            if teacher_items := items[path]:
                sequences = [
                    (teacher_prompt_ids(item), item.response_ids) for item in teacher_items.values()
                ]
                teacher = self.services.references[role]
                calls.append(
                    (teacher_items, teacher.top_log_probs(sequences, count, self._vocabulary))
                )
        return {
            key: item
            for teacher_items, call in calls
            for key, item in with_teacher(teacher_items, call.result()).items()
        }, metrics

    def prepare_items(
        self, items: dict[SampleKey, Taught], learner: SupervisedLearner[Taught]
    ) -> dict[SampleKey, Taught]:
        """Add teacher log-probs computed by the policy, if it is its own teacher."""
        if self.run.config.teacher_of:
            return items
        task = learner.task
        assert isinstance(task, DistillationTask)

        def top_tokens(batch: list[Taught]) -> list[tuple[np.ndarray, np.ndarray]]:
            teacher_items = [replace(item, prompt_ids=teacher_prompt_ids(item)) for item in batch]
            return learner.asked(teacher_items, task.top_log_probs)

        top_tokens_by_key = self.compute_in_parallel(items, learner, top_tokens)
        return with_teacher(
            {key: items[key] for key in top_tokens_by_key}, list(top_tokens_by_key.values())
        )

    def _samples_to_learn(
        self, scored: Sequence[Rollout]
    ) -> tuple[list[tuple[Rollout, Taught]], dict[str, float]]:
        """Return the samples to learn with their items (with teacher prompts), and their counts."""
        if self.teacher_prompts is None:
            return [
                (sample, without_teacher(sample)) for sample in filter(is_trainable, scored)
            ], {}
        samples: list[tuple[Rollout, Taught]] = []
        chat = chat_format(self.run.config.data)
        max_tokens, num_too_long = self.run.config.distillation.max_teacher_prompt_tokens, 0
        for group in trainable_groups(scored):
            for sample, prompt in zip(group, self.teacher_prompts(group), strict=True):
                if prompt is None:
                    continue
                ids = tokenised_prompt(self.inputs.tokenizer, prompt, chat)
                if len(ids) > max_tokens:
                    num_too_long += 1
                else:
                    item = replace(without_teacher(sample), teacher_prompt_ids=ids)
                    samples.append((sample, item))
        return samples, {
            "selection/responses": float(len(samples)),
            "selection/prompts_too_long": float(num_too_long),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the data cursor of the texts."""
        return {"texts": self.texts.state_dict() if self.texts else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        if self.texts:
            self.texts.load_state_dict(state["texts"])
