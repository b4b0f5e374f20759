"""A mixture of experts under real DeepSpeed: load of the experts, and the loss that balances it."""

from pathlib import Path

import pytest
import torch

from raypo.collectives import Workers
from raypo.config import ExamplesLearnerSection
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import ResponseTask
from raypo.models.loading import load_causal_lm
from raypo.types import Example, Experience
from tests.integration.learning import (
    LR,
    MAX_NORM,
    STAGES,
    P,
    T,
    experience,
    largest_difference,
    learner,
    weights,
    with_targets,
)
from tests.tiny import tiny_experts

pytestmark = pytest.mark.usefixtures("group")
LOADS = ("ppo/router_load_max", "ppo/router_entropy", "ppo/router_aux_loss")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_experts(tmp_path_factory.mktemp("experts"), "qwen3_moe"))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_cut_into_microbatches_changes_neither_updates_nor_loads(
    experts: str, stage: int, checkpointing: bool
):
    results = []
    for microbatch in (P + T, 4096):  # one row a piece, all rows in one
        keys = {"max_grad_norm": MAX_NORM, "router_aux_coef": 0.5}
        keys["activation_checkpointing"] = checkpointing
        trained = learner(experts, stage=stage, microbatch=microbatch, optimizer=keys)
        batch = with_targets(trained.with_log_probs_and_values(experience()))
        _, update = trained.update(batch, step=1)
        results.append((weights(trained), update.metrics))
    (cut, figures_cut), (whole, figures_whole) = results
    assert largest_difference(cut, whole) < 0.1 * LR
    assert figures_cut == pytest.approx(figures_whole, rel=1e-4, abs=1e-6)
    load, entropy, loss = (figures_cut[name] for name in LOADS)
    assert 1.0 < load <= 2.0  # of four experts with two choices a token
    assert 0.0 < entropy < torch.tensor(4.0).log()
    assert loss > 2.0


def replayed(batch: Experience) -> Experience:
    """The batch with random experts, two of four in two layers."""
    generator = torch.Generator().manual_seed(3)

    def of_tokens(mask: torch.Tensor) -> torch.Tensor:
        return torch.rand(*mask.shape, 2, 4, generator=generator).argsort(-1)[..., :2].byte()

    prompts, responses = of_tokens(batch.prompt_mask), of_tokens(batch.attention_mask)
    return batch.with_(prompt_experts=prompts, response_experts=responses)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_replayed_experts_train_the_policy_alone_however_the_rows_are_cut(
    experts: str, stage: int, checkpointing: bool
):
    results = []
    for microbatch in (P + T, 4096):
        keys = {"max_grad_norm": MAX_NORM, "activation_checkpointing": checkpointing}
        trained = learner(experts, stage=stage, microbatch=microbatch, optimizer=keys)
        before = weights(trained)
        own = trained.with_log_probs_and_values(experience())
        batch = trained.with_log_probs_and_values(replayed(experience()))
        assert own.values is not None
        assert batch.values is not None
        assert torch.equal(own.values, batch.values)  # the critic chooses its own experts
        assert own.old_log_probs is not None
        assert batch.old_log_probs is not None
        assert (own.old_log_probs - batch.old_log_probs).abs().max() > 0.01
        _, update = trained.update(with_targets(batch), step=1)
        after = weights(trained)
        router = "model.layers.0.mlp.gate.weight"
        assert float((after[router] - before[router]).abs().max()) > 0.1 * LR
        results.append((after, update.metrics))
    (cut, figures_cut), (whole, figures_whole) = results
    assert largest_difference(cut, whole) < 0.1 * LR
    assert figures_cut == pytest.approx(figures_whole, rel=1e-4, abs=1e-6)
    assert 0.2 < figures_cut["mismatch/router_disagreement"] < 0.8  # half of random choices


def test_the_loss_is_off_by_default_and_moves_the_routers_if_it_is_on(experts: str):
    results = []
    for coef in (None, 0.0, 0.5):
        keys = {"max_grad_norm": MAX_NORM} | ({} if coef is None else {"router_aux_coef": coef})
        trained = learner(experts, stage=0, optimizer=keys)
        batch = with_targets(trained.with_log_probs_and_values(experience()))
        _, update = trained.update(batch, step=1)
        results.append((weights(trained), update.metrics))
    (default, figures), (off, _), (on, _) = results
    assert set(LOADS) & set(figures) == set(LOADS[:2])
    assert largest_difference(default, off) == 0.0
    router = "model.layers.0.mlp.gate.weight"
    assert float((on[router] - off[router]).abs().max()) > 0.1 * LR


def test_sft_with_the_loss_evens_the_load(experts: str):
    task = ResponseTask(load_causal_lm(experts, dtype="float32"))
    section = ExamplesLearnerSection(
        lr=1e-2, lr_schedule="constant", router_aux_coef=10.0, max_tokens_per_microbatch=32
    )
    trained: SupervisedLearner[Example] = SupervisedLearner(
        task, section, dtype="float32", num_steps=20, workers=Workers()
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 60, (8, 20), generator=generator).int().numpy()
    items = [Example(row[:4], row[4:]) for row in ids]
    steps = [trained.update(items, step=step) for step in range(1, 21)]
    losses = [step["train/router_aux_loss"] for step in steps]
    assert losses[0] > 2.05
    assert 2.0 <= losses[-1] < 2.02
    assert steps[-1]["train/router_load_max"] < steps[0]["train/router_load_max"]


def test_an_empty_microbatch_counts_nothing(experts: str, tmp_path: Path):
    """As on a worker that has fewer microbatches than another."""
    from raypo.learner.router_balance import RouterBalance
    from raypo.models.networks import Policy

    policy = Policy(load_causal_lm(experts, dtype="float32"), temperature=1.0)
    figures = []
    for pieces in ([range(6)], [range(6), range(0)]):
        balance = RouterBalance(policy, coef=1.0, workers=Workers())

        def read(piece: range) -> None:
            rows = torch.tensor(list(piece), dtype=torch.int64)
            batch = experience()
            policy(batch.select(rows) if len(piece) else batch.blank())

        balance.begin_update(pieces, read)
        for piece in pieces:
            with balance.recorded(piece) as routing:
                read(piece)
            balance.loss(routing, piece)
        figures.append(balance.metrics("ppo"))
    assert figures[0] == figures[1]
