"""A billion and a half of weights on four workers, none of which ever holds them all."""

from pathlib import Path

from tests.integration.shares import assert_no_whole_model, run_workers

LORA = {"rank": 8, "target_modules": ["k_proj"]}
"""Masters and moments of all weights would take 18 GB; the quick tier has them, of 150 million."""


def test_a_model_of_one_and_a_half_billion_weights_on_four_workers(tmp_path: Path):
    outcome = run_workers(
        tmp_path,
        4,
        timeout_s=3000,
        lora=LORA,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=22,
    )
    assert outcome.parameters > 1.4e9
    for rank, peaks in enumerate(outcome.peaks):
        print(rank, {name: f"{size / 2**20:.0f} MiB" for name, size in peaks.items()})
    assert_no_whole_model(outcome, trained=False)
