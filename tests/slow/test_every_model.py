"""Every architecture of transformers: loaded, trained by a step, exported, and the same there."""

from pathlib import Path

import pytest

from raypo.config import ConfigError
from tests.every_model import KINDS, NAMES, CannotBuildError, check

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("kind", "architecture"), [(kind, name) for kind in KINDS for name in NAMES[kind]]
)
def test_trained_and_exported_it_is_the_same_for_transformers(
    kind: str, architecture: str, tmp_path: Path
):
    try:
        check(kind, architecture, tmp_path)
    except CannotBuildError as error:
        pytest.skip(str(error))
    except ConfigError as error:  # the docs list what is refused
        pytest.skip(f"refused: {error}")
