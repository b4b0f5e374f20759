"""The real Learner, collecting and advantages on a tiny Llama, with plain torch for DeepSpeed."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM

from raypo.collectives import Workers
from raypo.config import LearnerSection, ModelSection, PPOSection
from raypo.learner import learner as learner_module
from raypo.learner.learner import Learner
from raypo.learner.roles import Roles
from raypo.metrics.clock import Clock
from raypo.models import critic as critic_module
from raypo.models import lora as lora_module
from raypo.models.networks import Policy
from raypo.ppo.controllers import UpdateState
from raypo.recipes.ppo import ppo_step
from raypo.rewards.scoring import ScoreOfParts
from raypo.rollout.sharding import deal, to_experience
from raypo.rollout.step_batch import StepBatch
from raypo.types import Experience, Rollout

VOCABULARY = 12
MAX_NEW_TOKENS = 6
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 4, 3
TEMPERATURE = 0.8


@functools.cache
def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """One layer in float64, far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.4,
        )
        return LlamaForCausalLM(config).double()


class PlainModel:
    """What `TrainedModel` promises, on plain torch; it remembers the gradients of each step."""

    optimizer: Callable[..., torch.optim.Optimizer] = functools.partial(torch.optim.SGD)
    dtype = torch.float64
    is_packed = True

    def __init__(
        self,
        module: Any,
        *,
        dtype: str,
        section: LearnerSection,
        workers: Workers,
        mpu: None = None,
        sequence: None = None,
    ) -> None:
        self.module, self.workers = module.to(type(self).dtype), workers
        self.device = torch.device("cpu")
        if hasattr(module, "value_head"):  # it starts at 0, where much would not show
            generator = torch.Generator().manual_seed(1)
            weight = module.value_head.weight
            weight.data = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        self.gradients: list[Tensor] = []
        self._optimizer = type(self).optimizer(module.parameters(), lr=0.0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> tuple[bool, float]:
        for parameter in self.module.parameters():
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.workers.sum(mine)
        parameters = list(self.module.parameters())
        gradient = nn.utils.parameters_to_vector([p.grad for p in parameters if p.grad is not None])
        self.gradients.append(gradient)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return True, float(gradient.norm())


@contextmanager
def plain_models() -> Iterator[None]:
    """Learners made in here hold `PlainModel`s of `tiny_llama`; one thread, they are tiny."""
    llama, num_threads = tiny_llama(), torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        patch.object(learner_module, "TrainedModel", PlainModel),
        patch.object(lora_module, "load_causal_lm", lambda *_, **__: copy.deepcopy(llama)),
        patch.object(critic_module, "load_backbone", lambda *_, **__: copy.deepcopy(llama.model)),
    ):
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def plain_learner(
    ppo: PPOSection,
    workers: Workers,
    *,
    tokens: int = 10_000,
    rate: float = 0.03,
    num_steps: int = 9,
    roles: Roles | None = None,
    **section: Any,
) -> Learner:
    """A learner under `plain_models`; `tokens` of a micro-batch, `rate` of learning, `roles` of its
    workers, further keys of its `section`.
    """
    section |= {"policy_lr": rate, "critic_lr": rate, "max_tokens_per_microbatch": tokens}
    return Learner(
        ModelSection(policy="tiny"),
        ppo,
        LearnerSection.model_validate(section),
        temperature=TEMPERATURE,
        max_new_tokens=MAX_NEW_TOKENS,
        num_steps=num_steps,
        seed=0,
        workers=workers,
        roles=roles,
    )


@functools.cache
def group(index: int) -> tuple[Rollout, ...]:
    """All samples of one draw; every third group's scores are alike, the first has no range."""
    generator = np.random.default_rng(index)
    prompt = generator.integers(0, VOCABULARY, generator.integers(1, 5)).astype(np.int32)
    samples = []
    for number in range(SAMPLES_PER_PROMPT):
        tokens = int(generator.integers(1, MAX_NEW_TOKENS + 1))
        response = generator.integers(0, VOCABULARY, tokens).astype(np.int32)
        mask = np.ones(tokens, dtype=bool)
        if tokens > 3:
            mask[1] = False  # an environment wrote it
        rollout = Rollout(
            prompt="p",
            response="r",
            prompt_ids=prompt,
            response_ids=response,
            log_probs=np.zeros(tokens, np.float32),
            response_mask=mask,
            label=None,
            prompt_index=index,
            sample_index=number,
            finish_reason="length" if tokens == MAX_NEW_TOKENS or number == 0 else "stop",
            weight_version=-int(index == 1),
            group_index=index,
        )
        alike = index % 3 == 2
        score = 0.5 if alike else float(generator.normal())
        parts = {"function": ScoreOfParts(score, {"right": float(number)}), "model": -float(number)}
        samples.append(
            replace(
                rollout,
                score=score,
                scores_by_source=parts,
                ref_log_probs=np.zeros(tokens, np.float32),
            )
        )
    return tuple(with_log_probs(samples, generator))


