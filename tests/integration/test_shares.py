"""At ZeRO stage 3 no worker ever holds a whole model: loading, pushing, exporting; real gloo."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.integration.shares import Outcome, assert_no_whole_model, run_workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shares")


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Outcome:
    return run_workers(
        folder, 2, timeout_s=500, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8
    )


def test_each_worker_holds_its_share_and_what_is_on_its_way(outcome: Outcome):
    assert_no_whole_model(outcome)


def test_the_exported_files_are_the_model_that_was_loaded(outcome: Outcome, folder: Path):
    policy = folder / "policy"
    places = json.loads((policy / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(places.values())) > 3
    start = load_file(folder / "model" / "model.safetensors")
    assert places.keys() == start.keys() == outcome.sums[0].keys()
    for name, weight in start.items():
        with safe_open(policy / places[name], framework="pt") as file:
            assert torch.equal(file.get_tensor(name), weight), name


def test_a_critic_in_shares_starts_at_its_reward_models_head(outcome: Outcome, folder: Path):
    head = load_file(folder / "reward" / "model.safetensors")["score.weight"]
    expected = 2 * head.bfloat16().float().flatten()  # DeepSpeed makes its shares in bfloat16
    for found in outcome.heads:
        assert torch.equal(torch.tensor(found), expected)
