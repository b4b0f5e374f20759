"""Every causal architecture of transformers: pushed to vLLM, and the same log-probs there."""

import pytest

from tests.every_engine import KIND, outcome, prepare
from tests.every_model import CAUSAL, NAMES, told

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    prepare()


@pytest.mark.parametrize("architecture", NAMES[CAUSAL])
def test_a_push_does_what_the_docs_say(architecture: str):
    state, detail = outcome(architecture)
    assert state == told(KIND).get(architecture), detail
