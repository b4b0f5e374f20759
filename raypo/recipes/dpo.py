"""Direct preference optimisation (DPO): a policy learns preferences without a reward model."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import chain
from typing import Any

from raypo.config import DPOConfig
from raypo.data.examples import load_pairs, load_verdicts
from raypo.data.item_store import ItemStore, Selection
from raypo.learner.preference_tasks import PreferenceTask, VerdictTask
from raypo.learner.supervised import SupervisedLearner
from raypo.models.loading import load_causal_lm
from raypo.models.lora import load_policy
from raypo.recipes.on_examples import AnswerEvaluation, Examples, train_on_examples
from raypo.run.records import Records
from raypo.run.reference import with_references
from raypo.run.run import Run, open_run
from raypo.run.supervised_learner import new_learner


def train_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """Run DPO on one learner worker; Ray Train calls this on each of them."""
    with open_run(setup) as run:
        config = run.config
        preferences = load_preferences(run)
        records = Records(run)
        answers = AnswerEvaluation.start(run, preferences.tokenizer)
        task: Any = VerdictTask if config.dpo.loss == "kto" else PreferenceTask
        learner = new_learner(run, lambda: task(load_policy(config.model), config.dpo))
        if config.dpo.needs_reference and not config.data.ref_chosen_key:
            preferences = with_reference_log_probs(run, preferences, learner)
        return train_on_examples(run, records, preferences, learner, answers)


def load_preferences(run: Run[DPOConfig]) -> Examples[Any]:
    """Load pairs, or verdicts if the loss is kto."""
    read = load_verdicts if run.config.dpo.loss == "kto" else load_pairs
    # Only `eval.function` reads labels, so preferences need none.
    section = run.config.data.model_copy(update={"label_key": None})
    return Examples.load(run, read, section=section, held_out_key="pairs")


def with_reference_log_probs(
    run: Run[DPOConfig], preferences: Examples[Any], learner: SupervisedLearner[Any]
) -> Examples[Any]:
    """Return the preferences with the reference model's log-probs. All workers call this.

    Without `model.reference` the learner's initial policy is the reference model, so this runs
    before a checkpoint is restored.
    """
    config = run.config
    run.tell.phase("computing the reference's log-probs")
    stream = preferences.stream
    items, drawn = stream.items, list(range(len(stream.items)))
    # A restored data cursor may be anywhere, so a resumed run needs all items. A new run needs only
    # the items that it will draw.
    if config.from_checkpoint is None and run.runtime.resume_from is None:
        draws = stream.of(drawn).take(config.num_steps * config.learner.batch_size)
        drawn = list(dict.fromkeys(index for _, index in draws))
    section, reference = config.model, config.model.reference
    model = None
    if reference is not None:
        model = load_causal_lm(reference, dtype=section.dtype, attention=section.attention)
    completed = with_references(
        run,
        ItemStore(chain(Selection(items, drawn), preferences.held_out)),
        learner,
        model=model,
        name=f"{reference or section.policy} {section.dtype}",
    )
    # Items that are not drawn keep the number len(completed), which is out of range.
    numbers = array("q", [len(completed)]) * len(items)
    for number, index in enumerate(drawn):
        numbers[index] = number
    return replace(
        preferences,
        stream=stream.of(Selection(completed, numbers)),
        held_out=completed[len(drawn) :],
    )
