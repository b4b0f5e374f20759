"""Sample the rollouts of some prompts.

Concurrency. `Sampler.sample` blocks its caller until all responses are complete. Early completions
become rollouts in the threads that report them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from raypo.config import RewardSection, SamplingSection
from raypo.data.stop_tokens import without_end
from raypo.rewards.scoring import first_reason, too_many_failures
from raypo.rollout.engines import Engines
from raypo.seeds import SeedWord
from raypo.serving.client import Completions
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Prompt, Rollout


class Plays(Protocol):
    """Runner of multi-turn episodes (`Episodes`)."""

    def play(
        self, prompts: Sequence[Prompt], engines: Engines, sampling: Sampling
    ) -> list[Rollout]:
        """Run the episodes of some prompts, and return their rollouts (`Sampler.sample`)."""
        ...

    def waited_s(self) -> float:
        """Return the seconds that training batches waited for environments since the last call."""
        ...

    def close(self) -> None:
        """End the processes and threads that this runner has started."""
        ...


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a run's training or evaluation."""

    samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    seed: int
    seeds: Literal["request", "engine"] = "request"
    """Value of `rollout.engine.seeds`."""
    stream: int = 0
    """Number that is part of every seed: 0 in training, `EVALUATION_STREAM` in evaluation."""
    adapter: str | None = None
    """Name of the LoRA adapter to sample with. None means the engines' own weights."""
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    priority: int | None = 0
    """Priority of requests that join a running batch. Lower numbers come first. None means that
    older draws come first."""
    owner: str = ""
    """Id of all requests, which names the run and its attempt."""
    episodes: Plays | None = None
    """Runner of the episodes. None means that each sample is a single response."""
    with_experts: bool = False
    """True if the learner replays the engine's experts (`rollout.router_replay`)."""

    @classmethod
    def of(
        cls,
        section: SamplingSection,
        *,
        stop_token_ids: tuple[int, ...],
        seed: int,
        samples_per_prompt: int = 1,
        adapter: str | None = None,
        priority: int | None = 0,
        owner: str = "",
        episodes: Plays | None = None,
        with_experts: bool = False,
    ) -> Sampling:
        """Return the sampling parameters of training rollouts."""
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
            seeds=section.engine.seeds,
            adapter=adapter,
            priority=priority,
            owner=owner,
            episodes=episodes,
            with_experts=with_experts,
        )


