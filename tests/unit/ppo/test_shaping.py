from typing import Any

import pytest
import torch
from hypothesis import given

from raypo.collectives import Workers
from raypo.config import ShapingSection
from raypo.ppo.shaping import (
    RunningMoments,
    clip_scores,
    overlong_penalty,
    shape_scores,
    truncation_penalty,
)
from tests.unit.learner.plain import on_workers
from tests.unit.ppo.steps import NAN, experience, few, seeds


def shape(
    scores: list[float],
    num_tokens: list[int],
    truncated: list[bool],
    seen: RunningMoments | None = None,
    workers: Workers | None = None,
    **keys: Any,
) -> tuple[torch.Tensor, RunningMoments]:
    """`shape_scores` of responses of at most 4 tokens, by keys of `ppo.shaping`."""
    mask = torch.arange(4) < torch.tensor(num_tokens).unsqueeze(1)
    rows = experience(mask, scores=torch.tensor(scores), truncated=torch.tensor(truncated))
    seen, workers = seen or RunningMoments(), workers or Workers()
    return shape_scores(rows, ShapingSection(**keys), seen, workers, max_new_tokens=4)


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
    seen = RunningMoments(5.0, 1.0, 2.0)

    shaped, after = shape([1.0, -2.0], [3, 3], [False, True], seen)

    assert shaped.tolist() == [1.0, -2.0]
    assert after == seen


def test_failed_and_empty_responses_are_left_out_of_the_moments():
    scores, truncated = [1.0, 3.0, NAN, 100.0], [False, False, True, False]

    shaped, seen = shape(scores, [2, 2, 2, 0], truncated, truncated_score=-1.0, normalize=True)

    assert seen == RunningMoments(2.0, 2.0, 2.0)
    assert shaped[:2].tolist() == [-1.0, 1.0]
    assert shaped[2].isnan()  # failed stays failed, though truncated
    assert shaped[3].item() == 0.0


def test_normalizer_sees_the_scores_of_all_workers_and_all_steps():
    before = RunningMoments.of(torch.tensor([3.0]))

    def shaped_by(workers: Workers):
        scores = [[1.0, 1.0], [7.0]][workers.rank]
        count = len(scores)
        return shape(scores, [2] * count, [False] * count, before, workers, normalize=True)

    (shaped, seen), (_, same) = on_workers(2, shaped_by)

    # 1, 1, 7 and before them 3: mean 3, variance (4 + 4 + 16 + 0) / 4 = 6
    assert seen == same
    assert seen.mean == pytest.approx(3.0)
    assert seen.variance == pytest.approx(6.0)
    torch.testing.assert_close(shaped, torch.full((2,), -2.0 / 6.0**0.5))


def test_bug_6_scores_are_normalized_before_they_are_clipped():
    clip: dict[str, Any] = {"clip_low": -0.5, "clip_high": 0.5}

    shaped, seen = shape([0.0, 100.0], [2, 2], [False, False], normalize=True, **clip)

    # normalised to -1 and 1, then clipped; the other way round gives clip(0, 100) = 0, 0.5 -> -1, 1
    assert shaped.tolist() == [-0.5, 0.5]
    assert seen.mean == 50.0


def test_bug_6_penalties_come_before_the_normalizer():
    penalties: dict[str, Any] = {
        "overlong_buffer_tokens": 2,
        "overlong_factor": 1.0,
        "truncated_scale": 0.5,
    }

    shaped, seen = shape([1.0, 3.0], [2, 4], [False, True], normalize=True, **penalties)

    # 3 - 1 for its length, then halved for being cut off: 1 and 1, so normalised to 0 and 0
    assert shaped.tolist() == [0.0, 0.0]
    assert seen.mean == 1.0
