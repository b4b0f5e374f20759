import pytest
import torch
from hypothesis import given

from raypo.ppo.shaping import (
    RunningMoments,
    ShapingRules,
    clip_scores,
    overlong_penalty,
    shape_scores,
    truncation_penalty,
)
from tests.unit.ppo.steps import NAN, few, seeds


def alone(moments: RunningMoments) -> list[RunningMoments]:
    return [moments]


def test_overlong_penalty_by_hand():
    num_tokens = torch.tensor([6, 7, 8, 10, 12])

    shaped = overlong_penalty(torch.ones(5), num_tokens, max_tokens=10, buffer_tokens=4, factor=2.0)

    # e = min(n - 6, 4) = 0, 1, 2, 4, 4; 1 - 2 * e / 4
    assert shaped.tolist() == [1.0, 0.5, 0.0, -1.0, -1.0]


def test_truncation_replaces_or_scales():
    scores, truncated = torch.tensor([2.0, 2.0, -2.0]), torch.tensor([False, True, True])

    assert truncation_penalty(scores, truncated, replacement=-1.0).tolist() == [2.0, -1.0, -1.0]
    # 2 - 0.75 * 2, -2 - 0.75 * 2: a negative score must not improve
    assert truncation_penalty(scores, truncated, scale=0.25).tolist() == [2.0, 0.5, -3.5]
    assert truncation_penalty(scores, truncated, scale=1.0).tolist() == scores.tolist()


def test_clip_by_hand():
    scores = torch.tensor([-5.0, 0.5, 5.0])

    assert clip_scores(scores, low=-1.0, high=1.0).tolist() == [-1.0, 0.5, 1.0]
    assert clip_scores(scores, high=1.0).tolist() == [-5.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, t: overlong_penalty(s, t, max_tokens=4, buffer_tokens=5), "buffer_tokens"),
        (lambda s, t: truncation_penalty(s, t > 0), "one of"),
        (lambda s, t: truncation_penalty(s, t > 0, replacement=0.0, scale=0.5), "one of"),
        (lambda s, t: truncation_penalty(s, t > 0, scale=1.5), "scale"),
        (lambda s, t: clip_scores(s, low=1.0, high=-1.0), "low"),
        (lambda s, t: overlong_penalty(s, t[:1], max_tokens=4, buffer_tokens=2), "one shape"),
    ],
)
def test_impossible_rules_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2), torch.ones(2, dtype=torch.int64))


def test_running_moments_by_hand():
    moments = RunningMoments.of(torch.tensor([1.0, 2.0, 3.0, NAN]))

    assert moments == RunningMoments(3.0, 2.0, 2.0)  # (1 - 2)^2 + 0 + (3 - 2)^2
    assert moments.variance == pytest.approx(2 / 3)
    assert RunningMoments(**moments.state_dict()) == moments
    assert RunningMoments().variance == 0.0
    assert RunningMoments().merged(RunningMoments()) == RunningMoments()


@given(seed=seeds)
@few
def test_running_moments_do_not_depend_on_the_cut(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = 1e3 + torch.randn(20, generator=generator, dtype=torch.float64)
    cuts = sorted(torch.randint(0, 21, (3,), generator=generator).tolist())
    pieces = [RunningMoments.of(piece) for piece in scores.tensor_split(cuts)]

    total = RunningMoments.total(pieces)

    assert total.count == 20.0
    assert total.mean == pytest.approx(scores.mean().item())
    assert total.variance == pytest.approx(scores.var(correction=0).item())


def test_normalized_scores_by_hand():
    moments = RunningMoments.of(torch.tensor([1.0, 3.0]))

    assert moments.normalize(torch.tensor([1.0, 3.0, 4.0])).tolist() == [-1.0, 1.0, 2.0]
    alike = RunningMoments.of(torch.tensor([2.0, 2.0]))
    assert alike.normalize(torch.tensor([2.0])).tolist() == [0.0]


def test_without_rules_scores_pass_unchanged():
    scores = torch.tensor([1.0, -2.0])
    seen = RunningMoments(5.0, 1.0, 2.0)

    shaped, after = shape_scores(
        scores,
        torch.tensor([3, 3]),
        torch.tensor([False, True]),
        ShapingRules(max_new_tokens=4),
        seen=seen,
        gather=alone,
    )

    assert torch.equal(shaped, scores)
    assert after == seen


def test_failed_and_empty_responses_are_left_out_of_the_moments():
    scores = torch.tensor([1.0, 3.0, NAN, 100.0])

    shaped, seen = shape_scores(
        scores,
        torch.tensor([2, 2, 2, 0]),
        torch.tensor([False, False, True, False]),
        ShapingRules(max_new_tokens=4, truncated_score=-1.0, normalize=True),
        seen=RunningMoments(),
        gather=alone,
    )

    assert seen == RunningMoments(2.0, 2.0, 2.0)
    assert shaped[:2].tolist() == [-1.0, 1.0]
    assert shaped[2].isnan()  # failed stays failed, though truncated
    assert shaped[3].item() == 0.0


def test_normalizer_sees_the_scores_of_all_workers_and_all_steps():
    rules = ShapingRules(max_new_tokens=4, normalize=True)
    other = RunningMoments.of(torch.tensor([7.0]))
    tokens, whole = torch.tensor([2, 2]), torch.tensor([False, False])

    shaped, seen = shape_scores(
        torch.tensor([1.0, 1.0]),
        tokens,
        whole,
        rules,
        seen=RunningMoments.of(torch.tensor([3.0])),
        gather=lambda mine: [mine, other],
    )

    # 1, 1, 7 and before them 3: mean 3, variance (4 + 4 + 16 + 0) / 4 = 6
    assert seen.mean == pytest.approx(3.0)
    assert seen.variance == pytest.approx(6.0)
    torch.testing.assert_close(shaped, torch.full((2,), -2.0 / 6.0**0.5))
