"""The longest response that fits, and the keys that make it longer."""

import json
from pathlib import Path

import pytest

from raypo.cluster.hardware import parse_cluster
from raypo.config.sweep_config import with_values
from raypo.plan.fit import can_share_rows, can_tile, make_plan, remedies
from raypo.plan.longest import LENGTHS, longer_with, longest_response
from scripts.length_table import HEAD, TILED, rows, run_config

PAGE = Path(__file__).parents[3] / "docs" / "long-responses.md"


@pytest.mark.parametrize("changes", [{}, TILED, {"learner.sequence_parallel": 4}])
def test_the_longest_response_fits_and_the_next_one_does_not(tmp_path: Path, changes: dict):
    config, nodes = run_config(tmp_path, "7B", 8), parse_cluster("8xH100,2000G")
    values = with_values(config.model_dump(), changes)
    longest = longest_response(config, nodes, changes)
    assert LENGTHS[0] < longest < LENGTHS[-1]
    for tokens in (longest, LENGTHS[LENGTHS.index(longest) + 1]):
        tried = config.parse(with_values(values, {"rollout.max_new_tokens": tokens}))
        assert make_plan(tried, nodes).fits is (tokens == longest)


def test_keys_that_make_it_longer_are_named_with_the_best_first(tmp_path: Path):
    config, nodes = run_config(tmp_path, "7B", 8), parse_cluster("8xH100,2000G")
    longest = longest_response(config, nodes)
    named = longer_with(config, nodes)
    lengths = [tokens for _, tokens in named]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] > longest
    assert "learner.sequence_parallel" in named[0][0]
    for changes, tokens in named:
        assert longest_response(config, nodes, changes) == tokens


@pytest.mark.parametrize(
    ("values", "shares", "tiles"),
    [
        ({}, True, True),
        ({"layer_types": ["sliding_attention", "full_attention"]}, True, True),
        ({"layer_types": ["linear_attention", "full_attention"]}, False, True),
        ({"full_attention_interval": 4}, False, True),
        ({"vision_config": {}}, False, True),
        ({"num_experts": 4, "num_experts_per_tok": 2}, True, False),
        ({"model_type": "opt"}, True, False),
    ],
)
def test_keys_that_the_start_would_refuse_are_not_named(
    tmp_path: Path, values: dict, shares: bool, tiles: bool
):
    config, nodes = run_config(tmp_path, "7B", 8), parse_cluster("8xH100,2000G")
    path = tmp_path / "7B" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    long = with_values(config.model_dump(), {"rollout.max_new_tokens": 196_608})
    plan = make_plan(config.parse(long), nodes)
    assert can_share_rows(config, plan.models) is shares
    assert can_tile(plan.models) is tiles
    named = [changes for changes, _ in longer_with(config, nodes)]
    keys = {key for changes in (*named, *remedies(plan)) for key in changes}
    assert shares or "learner.sequence_parallel" not in keys
    assert tiles or "learner.mlp_tile_tokens" not in keys


def test_the_plan_does_not_count_on_tiles_of_experts(tmp_path: Path):
    config, nodes = run_config(tmp_path, "7B", 8), parse_cluster("8xH100,2000G")
    path = tmp_path / "7B" / "config.json"
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | experts))
    plain, tiled = (
        make_plan(config.parse(with_values(config.model_dump(), changes)), nodes)
        for changes in ({}, {"learner.mlp_tile_tokens": 16})
    )
    assert tiled.roles[0].memory.peak == plain.roles[0].memory.peak


def test_the_table_of_the_page_is_what_the_plan_says():
    text = PAGE.read_text()
    assert "\n".join(HEAD) in text
    (row,) = rows(["7B"], [8])
    assert row in text


def test_workers_that_share_a_row_share_its_activations(tmp_path: Path):
    """Layer inputs wait in RAM, and tiles of MLPs do not grow with the row."""
    nodes = parse_cluster("8xH100,2000G")
    config = run_config(tmp_path, "7B", 8)

    def of_update(**changes: object) -> tuple[int, int]:
        keys = {f"learner.{key}": value for key, value in changes.items()}
        keys = {"learner.max_tokens_per_microbatch": 65536, **keys}
        keys |= {"rollout.max_new_tokens": 64512, "model.dtype": "bfloat16"}
        made = make_plan(config.parse(with_values(config.model_dump(), keys)), nodes)
        memory = made.roles[0].memory
        return memory.phases["update"]["activations"], memory.host.get("layer inputs", 0)

    alone, _ = of_update()
    shared, _ = of_update(sequence_parallel=2, max_tokens_per_microbatch=32768)
    assert shared == pytest.approx(alone / 2, rel=0.01)
    tiled, _ = of_update(mlp_tile_tokens=1024)
    inputs = 28 * 2 * 3584 * 65536
    on_device, in_ram = of_update(activation_checkpointing="offload")
    assert in_ram == 28 * 2**29  # torch rounds pinned buffers up to powers of two
    assert alone - on_device == inputs
    assert alone - tiled == 4 * 2 * 18_944 * (65536 - 1024)
