"""A run that shrinks and grows with its cluster is the one that never did, up to rounding."""

import re
from pathlib import Path

import pytest

from tests.integration.task import on_a_cluster


def test_a_run_loses_a_node_gets_one_and_is_told_of_one_that_goes(tmp_path: Path):
    found = on_a_cluster("elastic", str(tmp_path), timeout_s=1500)
    sizes = [
        int(match[1])
        for each in found["messages"]
        if (match := re.search(r"learner workers: (\d) of at most 2", each))
    ]
    assert sizes == [2, 1, 2, 1]
    goes_on = [
        tuple(map(int, match.groups()))
        for each in found["messages"]
        if (match := re.search(r"step (\d+) was written by (\d) workers? .* with (\d):", each))
    ]
    assert [(before, now) for _, before, now in goes_on] == [(2, 1), (1, 2), (2, 1)]
    # The first two steps are those of `checkpoint.every`. The last was saved before its node went.
    saved = {
        int(match[1])
        for each in found["messages"]
        if (match := re.search(r"step (\d+): a node is about to be preempted", each))
    }
    assert goes_on[0][0] % 5 == goes_on[1][0] % 5 == 0
    assert goes_on[2][0] in saved
    elastic, plain = (found["losses"][name] for name in ("elastic", "plain"))
    assert len(plain) == 200
    assert elastic == pytest.approx(plain, rel=1e-3)
    assert plain[-1] < 0.9 * plain[0], "hardly anything was learned: this shows nothing"
