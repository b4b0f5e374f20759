"""Which GPU each process of a run is shown, in the placements that CI leaves out."""

from pathlib import Path

from tests.integration.test_fake_gpus import EXPECTED, HERE, assert_shown_as_planned, run_all


def test_each_process_is_shown_the_gpus_that_the_plan_gives_it(tmp_path: Path):
    names = [name for name in EXPECTED if name not in HERE]
    found = run_all(tmp_path, names)
    for name in names:
        assert_shown_as_planned(found, name)
