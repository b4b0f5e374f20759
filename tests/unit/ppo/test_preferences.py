"""Losses of preferences against TRL's numbers, plain float64 loops, and what their papers say."""

import math

import pytest
import torch

from raypo.ppo.preferences import Responses, kto_kl, kto_losses, pair_losses

CHOSEN = [[-1.2, -0.3, -0.5], [-2.0, -0.7]]
REJECTED = [[-0.9, -1.1, -0.4, -0.8], [-3.5]]
REF_CHOSEN, REF_REJECTED = [-2.3, -2.4], [-2.8, -2.6]
BETA = 0.5


def responses(tokens: list[list[float]], references: list[float] | None) -> Responses:
    sums = torch.tensor([math.fsum(row) for row in tokens], dtype=torch.float64)
    known = None if references is None else torch.tensor(references).double()
    return Responses(sums, torch.tensor([len(row) for row in tokens]).double(), known)


def losses(kind, *, beta=BETA, **options):
    references = (None, None) if kind == "simpo" else (REF_CHOSEN, REF_REJECTED)
    chosen = responses(CHOSEN, references[0])
    return pair_losses(chosen, responses(REJECTED, references[1]), kind=kind, beta=beta, **options)


# TRL 1.16.0: `DPOTrainer._compute_loss` (loss types of the same names; the smoothed sigmoid is the
# term of its `CPOTrainer.cpo_loss`) on the log-probs above, beta 0.5; means over both pairs.
@pytest.mark.parametrize(
    ("kind", "label_smoothing", "mean"),
    [
        ("sigmoid", 0.0, 0.5438686609),
        ("sigmoid", 0.1, (0.5683820844 + 0.5843551755) / 2),
        ("sigmoid_norm", 0.0, 0.5837599635),
        ("robust", 0.1, 0.5032435656),
        ("hinge", 0.0, 0.6749999523),
        ("ipo", 0.0, 0.3512499332),
    ],
)
def test_losses_of_pairs_are_those_of_trl(kind, label_smoothing, mean):
    made = losses(kind, label_smoothing=label_smoothing)
    assert float(made.mean()) == pytest.approx(mean, rel=1e-6)


# TRL 1.16.0: `CPOTrainer.cpo_loss`, loss_type simpo, beta 2, simpo_gamma 0.5, on mean log-probs.
@pytest.mark.parametrize(
    ("label_smoothing", "expected"),
    [(0.0, [0.8166040182, 0.0221242122]), (0.1, [0.7932706475, 0.4021242559])],
)
def test_simpo_is_that_of_trl(label_smoothing, expected):
    made = losses("simpo", beta=2.0, simpo_gamma=0.5, label_smoothing=label_smoothing)
    assert made.tolist() == pytest.approx(expected, rel=1e-6)


def test_kto_is_that_of_trl():
    # TRL 1.16.0: `KTOTrainer._compute_loss`, weights 1 and 1.5, beta 0.5.
    ratios_of_others = [-6.0 + 7.0, -2.0 + 2.5, -3.0 + 2.8, -9.0 + 9.4]
    kl = kto_kl(math.fsum(ratios_of_others), 4)
    both = responses([*CHOSEN, *REJECTED], [-2.3, -2.4, -2.8, -3.9])
    made = kto_losses(
        both,
        torch.tensor([True, False, False, True]),
        beta=BETA,
        kl=kl,
        undesirable_weight=1.5,
    )
    assert kl == pytest.approx(0.425)
    assert float(made.mean()) == pytest.approx(0.5579364896, rel=1e-6)


def by_loop(kind, chosen, rejected, ref_chosen, ref_rejected, beta, e, gamma, margin):
    """One pair in plain Python."""
    better = math.fsum(chosen) - ref_chosen
    worse = math.fsum(rejected) - ref_rejected
    if kind in ("sigmoid_norm", "ipo", "simpo"):
        better, worse = better / len(chosen), worse / len(rejected)
    if kind == "ipo":
        return (better - worse - 1 / (2 * beta)) ** 2
    z = beta * (better - worse) - margin - (gamma if kind == "simpo" else 0.0)
    if kind == "hinge":
        return max(0.0, 1.0 - z)
    right, swapped = math.log1p(math.exp(-z)), math.log1p(math.exp(z))
    if kind == "robust":
        return ((1 - e) * right - e * swapped) / (1 - 2 * e)
    return (1 - e) * right + e * swapped


@pytest.mark.parametrize("kind", ["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo"])
def test_losses_of_pairs_are_those_of_a_loop(kind):
    generator = torch.Generator().manual_seed(0)

    def drawn(count):
        lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
        return [(-3 * torch.rand(n, generator=generator).double()).tolist() for n in lengths]

    chosen, rejected = drawn(20), drawn(20)
    refs = (-8 * torch.rand(2, 20, generator=generator)).double()
    if kind == "simpo":
        refs = torch.zeros_like(refs)
    margins = torch.zeros(20) if kind == "ipo" else torch.rand(20, generator=generator)
    made = pair_losses(
        responses(chosen, refs[0].tolist()),
        responses(rejected, refs[1].tolist()),
        kind=kind,
        beta=0.7,
        label_smoothing=0.2,
        simpo_gamma=0.3,
        margins=margins.double(),
    )
    columns = zip(chosen, rejected, *refs.tolist(), margins.double().tolist(), strict=True)
    expected = [by_loop(kind, a, b, c, d, 0.7, 0.2, 0.3, m) for a, b, c, d, m in columns]
    # The references pass through float32 in the helper above.
    assert made.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_policy_that_is_its_reference_has_the_loss_of_a_coin():
    for kind in ("sigmoid", "sigmoid_norm", "robust"):
        same = responses(CHOSEN, [math.fsum(row) for row in CHOSEN])
        made = pair_losses(same, same, kind=kind, beta=BETA, label_smoothing=0.1)
        assert made.tolist() == pytest.approx([math.log(2.0)] * 2, rel=1e-5)


def test_robust_is_right_in_the_mean_over_swapped_pairs():
    e, chosen, rejected = 0.3, responses(CHOSEN, REF_CHOSEN), responses(REJECTED, REF_REJECTED)
    as_told, swapped = (
        pair_losses(*pair, kind="robust", beta=BETA, label_smoothing=e)
        for pair in ((chosen, rejected), (rejected, chosen))
    )
    torch.testing.assert_close((1 - e) * as_told + e * swapped, losses("sigmoid"))


def test_one_token_answers_have_losses_and_gradients():
    ratios = torch.tensor([-0.4], requires_grad=True)
    one = torch.ones(1)
    chosen, rejected = Responses(ratios, one, 0 * one), Responses(-2 * one, one, 0 * one)
    for kind in ("sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo"):
        (grad,) = torch.autograd.grad(
            pair_losses(chosen, rejected, kind=kind, beta=0.1).sum(), ratios
        )
        assert float(grad) < 0.0, kind


def test_the_kl_of_kto_is_a_mean_and_never_negative():
    assert kto_kl(6.0, 4) == 1.5
    assert kto_kl(-6.0, 4) == 0.0
    assert kto_kl(0.0, 0) == 0.0


def test_kto_turns_against_what_is_undesirable():
    ratios = torch.zeros(2, requires_grad=True)
    both = Responses(ratios, torch.ones(2), torch.zeros(2))
    made = kto_losses(both, torch.tensor([True, False]), beta=0.1, kl=0.0)
    (grad,) = torch.autograd.grad(made.sum(), ratios)
    assert made.tolist() == [0.5, 0.5]
    assert grad.tolist() == pytest.approx([-0.025, 0.025])
