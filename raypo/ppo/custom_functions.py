"""Custom losses, advantages and score shapings: their arguments, and checks of their results.

Notation: B responses of the step on all workers, T response tokens. Every mask: True = keep.
Results are checked before use. Error messages begin with the config key of the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import is_import_path
from raypo.custom.errors import UserCodeError, text_of
from raypo.custom.loader import load_function
from raypo.ppo.kl import MAX_LOG_RATIO
from raypo.ppo.surrogates import SURROGATES, Surrogate, TokenLoss, Tokens
from raypo.types import Experience


class CustomFunctionError(UserCodeError):
    """A custom function raised an error, or returned an unusable result."""


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """Argument of a custom score-shaping function, which returns the shaped scores, [B]."""

    scores: Tensor  # [B] float32, raw scores; 0 where not valid
    valid: Tensor  # [B] bool, False where scoring failed or no token was sampled
    num_tokens: Tensor  # [B] int64, sampled tokens
    truncated: Tensor  # [B] bool, the response ran into the limit
    group_index: Tensor  # [B] int64, the same for all samples of a group
    sample_index: Tensor  # [B] int64, within the group; conversations of one episode share it
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class StepRewards:
    """Argument of a custom advantage function, which returns advantages [B, T], or [B] per row."""

    scores: Tensor  # [B] float32, shaped; 0 where not valid
    rewards: Tensor  # [B, T] float32: turn rewards + score (at the last token) - KL penalty
    mask: Tensor  # [B, T] bool, True on sampled tokens of valid rows
    valid: Tensor  # [B] bool
    truncated: Tensor  # [B] bool
    group_index: Tensor  # [B] int64
    sample_index: Tensor  # [B] int64
    gamma: float


def custom_surrogate(function: Callable[[Tokens], Any], label: str) -> Surrogate:
    """Wrap a custom policy loss as a surrogate, like those in `raypo.ppo.surrogates`.

    The custom function returns the loss of each token, [B, T] with gradient, or a whole
    `TokenLoss`. Masked tokens may have any finite value. raypo multiplies the loss by the
    correction weights, masks it, aggregates it by `ppo.aggregation`, and divides it by the count of
    the whole optimizer step. So the loss does not depend on the split into micro-batches and
    workers.

    Args:
        function: The custom function.
        label: Config key and value, like `ppo.policy_loss (module.function)`, for messages.
    """

    def surrogate(tokens: Tokens) -> TokenLoss:
        result = _called(function, tokens, label)
        loss = result.loss if isinstance(result, TokenLoss) else result
        _check(loss, label, {"[B, T]": tuple(tokens.mask.shape)})
        if tokens.log_probs.requires_grad and not loss.requires_grad:
            raise CustomFunctionError(
                f"{label}: the loss has no gradient. Compute it from tokens.log_probs or "
                "tokens.log_ratio, without detach() around all of them."
            )
        _check_finite(loss.detach()[tokens.mask], label)
        if isinstance(result, TokenLoss):
            return result
        ratio = tokens.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        never = torch.zeros_like(tokens.mask, dtype=torch.bool)
        return TokenLoss(torch.where(tokens.mask, loss, 0.0), ratio, never, never)

    return surrogate


def surrogate_of(policy_loss: str) -> Surrogate:
    """Return the surrogate that `ppo.policy_loss` names: raypo's own, or a user's function."""
    if not is_import_path(policy_loss):
        return SURROGATES[policy_loss]
    key = "ppo.policy_loss"
    return custom_surrogate(load_function(policy_loss, key=key), f"{key} ({policy_loss})")


def custom_scores(function: Callable[[StepScores], Any], step: StepScores, label: str) -> Tensor:
    """Compute shaped scores with a custom function: [B] float32, NaN where not valid.

    Args:
        function: The custom function.
        step: Its argument.
        label: `key (value)`, for messages.

    Raises:
        CustomFunctionError: the function raised, or did not return finite numbers [B].
    """
    shaped = _called(function, step, label)
    _check(shaped, label, {"[B]": tuple(step.scores.shape)})
    _check_finite(shaped[step.valid], label)
    return torch.where(step.valid, shaped.detach().float(), torch.nan)


def custom_advantages(
    function: Callable[[StepRewards], Any], step: StepRewards, label: str
) -> Tensor:
    """Compute advantages with a custom function: [B, T] float32, 0 where masked.

    Args:
        function: The custom function.
        step: Its argument.
        label: `key (value)`, for messages.

    Raises:
        CustomFunctionError: the function raised, or did not return finite numbers [B, T] or [B].
    """
    result = _called(function, step, label)
    shapes = {"[B, T]": tuple(step.mask.shape), "[B]": tuple(step.scores.shape)}
    _check(result, label, shapes)
    advantages = result.detach().float()
    by_token = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    by_token = by_token.expand(step.mask.shape)
    _check_finite(by_token[step.mask], label)
    return torch.where(step.mask, by_token, 0.0)


def shaped_by(
    spec: str, experience: Experience, workers: Workers, *, max_new_tokens: int
) -> Tensor:
    """Shape the scores of this worker's rows with `ppo.shaping.function`: [B], NaN if not valid."""
    key, samples = "ppo.shaping.function", _samples(experience)
    rows, mine = _rows_of_all(
        workers,
        scores=experience.scores,
        num_tokens=experience.response_mask.sum(1),
        truncated=experience.truncated,
        group_index=experience.group_index,
        sample_index=samples,
    )
    valid = ~rows["scores"].isnan() & (rows["num_tokens"] > 0)
    rows["scores"] = torch.where(valid, rows["scores"], 0.0)
    step = StepScores(**rows, valid=valid, max_new_tokens=max_new_tokens)
    shaped = custom_scores(load_function(spec, key=key), step, f"{key} ({spec})")[mine]
    return shaped.to(experience.scores)


