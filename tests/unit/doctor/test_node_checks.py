"""Nodes of a cluster are compared by what they say of themselves."""

from dataclasses import replace

from raypo.doctor.node_checks import NodeFacts, clocks, shared_folder, versions_equal

GOOD = NodeFacts({"python": "3.11.7", "ray": "2.60.0"}, 0.002, 0.001, sees_mark=True)


def test_equal_nodes_give_no_alarm():
    facts = {"10.0.0.1": GOOD, "10.0.0.2": replace(GOOD, clock_s=-0.3)}
    assert versions_equal(facts).found == "python 3.11.7, ray 2.60.0, on every node"
    assert clocks(facts, at_uri=False).found == "at most 0.3 s apart"
    assert shared_folder(facts, "/data/runs").status == "ok"
    assert shared_folder(facts, "s3://bucket/runs").status == "skipped"


def test_a_node_with_another_version_or_without_a_package():
    other = replace(GOOD, versions={"python": "3.11.7", "ray": "2.59.0"})
    result = versions_equal({"10.0.0.1": GOOD, "10.0.0.2": other})
    assert (result.status, result.check) == ("fault", "versions")
    assert result.found == "ray: 2.60.0 on 10.0.0.1; 2.59.0 on 10.0.0.2"
    without = replace(GOOD, versions={"python": "3.11.7"})
    result = versions_equal({"10.0.0.1": without, "10.0.0.2": GOOD})
    assert result.found == "ray: none on 10.0.0.1; 2.60.0 on 10.0.0.2"


def test_a_clock_that_is_wrong():
    facts = {"10.0.0.1": GOOD, "10.0.0.2": replace(GOOD, clock_s=-4.2)}
    result = clocks(facts, at_uri=True)
    assert (result.status, result.found) == ("warning", "clocks differ: 10.0.0.2 by -4.2 s")
    facts["10.0.0.2"] = replace(GOOD, clock_s=400.0)
    assert clocks(facts, at_uri=True).status == "fault"
    assert clocks(facts, at_uri=False).status == "warning"


def test_a_clock_within_the_error_of_its_measurement_is_not_wrong():
    facts = {"10.0.0.1": replace(GOOD, clock_s=2.0, error_s=1.5)}
    assert clocks(facts, at_uri=False).status == "ok"


def test_a_storage_path_that_nodes_do_not_share():
    facts = {"10.0.0.1": GOOD, "10.0.0.2": replace(GOOD, sees_mark=False)}
    result = shared_folder(facts, "/data/runs")
    assert result.status == "fault"
    assert result.found == "10.0.0.2: a file that this machine wrote is not there"
