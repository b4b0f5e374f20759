"""raypo's scheduler beside vLLM's own, in another process: importing vLLM disables compiling."""

from tests.integration.task import run_probe


def test_random_schedules_are_those_of_vllms_own_scheduler():
    assert " passed" in run_probe("lean_scheduler_probe.py")
