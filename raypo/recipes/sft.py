"""Supervised fine-tuning (SFT): a policy learns the responses of examples."""

from __future__ import annotations

from typing import Any

from raypo.data.examples import load_examples
from raypo.learner.tasks import ResponseTask
from raypo.models.lora import load_policy
from raypo.recipes.on_examples import Examples, ResponseEvaluation, train_on_examples
from raypo.run.records import Records
from raypo.run.run import open_run
from raypo.run.supervised_learner import new_learner


def train_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """Run SFT on one learner worker; Ray Train calls this on each of them."""
    with open_run(setup) as run:
        examples = Examples.load(run, load_examples)
        records = Records(run)
        evaluation = ResponseEvaluation.start(run, examples.tokenizer)
        learner = new_learner(run, lambda: ResponseTask(load_policy(run.config.model)))
        return train_on_examples(run, records, examples, learner, evaluation)
