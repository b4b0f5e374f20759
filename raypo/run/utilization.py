"""What each phase of a PPO step has to do, and how fast that was."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from raypo.collectives import Workers, as_tensor
from raypo.config import ConfigError, OnlineConfig, PPOConfig
from raypo.plan.estimate import Models
from raypo.plan.flops import Lengths, forward_flops
from raypo.plan.model_shape import ModelShape
from raypo.rollout.collect import samples_of
from raypo.rollout.dynamic_sampling import Collected
from raypo.types import ScoredRollout


@dataclass(frozen=True)
class Work:
    """What one phase has done, over all workers."""

    samples: float
    """An agent's episode is one."""
    tokens: float
    flops: float = 0.0
    """FLOPs of the models; see `raypo.plan.flops`."""


def models_of(config: OnlineConfig) -> Models | None:
    """The shapes of a run's models; None where a config.json does not tell them."""
    try:
        return Models.read(config)
    except ConfigError:
        return None


def step_work(
    collected: Collected,
    models: Models | None,
    config: PPOConfig,
    workers: Workers,
    *,
    step: int,
    elsewhere: Container[str] = (),
) -> dict[str, Work]:
    """The work of a step by phase; all workers call it together.

    Every pass counts each response token and, once per group, the prompt; the rate of generating is
    of sampled tokens. Evaluating passes critic and policy once (the policy not where the step is
    one update that reads no old log-probs), an update `ppo.num_epochs` times forward and backward.

    Args:
        elsewhere: Roles with devices of their own: the learner workers do not do their FLOPs.
    """
    sampled, trained, shared, shared_trained = (
        Lengths(*workers.sum(as_tensor(*lengths)).tolist())
        for lengths in (
            _lengths(collected.scored),
            _lengths(collected.trained),
            _shared_prompts(collected.scored),
            _shared_prompts(collected.trained),
        )
    )
    generated = sum(each.rollout.num_sampled for each in collected.scored)
    counts = len(samples_of(collected.scored)), len(samples_of(collected.trained)), generated
    num_sampled, num_trained, num_tokens = workers.sum(as_tensor(*counts)).tolist()
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
        every, again = (forward_flops(shape, each, with_logits=with_logits) for each in read)
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
    return {phase: Work(each.samples, each.tokens, flops[phase]) for phase, each in work.items()}


def work_metrics(
    work: Mapping[str, Work], seconds: Mapping[str, float], *, peak_flops: float
) -> dict[str, float]:
    """Rates of each phase, and model FLOPs utilisation of each and of the whole step.

    Args:
        seconds: `time/generate_s` and its like, `time/step_s` among them; `perf/generate_s` where
            the learner did something else meanwhile.
        peak_flops: FLOP/s of all devices together.
    """
    metrics: dict[str, float] = {}
    for phase, each in work.items():
        took = seconds.get(f"time/{phase}_s") or seconds.get(f"perf/{phase}_s", 0.0)
        if took > 0.0:
            metrics[f"perf/{phase}_samples_per_s"] = each.samples / took
            metrics[f"perf/{phase}_tokens_per_s"] = each.tokens / took
            if each.flops:
                metrics[f"perf/{phase}_mfu"] = each.flops / (took * peak_flops)
    total = sum(each.flops for each in work.values())
    if total:
        metrics["perf/mfu"] = total / (seconds["time/step_s"] * peak_flops)
        metrics["perf/peak_tflops"] = peak_flops / 1e12
    return metrics


def _lengths(scored: list[ScoredRollout]) -> Lengths:
    rollouts = [each.rollout for each in scored]
    return Lengths.of((len(r.prompt_ids), len(r.response_ids)) for r in rollouts)


def _shared_prompts(scored: list[ScoredRollout]) -> Lengths:
    """The prompts of a group's rows that others of it have too: passes read them once."""
    prompts = [(each.rollout.group_index, each.rollout.prompt_ids) for each in scored]
    groups = {(group, ids.tobytes()): len(ids) for group, ids in prompts}
    every = Lengths.of((len(ids), 0) for _, ids in prompts)
    once = Lengths.of((length, 0) for length in groups.values())
    return Lengths(*(all_of_them - first for all_of_them, first in zip(every, once, strict=True)))
