import logging
import subprocess
import sys
import sysconfig
import warnings

import pytest

from raypo.run.callbacks import StepView, ask_callbacks
from raypo.tracking.logs import CONSOLE_KEY, log_to_file


@pytest.fixture(autouse=True)
def loggers_as_before():
    """Put handlers, levels and the showing of warnings back."""
    names = [None, "vllm", "DeepSpeed", "a.library"]
    before = {n: (logging.getLogger(n), *_state(logging.getLogger(n))) for n in names}
    show = warnings.showwarning
    yield
    for logger, handlers, level, propagate in before.values():
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers, logger.level, logger.propagate = handlers, level, propagate
    logging.captureWarnings(False)
    warnings.showwarning = show


def _state(logger):
    return list(logger.handlers), logger.level, logger.propagate


def library_with_a_console_of_its_own(name):
    logger = logging.getLogger(name)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    return logger


def test_records_of_all_loggers_go_to_the_file_and_none_to_the_console(tmp_path, capsys):
    apart = library_with_a_console_of_its_own("vllm")
    logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))

    log_to_file(tmp_path / "logs" / "worker.log")
    apart.info("engine ready")
    logging.getLogger("a.library").warning("careful")

    lines = (tmp_path / "logs" / "worker.log").read_text().splitlines()
    assert [line.split(" ", 3)[3] for line in lines] == [
        "INFO vllm: engine ready",
        "WARNING a.library: careful",
    ]
    assert capsys.readouterr() == ("", "")


def test_a_library_that_sets_itself_up_later_is_caught_by_a_second_call(tmp_path, capsys):
    log_to_file(tmp_path / "w.log")
    late = library_with_a_console_of_its_own("DeepSpeed")
    log_to_file(tmp_path / "w.log")

    late.info("partitioned")

    assert (tmp_path / "w.log").read_text().count("partitioned") == 1
    assert capsys.readouterr().out == ""


def test_another_path_moves_the_log(tmp_path):
    library_with_a_console_of_its_own("vllm")
    log_to_file(tmp_path / "a.log")
    log_to_file(tmp_path / "b.log")
    logging.getLogger("vllm").info("here")

    assert (tmp_path / "a.log").read_text() == ""
    assert (tmp_path / "b.log").read_text().count("here") == 1


def test_it_works_in_a_process_of_its_own(tmp_path):
    code = (
        "import logging, sys, warnings\n"
        "from raypo.tracking.logs import CONSOLE_KEY, log_to_file\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "log_to_file(sys.argv[1])\n"
        "logging.getLogger('x').error('broken')\n"
        "warnings.warn('odd')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "w.log")], capture_output=True, text=True
    )
    text = (tmp_path / "w.log").read_text()

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "ERROR x: broken" in text
    assert "UserWarning: odd" in text


def test_the_first_line_that_a_function_prints_is_told_with_the_place_of_all(tmp_path):
    from ray.train.v2._internal.logging.patch_print import redirected_print

    path, told = tmp_path / "worker_0.log", []
    log_to_file(path, on_print=told.append)
    logging.getLogger("a.library").warning("not a print")
    redirected_print("score", 3)  # what `print` is in Ray Train's workers
    redirected_print("and again")
    assert told == [f"printed: score 3 (this and what follows: {path})"]
    log = path.read_text()
    assert "INFO root: score 3" in log
    assert "INFO root: and again" in log


def test_what_a_library_prints_is_not_shown_as_the_users(tmp_path):
    """`datasets`, say, prints a bytecode listing when it hashes some functions."""
    from ray.train.v2._internal.logging.patch_print import redirected_print

    path, shown = tmp_path / "worker_0.log", []
    log_to_file(path, on_print=shown.append)
    library = {"__name__": "datasets.utils", "print": redirected_print}
    place = f"{sysconfig.get_path('purelib')}/datasets/utils.py"
    exec(compile("def listing():\n    print('159  0 RESUME  0')", place, "exec"), library)
    ours = {"__name__": "raypo.data.rows", "listing": library["listing"]}
    exec(compile("def load():\n    listing()", "raypo/data/rows.py", "exec"), ours)
    ours["load"]()
    assert shown == []
    assert "159  0 RESUME  0" in path.read_text()
    library["listing"]()  # called by a function of the user's, which this test is
    assert len(shown) == 1


def test_all_that_a_callback_prints_is_shown(tmp_path):
    from ray.train.v2._internal.logging.patch_print import redirected_print

    def watch(view):
        redirected_print(f"step {view.step}")
        redirected_print("x" * 300)

    shown = []
    log_to_file(tmp_path / "worker_0.log", on_print=shown.append)
    for step in (1, 2):
        ask_callbacks({"mine.py:watch": watch}, StepView(step, {}, []))
    long = f"printed: {'x' * 300}"
    assert shown == ["printed: step 1", long, "printed: step 2", long]


def test_an_event_of_raypo_is_shown_with_its_key(tmp_path):
    shown: list[tuple[str, str]] = []
    path = tmp_path / "worker_0.log"
    log_to_file(path, on_event=lambda key, line: shown.append((key, line)))
    logger = logging.getLogger("raypo.deployment.handle")
    logger.warning("engine %d was lost", 0, extra={CONSOLE_KEY: "engine 0"})
    logger.warning("not for the console")
    assert shown == [("engine 0", "engine 0 was lost")]
    assert "not for the console" in path.read_text()


def test_the_metrics_of_a_step_are_not_in_the_log(tmp_path):
    """Ray Train logs all 70 of them at each step, and drowns everything else."""
    log_to_file(tmp_path / "worker_0.log")
    logging.getLogger("ray/train/context.py").info("Reporting training result %d: %s", 1, {"a": 1})
    logging.getLogger("ray/train/context.py").info("something else")
    (line,) = (tmp_path / "worker_0.log").read_text().splitlines()
    assert line.endswith(": something else")
