"""The longest response that fits, and the keys that make it longer."""

from pathlib import Path

import pytest

from raypo.cluster.hardware import parse_cluster
from raypo.config.sweep_config import with_values
from raypo.plan.fit import make_plan
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


def test_the_table_of_the_page_is_what_the_plan_says():
    text = PAGE.read_text()
    assert "\n".join(HEAD) in text
    (row,) = rows(["7B"], [8])
    assert row in text
