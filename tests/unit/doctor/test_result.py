"""Checks run concurrently; one that hangs, fails or refuses is reported, and holds none up."""

import threading
import time
from collections.abc import Callable

from raypo.config import ConfigError
from raypo.doctor.result import Check, Result, ok, refused, run_checks


def test_a_check_that_hangs_is_given_up_at_its_limit_and_no_other_waits_for_it():
    release = threading.Event()
    begin = time.monotonic()
    hung, good = run_checks(
        [
            Check("storage", lambda: ok("done") if release.wait(60.0) else ok("late"), 0.5),
            Check("ports", lambda: ok("free")),
        ]
    )
    assert time.monotonic() - begin < 10.0
    release.set()
    assert (hung.check, hung.status, hung.is_hung) == ("storage", "fault", True)
    assert hung.found == "timed out after 0.5 s"
    assert "server that is down" in hung.remedy
    assert (good.check, good.status, good.found, good.is_hung) == ("ports", "ok", "free", False)


def test_checks_run_at_the_same_time():
    together = threading.Barrier(3, timeout=10.0)

    def meet() -> Result:
        together.wait()
        return ok("met")

    assert [r.found for r in run_checks([Check(name, meet) for name in "abc"])] == ["met"] * 3


def raising(error: Exception) -> Callable[[], Result]:
    def function() -> Result:
        raise error

    return function


def test_an_error_of_a_check_is_a_warning_and_one_of_the_config_a_fault():
    rule = "learner.use_gpu (True): no node has a GPU. Set it to false. Or add a node."
    broken, refusal = run_checks(
        [Check("a", raising(KeyError("x"))), Check("b", raising(ConfigError(rule)))],
        node="10.0.0.1",
    )
    assert (broken.status, broken.found, broken.node) == ("warning", "KeyError: 'x'", "10.0.0.1")
    assert refusal.status == "fault"
    assert refusal.found == "learner.use_gpu (True): no node has a GPU."
    assert refusal.remedy == "Set it to false. Or add a node."


def test_an_error_without_a_remedy_keeps_its_text():
    assert refused(ConfigError("a (1.5): is odd")).found == "a (1.5): is odd"
