"""A run on a cluster that others keep busy says who waits for what, and who has it."""

from pathlib import Path

import pytest
import ray
import ray.util
from ray.util.placement_group import placement_group_table, remove_placement_group

from raypo import PPOConfig, PPOTrainer
from raypo.cluster.placement import PlacementError
from raypo.deployment import reserve

pytestmark = pytest.mark.usefixtures("local_ray")


def test_what_is_not_free_in_time_names_the_bundle_that_waits_and_who_holds_the_rest(
    task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Ray Train's own group would wait without a word; nothing is started, nothing is left."""
    assert reserve.MESSAGE_AFTER_S < 10.0
    monkeypatch.setattr(reserve, "MESSAGE_AFTER_S", 0.0)
    cpus = ray.cluster_resources()["CPU"]
    others = ray.util.placement_group([{"CPU": cpus}], name="others")
    assert others.wait(60)
    config = PPOConfig.load(task, {"name": "waiting", "placement.timeout_s": 1.0})
    try:
        with pytest.raises(PlacementError) as caught:
            PPOTrainer(config).fit()
    finally:
        remove_placement_group(others)
    message = str(caught.value)
    assert message.startswith(
        "placement.timeout_s (1): bundle 0 of the learner workers' group (1 CPU for learner worker "
        "0) is not free"
    )
    assert f"Placement groups that hold the missing resources: others ({cpus:g} CPU)." in message
    said = "waiting for room, up to 1 s (placement.timeout_s): bundle 0 of the learner workers'"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(said)]
    assert f"others ({cpus:g} CPU)." in line
    states = {group["name"]: group["state"] for group in placement_group_table().values()}
    assert states["raypo:waiting:workers"] == "REMOVED"
