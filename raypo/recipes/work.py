"""What each phase of a PPO step has to do, and how fast that was."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from raypo.collectives import Workers, as_tensor
from raypo.config import ConfigError, PPOConfig
from raypo.metrics.flops import Lengths, forward_flops
from raypo.plan.estimate import Models
from raypo.rollout.refill import Collected
from raypo.types import ScoredRollout


@dataclass(frozen=True)
class Work:
    """Of one phase, over all workers."""

    samples: float
    tokens: float
    flops: float = 0.0
    """Of the models; see `raypo.metrics.flops`."""


def models_of(config: PPOConfig) -> Models | None:
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

    Generating counts each response token and, once a group, the prompt; its rate is of response
    tokens. Evaluating passes policy and critic once, an update `ppo.num_epochs` times forward
    and backward.

    Args:
        elsewhere: Roles with devices of their own: the learner workers do not do their FLOPs.
    """
    sampled, trained, shared = (
        Lengths(*workers.sum(as_tensor(*lengths.values())).tolist())
        for lengths in (
            _lengths(collected.scored),
            _lengths(collected.trained),
            _shared_prompts(collected.scored),
        )
    )
    epochs = config.ppo.num_epochs
    work = {
        "generate": Work(sampled.sequences, sampled.responses),
        "score": Work(sampled.sequences, sampled.tokens),
        "evaluate": Work(trained.sequences, trained.tokens),
        "update": Work(epochs * trained.sequences, epochs * trained.tokens),
    }
    if models is None:
        return work
    policy = forward_flops(models.policy, trained)
    critic = forward_flops(models.critic, trained, with_logits=False) if models.critic else 0.0
    learns = step > config.ppo.critic_warmup_steps
    judges = [
        forward_flops(shape, sampled, with_logits=False)
        for number, shape in enumerate(models.rewards)
        if f"reward_{number}" not in elsewhere
    ]
    if models.reference and "reference" not in elsewhere:
        judges.append(forward_flops(models.reference, sampled))
    generate = forward_flops(models.policy, sampled) - forward_flops(models.policy, shared)
    flops = {
        "generate": 0.0 if "engine" in elsewhere else generate,
        "score": sum(judges),
        "evaluate": policy + critic,
        "update": 3 * epochs * (critic + (policy if learns else 0.0)),
    }
    return {phase: Work(each.samples, each.tokens, flops[phase]) for phase, each in work.items()}


def work_figures(
    work: Mapping[str, Work], seconds: Mapping[str, float], *, peak_flops: float
) -> dict[str, float]:
    """Rates of each phase, and model FLOPs utilisation of each and of the whole step.

    Args:
        seconds: `time/generate_s` and its like, `time/step_s` among them.
        peak_flops: FLOP/s of all devices together.
    """
    figures: dict[str, float] = {}
    for phase, each in work.items():
        took = seconds.get(f"time/{phase}_s", 0.0)
        if took > 0.0:
            figures[f"perf/{phase}_samples_per_s"] = each.samples / took
            figures[f"perf/{phase}_tokens_per_s"] = each.tokens / took
            if each.flops:
                figures[f"perf/{phase}_mfu"] = each.flops / (took * peak_flops)
    total = sum(each.flops for each in work.values())
    if total:
        figures["perf/mfu"] = total / (seconds["time/step_s"] * peak_flops)
        figures["perf/peak_tflops"] = peak_flops / 1e12
    return figures


def _lengths(scored: list[ScoredRollout]) -> Lengths:
    rollouts = [each.rollout for each in scored]
    return Lengths.of((len(r.prompt_ids), len(r.response_ids)) for r in rollouts)


def _shared_prompts(scored: list[ScoredRollout]) -> Lengths:
    """The prompts of a group's samples but one: the engine needs their keys and values once."""
    groups = {each.rollout.group_index: len(each.rollout.prompt_ids) for each in scored}
    every = Lengths.of((len(each.rollout.prompt_ids), 0) for each in scored)
    once = Lengths.of((length, 0) for length in groups.values())
    pairs = zip(every.values(), once.values(), strict=True)
    return Lengths(*(all_of_them - first for all_of_them, first in pairs))
