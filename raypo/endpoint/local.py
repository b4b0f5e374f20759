"""A model of a folder behind the endpoint: one engine in this process, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import AutoConfig

from raypo.config import EngineSection
from raypo.endpoint.app import Served
from raypo.models.loading import load_tokenizer, short_name, stop_token_ids
from raypo.serving.engine import Engine
from raypo.serving.requests import Completion, Heard, SamplingRequest

USUAL_MODEL_LEN = 8192
"""Tokens of prompt and response, of a model that could take more."""


@dataclass(frozen=True)
class EngineSampler:
    """Samples with an engine of this process."""

    engine: Engine

    async def sample(self, request: SamplingRequest, heard: Heard) -> Completion:
        """One response; a caller that is cancelled has it cancelled in the engine."""
        (answer,) = self.engine.submit([request], heard)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            asyncio.get_running_loop().run_in_executor(None, self.engine.cancel, request.id)
            raise


@contextmanager
def served_model(
    model: str,
    *,
    name: str | None,
    section: EngineSection,
    dtype: str,
    max_model_len: int | None,
) -> Iterator[tuple[Served, Engine]]:
    """A model with its own weights, and the engine that samples for it.

    Args:
        model: Folder or hub id of a causal language model.
        name: That clients ask for; None: the end of the folder's.
        section: Of the engine.
        dtype: float32 or bfloat16.
        max_model_len: Tokens of prompt and response; None: what the model takes, at most
            `USUAL_MODEL_LEN`.

    Raises:
        ConfigError: the model names no token that ends a response.
    """
    own = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", USUAL_MODEL_LEN)
    length = max_model_len or min(own, USUAL_MODEL_LEN)
    tokenizer = load_tokenizer(model)
    stops = stop_token_ids(model, tokenizer)
    engine = Engine(model, section=section, dtype=dtype, max_model_len=length, reads_weights=True)
    try:
        sampler = EngineSampler(engine)
        yield Served(name or short_name(model), tokenizer, stops, length, sampler), engine
    finally:
        engine.shutdown()
