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


def untaught_of(item: Rollout | Example) -> Taught:
    """Return an item without teacher log-probs; a teacher adds them later."""
    empty = np.zeros((len(item.response_ids), 0))
    log_probs, token_ids = empty.astype(np.float32), empty.astype(np.int32)
    return Taught(item.prompt_ids, item.response_ids, log_probs, token_ids)


def read_by_teacher(item: Taught) -> np.ndarray:
    """Return the prompt with which the teacher reads the response, int32 [P]."""
    return item.prompt_ids if item.teacher_prompt_ids is None else item.teacher_prompt_ids


def with_teacher(
    items: Mapping[SampleKey, Taught], top: Sequence[tuple[np.ndarray, np.ndarray]]
) -> dict[SampleKey, Taught]:
    """Return the items with the teacher's most likely tokens and their log-probs."""
    return {
        key: replace(item, teacher_log_probs=log_probs, teacher_ids=ids)
        for (key, item), (log_probs, ids) in zip(items.items(), top, strict=True)
    }


class DistillationRecipe(RoundsRecipe[DistillationConfig, Taught]):
    """Distillation recipe: the policy learns a teacher's distributions.

    They are computed on the policy's own samples or on given texts.
    """

    def __init__(
        self, run: Run[DistillationConfig], inputs: OnlineInputs, services: Services
    ) -> None:
        """Load the given texts, if the config has any."""
        super().__init__(run, inputs, services)
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
        """Return the scorer without a reference: `select` asks teachers for distributions."""
        return replace(super().scorer(scorer), reference=None)

    def select(
        self, scored: Sequence[Rollout], step: int
    ) -> tuple[dict[SampleKey, Taught], dict[str, float]]:
        """Return the samples and texts of a round, with teacher log-probs, and metrics.

        If the policy is its own teacher, `prepare_items` adds the teacher log-probs.
        """
        config = self.run.config
        teacher_of = config.teacher_of
        sampled, metrics = self._sampled(scored)
        if metrics.get("selection/responses") == 0:
            self.run.tell.message(
                f"round {step}: no sample has a prompt for its teacher, so nothing is learned"
            )
        if not teacher_of:
            return {key_of(sample): untaught for sample, untaught in sampled}, metrics
        items: dict[str, dict[SampleKey, Taught]] = {path: {} for path in teacher_of.values()}
        for sample, untaught in sampled:
            items[teacher_of[str(sample.data_source)]][key_of(sample)] = untaught
        if self.texts is not None:
            count = config.rollout.prompts_per_step - config.prompts_answered
            drawn = self.texts.take(count * config.rollout.samples_per_prompt)
            for position, (source, text) in drawn:
                # Texts belong to no group. -1 keeps their keys apart from those of samples.
                items[teacher_of[source]][-1, position] = untaught_of(text)
        count = min(config.distillation.top_k or self._vocabulary, self._vocabulary)
        calls = []
        for role, path in config.references.items():
            if of_teacher := items[path]:
                sequences = [(read_by_teacher(t), t.response_ids) for t in of_teacher.values()]
                teacher = self.services.references[role]
                calls.append(
                    (of_teacher, teacher.top_log_probs(sequences, count, self._vocabulary))
                )
        return {
            key: item
            for of_teacher, call in calls
            for key, item in with_teacher(of_teacher, call.result()).items()
        }, metrics

    def prepare_items(
        self, items: dict[SampleKey, Taught], learner: SupervisedLearner[Taught]
    ) -> dict[SampleKey, Taught]:
        """Add teacher log-probs computed by the policy, if it is its own teacher."""
        if self.run.config.teacher_of:
            return items
        task = learner.task
        assert isinstance(task, DistillationTask)

        def top_tokens(untaught: list[Taught]) -> list[tuple[np.ndarray, np.ndarray]]:
            read = [replace(item, prompt_ids=read_by_teacher(item)) for item in untaught]
            return learner.asked(read, task.top_log_probs)

        top = self.computed(items, learner, top_tokens)
        return with_teacher({key: items[key] for key in top}, list(top.values()))

    def _sampled(
        self, scored: Sequence[Rollout]
    ) -> tuple[list[tuple[Rollout, Taught]], dict[str, float]]:
        """Return the samples to learn, with their teacher prompts, and metrics that count them."""
        if self.teacher_prompts is None:
            return [(sample, untaught_of(sample)) for sample in filter(is_trainable, scored)], {}
        sampled: list[tuple[Rollout, Taught]] = []
        chat = chat_format(self.run.config.data)
        max_tokens, too_long = self.run.config.distillation.max_teacher_prompt_tokens, 0
        for group in trainable_groups(scored):
            for sample, prompt in zip(group, self.teacher_prompts(group), strict=True):
                if prompt is None:
                    continue
                ids = tokenised_prompt(self.inputs.tokenizer, prompt, chat)
                if len(ids) > max_tokens:
                    too_long += 1
                else:
                    untaught = replace(untaught_of(sample), teacher_prompt_ids=ids)
                    sampled.append((sample, untaught))
        return sampled, {
            "selection/responses": float(len(sampled)),
            "selection/prompts_too_long": float(too_long),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the data cursor of the texts."""
        return {"texts": self.texts.state_dict() if self.texts else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        if self.texts:
            self.texts.load_state_dict(state["texts"])
