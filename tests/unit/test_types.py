"""Experience: shapes are checked once, selections are trimmed, a blank row weighs nothing."""

import dataclasses

import pytest
import torch

from raypo.types import Experience


def batch() -> Experience:
    """Prompts of 1 and 3 tokens, responses of 2 and 1."""
    response_mask = torch.tensor([[True, True], [True, False]])
    return Experience(
        prompt_ids=torch.tensor([[0, 0, 5], [6, 7, 8]]),
        prompt_mask=torch.tensor([[False, False, True], [True, True, True]]),
        response_ids=torch.tensor([[9, 2], [2, 0]]),
        attention_mask=response_mask,
        response_mask=response_mask,
        rollout_log_probs=torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        scores=torch.tensor([1.0, 0.0]),
        group_index=torch.tensor([4, 5]),
        minibatch=torch.tensor([0, 1]),
        weight_version=torch.tensor([3, 3]),
        truncated=torch.tensor([False, False]),
    )


def test_a_selection_is_trimmed_to_its_own_longest_rows():
    first = batch().select(torch.tensor([0]))
    assert first.prompt_ids.tolist() == [[5]]
    assert first.response_ids.tolist() == [[9, 2]]
    second = batch().select(torch.tensor([1]))
    assert second.prompt_ids.tolist() == [[6, 7, 8]]
    assert second.rollout_log_probs.tolist() == [[-3.0]]
    assert second.group_index.tolist() == [5]


def test_a_selection_of_nothing_is_empty():
    nothing = batch().select(torch.tensor([], dtype=torch.int64))
    assert len(nothing) == 0


def test_a_blank_row_has_a_token_to_compute_and_none_to_count():
    blank = batch().with_(values=torch.zeros(2, 2)).blank()
    assert blank.prompt_mask.all()
    assert blank.attention_mask.all()
    assert not blank.response_mask.any()
    assert blank.values is not None
    assert blank.advantages is None


def test_only_what_packing_reads_stays_when_a_batch_goes_to_a_device():
    moved = batch().to("meta")
    devices = {field.name: getattr(moved, field.name) for field in dataclasses.fields(moved)}
    stayed = {k for k, v in devices.items() if v is not None and v.device.type == "cpu"}
    assert stayed == {"prompt_ids", "prompt_mask", "response_ids", "attention_mask"}


def test_a_field_of_another_shape_is_refused_by_name():
    with pytest.raises(
        AssertionError, match=r"Experience.scores has shape \(3,\), expected \(2,\)"
    ):
        dataclasses.replace(batch(), scores=torch.zeros(3))
