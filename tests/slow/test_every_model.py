"""Every architecture of transformers: loaded, trained by a step, exported, and the same there."""

import pytest

from tests.every_model import KINDS, NAMES, outcome, told

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("kind", "architecture"), [(kind, name) for kind in KINDS for name in NAMES[kind]]
)
def test_an_architecture_does_what_the_docs_say(kind: str, architecture: str):
    state, detail = outcome(kind, architecture)
    assert state == told(kind)[architecture], detail
