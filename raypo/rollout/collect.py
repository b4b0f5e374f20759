"""Step 4: prompts -> rollouts -> scores and reference log-probs, for one worker's share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from raypo.calls import Method
from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import Workers, as_tensor
from raypo.config import RewardSection, SamplingSection
from raypo.data.stream import Draw
from raypo.rewards.scoring import first_reason, too_many_failures
from raypo.rollout.judges import Judges
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Rollout, ScoredRollout


class Sampler(Protocol):
    """What sampling asks of engines."""

    @property
    def generate(self) -> Method[[list[SamplingRequest]], list[Completion]]:
        """One response a request, in the order given."""
        ...

    async def join(self, request: SamplingRequest) -> Completion:
        """One response, which joins what is being sampled; no thread waits for it."""
        ...

    def each_preferred(self) -> Sequence[Sampler]:
        """This worker's engines, one by one; itself where it has but one."""
        ...


class Reference(Protocol):
    """What a step asks of the reference model."""

    @property
    def log_probs(self) -> Method[[list[Rollout]], list[np.ndarray]]:
        """float32 [T] of each response's tokens, nats."""
        ...


class Decoder(Protocol):
    """What sampling asks of a tokenizer."""

    def batch_decode(self, ids: list[np.ndarray], /, *, skip_special_tokens: bool) -> list[str]:
        """The text of each row of ids."""
        ...


class Plays(Protocol):
    """Who plays episodes of several turns."""

    def play(
        self,
        draws: Sequence[Draw],
        engine: Sampler,
        sampling: Sampling,
        push_again: PushAgain | None,
    ) -> list[Rollout]:
        """As `sample`."""
        ...

    def waited_s(self) -> float:
        """Seconds that no episode could be asked, since this was last asked."""
        ...

    def close(self) -> None:
        """End what it has started."""
        ...


_SEED_WORD = 4
"""First of the numbers that seed a request; prompt stream, dealing and learner have 1 to 3."""


@dataclass(frozen=True)
class Sampling:
    """How prompts become responses."""

    samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    seed: int
    stream: int = 0
    """Keeps the seeds of training and evaluation apart."""
    adapter: str | None = None
    """Name of the LoRA adapter that the engines answer with; None: their own weights alone."""
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    priority: int = 0
    """Of requests that join what is being sampled; lower comes sooner."""
    episodes: Plays | None = None
    """Where responses are episodes of several turns: who plays them."""

    @classmethod
    def of(
        cls,
        section: SamplingSection,
        *,
        stop_token_ids: tuple[int, ...],
        seed: int,
        samples_per_prompt: int = 1,
        adapter: str | None = None,
        episodes: Plays | None = None,
    ) -> Sampling:
        """The sampling of training rollouts."""
        return cls(
            samples_per_prompt=samples_per_prompt,
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            stop=section.stop,
            stop_token_ids=stop_token_ids,
            seed=seed,
            adapter=adapter,
            episodes=episodes,
        )


@dataclass(frozen=True)
class PushAgain:
    """What all workers do together when no engine is left that holds the weights."""

    push: Callable[[], object]
    workers: Workers


