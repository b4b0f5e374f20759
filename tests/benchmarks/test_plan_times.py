"""Seconds of a step as `raypo plan` tells them of this machine's cores, beside those of the run.

Ratios of one session, printed (`-s` shows them). What is asserted is that the plan names the phase
that takes longest.
"""

from __future__ import annotations

import pytest

from raypo.cli.plan import _measured_here
from raypo.config import parse_run_config
from raypo.config.base import read_yaml
from raypo.plan.fit import make_plan
from raypo.plan.hardware import this_machine
from raypo.plan.times import step_time
from tests.benchmarks.bench import SHAPES, Bench

MEASURED = {
    "generate": "generate_s",
    "score": "score_s",
    "update": "update_s",
    "push": "push_weights_s",
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), repeats=1)


@pytest.mark.parametrize("size", list(SHAPES)[-3:])
def test_a_step_takes_what_the_plan_told(bench: Bench, size: str):
    taken = bench.growth("model", size)

    file = bench.folder / "raypo.yaml"
    made = make_plan(parse_run_config(read_yaml(file, ()), origin=str(file)), this_machine())
    rates = _measured_here(made)(made)
    assert rates is not None
    told = step_time(made, rates)

    told_s = {phase.phase: phase.seconds for phase in told.phases}
    took_s = {phase: taken[name] for phase, name in MEASURED.items()}
    rows = {"step": (told.seconds, taken["step_s"])}
    rows |= {phase: (told_s[phase], took) for phase, took in took_s.items()}
    print(f"\n{size}, seconds told / taken:")
    for name, (seconds, took) in rows.items():
        print(f"  {name}: {seconds:.2f} / {took:.2f} = {seconds / took:.2f}")
    assert told.longest.phase == max(took_s, key=lambda phase: took_s[phase])
