"""The user's part of a traceback."""

from pathlib import Path

import pytest

import raypo
from raypo.custom.errors import located_text, user_frames


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("/home/me/reward.py", True),
        (f"{Path(raypo.__file__).parent}_rewards.py", True),  # beside the package
        (f"{Path(raypo.__file__).parent}/rewards/scoring.py", False),
    ],
)
def test_only_files_of_the_package_are_raypos(file: str, is_users: bool):
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", file, "exec"))
    assert (file in user_frames(caught.value)) == is_users
    assert (file in located_text(caught.value)) == is_users
