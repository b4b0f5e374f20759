import os
import sys
from contextlib import suppress

import psutil
import pytest

from raypo.config import ConfigError
from raypo.custom import in_subprocess
from raypo.custom.in_subprocess import CallTooSlowError, call_in_subprocess
from raypo.custom.loader import load_function


def load(*specs: str) -> int:
    for spec in specs:
        load_function(spec)
    return len(specs)


def test_the_files_are_imported_once_and_only_in_the_subprocess(tmp_path, monkeypatch, capfd):
    path = tmp_path / "rewards.py"
    path.write_text(
        "import pathlib, sys, threading, time\n"
        "import neighbour_on_the_path\n"
        f"with pathlib.Path({str(tmp_path / 'imports')!r}).open('a') as file: file.write('x')\n"
        "print('hello from the file')\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "first = second = lambda rollouts: []\n"
    )
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "neighbour_on_the_path.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "path")

    assert call_in_subprocess(load, f"{path}:first", f"{path}:second") == 2

    assert (tmp_path / "imports").read_text() == "x"
    assert not any(path.as_posix() == getattr(m, "__file__", "") for m in sys.modules.values())
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "hello from the file\n")


def test_an_error_of_the_file_is_raised_with_its_line(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("limit = 1\nlimit / 0\n")
    with pytest.raises(ConfigError, match=rf"ZeroDivisionError.*\"{path}\", line 2, in <module>"):
        call_in_subprocess(load, f"{path}:score")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)", "cannot be imported: SystemExit: 3"),
        ("import os; os._exit(3)", r"ended the process that checks them \(status 3\)"),
        ("import os; os.kill(os.getpid(), 11)", r"\(status -11\)"),
    ],
)
def test_an_import_that_ends_the_process_is_refused(tmp_path, text, message):
    path = tmp_path / "rewards.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        call_in_subprocess(load, f"{path}:score")


def test_an_import_that_hangs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(in_subprocess, "DEFAULT_LIMIT_S", 1.0)
    path = tmp_path / "rewards.py"
    path.write_text("import time; time.sleep(600)")
    with pytest.raises(ConfigError, match="took longer than 1 s"):
        call_in_subprocess(load, f"{path}:score")


def end(status: int) -> None:
    os._exit(status)


def test_a_call_that_imports_nothing_is_told_by_its_name():
    with pytest.raises(ConfigError, match=r"^reading models ended the process .* \(status 3\)"):
        call_in_subprocess(end, 3, what="reading models")


def test_a_call_that_hangs_leaves_no_process_behind(tmp_path):
    path, pid = tmp_path / "rewards.py", tmp_path / "pid"
    path.write_text(
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    with pytest.raises(CallTooSlowError):
        call_in_subprocess(load, f"{path}:score", limit_s=10.0)
    assert pid.exists()
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE
