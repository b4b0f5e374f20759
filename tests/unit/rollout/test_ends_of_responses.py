"""The text of a response has no end in it, whatever the tokenizer thinks of the end."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from raypo.endpoint.protocol import text_and_calls
from raypo.rollout.collect import Sampler, Sampling
from raypo.serving.requests import Completion
from raypo.types import Prompt
from tests.stand_ins import Engine
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("is_special", [True, False])
def test_the_end_of_a_turn_is_no_part_of_its_text(tmp_path, is_special):
    """Fine-tuned models often have their end of turn as an ordinary added token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=is_special)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = np.array([*tokenizer("42")["input_ids"], stop], np.int32)
    sampled = Completion(ids, np.zeros(3, np.float32), "stop", 1)
    engine = Engine(lambda requests: [sampled for _ in requests])
    sampling = Sampling(1, 4, temperature=1.0, top_p=1.0, stop_token_ids=(2, stop), seed=0)
    draw = Prompt(0, "6*7=", np.array([5], np.int32), group_index=0)
    (rollout,) = Sampler(engine, tokenizer, sampling).sample([draw])
    assert rollout.response == "42"
    assert rollout.response_ids.tolist() == ids.tolist()
    assert text_and_calls(tokenizer, ids.tolist(), stop_token_ids=(2, stop)) == ("42", [])
