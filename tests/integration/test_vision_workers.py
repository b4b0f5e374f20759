"""A PPO step with images under DeepSpeed does not depend on the number of workers; gloo."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.integration.test_workers import assert_agrees_with_one_worker, run_workers
from tests.vision_models import tiny_vision_model

KIND = "qwen3_vl"
CASES = [("float32", 0), ("float32", 2), ("float32", 3)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("vision")
    tiny_vision_model(KIND).save_pretrained(folder / "policy")
    (folder / "checkpoints").mkdir()
    more = {"images": KIND, "checkpoints": str(folder / "checkpoints")}
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda count: run_workers(folder, count, CASES, **more), (1, 2))
        return dict(zip((1, 2), found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_figures_and_weights_agree_with_one_worker(outcomes: Any, case: tuple[str, int]) -> None:
    """Minibatches of some prompts with images and some without; policy and critic see them."""
    assert_agrees_with_one_worker(outcomes[1][case], outcomes[2][case], *case)
    one, two = (outcomes[count][case]["second"] for count in (1, 2))
    assert_agrees_with_one_worker(one, two, *case)


def test_the_vision_tower_keeps_every_bit(outcomes: Any) -> None:
    start = tiny_vision_model(KIND).state_dict()
    for outcome in outcomes.values():
        weights = outcome["float32", 2]["weights"]
        assert weights.keys() == start.keys()
        changed = {name for name in start if not torch.equal(weights[name], start[name])}
        assert not any("visual" in name for name in changed)
        assert {name for name in start if "language_model" in name} <= changed
