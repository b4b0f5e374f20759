"""A billion and a half of weights on four workers, none of which ever holds them all."""

from pathlib import Path

from tests.integration.shares import assert_no_whole_model, run_workers


def test_a_model_of_one_and_a_half_billion_weights_on_four_workers(tmp_path: Path):
    outcome = run_workers(
        tmp_path,
        4,
        timeout_s=3000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=22,
    )
    assert outcome.parameters > 1.4e9
    assert_no_whole_model(outcome)
