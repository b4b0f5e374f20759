"""The `raypo` command in the process of a test."""

import sys

import pytest

import raypo.cli


def exit_status(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The status with which the command ends; the arguments begin with its name, like train."""
    monkeypatch.setattr(sys, "argv", ["raypo", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        raypo.cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code
