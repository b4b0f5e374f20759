"""Probe of a push: engines and learner must give similar log-probs to the same tokens.

Notation: B probe responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import OnlineConfig, PolicyExamplesConfig
from raypo.data.padding import pad_right
from raypo.learner.tasks import response_batch
from raypo.serving.client import EngineClient
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Example, Experience, Prompt
from raypo.weights.manifest import WeightError

NUM_PROBES = 2
"""Number of prompts in a probe: the first ones of a run."""
PROBE_PROMPT_TOKENS, PROBE_TOKENS = 16, 4
"""Number of tokens taken from the end of each prompt, and number of response tokens to sample."""
PRIORITY = -1
"""Priority of probes: they go before training requests, because the push is blocked on them."""


@dataclass(frozen=True)
class Bound:
    """Largest gap between the log-probs of engine and learner that rounding can explain."""

    statistic: Literal["max", "mean"]
    """max compares the worst token of a probe, mean its average token."""
    nats: float
    """The bound, in nats per token."""


def probe_bound(dtype: str, *, on_gpu: bool, quantized: bool = False) -> Bound:
    """Return the largest allowed gap. If the weights differ, the gap is 0.7 nats or more."""
    # FP8 has 3 bits of mantissa: the measured mean gap of SmolLM2-135M was 0.23 with weights, 0.17
    # with keys and 0.29 with both in FP8, and 0.05 without.
    if quantized:
        return Bound("mean", 0.5)
    # bfloat16 has 7 bits of mantissa, and engine and learner round in different places. The
    # measured mean gap was 0.07.
    if dtype == "bfloat16":
        return Bound("mean", 0.15)
    # In float32 on CPU, engine and learner compute alike. On a GPU vLLM multiplies float32 in TF32
    # (10 bits): the measured mean gap on an H100 was 0.0035, and 0.03 leaves room for deeper
    # models.
    return Bound("mean", 0.03) if on_gpu else Bound("max", 1e-3)


class ProbedLearner(Protocol):
    """A learner that can compute the log-probs of a probe."""

    def log_probs(self, experience: Experience) -> Tensor:
        """Return the log-probs of response tokens, [B, T] float32, in nats."""
        ...


@dataclass(frozen=True)
class Probe:
    """Prompts on which the log-probs of engine and learner are compared after every push."""

    prompts: Sequence[np.ndarray]  # int32 [P] each
    max_new_tokens: int
    temperature: float
    dtype: str
    seed: int
    adapter: str | None = None
    """Name of the adapter to sample with. None means the engines' own weights."""
    quantized: bool = False
    """True if the engines' weights, or their keys and values, are quantised."""
    joins: bool = False
    """True if the probe joins the engines' running batches. False makes it an exclusive batch."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        config: OnlineConfig | PolicyExamplesConfig,
        *,
        temperature: float,
        adapter: str | None = None,
        joins: bool = False,
    ) -> Probe:
        """Return the probe of a run: its first prompts, at the learner's temperature."""
        return cls(
            prompts=[prompt.token_ids for prompt in islice(prompts, NUM_PROBES)],
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=temperature,
            dtype=config.model.dtype,
            seed=config.seed,
            adapter=adapter,
            quantized=config.rollout.engine.low_precision is not None,
            joins=joins,
        )

    def requests(self, version: int) -> list[SamplingRequest]:
        """Return the sampling requests of the probe. Their seeds depend on the version."""
        return [
            SamplingRequest(
                prompt_ids=ids[-PROBE_PROMPT_TOKENS:],
                max_new_tokens=min(PROBE_TOKENS, self.max_new_tokens),
                temperature=self.temperature,
                seed=(self.seed + 7919 * version + number) % 2**31,
                adapter=self.adapter,
                priority=PRIORITY,
            )
            for number, ids in enumerate(self.prompts)
        ]


def try_probe(
    learner: ProbedLearner, engine: EngineClient, probe: Probe, version: int, workers: Workers
) -> dict[str, float]:
    """Compare the log-probs of all engines with the learner's. All workers call it together.

    Returns:
        `mismatch/probe_gap_max` and `mismatch/probe_gap_mean`, in nats per token.

    Raises:
        WeightError: the gap exceeds `probe_bound`.
    """
    sampled: list[Completion] | None = None
    if workers.rank == 0:
        of_engines = engine.sample_on_all(probe.requests(version), alone=not probe.joins)
        sampled = [completion for batch in of_engines for completion in batch]
    completions: list[Completion] = workers.broadcast(sampled)
    prompts = [request.prompt_ids for request in probe.requests(version)]
    prompts *= len(completions) // len(prompts)
    pairs = zip(prompts, completions, strict=True)
    batch = response_batch([Example(prompt, completion.token_ids) for prompt, completion in pairs])
    engine_log_probs = pad_right(
        [completion.log_probs for completion in completions], torch.float32
    )
    gap = (learner.log_probs(batch) - engine_log_probs).abs()[batch.response_mask]
    metrics = {
        "mismatch/probe_gap_max": float(gap.max()),
        "mismatch/probe_gap_mean": float(gap.mean(dtype=torch.float64)),
    }
    bound = probe_bound(probe.dtype, on_gpu=torch.cuda.is_available(), quantized=probe.quantized)
    measured = metrics[f"mismatch/probe_gap_{bound.statistic}"]
    if not measured <= bound.nats:
        raise WeightError(
            f"Push of version {version}: engine and learner give other log-probs to the same "
            f"tokens ({measured:.2g} nats apart, at most {bound.nats:g} is allowed in "
            f"{probe.dtype}). The engine does not hold the learner's weights, or computes a "
            "different model; look at rollout.engine.extra."
        )
    return metrics
