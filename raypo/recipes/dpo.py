"""Direct preference optimisation (DPO): a policy learns preferences without a reward model."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from raypo.config import DPOConfig
from raypo.data.examples import load_pairs, load_verdicts
from raypo.data.item_store import Joined, Selection
from raypo.learner.preference_tasks import PreferenceTask, VerdictTask
from raypo.learner.supervised import SupervisedLearner
from raypo.models.loading import load_causal_lm
from raypo.models.lora import load_policy
from raypo.recipes.on_examples import Examples, ResponseEvaluation, train_on_examples
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
        evaluation = ResponseEvaluation.start(run, preferences.tokenizer)
        task_class: Any = VerdictTask if config.dpo.loss == "kto" else PreferenceTask
        learner = new_learner(run, lambda: task_class(load_policy(config.model), config.dpo))
        if config.dpo.needs_reference and not config.data.ref_chosen_key:
            preferences = with_reference_log_probs(run, preferences, learner)
        return train_on_examples(run, records, preferences, learner, evaluation)


def load_preferences(run: Run[DPOConfig]) -> Examples[Any]:
    """Load pairs, or verdicts if the loss is kto."""
    load = load_verdicts if run.config.dpo.loss == "kto" else load_pairs
    # Labels are only for `eval.function`, so preferences need none.
    section = run.config.data.model_copy(update={"label_key": None})
    return Examples.load(run, load, section=section, held_out_key="pairs")


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
    items, drawn_indices = stream.items, list(range(len(stream.items)))
    # A resumed run needs all items, because its data cursor may be anywhere. A new run needs only
    # the items that it will draw.
    if config.from_checkpoint is None and run.runtime.resume_from is None:
        draws = stream.of(drawn_indices).take(config.num_steps * config.learner.batch_size)
        drawn_indices = list(dict.fromkeys(index for _, index in draws))
    section, reference = config.model, config.model.reference
    model = None
    if reference is not None:
        model = load_causal_lm(reference, dtype=section.dtype, attention=section.attention)
    completed = with_references(
        run,
        Joined(Selection(items, drawn_indices), preferences.held_out),
        learner,
        model=model,
        name=f"{reference or section.policy} {section.dtype}",
    )
    # Items that are not drawn keep the index len(completed), which is out of range.
    new_indices = array("q", [len(completed)]) * len(items)
    for new_index, index in enumerate(drawn_indices):
        new_indices[index] = new_index
    return replace(
        preferences,
        stream=stream.of(Selection(completed, new_indices)),
        held_out=completed[len(drawn_indices) :],
    )