def with_log_probs(samples: list[Rollout], generator: np.random.Generator) -> Iterator[Rollout]:
    """Log-probs of engine and reference: the policy's, with noise."""
    with torch.no_grad():
        batch = to_experience(samples)
        exact = Policy(tiny_llama(), temperature=TEMPERATURE)(batch)[0].float().numpy()
    for row, each in enumerate(samples):
        tokens = len(each.response_ids)
        noise = generator.normal(0, 0.4, (2, tokens)).astype(np.float32)
        engine, reference = exact[row, :tokens] + noise
        yield replace(each, log_probs=engine, ref_log_probs=reference)


@dataclass
class Outcome:
    """All that a step leaves behind."""

    collected: StepBatch
    experience: Experience
    figures: dict[str, float]
    state: UpdateState
    policy: list[Tensor]
    """Gradients, one vector an optimizer step."""
    critic: list[Tensor] = field(default_factory=list)


def one_step(
    ppo: PPOSection,
    workers: Workers | None = None,
    *,
    tokens: int = 10_000,
    shuffled: bool = False,
    step: int = 1,
    rate: float = 0.03,
    critic_workers: int = 0,
) -> Outcome:
    """A whole step of the loop, from draws to gradients; call it under `plain_models`.

    The last workers, `critic_workers` of them, train the critic alone.
    """
    workers, position = workers or Workers(), 0
    roles = Roles.shared(workers)
    if critic_workers:
        sizes = (workers.count - critic_workers, critic_workers)
        teams = (range(sizes[0]), range(sizes[0], workers.count))
        roles = Roles(workers, workers.team(sizes), teams)

    def scored_rollouts(count: int) -> list[Rollout]:
        nonlocal position
        draws = range(position, position + count)
        position += count
        return [each for index in draws for each in group(index)]

    batch = StepBatch(missing_groups=PROMPTS_PER_STEP, filter=ppo.filter)
    while batch.num_wanted:
        batch.add(scored_rollouts(batch.num_wanted))
    learner = plain_learner(ppo, workers, tokens=tokens, rate=rate, roles=roles)
    hands = deal(
        batch.trained,
        minibatch_size=ppo.minibatch_size,
        seed=(0, step),
        num_workers=workers.count,
        teams=roles.teams,
    )
    dealt = hands[workers.rank]
    experience = to_experience(dealt, parts=ppo.part_names)
    if shuffled:  # in another order, and wider
        order = torch.randperm(len(experience), generator=torch.Generator().manual_seed(3))
        experience = widened(experience.select(order))
    experience, metrics, state = ppo_step(
        learner,
        experience,
        ppo,
        UpdateState.initial(ppo),
        roles.own,
        max_new_tokens=MAX_NEW_TOKENS,
        step=step,
        clock=Clock(),
    )
    models: Any = learner
    computed = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
    return Outcome(
        batch,
        experience,
        batch.metrics | computed,
        state,
        models._policy.gradients if roles.trains_policy else [],
        models._critic.gradients if models._critic else [],
    )


class ThreadWorkers(Workers):
    """Workers that are threads of this process, to try any number of them in no time."""

    def __init__(self, rank: int, count: int, barrier: threading.Barrier, box: list[Any]) -> None:
        super().__init__(rank, count)
        object.__setattr__(self, "_barrier", barrier)
        object.__setattr__(self, "_box", box)

    def gather(self, value: Any) -> list[Any]:
        box, barrier = vars(self)["_box"], vars(self)["_barrier"]
        box[self.rank] = value
        barrier.wait(30)
        everyone = list(box)
        barrier.wait(30)
        return everyone

    def with_new_group(self) -> Workers:
        own = (threading.Barrier(self.count), [None] * self.count)
        barrier, box = self.gather(own)[0]
        return ThreadWorkers(self.rank, self.count, barrier, box)

    def team(self, sizes: Sequence[int]) -> Workers:
        made = [(size, threading.Barrier(size), [None] * size) for size in sizes]
        first = 0
        for size, barrier, box in self.gather(made)[0]:
            if first <= self.rank < first + size:
                return ThreadWorkers(self.rank - first, size, barrier, box)
            first += size
        raise AssertionError("the sizes together are the count")

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def gather_first(self, value: Any) -> list[Any]:
        gathered = self.gather(value)
        return gathered if self.rank == 0 else []

    def scatter(self, values: Sequence[Any]) -> Any:
        return self.broadcast(values)[self.rank]

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        return [of_one[self.rank] for of_one in self.gather(list(values))]

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather(values)).sum(0)

    def max(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather(values)).amax(0)


def on_workers(count: int, function: Callable[[Workers], Any]) -> list[Any]:
    """What `function` gives on each of `count` workers, in the order of ranks."""
    barrier, box = threading.Barrier(count), [None] * count
    results: list[Any] = [None] * count

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadWorkers(rank, count, barrier, box))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r for r in results if isinstance(r, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return results


def widened(experience: Experience) -> Experience:
    """The same batch with two more response positions, False in every mask."""
    wide: dict[str, Any] = {}
    for name in (each.name for each in fields(experience)):
        value = getattr(experience, name)
        is_by_token = name != "parts" and not name.startswith("prompt_")
        if value is not None and value.dim() == 2 and is_by_token:
            value = pad(value, (0, 2))
        wide[name] = value
    return Experience(**wide)
