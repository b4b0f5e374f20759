"""A user's own functions see the step of all workers, however its rows are dealt."""

from pathlib import Path

import pytest
import torch

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.ppo.controllers import UpdateState
from raypo.ppo.estimators import with_advantages
from raypo.types import Experience
from tests.unit.learner.plain import on_workers
from tests.unit.test_types import batch

FUNCTIONS = "examples/own_functions/functions.py"
PPO = {
    "advantage": f"{FUNCTIONS}:over_the_median",
    "shaping": {"function": f"{FUNCTIONS}:ranks"},
    "kl": {"coef": 0.0},
}


def step_of(rows: int) -> Experience:
    one = batch()
    picked = one.select(torch.arange(len(one)).repeat(rows)[:rows])
    return picked.with_(
        scores=torch.arange(float(rows)).square(), group_index=torch.arange(rows) // 2
    )


def advantages(experience: Experience, workers: Workers) -> torch.Tensor:
    ppo = PPOSection.model_validate(PPO)
    found, figures, _ = with_advantages(
        experience, ppo, UpdateState.initial(ppo), workers, max_new_tokens=2, step=1
    )
    assert found.advantages is not None
    assert found.returns is not None
    assert torch.equal(found.returns, found.advantages)
    assert "ppo/shaped_score_mean" in figures
    return found.advantages


def test_shaping_comes_first_and_the_advantage_gets_what_it_made():
    step = step_of(4)
    ranked = torch.tensor([0.0, 0.25, 0.5, 0.75])
    medians = torch.tensor([0.0, 0.0, 0.5, 0.5])  # torch's is the lower one of two
    expected = torch.where(step.response_mask, (ranked - medians).unsqueeze(1), 0.0)
    torch.testing.assert_close(advantages(step, Workers()), expected)


def test_neither_depends_on_which_worker_has_which_row_or_how_wide_it_padded():
    step = step_of(5)
    shares = [torch.tensor([0, 3, 4]), torch.tensor([1])]  # the second is one token wide
    found = on_workers(2, lambda worker: advantages(step.select(shares[worker.rank]), worker))
    alone = advantages(step.select(torch.tensor([0, 1, 3, 4])), Workers())
    expected = dict(zip([0, 1, 3, 4], alone, strict=True))
    assert alone.abs().sum() > 0
    for rows, mine in zip(shares, found, strict=True):
        for row, own in zip(rows.tolist(), mine, strict=True):
            torch.testing.assert_close(own, expected[row][: len(own)])


def test_a_response_without_a_score_is_no_ones_rival():
    step = step_of(4)
    step = step.with_(scores=torch.tensor([0.0, torch.nan, 4.0, 9.0]))
    found = advantages(step, Workers())
    assert found[:2].abs().sum() == 0.0
    assert found[3].abs().sum() > 0.0


def test_a_function_that_is_not_there_is_told_by_its_key(tmp_path: Path):
    from raypo.config import ConfigError
    from raypo.custom.loader import load_function

    file = tmp_path / "own.py"
    file.write_text("def loss(tokens, step):\n    return tokens\n")
    with pytest.raises(ConfigError, match=r"ppo.policy_loss .* the tokens, but it has the parame"):
        load_function(f"{file}:loss", key="ppo.policy_loss")
    with pytest.raises(ConfigError, match=r"ppo.advantage \(.*:adv\): .* defines no adv"):
        load_function(f"{file}:adv", key="ppo.advantage")
