import pytest
import torch
from hypothesis import given

from raypo.ppo.masked import keep, masked_moments, masked_sum, masked_whiten
from tests.unit.ppo.steps import INF, NAN, few, random_step, seeds

MASK = torch.tensor([[True, True, False]])


@pytest.mark.parametrize("rubbish", [0.0, 1e30, INF, -INF, NAN])
def test_a_sum_is_over_kept_positions(rubbish):
    x = torch.tensor([[1.0, 2.0, rubbish]])

    assert masked_sum(x, MASK).item() == 3.0
    assert masked_sum(x, MASK & False).item() == 0.0


@pytest.mark.parametrize("rubbish", [INF, -INF, NAN])
def test_gradient_of_masked_positions_is_zero_whatever_they_hold(rubbish):
    x = torch.tensor([[1.0, 2.0, rubbish]], requires_grad=True)

    keep(x, MASK).square().sum().backward()

    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 4.0, 0.0]]


def test_whitening_by_hand():
    x = torch.tensor([[1.0, 3.0, NAN]])  # mean 2, population variance 1

    assert masked_whiten(x, MASK).tolist() == [[-1.0, 1.0, 0.0]]


def test_whitening_values_that_are_all_alike_gives_zero():
    x = torch.full((3, 7), 0.1)

    whitened = masked_whiten(x, torch.ones(3, 7, dtype=torch.bool))

    torch.testing.assert_close(whitened, torch.zeros(3, 7), atol=1e-6, rtol=0)


def test_whitening_far_from_zero_keeps_its_digits():
    x = torch.tensor([[10_000.0, 10_001.0, NAN]])  # mean 10000.5, deviation 0.5

    torch.testing.assert_close(masked_whiten(x, MASK), torch.tensor([[-1.0, 1.0, 0.0]]))


@given(seed=seeds)
@few
def test_moments_of_parts_add_up_to_those_of_the_whole(seed):
    step = random_step(seed)
    whole = masked_moments(step.advantages, step.mask)

    parts = [
        masked_moments(p.advantages, p.mask) for p in (step.of(slice(2)), step.of(slice(2, 9)))
    ]

    torch.testing.assert_close(parts[0] + parts[1], whole)
    part = step.of(slice(2, 9))
    torch.testing.assert_close(
        masked_whiten(part.advantages, part.mask, moments=whole),
        masked_whiten(step.advantages, step.mask)[2:],
    )


def test_half_precision_is_computed_in_float32():
    x = torch.tensor([[256.0, 1.0, 0.0]], dtype=torch.bfloat16)

    assert masked_sum(x, MASK).item() == 257.0  # bfloat16 has 256 and 258
    assert masked_whiten(x, MASK).dtype == torch.float32


def test_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"x \(1, 3\), mask \(1, 2\)"):
        masked_moments(torch.zeros(1, 3), MASK[:, :2])
