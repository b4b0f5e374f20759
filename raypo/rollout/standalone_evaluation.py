"""Evaluation of a model on held-out prompts without a run: one engine in this process, no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext

import torch

from raypo.collectives import Workers
from raypo.config import (
    ConfigError,
    OnlineConfig,
    PolicyExamplesConfig,
    functions_of,
    source_name,
)
from raypo.data.prompts import load_prompts
from raypo.deployment.handle import local_handle
from raypo.models.loading import load_tokenizer, stop_token_ids
from raypo.rewards.functions import evaluation_function, open_function
from raypo.rewards.labels import label_checks
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.episodes import open_episodes
from raypo.rollout.evaluation import evaluate_policy
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine


def evaluate_model(
    model: str, config: OnlineConfig | PolicyExamplesConfig, tell: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Evaluate a model on the prompts of `eval.prompts`.

    Args:
        model: Folder or hub id of a causal language model.
        config: Config of a run. Its `data`, `rollout`, `eval` and `model.dtype` are used.
            `eval.function` scores the responses; if it is not set, `reward.function` does.
        tell: Callback for progress messages.

    Returns:
        Metrics `eval/*` for each source of prompts.

    Raises:
        ConfigError: the config has no held-out prompts or no function that scores, or a prompt file
            is invalid.
    """
    config = config.with_dtype(use_gpu=torch.cuda.is_available())
    paths = config.eval.prompts
    if not paths:
        raise ConfigError(
            "eval.prompts (None): there is nothing to evaluate on. Set it to files or a data set."
        )
    plays = isinstance(config, OnlineConfig) and config.rollout.is_episodic
    of_training = None
    if config.eval.function is None and isinstance(config, OnlineConfig) and not plays:
        section = config.reward.model_copy(update={"processes": 0})
        of_training = open_function(section, None, functions_of(config.data.prompts))
    # None means that the scores of the episodes are used.
    function = evaluation_function(config.eval, of_training)
    if function is None and not plays:
        raise ConfigError(
            "eval.function (None): no function scores the answers. Set it to file.py:name or "
            "package.module:name."
        )
    tokenizer = load_tokenizer(model)
    all_sources = [str(path) for path in paths]
    checks = label_checks(config, "eval.prompts")
    prompts = {}
    for path in paths:
        section = config.data.model_copy(update={"prompts": (path,)})
        loaded = load_prompts(section, tokenizer, key="eval.prompts", label_checks=checks)
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
        results = {}
        for path, held_out in prompts.items():
            tell(f"answering {len(held_out)} prompts of {path}")
            results[path] = evaluate_policy(
                held_out,
                Sampler(engine, tokenizer, sampling),
                function,
                section=config.eval,
                workers=Workers(),
                scorer=Scorer(None, (), {}) if plays else None,
            ) | {"eval/prompts": float(len(held_out))}
    return results


def joined(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """Combine the metrics of all sources: sums of counts, and means weighted by prompt counts."""
    whole: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in results.values() for name in metrics):
        having = [metrics for metrics in results.values() if name in metrics]
        whole[name] = sum(metrics[name] for metrics in having)
        if name not in ("eval/prompts", "eval/failed"):
            prompts = sum(metrics["eval/prompts"] for metrics in having)
            whole[name] = sum(each[name] * each["eval/prompts"] for each in having) / prompts
    return whole


@contextmanager
def _engine_of(model: str, config: OnlineConfig | PolicyExamplesConfig) -> Iterator[EngineClient]:
    """Start an engine with the model's weights, and shut it down at the end."""
    engine = Engine(
        model,
        section=config.rollout.engine,
        dtype=config.model.dtype,
        max_model_len=config.max_model_len,
        seed=config.seed,
        reads_text=config.rollout.reads_text,
        reads_weights=True,
    )
    try:
        yield EngineClient(local_handle(engine))
    finally:
        engine.shutdown()