def sample(
    draws: Sequence[Draw],
    engine: Sampler,
    tokenizer: Decoder,
    sampling: Sampling,
    push_again: PushAgain | None = None,
) -> list[Rollout]:
    """Responses for this worker's draws: `samples_per_prompt` a draw, in order.

    Every response has a seed of its own, made from the run's seed, its draw and its number, so
    that it does not depend on the batch or the worker that it is sampled in, nor on an engine that
    was lost meanwhile.

    Args:
        push_again: Given: all workers call this together, and where one of them is left without
            an engine, all leave for one more push of the weights.
    """
    if sampling.episodes is not None:
        return sampling.episodes.play(draws, engine, sampling, push_again)
    requests = [
        request_of(draw, number, sampling)
        for draw in draws
        for number in range(sampling.samples_per_prompt)
    ]
    completions = _generate(requests, engine, push_again) if requests or push_again else []
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    return [
        _rollout(draws[i // sampling.samples_per_prompt], i % sampling.samples_per_prompt, c, text)
        for i, (c, text) in enumerate(zip(completions, texts, strict=True))
    ]


def _generate(
    requests: list[SamplingRequest], engine: Sampler, push_again: PushAgain | None
) -> list[Completion]:
    try:
        completions, lost = ask(requests, engine), None
    except NoReplicaLeft as error:
        if push_again is None:
            raise
        completions, lost = [], error
    if push_again is None or not push_again.workers.sum(as_tensor(lost is not None)):
        return completions
    push_again.push()
    return ask(requests, engine) if lost else completions


def ask(requests: list[SamplingRequest], engine: Sampler) -> list[Completion]:
    """All at once, each of this worker's engines an equal lot; the answers in the order given."""
    engines = engine.each_preferred()
    size = -(-len(requests) // len(engines))
    lots = [requests[i * size : (i + 1) * size] for i in range(len(engines))]
    pending = [one.generate.remote(lot) for one, lot in zip(engines, lots, strict=True) if lot]
    return [completion for response in pending for completion in response.result()]


def request_of(draw: Draw, sample_index: int, sampling: Sampling, turn: int = 0) -> SamplingRequest:
    """What an engine is asked for one sample of a draw; of an episode, for a turn of it."""
    return SamplingRequest(
        prompt_ids=draw.prompt.token_ids,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=sampling.stop,
        seed=request_seed(sampling, draw.group_index, sample_index, turn),
        stop_token_ids=sampling.stop_token_ids,
        adapter=sampling.adapter,
        priority=sampling.priority,
    )


def request_seed(sampling: Sampling, group_index: int, sample_index: int, turn: int = 0) -> int:
    """A 31-bit seed that differs between runs, draws, samples and turns."""
    parts = (_SEED_WORD, sampling.seed, sampling.stream, group_index, sample_index)
    state = np.random.SeedSequence(parts + ((turn,) if turn else ())).generate_state(1)
    return int(state[0] >> 1)


def _rollout(draw: Draw, sample_index: int, completion: Completion, text: str) -> Rollout:
    return Rollout(
        prompt=draw.prompt.text,
        response=text,
        prompt_ids=draw.prompt.token_ids,
        response_ids=completion.token_ids,
        log_probs=completion.log_probs,
        response_mask=np.ones(len(completion.token_ids), dtype=bool),
        label=draw.prompt.label,
        prompt_index=draw.prompt.index,
        sample_index=sample_index,
        finish_reason=completion.finish_reason,
        weight_version=completion.weight_version,
        later_versions=completion.later_versions,
        group_index=draw.group_index,
        messages=draw.prompt.messages,
        data_source=draw.prompt.data_source,
    )


def judge(
    rollouts: list[Rollout], judges: Judges, reference: Reference | None
) -> list[ScoredRollout]:
    """The rollouts with their scores and reference log-probs; all judges work at the same time."""
    pending = reference.log_probs.remote(rollouts) if reference and rollouts else None
    scores = judges.scores_by_source(rollouts)
    ref_log_probs = pending.result() if pending else [None] * len(rollouts)
    return [
        ScoredRollout(rollout, judges.total(by_source), by_source, log_probs)
        for rollout, by_source, log_probs in zip(rollouts, scores, ref_log_probs, strict=True)
    ]


def is_trainable(scored: ScoredRollout) -> bool:
    """Whether it can be learned from: it has a score, and at least one sampled token."""
    return math.isfinite(scored.score) and bool(scored.rollout.response_mask.any())


def samples_of(scored: list[ScoredRollout]) -> list[ScoredRollout]:
    """One rollout a sample: of an episode with several conversations, its first."""
    return [each for each in scored if each.rollout.row_index == 0]


def refuse_too_many_failures(
    scored: list[ScoredRollout], section: RewardSection, workers: Workers
) -> None:
    """Stop where scoring fails too often; all workers call it together.

    Raises:
        RewardError: of all workers' samples, more than `reward.max_failed_fraction` have no score.
    """
    scored = samples_of(scored)
    failed = [s.rollout for s in scored if not math.isfinite(s.score)]
    reason = first_reason(value for s in scored for value in s.scores_by_source.values())
    num_failed, num_all = workers.sum(as_tensor(len(failed), len(scored))).tolist()
    if num_failed > section.max_failed_fraction * num_all:
        (first, *_) = (rollout for share in workers.gather(failed[:1]) for rollout in share)
        reasons = workers.gather(reason)
        raise too_many_failures(
            int(num_failed),
            int(num_all),
            first,
            name=section.function or "the reward function",
            max_failed_fraction=section.max_failed_fraction,
            reason=next(filter(None, reasons), None),
        )
