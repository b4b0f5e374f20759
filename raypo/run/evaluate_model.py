"""A policy on held-out prompts, without a run: one engine in this process, no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from raypo.calls import Here
from raypo.collectives import Workers
from raypo.config import ConfigError, PPOConfig, SFTConfig
from raypo.data.prompts import load_prompts
from raypo.models.loading import load_causal_lm, load_tokenizer, stop_token_ids
from raypo.rewards.loader import load_function
from raypo.rollout.collect import Sampling
from raypo.rollout.evaluation import evaluate_policy
from raypo.serving.engine import Engine
from raypo.serving.requests import Completion, SamplingRequest
from raypo.weights.buckets import pack
from raypo.weights.transport import BUCKET_BYTES, LocalTransport


def evaluate_model(
    model: str, config: PPOConfig | SFTConfig, tell: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """`eval/*` of a policy by source of its held-out prompts, the files of `eval.prompts`.

    Args:
        model: Folder or hub id of a causal language model.
        config: Its `data`, `rollout`, `eval` and `model.dtype` count; `eval.function`, else
            `reward.function`, is the judge.
        tell: Called with what goes on.

    Raises:
        ConfigError: the config names no held-out prompts or no judge, or a prompt file is wrong.
    """
    paths = config.eval.prompts
    if not paths:
        raise ConfigError(
            "eval.prompts (None): there is nothing to evaluate on. Set it to files or a data set."
        )
    spec, key = config.eval.function, "eval.function"
    if spec is None and isinstance(config, PPOConfig):
        spec, key = config.reward.function, "reward.function"
    if spec is None:
        raise ConfigError(
            "eval.function (None): nobody judges the answers. Set it to file.py:name or "
            "package.module:name."
        )
    function = load_function(spec, key=key)
    tokenizer = load_tokenizer(model)
    prompts = {
        str(path): load_prompts(
            config.data.model_copy(update={"prompts": (path,)}), tokenizer, key="eval.prompts"
        ).prompts
        for path in paths
    }
    sampling = Sampling.of(
        config.rollout, stop_token_ids=stop_token_ids(model, tokenizer), seed=config.seed
    )
    tell("starting the engine")
    with _engine_of(model, config) as engine:
        results = {}
        for path, held_out in prompts.items():
            tell(f"answering {len(held_out)} prompts of {path}")
            results[path] = evaluate_policy(
                held_out,
                engine,
                tokenizer,
                function,
                section=config.eval,
                sampling=sampling,
                workers=Workers(),
            ) | {"eval/prompts": float(len(held_out))}
    return results


def joined(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """The figures over all sources: means by their prompts, counts summed."""
    total = sum(figures["eval/prompts"] for figures in results.values())
    whole = {"eval/prompts": total}
    for name in next(iter(results.values())):
        if name == "eval/failed":
            whole[name] = sum(figures[name] for figures in results.values())
        elif name != "eval/prompts":
            whole[name] = (
                sum(figures[name] * figures["eval/prompts"] for figures in results.values()) / total
            )
    return whole


@dataclass(frozen=True)
class LocalEngine:
    """One engine of this process, asked as a deployment of engines is."""

    generate: Here[[list[SamplingRequest]], list[Completion]]

    def each_preferred(self) -> list[LocalEngine]:
        """Itself: there is no other one."""
        return [self]


@contextmanager
def _engine_of(model: str, config: PPOConfig | SFTConfig) -> Iterator[LocalEngine]:
    """An engine with the model's weights."""
    engine = Engine(
        model,
        section=config.rollout.engine,
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        seed=config.seed,
    )
    try:
        weights = load_causal_lm(model, dtype=config.model.dtype)
        named = weights.named_parameters(remove_duplicate=False)
        with torch.no_grad():
            buckets = pack(((n, p.detach()) for n, p in named), bucket_bytes=BUCKET_BYTES)
            engine.load_weights(LocalTransport().send(buckets, version=0))
        del weights
        yield LocalEngine(Here(engine.generate))
    finally:
        engine.shutdown()
