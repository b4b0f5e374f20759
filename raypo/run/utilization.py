"""Work of each phase of a PPO step in samples, tokens and FLOPs, and its rates."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from raypo.collectives import Workers, as_tensor
from raypo.config import ConfigError, PPOConfig
from raypo.learner.peak import peak_flops
from raypo.metrics.reduce import slowest
from raypo.models.flops import Lengths, forward_flops
from raypo.models.model_shape import Models, ModelShape
from raypo.rollout.collect import samples_of
from raypo.rollout.step_batch import StepBatch
from raypo.run.services import Services
from raypo.types import Experience, Rollout

MIN_PASS_S = 0.05
"""Seconds. Differences of shorter passes are chance."""


@dataclass(frozen=True)
class Work:
    """Work of one phase, over all workers."""

    samples: float
    """Number of samples. A whole episode is one sample."""
    tokens: float
    flops: float = 0.0
    """FLOPs of the models; see `raypo.models.flops`."""


def models_of(config: PPOConfig) -> Models | None:
    """Return the shapes of a run's models, or None if a config.json does not contain them."""
    try:
        return Models.read(config)
    except ConfigError:
        return None


@dataclass(frozen=True)
class Utilization:
    """Rates and model FLOPs utilisation (MFU) of a run's steps."""

    config: PPOConfig
    models: Models | None
    """Shapes of the models, or None if a config.json does not contain them."""
    peak_flops: float
    """Peak FLOP/s of all workers' devices together."""

    @classmethod
    def measure(cls, config: PPOConfig, workers: Workers) -> Utilization:
        """Measure the devices' peak FLOP/s on all workers, before services use the same devices."""
        mine = peak_flops(config.model.dtype, config.learner.peak_tflops)
        return cls(config, models_of(config), float(workers.sum(as_tensor(mine))))

    def rates(
        self, batch: StepBatch, services: Services, *, step: int
    ) -> Callable[[Mapping[str, float]], dict[str, float]]:
        """Return a function that derives a step's rates from its metrics, including its times."""
        work = step_work(batch, self.models, self.config, step=step, elsewhere=services.elsewhere)
        return partial(work_metrics, work, peak_flops=self.peak_flops)


def step_work(
    batch: StepBatch,
    models: Models | None,
    config: PPOConfig,
    *,
    step: int,
    elsewhere: Container[str] = (),
) -> dict[str, Work]:
    """Return the work of a step by phase.

    FLOPs of a pass count each response token and, once per group, the prompt. The tokens of
    `generate` are sampled tokens only. The phase `log_probs` is one forward pass of critic and
    policy; the policy is left out if the step is a single update that needs no old log-probs. The
    phase `update` is `ppo.num_epochs` forward and backward passes.

    Args:
        batch: The rollouts of the step.
        models: Shapes of the models. None means that FLOPs are not counted.
        config: The run's config.
        step: Number of the step, counted from 1.
        elsewhere: Roles on devices of their own. Their FLOPs are not counted.
    """
    sampled, trained = _lengths(batch.scored), _lengths(batch.trained)
    shared, shared_trained = _shared_prompts(batch.scored), _shared_prompts(batch.trained)
    num_tokens = sum(rollout.num_sampled for rollout in batch.scored)
    num_sampled, num_trained = (
        len(samples_of(rollouts)) for rollouts in (batch.scored, batch.trained)
    )
    epochs = config.ppo.num_epochs
    work = {
        "generate": Work(num_sampled, num_tokens),
        "score": Work(num_sampled, sampled.tokens),
        "log_probs": Work(num_trained, trained.tokens),
        "update": Work(epochs * num_trained, epochs * trained.tokens),
    }
    if models is None:
        return work

    def passed(
        shape: ModelShape, read: tuple[Lengths, Lengths], *, with_logits: bool = True
    ) -> float:
        every, again = (forward_flops(shape, lengths, with_logits=with_logits) for lengths in read)
        return every - again

    scoring, learning = (sampled, shared), (trained, shared_trained)
    policy = passed(models.policy, learning)
    critic = passed(models.critic, learning, with_logits=False) if models.critic else 0.0
    learns = step > config.ppo.critic_warmup_steps
    is_one_update = num_trained <= config.ppo.minibatch_size and learns
    judges = [
        passed(shape, scoring, with_logits=role in models.references)
        for role, shape in models.frozen.items()
        if role not in elsewhere
    ]
    of_reference = policy if config.ppo.needs_reference and config.model.is_own_reference else 0.0
    flops = {
        "generate": 0.0 if "engine" in elsewhere else passed(models.policy, scoring),
        "score": sum(judges),
        "log_probs": critic
        + of_reference
        + (policy if config.ppo.computes_old_log_probs(is_one_update=is_one_update) else 0.0),
        "update": 3 * epochs * (critic + (policy if learns else 0.0)),
    }
    return {
        phase: Work(phase_work.samples, phase_work.tokens, flops[phase])
        for phase, phase_work in work.items()
    }


