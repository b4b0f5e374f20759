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
from raypo.ppo.surrogates import SURROGATES, Surrogate, SurrogateInputs, TokenLoss
from raypo.types import Experience


class CustomFunctionError(UserCodeError):
    """A custom function raised an error, or returned an unusable result."""


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """Argument of a custom score-shaping function, which returns the shaped scores [B]."""

    scores: Tensor  # [B] float32, raw scores; 0 where not valid
    valid: Tensor  # [B] bool, False where scoring failed or no token was sampled
    num_tokens: Tensor  # [B] int64, sampled tokens
    truncated: Tensor  # [B] bool, True if the response was cut at the length limit
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


def custom_surrogate(function: Callable[[SurrogateInputs], Any], label: str) -> Surrogate:
    """Wrap a custom policy loss as a surrogate (see `raypo.ppo.surrogates`).

    The custom function returns the loss of each token, [B, T] with gradient, or a whole
    `TokenLoss`. Masked tokens may have any finite value. raypo multiplies the loss by the
    correction weights, masks it, aggregates it by `ppo.aggregation`, and divides it by the count of
    the whole optimizer step. So the loss does not depend on the split into micro-batches and
    workers.

    Args:
        function: The custom function.
        label: Config key and value, like `ppo.policy_loss (module.function)`, for messages.
    """

    def surrogate(inputs: SurrogateInputs) -> TokenLoss:
        result = _call(function, inputs, label)
        loss = result.loss if isinstance(result, TokenLoss) else result
        _check(loss, label, {"[B, T]": tuple(inputs.mask.shape)})
        if inputs.log_probs.requires_grad and not loss.requires_grad:
            raise CustomFunctionError(
                f"{label}: the loss has no gradient. Compute it from tokens.log_probs or "
                "tokens.log_ratio, without detach() around all of them."
            )
        _check_finite(loss.detach()[inputs.mask], label)
        if isinstance(result, TokenLoss):
            return result
        ratio = inputs.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        no_tokens = torch.zeros_like(inputs.mask, dtype=torch.bool)
        return TokenLoss(torch.where(inputs.mask, loss, 0.0), ratio, no_tokens, no_tokens)

    return surrogate


def surrogate_of(policy_loss: str) -> Surrogate:
    """Return the surrogate of `ppo.policy_loss`: a loss of raypo or a wrapped user function."""
    if not is_import_path(policy_loss):
        return SURROGATES[policy_loss]
    key = "ppo.policy_loss"
    return custom_surrogate(load_function(policy_loss, key=key), f"{key} ({policy_loss})")


def custom_scores(
    function: Callable[[StepScores], Any], argument: StepScores, label: str
) -> Tensor:
    """Compute shaped scores with a custom function: [B] float32, NaN where not valid.

    Args:
        function: The custom function.
        argument: Argument of the function.
        label: `key (value)`, for messages.

    Raises:
        CustomFunctionError: the function raised, or did not return finite numbers [B].
    """
    shaped = _call(function, argument, label)
    _check(shaped, label, {"[B]": tuple(argument.scores.shape)})
    _check_finite(shaped[argument.valid], label)
    return torch.where(argument.valid, shaped.detach().float(), torch.nan)


def custom_advantages(
    function: Callable[[StepRewards], Any], argument: StepRewards, label: str
) -> Tensor:
    """Compute advantages with a custom function: [B, T] float32, 0 where masked.

    Args:
        function: The custom function.
        argument: Argument of the function.
        label: `key (value)`, for messages.

    Raises:
        CustomFunctionError: the function raised, or did not return finite numbers [B, T] or [B].
    """
    result = _call(function, argument, label)
    shapes = {"[B, T]": tuple(argument.mask.shape), "[B]": tuple(argument.scores.shape)}
    _check(result, label, shapes)
    advantages = result.detach().float()
    token_advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
    token_advantages = token_advantages.expand(argument.mask.shape)
    _check_finite(token_advantages[argument.mask], label)
    return torch.where(argument.mask, token_advantages, 0.0)


def custom_shaped_scores(
    spec: str, experience: Experience, workers: Workers, *, max_new_tokens: int
) -> Tensor:
    """Shape the scores of this worker's rows with `ppo.shaping.function`: [B], NaN if not valid."""
    key, sample_index = "ppo.shaping.function", _sample_index(experience)
    rows, own_rows = _gather_rows(
        workers,
        scores=experience.scores,
        num_tokens=experience.response_mask.sum(1),
        truncated=experience.truncated,
        group_index=experience.group_index,
        sample_index=sample_index,
    )
    valid = ~rows["scores"].isnan() & (rows["num_tokens"] > 0)
    rows["scores"] = torch.where(valid, rows["scores"], 0.0)
    step = StepScores(**rows, valid=valid, max_new_tokens=max_new_tokens)
    shaped = custom_scores(load_function(spec, key=key), step, f"{key} ({spec})")[own_rows]
    return shaped.to(experience.scores)


def custom_step_advantages(
    spec: str,
    scores: Tensor,  # [B], shaped
    rewards: Tensor,  # [B, T]
    experience: Experience,
    workers: Workers,
    *,
    gamma: float,
) -> Tensor:
    """Compute advantages [B, T] of this worker's rows with the function of `ppo.advantage`."""
    key, sample_index = "ppo.advantage", _sample_index(experience)
    valid = ~scores.isnan() & experience.response_mask.any(1)
    rows, own_rows = _gather_rows(
        workers,
        scores=torch.where(valid, scores, 0.0),
        rewards=rewards,
        mask=experience.response_mask & valid.unsqueeze(1),
        valid=valid,
        truncated=experience.truncated,
        group_index=experience.group_index,
        sample_index=sample_index,
    )
    step = StepRewards(**rows, gamma=gamma)
    advantages = custom_advantages(load_function(spec, key=key), step, f"{key} ({spec})")
    return advantages[own_rows, : rewards.shape[1]].to(rewards)


def _sample_index(experience: Experience) -> Tensor:
    """Return the sample index of each row, [B]."""
    if experience.sample_index is None:
        return torch.arange(len(experience))
    return experience.sample_index


def _gather_rows(workers: Workers, **rows: Tensor) -> tuple[dict[str, Tensor], slice]:
    """Return the rows of all workers in the order of ranks, and the slice of this worker's rows."""
    gathered, own_rows = workers.gather_rows(*rows.values())
    return dict(zip(rows, gathered, strict=True)), own_rows


def _call(function: Callable[[Any], Any], argument: Any, label: str) -> Any:
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
    num_invalid = int((~torch.isfinite(values)).sum())
    if num_invalid:
        raise CustomFunctionError(
            f"{label} returned NaN or infinity in {num_invalid} of {values.numel()} unmasked "
            "positions. Look for logarithms of 0 and divisions by 0, such as by the standard "
            "deviation of equal scores."
        )
