import re

import pytest
from pydantic import ValidationError

from raypo.config import RewardSection


def test_one_address_or_several():
    assert RewardSection.model_validate({"url": "http://a:1/score"}).url == ("http://a:1/score",)
    two = RewardSection.model_validate({"url": ["http://a/", "https://b/score"]})
    assert two.url == ("http://a/", "https://b/score")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"function": ["a.py:f", "b.py:g"]}, "must be one function. Write one that calls the"),
        ({"function": {"a.py:f": 0.5}}, "must be one function. Write one that calls the others"),
        ({"url": "localhost:8000"}, "reward.url (localhost:8000): must begin with http://"),
        ({"url": ["http://a/", "http:///score"]}, "reward.url (http:///score): must begin"),
    ],
)
def test_what_cannot_act_is_refused(values: dict, text: str):
    with pytest.raises(ValidationError, match=re.escape(text)):
        RewardSection.model_validate(values)
