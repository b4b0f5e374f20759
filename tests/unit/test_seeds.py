"""The draws of a seed are those of every earlier version, or a resumed run would draw others."""

import torch

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.data.stream import Mix, ShuffledStream
from raypo.learner.learner import minibatch_order
from raypo.ppo.covariance import with_covariant_tokens
from raypo.rollout.collect import Sampling, request_seed
from tests.unit.ppo.steps import experience

SEED = 5


def rows(mix: Mix | None = None) -> list[int]:
    stream = ShuffledStream(range(8), seed=SEED, mix=mix)
    return [row for _, row in stream.take(8)]


def covariant_tokens() -> list[int]:
    tokens = torch.arange(1.0, 9.0).unsqueeze(0)
    index = torch.zeros(1, dtype=torch.int64)
    batch = experience(
        tokens > 0,
        old_log_probs=-tokens,
        advantages=tokens,
        sample_index=index,
        row_index=index,
    )
    section = {"fraction": 0.4, "low": -100.0, "high": 100.0}
    ppo = PPOSection.model_validate({"policy_loss": "clip_cov", "covariance": section})
    drawn = with_covariant_tokens(batch, ppo, Workers(), seed=SEED, step=1).covariant
    assert drawn is not None
    return drawn[0].nonzero().flatten().tolist()


def test_the_draws_of_a_seed_are_those_of_every_version():
    sampling = Sampling(4, 8, 1.0, 1.0, (), SEED)

    assert rows() == [1, 2, 0, 7, 5, 4, 6, 3]
    assert rows(Mix((4, 4), (0.5, 0.5), 4)) == [4, 1, 0, 5, 7, 6, 3, 2]
    assert minibatch_order(SEED, 1, 0, 8) == [6, 3, 7, 4, 1, 0, 2, 5]
    assert request_seed(sampling, 3, 2) == 441655792
    assert covariant_tokens() == [0, 2, 5]