def advantages_by(
    spec: str,
    scores: Tensor,  # [B], shaped
    rewards: Tensor,  # [B, T]
    experience: Experience,
    workers: Workers,
    *,
    gamma: float,
) -> Tensor:
    """Compute advantages [B, T] of this worker's rows with the function of `ppo.advantage`."""
    key, samples = "ppo.advantage", _samples(experience)
    valid = ~scores.isnan() & experience.response_mask.any(1)
    rows, mine = _rows_of_all(
        workers,
        scores=torch.where(valid, scores, 0.0),
        rewards=rewards,
        mask=experience.response_mask & valid.unsqueeze(1),
        valid=valid,
        truncated=experience.truncated,
        group_index=experience.group_index,
        sample_index=samples,
    )
    step = StepRewards(**rows, gamma=gamma)
    of_all = custom_advantages(load_function(spec, key=key), step, f"{key} ({spec})")
    return of_all[mine, : rewards.shape[1]].to(rewards)


def _samples(experience: Experience) -> Tensor:
    """Return the sample index of each row, [B]."""
    if experience.sample_index is None:
        return torch.arange(len(experience))
    return experience.sample_index


def _rows_of_all(workers: Workers, **rows: Tensor) -> tuple[dict[str, Tensor], slice]:
    """Return the rows of all workers in the order of ranks, and the slice of this worker's rows."""
    everyone, mine = workers.gather_rows(*rows.values())
    return dict(zip(rows, everyone, strict=True)), mine


def _called(function: Callable[[Any], Any], argument: Any, label: str) -> Any:
    try:
        return function(argument)
    except Exception as error:
        raise CustomFunctionError.caused_by(
            error,
            f"{label} raised {type(error).__name__}: {text_of(error)}. Correct the function.",
        ) from error


def _check(result: Any, label: str, shapes: dict[str, tuple[int, ...]]) -> None:
    expected = " or ".join(f"{name} = {shape}" for name, shape in shapes.items())
    if not isinstance(result, Tensor):
        raise CustomFunctionError(
            f"{label} returned {type(result).__name__}. Return a tensor of shape {expected}."
        )
    if tuple(result.shape) not in shapes.values():
        raise CustomFunctionError(
            f"{label} returned a tensor of shape {tuple(result.shape)}. Return one of shape "
            f"{expected}."
        )
    if not result.is_floating_point():
        raise CustomFunctionError(
            f"{label} returned a tensor of {result.dtype}. Return floating point numbers."
        )


def _check_finite(values: Tensor, label: str) -> None:
    wrong = int((~torch.isfinite(values)).sum())
    if wrong:
        raise CustomFunctionError(
            f"{label} returned NaN or infinity in {wrong} of {values.numel()} unmasked places. "
            "Look for logarithms of 0 and divisions by 0, such as by a deviation of equal "
            "scores."
        )
