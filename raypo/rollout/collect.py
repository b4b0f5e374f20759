"""Sample rollouts for one worker's share of the prompts.

Concurrency. `Sampler.sample` blocks its caller until all responses are complete. Early completions
become rollouts in the threads in which `Engines.generate` calls `on_completion`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from raypo.cluster.actors import NoReplicaLeft
from raypo.collectives import Workers, as_tensor
from raypo.config import RewardSection, SamplingSection
from raypo.data.stop_tokens import without_end
from raypo.rewards.scoring import first_reason, too_many_failures
from raypo.rollout.dispatch import sample_on_engines
from raypo.seeds import SeedWord
from raypo.serving.client import Engines
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Prompt, Rollout


class Decoder(Protocol):
    """The part of a tokenizer's interface that sampling uses."""

    def batch_decode(self, ids: list[np.ndarray], /, *, skip_special_tokens: bool) -> list[str]:
        """Return the text of each row of ids."""
        ...


class Plays(Protocol):
    """Runner of multi-turn episodes (`Episodes`)."""

    def play(
        self,
        prompts: Sequence[Prompt],
        engine: Engines,
        sampling: Sampling,
        push_again: PushAgain | None,
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
        )


@dataclass(frozen=True)
class PushAgain:
    """Weight push that all workers repeat together if any of them has no engine left."""

    push: Callable[[], object]
    workers: Workers


@dataclass(frozen=True)
class Sampler:
    """Samples responses from the engines, with the sampling parameters of training or evaluation.

    Every response has its own seed, derived from the run's seed, the draw and the sample index. A
    response therefore does not depend on its batch, on its worker, or on the loss of an engine.
    With `rollout.engine.seeds: engine`, requests have no seeds.
    """

    engines: Engines
    tokenizer: Decoder
    sampling: Sampling
    push_again: PushAgain | None = None
    """Weight push to repeat if a worker has no engine left. If it is set, all workers call `sample`
    together."""
    shares_engines: bool = False
    """True if several workers use the same engine, which then samples one batch for all of them."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        workers: Workers | None = None,
        *,
        on_rollouts: Callable[[list[Rollout]], None] | None = None,
    ) -> list[Rollout]:
        """Sample `samples_per_prompt` responses for each of this worker's prompts.

        Args:
            prompts: This worker's share of the drawn prompts.
            workers: The workers that sample at the same time. Needed if they share engines.
            on_rollouts: Callback that gets all rollouts of a prompt if they are complete before the
                whole batch is. It is called from any thread, and never for episodes.

        Returns:
            The rollouts, in the order of prompts and samples.
        """
        sampling = self.sampling
        if sampling.episodes is not None:
            return sampling.episodes.play(prompts, self.engines, sampling, self.push_again)
        requests = [
            request_of(prompt, number, sampling)
            for prompt in prompts
            for number in range(sampling.samples_per_prompt)
        ]
        groups = _Groups(prompts, sampling, self.tokenizer, on_rollouts)
        left, again = requests, self.push_again
        completions: list[Completion] = []
        while True:
            is_lost = False
            try:
                sampled = sample_on_engines(
                    left,
                    self.engines,
                    sharing=workers if self.shares_engines else None,
                    on_completion=groups.add if on_rollouts else None,
                )
                completions = sampled or completions
            except NoReplicaLeft:
                if again is None:
                    raise
                is_lost = True
            if again is None or not again.workers.sum(as_tensor(is_lost)):
                return groups.all_of(completions)
            again.push()
            # All workers sample together again. Workers that have their completions send no
            # requests.
            left = requests if is_lost else []


@dataclass
class _Groups:
    """Collector of completions, which makes the rollouts of a prompt once all have come."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    tokenizer: Decoder
    on_rollouts: Callable[[list[Rollout]], None] | None
    _completions: dict[int, Completion] = field(default_factory=dict)
    _rollouts: dict[int, list[Rollout]] = field(default_factory=dict)
    """Finished rollouts by place in `prompts`."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, index: int, completion: Completion) -> None:
        """Add a completion that is ready early. A repeated one is ignored."""
        size = self.sampling.samples_per_prompt
        place = index // size
        indices = range(place * size, (place + 1) * size)
        with self._lock:
            self._completions.setdefault(index, completion)
            if place in self._rollouts or any(each not in self._completions for each in indices):
                return
            rollouts = self._made(place, [self._completions[each] for each in indices])
            self._rollouts[place] = rollouts
        assert self.on_rollouts is not None
        self.on_rollouts(rollouts)

    def all_of(self, completions: Sequence[Completion]) -> list[Rollout]:
        """Return the rollouts of all prompts. Those that `on_rollouts` already got are reused."""
        size = self.sampling.samples_per_prompt
        with self._lock:
            for place in range(len(self.prompts)):
                if place not in self._rollouts:
                    samples = completions[place * size : (place + 1) * size]
                    self._rollouts[place] = self._made(place, samples)
            return [each for place in range(len(self.prompts)) for each in self._rollouts[place]]

    def _made(self, place: int, completions: Sequence[Completion]) -> list[Rollout]:
        # Some tokenizers do not count the end of a turn as special, and would decode it as text.
        ids = [without_end(each.token_ids, self.sampling.stop_token_ids) for each in completions]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [
            _rollout(self.prompts[place], number, completion, text)
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
    )


def request_seed(sampling: Sampling, group_index: int, sample_index: int, turn: int = 0) -> int:
    """Return a 31-bit seed that differs between runs, draws, samples and turns."""
    parts = (SeedWord.REQUEST, sampling.seed, sampling.stream, group_index, sample_index)
    state = np.random.SeedSequence(parts + ((turn,) if turn else ())).generate_state(1)
    return int(state[0] >> 1)


def _rollout(prompt: Prompt, sample_index: int, completion: Completion, text: str) -> Rollout:
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
    )


def is_trainable(scored: Rollout) -> bool:
    """Return whether a rollout can be trained: it has a score and at least one sampled token."""
    return math.isfinite(scored.score) and bool(scored.response_mask.any())


def samples_of(scored: list[Rollout]) -> list[Rollout]:
    """Return one rollout per sample. If an episode has several conversations, take the first."""
    return [each for each in scored if each.row_index == 0]


def refuse_too_many_failures(
    scored: list[Rollout], section: RewardSection, workers: Workers
) -> None:
    """Stop the run if too many samples could not be scored; all workers call it together.

    Raises:
        RewardError: more than `reward.max_failed_fraction` of all workers' samples have no score.
    """
    scored = samples_of(scored)
    failed = [s for s in scored if not math.isfinite(s.score)]
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
