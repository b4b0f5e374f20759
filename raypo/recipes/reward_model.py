"""Reward-model training on pairs of responses.

The model is a Hugging Face sequence classifier with one label.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from raypo.config import RewardModelConfig
from raypo.data.examples import load_pairs
from raypo.learner.tasks import PairTask
from raypo.models.loading import load_reward_model, stop_token_ids
from raypo.models.lora import add_adapter
from raypo.models.vision import freeze
from raypo.recipes.on_examples import Examples, train_on_examples
from raypo.run.records import Records
from raypo.run.run import open_run
from raypo.run.supervised_learner import new_learner


def train_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """Train a reward model on one learner worker; Ray Train calls this on each of them."""
    with open_run(setup) as run:
        examples = Examples.load(run, load_pairs)
        records = Records(run)
        learner = new_learner(run, partial(make_task, run.config, examples.tokenizer))
        return train_on_examples(run, records, examples, learner)


def make_task(config: RewardModelConfig, tokenizer: Any) -> PairTask:
    """Load `model.policy` as a classifier, with a new score head if it has none."""
    section = config.model
    model = load_reward_model(
        section.policy, dtype=section.dtype, attention=section.attention, new_head=True
    )
    freeze(model, section.freeze)
    model = add_adapter(model, section.lora)
    # transformers finds the last token of a row by the padding id. If that id also ends responses,
    # it would skip the end of the response.
    padding = tokenizer.pad_token_id
    ends = (tokenizer.eos_token_id, *stop_token_ids(section.policy, tokenizer))
    for of_model in (model.config, model.config.get_text_config()):  # the head reads the latter
        of_model.pad_token_id = None if padding in ends else padding
    return PairTask(model, centering_coef=config.reward_model.centering_coef)
