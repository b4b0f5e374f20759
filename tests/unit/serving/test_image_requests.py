"""Prompts with images on their way to vLLM."""

from hashlib import sha256

import numpy as np
import pytest

from raypo.serving.requests import SamplingRequest
from raypo.serving.vllm_requests import check_ids, vllm_prompt
from raypo.types import Images
from tests.tiny_vision import picture


def test_vllm_gets_slots_instead_of_placeholders():
    files = (picture("red"), picture("blue"))
    images = Images(files, {}, 6, "d", np.array([9, 6, 6, 8], np.int32), num_prompt_tokens=6)
    ids = np.array([9, 6, 6, 6, 6, 8, 1, 2], np.int32)  # with what an earlier turn has added
    request = SamplingRequest(ids, 4, 1.0, images=images, cache_salt="s")
    prompt = vllm_prompt(request, "a ")
    assert prompt["prompt_token_ids"] == [9, 6, 6, 8, 1, 2]
    assert prompt["cache_salt"] == "a s"
    assert prompt["multi_modal_uuids"]["image"] == [sha256(file).hexdigest() for file in files]
    pixels = [image.getpixel((0, 0)) for image in prompt["multi_modal_data"]["image"]]
    assert pixels == [(255, 0, 0), (0, 0, 255)]
    check_ids(request, ids.tolist())
    with pytest.raises(RuntimeError, match="vLLM reads 7 tokens for a prompt with images"):
        check_ids(request, ids[1:].tolist())


def test_a_prompt_of_text_has_its_ids_alone():
    request = SamplingRequest(np.array([3, 4], np.int32), 4, 1.0)
    assert vllm_prompt(request) == {"prompt_token_ids": [3, 4]}
