"""What modules are called: a name in an editor's tab or a traceback means one of them."""

from collections import Counter
from pathlib import Path

import raypo

SHARED = {"__init__.py", "__main__.py"}


def test_no_two_modules_have_one_file_name():
    names = Counter(path.name for path in Path(raypo.__file__).parent.rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} <= SHARED
