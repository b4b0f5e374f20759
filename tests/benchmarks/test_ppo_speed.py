"""What the mathematics costs on 512 x 8192 tokens, against a copy of its tensors and a plain loop.

Ratios of processor times of one run on one thread, printed (`-s` shows them); what is asserted is
that the results agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from raypo.ppo.advantages import discounted_returns, generalized_advantages
from raypo.ppo.losses import policy_loss, value_loss
from raypo.ppo.masked import masked_whiten
from tests.unit.ppo.steps import plain_advantages

ROWS, WIDTH = 512, 8192
REPEATS = 3


def best_of(function: Callable[[], Any]) -> tuple[float, Any]:
    """Shortest of a few times, in processor seconds, and the last result."""
    times, result = [], None
    for _ in range(REPEATS):
        started = time.process_time()
        result = function()
        times.append(time.process_time() - started)
    return min(times), result


def copy_time(*tensors: Tensor) -> float:
    """Seconds that one copy of the tensors takes, into memory that is there already."""
    targets = [torch.empty_like(tensor) for tensor in tensors]
    return best_of(lambda: [t.copy_(x) for t, x in zip(targets, tensors, strict=True)])[0]


@pytest.fixture(scope="module", params=["padded right", "with gaps"])
def batch(request) -> tuple[str, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, ROWS, WIDTH, generator=generator)
    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
    if request.param == "with gaps":
        mask &= torch.rand(ROWS, WIDTH, generator=generator) < 0.8
    return request.param, rewards, values, mask


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tell(name: str, masks: str, seconds: float, copy_s: float, loop_s: float | None = None) -> None:
    against_loop = "" if loop_s is None else f", {loop_s / seconds:.1f} times faster than the loop"
    print(f"\n{name} ({masks}): {seconds / copy_s:.1f} copies of its tensors{against_loop}")


def test_advantages_agree_with_the_loop_over_time(batch):
    masks, rewards, values, mask = batch
    knobs: dict[str, Any] = {"gamma": 1.0, "gae_lambda": 0.95}

    seconds, fast = best_of(lambda: generalized_advantages(rewards, values, mask, **knobs))
    started = time.process_time()
    plain = plain_advantages(rewards, values, mask, **knobs)
    loop_s = time.process_time() - started

    tell("gae", masks, seconds, copy_time(rewards, values, mask), loop_s)
    torch.testing.assert_close(fast, tuple(x.float() for x in plain))


def test_returns_agree_with_the_loop_over_time(batch):
    masks, rewards, _, mask = batch

    seconds, fast = best_of(lambda: discounted_returns(rewards, mask, gamma=0.999))
    zero = torch.zeros_like(rewards)
    started = time.process_time()
    plain, _ = plain_advantages(rewards, zero, mask, gamma=0.999, gae_lambda=1.0)
    loop_s = time.process_time() - started

    tell("returns", masks, seconds, copy_time(rewards, mask), loop_s)
    torch.testing.assert_close(fast, plain.float())


def test_whitening_and_losses_of_halves_agree_with_the_whole(batch):
    masks, advantages, values, mask = batch
    old = -values.abs()
    half = ROWS // 2

    def policy(rows: slice, normalizer: Tensor | None = None) -> Tensor:
        log_probs = (old[rows] + 0.1).requires_grad_()
        loss, _ = policy_loss(
            log_probs, old[rows], advantages[rows], mask[rows], normalizer=normalizer
        )
        loss.backward()
        return loss.detach()

    def critic(rows: slice, normalizer: Tensor | None = None) -> Tensor:
        now = (values[rows] + 0.1).requires_grad_()
        loss, _ = value_loss(
            now, values[rows], advantages[rows], mask[rows], value_clip=0.2, normalizer=normalizer
        )
        loss.backward()
        return loss.detach()

    copy_s = copy_time(old, advantages, values, mask)
    for name, loss_of in {"policy loss": policy, "value loss": critic}.items():
        seconds, whole = best_of(lambda f=loss_of: f(slice(None)))
        tell(f"{name} and gradient", masks, seconds, copy_s)
        parts = [loss_of(rows, mask.sum()) for rows in (slice(half), slice(half, None))]
        torch.testing.assert_close(parts[0] + parts[1], whole)
    seconds, whitened = best_of(lambda: masked_whiten(advantages, mask))
    tell("whitening", masks, seconds, copy_time(advantages, mask))
    torch.testing.assert_close(whitened[mask].mean(), torch.zeros(()), atol=1e-5, rtol=0)
