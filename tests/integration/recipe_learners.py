"""The learner of each recipe, made as a worker of a run makes it, and an update on fixed data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from raypo.cluster.run_monitor import MonitorClient
from raypo.collectives import Workers
from raypo.config import DistillationSection, DPOSection, RewardModelConfig, SFTConfig
from raypo.learner.distillation_task import DistillationTask
from raypo.learner.preference_tasks import PreferenceTask, VerdictTask
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import PairTask, ResponseTask
from raypo.models.loading import load_causal_lm, load_reward_model
from raypo.run.supervised_learner import even_shares, lengths, new_learner
from raypo.types import Example, Pair, Taught, Verdict

KINDS = ("sft", "dpo", "kto", "reward_model", "distillation")
"""Tasks of the recipes that learn from examples. Rejection sampling trains as sft does, iterative
dpo as dpo."""
OFF_LOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
"""Further keys of `learner.deepspeed.zero_optimization`."""
ITEMS = 5


class Case(NamedTuple):
    """A learner of the matrix."""

    kind: str
    """One of KINDS; ppo: policy and critic on all workers; apart: each on workers of its own."""
    dtype: str
    stage: int
    off_load: str = "none"
    """Key of OFF_LOADS."""


def example_learner(
    kind: str, folder: str, dtype: str, keys: dict[str, Any], workers: Workers | None = None
) -> SupervisedLearner[Any]:
    """The learner of a recipe that learns from examples; `keys` are of the section `learner`."""
    config_class = RewardModelConfig if kind == "reward_model" else SFTConfig
    config = config_class.model_validate(
        {
            "name": "run",
            "model": {"policy": folder, "dtype": dtype},
            "data": {"prompts": "a.jsonl", "max_prompt_tokens": 8, "max_response_tokens": 8},
            "learner": {"lr": 1e-3, "max_tokens_per_microbatch": 24, **keys},
            "num_steps": 9,
        }
    )

    def make_task() -> Any:
        if kind == "reward_model":
            model = load_reward_model(folder, dtype=dtype, new_head=True)
            return PairTask(model, centering_coef=0.1)
        policy = load_causal_lm(folder, dtype=dtype)
        if kind == "distillation":
            vocabulary = policy.config.vocab_size
            return DistillationTask(policy, DistillationSection(), vocabulary=vocabulary)
        if kind == "kto":
            return VerdictTask(policy, DPOSection(loss="kto"))
        return ResponseTask(policy) if kind == "sft" else PreferenceTask(policy, DPOSection())

    tell = MonitorClient(None)
    run: Any = SimpleNamespace(config=config, workers=workers or Workers(), tell=tell)
    return new_learner(run, make_task)


def items_of(kind: str) -> list[Any]:
    """Return examples of different lengths: the first one is as long as all others together."""
    generator = np.random.default_rng(0)
    made: list[Any] = []
    for number in range(ITEMS):
        tokens = 8 if number == 0 else 2
        prompt, response, other = (
            generator.integers(4, 60, count).astype(np.int32) for count in (2, tokens, 2)
        )
        reference = (-4.0 * tokens, -8.0)
        if kind == "sft":
            made.append(Example(prompt, response))
        elif kind == "kto":
            made.append(Verdict(prompt, response, number % 2 == 0, other, ref_log_probs=reference))
        elif kind == "distillation":
            log_probs = np.log(np.full((tokens, 2), 0.4, np.float32))
            made.append(
                Taught(
                    prompt,
                    response,
                    log_probs,
                    np.stack([response, other[:1].repeat(tokens)], axis=1),
                )
            )
        else:
            made.append(Pair(prompt, response, other, 0.5 * number, reference))
    return made


def example_update(kind: str, learner: SupervisedLearner[Any], *, step: int) -> dict[str, float]:
    """Update a learner on this worker's share of the examples."""
    items, data = items_of(kind), learner.data
    share = even_shares([lengths(item) for item in items], data.count)[data.rank]
    return learner.update([items[place] for place in share], step=step)
