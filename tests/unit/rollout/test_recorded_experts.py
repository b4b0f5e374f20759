"""Experts that an engine recorded, from its completions to the batch that the learner reads."""

from dataclasses import replace

import numpy as np
import torch

from raypo.rollout.collect import Sampler, request_of
from raypo.rollout.saved_batches import read_batches, write_batches
from raypo.rollout.session import Row
from raypo.rollout.sharding import to_experience
from raypo.rollout.step_batch import StepBatch
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Experience, Prompt, Rollout
from tests.stand_ins import Engine, Lossy
from tests.unit.test_known_bugs import SAMPLING

LAYERS, COUNT = 3, 2
PROMPTS = [
    Prompt(index, "?", np.arange(5, 7 + index, dtype=np.int32), group_index=index)
    for index in range(2)
]


def experts(length: int, start: int, dtype: type = np.uint8) -> np.ndarray:
    """Experts [length, LAYERS, COUNT], all numbers different."""
    size = length * LAYERS * COUNT
    return (start + np.arange(size, dtype=dtype)).reshape(length, LAYERS, COUNT)


def completion(request: SamplingRequest, start: int, *, length: int = 3) -> Completion:
    read = len(request.prompt_ids) + length - 1
    sampled = np.arange(20, 20 + length, dtype=np.int32)
    log_probs = np.full(length, -1.0, np.float32)
    return Completion(sampled, log_probs, "length", 1, experts=experts(read, start))


def sampled() -> list[Rollout]:
    engine = Engine(
        lambda requests: [completion(r, 50 * n, length=3 - n % 2) for n, r in enumerate(requests)]
    )
    sampler = Sampler(engine, Lossy(), replace(SAMPLING, with_experts=True))
    return [replace(each, score=1.0) for each in sampler.sample(PROMPTS)]


def test_only_samples_for_training_ask_for_experts():
    assert not request_of(PROMPTS[0], 0, SAMPLING).with_experts
    assert request_of(PROMPTS[0], 0, replace(SAMPLING, with_experts=True)).with_experts


def test_samples_of_a_prompt_share_its_experts_and_have_their_own_responses():
    first, second, third, _ = sampled()
    assert first.prompt_experts is second.prompt_experts
    assert first.prompt_experts is not None
    assert first.prompt_experts.tolist() == experts(2, 0).tolist()
    assert third.prompt_experts is not None
    assert third.prompt_experts.tolist() == experts(3, 100).tolist()
    assert second.response_experts is not None
    own = experts(3, 50)[2:]  # two of the prompt, then the first of two sampled tokens
    assert second.response_experts.tolist() == [*own.tolist(), np.zeros_like(own[0]).tolist()]


def test_a_batch_has_them_beside_the_tokens_that_they_belong_to():
    rollouts = sampled()
    batch = to_experience(rollouts)
    assert batch.experts is not None
    prompts, responses = batch.experts
    assert (prompts.dtype, responses.dtype) == (torch.uint8, torch.uint8)
    for number, rollout in enumerate(rollouts):
        for part, mask, own in (
            (prompts, batch.prompt_mask, rollout.prompt_experts),
            (responses, batch.attention_mask, rollout.response_experts),
        ):
            assert own is not None
            assert part[number][mask[number]].tolist() == own.tolist()
            assert not part[number][~mask[number]].any()

    small = batch.select(torch.tensor([1]))  # the shorter prompt, and a response of two
    assert small.experts is not None
    assert [tuple(part.shape) for part in small.experts] == [(1, 2, 3, 2), (1, 2, 3, 2)]
    assert small.experts[0].tolist() == [experts(2, 0).tolist()]
    blank = batch.blank().experts
    assert blank is not None
    assert [tuple(part.shape) for part in blank] == [(1, 1, 3, 2)] * 2

    plain = replace(rollouts[0], prompt_experts=None, response_experts=None)
    assert to_experience([plain]).experts is None
    many = [experts(n, 300, np.int16) for n in (2, 3)]
    wide = replace(rollouts[0], prompt_experts=many[0], response_experts=many[1])
    of_many: Experience = to_experience([wide])
    assert of_many.experts is not None
    assert of_many.experts[1].tolist() == [many[1].tolist()]


def test_batches_that_were_sampled_ahead_keep_them(tmp_path):
    rollouts = sampled()
    rollouts.append(replace(rollouts[0], prompt_experts=None, response_experts=None))
    write_batches(tmp_path / "x.npz", {1: StepBatch(rollouts, rollouts, 0, {})}, {})
    read = read_batches(tmp_path / "x.npz", PROMPTS)[0][1].scored
    for before, after in zip(rollouts, read, strict=True):
        for name in ("prompt_experts", "response_experts"):
            left, right = getattr(before, name), getattr(after, name)
            assert (left is None) == (right is None)
            assert left is None or (left.dtype, left.tolist()) == (right.dtype, right.tolist())


def test_a_token_of_a_conversation_keeps_the_experts_of_the_turn_that_read_it_first():
    row = Row(np.arange(4, dtype=np.int32), 4)
    first = completion(SamplingRequest(row.ids, 3, 1.0), 0)
    row.add(row.ids, first, is_cut_off=False)
    observed = np.concatenate([row.ids, [90, 91]]).astype(np.int32)
    second = completion(SamplingRequest(observed, 2, 1.0), 100, length=2)
    row.add(observed, second, is_cut_off=False)
    nothing = np.concatenate([row.ids, [92]]).astype(np.int32)
    row.add(nothing, Completion(np.zeros(0), np.zeros(0), "timeout", 1), is_cut_off=False)

    arrays = row.arrays()

    assert first.experts is not None
    assert second.experts is not None
    read = [*first.experts.tolist(), *second.experts[6:].tolist()]  # 4 + 3 - 1 tokens, and others
    unread = np.zeros((2, LAYERS, COUNT)).tolist()  # the last sampled token, and what follows it
    made = [*arrays["prompt_experts"].tolist(), *arrays["response_experts"].tolist()]
    assert made == [*read, *unread]
    assert len(arrays["response_experts"]) == len(arrays["response_ids"])
    assert "prompt_experts" not in Row(np.arange(4), 4).arrays()