@dataclass(frozen=True)
class Sampler:
    """Samples responses from the engines, with the sampling parameters of training or evaluation.

    Every response has its own seed, derived from the run's seed, the draw and the sample index. A
    response therefore does not depend on its batch, on its engine, or on the loss of an engine.
    With `rollout.engine.seeds: engine`, requests have no seeds.
    """

    engines: Engines
    tokenizer: Any
    sampling: Sampling

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        on_rollouts: Callable[[list[Rollout]], None] | None = None,
    ) -> list[Rollout]:
        """Sample `samples_per_prompt` responses for each prompt.

        Args:
            prompts: The drawn prompts.
            on_rollouts: Callback that gets all rollouts of a prompt if they are complete before the
                whole batch is. It is called from any thread, and never for episodes.

        Returns:
            The rollouts, in the order of prompts and samples.

        Raises:
            Exception: the error of a request that failed. The other requests are cancelled.
        """
        sampling = self.sampling
        if sampling.episodes is not None:
            return sampling.episodes.play(prompts, self.engines, sampling)
        requests = [
            request_of(prompt, number, sampling)
            for prompt in prompts
            for number in range(sampling.samples_per_prompt)
        ]
        groups = _Groups(prompts, sampling, self.tokenizer, on_rollouts)
        send = self._by_load if self.engines.joins else self._by_rule
        calls: list[Completions] = []
        try:
            calls.extend(send(requests, groups))
            return groups.all_of([answer for call in calls for answer in call.result()])
        except BaseException:
            for call in calls:
                call.cancel()
            raise

    def _by_rule(
        self, requests: Sequence[SamplingRequest], groups: _Groups
    ) -> Iterator[Completions]:
        """Send about equal parts to the engines, each as one batch, so that bits repeat."""
        engines = self.engines.per_engine()
        size = max(-(-len(requests) // len(engines)), 1)
        for engine, first in zip(engines, range(0, len(requests), size), strict=False):
            report = partial(groups.add, first) if groups.on_rollouts else None
            yield engine.generate(requests[first : first + size], report)

    def _by_load(
        self, requests: Sequence[SamplingRequest], groups: _Groups
    ) -> Iterator[Completions]:
        """Send the samples of each prompt to the engine that has the fewest of them."""
        size = self.sampling.samples_per_prompt
        for first in range(0, len(requests), size):
            call = self.engines.submit(requests[first : first + size])
            if groups.on_rollouts:
                call.add_done_callback(partial(groups.add_call, first))
            yield call


@dataclass
class _Groups:
    """Collector of completions, which makes the rollouts of a prompt once all have come."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    tokenizer: Any
    on_rollouts: Callable[[list[Rollout]], None] | None
    _completions: dict[int, Completion] = field(default_factory=dict)
    _rollouts: dict[int, list[Rollout]] = field(default_factory=dict)
    """Finished rollouts by position in `prompts`."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, first: int, index: int, completion: Completion) -> None:
        """Add a completion that is ready early. A repeated one is ignored.

        Args:
            first: Number of the first request of its call.
            index: Index of its request in the call.
            completion: The completion.
        """
        size = self.sampling.samples_per_prompt
        position = (first + index) // size
        numbers = range(position * size, (position + 1) * size)
        with self._lock:
            self._completions.setdefault(first + index, completion)
            if position in self._rollouts or any(n not in self._completions for n in numbers):
                return
            rollouts = self._made(position, [self._completions[n] for n in numbers])
            self._rollouts[position] = rollouts
        assert self.on_rollouts is not None
        self.on_rollouts(rollouts)

    def add_call(self, first: int, call: Completions) -> None:
        """Add the completions of a call, unless it failed or was cancelled."""
        if not call.cancelled() and call.exception() is None:
            for index, completion in enumerate(call.result()):
                self.add(first, index, completion)

    def all_of(self, completions: Sequence[Completion]) -> list[Rollout]:
        """Return the rollouts of all prompts. Those that `on_rollouts` already got are reused."""
        size = self.sampling.samples_per_prompt
        with self._lock:
            for position in range(len(self.prompts)):
                if position not in self._rollouts:
                    samples = completions[position * size : (position + 1) * size]
                    self._rollouts[position] = self._made(position, samples)
            positions = range(len(self.prompts))
            return [rollout for position in positions for rollout in self._rollouts[position]]

    def _made(self, position: int, completions: Sequence[Completion]) -> list[Rollout]:
        # Some tokenizers do not count the end of a turn as special, and would decode it as text.
        stops = self.sampling.stop_token_ids
        ids = [without_end(completion.token_ids, stops) for completion in completions]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        prompt = self.prompts[position]
        # The learner reads the prompt once, so its experts are those of one sample.
        recorded = (c.experts for c in completions if c.experts is not None)
        experts = next((of_row[: len(prompt.token_ids)] for of_row in recorded), None)
        return [
            _rollout(prompt, number, completion, text, experts)
            for number, (completion, text) in enumerate(zip(completions, texts, strict=True))
        ]


def request_of(
    prompt: Prompt, sample_index: int, sampling: Sampling, turn: int = 0
) -> SamplingRequest:
    """Return the request for one sample of a prompt, or for one turn of its episode."""
    has_seed = sampling.seeds == "request"
    return SamplingRequest(
        prompt_ids=prompt.token_ids,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=sampling.stop,
        seed=request_seed(sampling, prompt.group_index, sample_index, turn) if has_seed else None,
        stop_token_ids=sampling.stop_token_ids,
        adapter=sampling.adapter,
        id=sampling.owner,
        priority=prompt.group_index if sampling.priority is None else sampling.priority,
        # A resumed run does not repeat an earlier evaluation, but must sample the same as an
        # uninterrupted run. So evaluation must not fill the prefix cache of training.
        cache_salt=f"stream {sampling.stream}" if sampling.stream else "",
        with_experts=sampling.with_experts,
        images=prompt.images,
    )


def request_seed(sampling: Sampling, group_index: int, sample_index: int, turn: int = 0) -> int:
    """Return a 31-bit seed that differs between runs, draws, samples and turns."""
    parts = (SeedWord.REQUEST, sampling.seed, sampling.stream, group_index, sample_index)
    state = np.random.SeedSequence(parts + ((turn,) if turn else ())).generate_state(1)
    return int(state[0] >> 1)


def _rollout(
    prompt: Prompt,
    sample_index: int,
    completion: Completion,
    text: str,
    prompt_experts: np.ndarray | None,
) -> Rollout:
    experts = completion.experts
    return Rollout(
        prompt=prompt.text,
        response=text,
        prompt_ids=prompt.token_ids,
        response_ids=completion.token_ids,
        log_probs=completion.log_probs,
        response_mask=np.ones(len(completion.token_ids), dtype=bool),
        label=prompt.label,
        prompt_index=prompt.index,
        sample_index=sample_index,
        finish_reason=completion.finish_reason,
        weight_version=completion.weight_version,
        later_versions=completion.later_versions,
        group_index=prompt.group_index,
        messages=prompt.messages,
        data_source=prompt.data_source,
        row=prompt.row,
        images=prompt.images,
        prompt_experts=prompt_experts,
        response_experts=None if experts is None else with_last(experts[len(prompt.token_ids) :]),
    )


def with_last(experts: np.ndarray) -> np.ndarray:
    """Append experts 0 of the last token, which no model reads."""
    return np.concatenate([experts, np.zeros_like(experts, shape=(1, *experts.shape[1:]))])


def is_trainable(scored: Rollout) -> bool:
    """Return whether a rollout can be trained: it has a score and at least one sampled token."""
    return math.isfinite(scored.score) and bool(scored.response_mask.any())


def samples_of(scored: list[Rollout]) -> list[Rollout]:
    """Return one rollout per sample. If an episode has several conversations, take the first."""
    return [rollout for rollout in scored if rollout.row_index == 0]


def refuse_too_many_failures(scored: list[Rollout], section: RewardSection) -> None:
    """Stop the run if too many samples could not be scored.

    Raises:
        RewardError: more than `reward.max_failed_fraction` of the samples have no score.
    """
    samples = samples_of(scored)
    failed = [sample for sample in samples if not math.isfinite(sample.score)]
    if len(failed) > section.max_failed_fraction * len(samples):
        values = (value for sample in samples for value in sample.scores_by_source.values())
        raise too_many_failures(
            len(failed),
            len(samples),
            failed[0],
            name=section.function or "the reward function",
            max_failed_fraction=section.max_failed_fraction,
            reason=first_reason(values),
        )