def work_metrics(
    work: Mapping[str, Work], seconds: Mapping[str, float], *, peak_flops: float
) -> dict[str, float]:
    """Return rates and model FLOPs utilisation (MFU) of each phase and of the whole step.

    Args:
        work: Work by phase.
        seconds: Metrics with the durations: `time/step_s`, and `time/<phase>_s` for each phase, or
            `perf/<phase>_s` if the phase ran in the background.
        peak_flops: Peak FLOP/s of all devices together.
    """
    metrics: dict[str, float] = {}
    for phase, phase_work in work.items():
        took = seconds.get(f"time/{phase}_s") or seconds.get(f"perf/{phase}_s", 0.0)
        if took > 0.0:
            metrics[f"perf/{phase}_samples_per_s"] = phase_work.samples / took
            metrics[f"perf/{phase}_tokens_per_s"] = phase_work.tokens / took
            if phase_work.flops:
                metrics[f"perf/{phase}_mfu"] = phase_work.flops / (took * peak_flops)
    total = sum(phase_work.flops for phase_work in work.values())
    if total:
        metrics["perf/mfu"] = total / (seconds["time/step_s"] * peak_flops)
        metrics["perf/peak_tflops"] = peak_flops / 1e12
    return metrics


def slowest_worker(seconds: float, experience: Experience, workers: Workers) -> dict[str, float]:
    """Return the slowest worker's rank, and its seconds per token divided by the others' median.

    The rank is that among all learner workers. A worker that shares its rows stands for all workers
    that share them (`learner.sequence_parallel`): it is the first of them on the first worker.

    There are no metrics of one worker, or of passes too short to measure. With ZeRO-3 all workers
    take the same time, because each layer's weights are gathered from all of them.

    Args:
        seconds: Seconds that this worker took for passes of its share in which no worker waits.
        experience: This worker's share.
        workers: The workers to compare.
    """
    if workers.count == 1:
        return {}
    tokens = experience.prompt_mask.sum() + experience.attention_mask.sum()
    gathered = workers.gather((seconds, float(tokens)))
    if min(took for took, _ in gathered) < MIN_PASS_S:
        return {}
    rank, ratio = slowest([took / max(count, 1.0) for took, count in gathered])
    if workers.group is not None:  # the rule names this worker among all learner workers
        rank = dist.get_global_rank(workers.group, rank)
    return {"perf/slowest_worker": float(rank), "perf/slowest_worker_ratio": ratio}


def _lengths(scored: list[Rollout]) -> Lengths:
    return Lengths.of((len(r.prompt_ids), len(r.response_ids)) for r in scored)


def _shared_prompts(scored: list[Rollout]) -> Lengths:
    """Return the lengths of repeated prompts: all copies of a prompt in its group except the first.

    A pass computes each prompt only once per group.
    """
    prompts = [(rollout.group_index, rollout.prompt_ids) for rollout in scored]
    groups = {(group, ids.tobytes()): len(ids) for group, ids in prompts}
    every = Lengths.of((len(ids), 0) for _, ids in prompts)
    once = Lengths.of((length, 0) for length in groups.values())
    return Lengths(*(all_of_them - first for all_of_them, first in zip(every, once, strict=True)))
