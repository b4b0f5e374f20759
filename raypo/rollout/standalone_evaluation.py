"""Evaluation of a model on held-out prompts without a run: one engine in this process, no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import cache, partial

import torch

from raypo.config import (
    ConfigError,
    OnlineConfig,
    PolicyExamplesConfig,
    functions_of,
    source_name,
)
from raypo.data.prompts import load_prompts
from raypo.deployment.handle import local_handle
from raypo.metrics.reduce import WeightedMeans
from raypo.models.loading import load_tokenizer, stop_token_ids
from raypo.rewards.functions import evaluation_function, open_function
from raypo.rewards.labels import label_checks
from raypo.rewards.scoring import RewardFunction
from raypo.rollout.batch_scoring import FUNCTION, Scorer
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.engines import PolicyEngines
from raypo.rollout.episodes import open_episodes
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.image_reader import image_reader
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine
from raypo.serving.vllm_arguments import with_head_dtype
from raypo.types import Prompt


def evaluate_model(
    model: str, config: OnlineConfig | PolicyExamplesConfig, tell: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Evaluate a model on the prompts of `eval.prompts`.

    Args:
        model: Folder or hub id of a causal language model.
        config: Config of a run. Its `data`, `rollout`, `eval` and `model.dtype` are used.
            `eval.function` scores the responses; if it is not set, `reward.function` does, and
            for episodes its score is added to that of the environment or agent, as in the run.
        tell: Callback for progress messages.

    Returns:
        Metrics `eval/*` for each source of prompts. If there are several sources, `all` has the
        metrics over all of their prompts.

    Raises:
        ConfigError: the config has no held-out prompts or no function that scores, the score of the
            run needs models or servers, or a prompt file is invalid.
    """
    config = config.with_dtype(use_gpu=torch.cuda.is_available())
    paths = config.eval.prompts
    if not paths:
        raise ConfigError(
            "eval.prompts (None): there is nothing to evaluate on. Set it to files or a data set."
        )
    function, scorer = _scoring_of(config)
    tokenizer = load_tokenizer(model)
    all_sources = [str(path) for path in paths]
    checks = label_checks(config, "eval.prompts")
    prompts: dict[str, Sequence[Prompt]] = {}
    for path in paths:
        section = config.data.model_copy(update={"prompts": (path,)})
        loaded = load_prompts(
            section,
            tokenizer,
            key="eval.prompts",
            label_checks=checks,
            reader=cache(partial(image_reader, model)),
        )
        for note in loaded.notes("eval.prompts"):
            tell(note)
        is_unique = all_sources.count(str(path)) == 1
        prompts[str(path) if is_unique else source_name(path)] = loaded.prompts
    stop = stop_token_ids(model, tokenizer)
    episodes = None
    if isinstance(config, OnlineConfig):
        episodes = open_episodes(config, model, tokenizer, stop)
    sampling = Sampling.of(config.rollout, stop_token_ids=stop, seed=config.seed, episodes=episodes)
    tell("starting the engine")
    with closing(episodes) if episodes else nullcontext(), _engine_of(model, config) as engine:
        results: dict[str, dict[str, float]] = {}
        total = WeightedMeans()
        for path, held_out in prompts.items():
            tell(f"answering {len(held_out)} prompts of {path}")
            total.total("eval/prompts", len(held_out))
            metrics, _ = evaluate_policy(
                held_out,
                Sampler(PolicyEngines(engine), tokenizer, sampling),
                function,
                section=config.eval,
                scorer=scorer,
                total=total,
            )
            results[path] = metrics | {"eval/prompts": float(len(held_out))}
    if len(results) > 1:
        names = set[str]().union(*results.values())  # the sources have lines of their own
        results["all"] = {name: value for name, value in total.values().items() if name in names}
    return results


def _scoring_of(
    config: OnlineConfig | PolicyExamplesConfig,
) -> tuple[RewardFunction | None, Scorer | None]:
    """Return the function that scores the responses, or None and the scorer of episodes.

    Raises:
        ConfigError: nothing scores the responses, or the score of the run needs models or servers.
    """
    of_training, plays = None, False
    if isinstance(config, OnlineConfig):
        plays = config.rollout.is_episodic
        section = config.reward.model_copy(update={"processes": 0})
        if config.eval.function is None:
            of_training = open_function(section, None, functions_of(config.data.prompts))
    function = evaluation_function(config.eval, None if plays else of_training)
    if function is not None:
        return function, None
    if not isinstance(config, OnlineConfig) or not plays:
        raise ConfigError(
            "eval.function (None): no function scores the answers. Set it to file.py:name or "
            "package.module:name."
        )
    served = {
        "model.reward": [entry.path for entry in config.model.reward or ()],
        "reward.url": config.reward.url,
        "reward.judge": config.judges.get("reward.judge"),
    }
    for key, value in served.items():
        if value:
            raise ConfigError(
                f"{key} ({value}): is part of the run's score, but `raypo eval` calls no reward "
                f"models, servers or judges. Set eval.function, or set {key} to null to leave it "
                "out of the score."
            )
    weights = config.reward.weights
    return None, Scorer(of_training, (), {FUNCTION: weights.function})


@contextmanager
def _engine_of(model: str, config: OnlineConfig | PolicyExamplesConfig) -> Iterator[EngineClient]:
    """Start an engine with the model's weights, and shut it down at the end."""
    engine = Engine(
        model,
        section=with_head_dtype(
            config.rollout.engine, getattr(config.model, "head_dtype", "model")
        ),
        dtype=config.model.dtype,
        max_model_len=config.max_model_len,
        seed=config.seed,
        reads_text=config.rollout.reads_text,
        reads_weights=True,
        max_images=config.data.max_images if config.data.image_key else 1,
    )
    try:
        yield EngineClient(local_handle(engine))
    finally:
        engine.shutdown()
