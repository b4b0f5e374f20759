"""Normalizers and moments summed over real processes."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from raypo.collectives import Workers
from raypo.config.ppo_section import ESTIMATORS
from raypo.ppo.masked import masked_moments, masked_whiten
from raypo.ppo.shaping import RunningMoments
from raypo.ppo.surrogates import SURROGATES
from tests.unit.ppo.steps import AGGREGATIONS, estimate, policy_loss, random_step, value_loss

ROWS = 7


def reduced_step(workers: Workers) -> list[torch.Tensor]:
    """Losses, gradients, statistics and moments as one worker ends up with them."""
    step = random_step(0, rows=ROWS)
    mine = step.of(torch.arange(workers.rank, ROWS, workers.count))
    moments = workers.sum(masked_moments(mine.advantages, mine.mask))
    whitened = masked_whiten(mine.advantages, mine.mask, moments=moments)
    results = [moments, workers.sum((whitened * mine.returns).sum())]
    for aggregation in AGGREGATIONS:
        knobs: dict[str, Any] = {"aggregation": aggregation, "workers": workers}
        outcomes = [
            (
                policy_loss(*mine.policy(), kind=kind, covariant=mine.covariant, **knobs),
                step.log_probs,
            )
            for kind in SURROGATES
        ]
        critic = value_loss(*mine.critic(), value_clip=0.2, workers=workers)
        outcomes.append((critic, step.values))
        for (loss, stats), leaf in outcomes:
            (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            mine_of_all = loss.detach(), gradient, torch.stack(list(stats.values()))
            results += map(workers.sum, mine_of_all)
    for kind in sorted({*ESTIMATORS} - {"gigpo"}):
        at_least_0 = kind == "maxrl"
        advantages, returns = estimate(
            mine.returns[:, 0].abs() if at_least_0 else mine.returns[:, 0],
            mine.mask,
            kind=kind,
            gae_lambda="adaptive",
            lambda_alpha=0.5,
            critic_lambda=0.9,
            kl=mine.old_values.square(),
            kl_coef=0.0 if at_least_0 else 0.1,
            values=mine.old_values,
            group_index=torch.arange(workers.rank, ROWS, workers.count) // 3,
            workers=workers,
        )
        results.append(workers.sum((advantages * mine.returns + returns).sum()))
    seen = RunningMoments.total(workers.gather(RunningMoments.of(mine.returns[:, 0])))
    return [*results, torch.tensor([seen.count, seen.mean, seen.variance])]


def run_worker(rank: int, folder: str) -> None:
    """One of three processes: a group of three first, then the first two as a group of two."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    for count in (3, 2):
        if rank < count:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store{count}", rank=rank, world_size=count
            )
            workers = Workers.current()
            torch.save(reduced_step(workers), f"{folder}/{count}_{rank}.pt")
            parcels = [{"from": rank, "to": to, "long": [rank] * 1000 * to} for to in range(count)]
            torch.save(workers.exchange(parcels), f"{folder}/parcels_{count}_{rank}.pt")
            dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_one_two_and_three_processes_agree(tmp_path):
    mp.set_forkserver_preload([__name__])  # torch is imported once, not once a process
    mp.start_processes(  # pyright: ignore[reportPrivateImportUsage]
        run_worker, args=(str(tmp_path),), nprocs=3, start_method="forkserver"
    )

    alone = reduced_step(Workers())

    for count in (2, 3):
        for rank in range(count):
            torch.testing.assert_close(torch.load(tmp_path / f"{count}_{rank}.pt"), alone)
            for sender, parcel in enumerate(torch.load(tmp_path / f"parcels_{count}_{rank}.pt")):
                assert parcel == {"from": sender, "to": rank, "long": [sender] * 1000 * rank}


def test_counts_and_rollouts_go_over_gloo_whatever_the_default_group_is(
    monkeypatch: pytest.MonkeyPatch,
):
    """Where that is NCCL's, they would wait for whoever computes on the GPUs."""
    made: list[tuple[Any, Any]] = []

    def new_group(ranks: Any = None, *, backend: Any = None, **_: Any) -> str:
        made.append((ranks, backend))
        return f"group {len(made)}"

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    workers: Any = Workers.current()
    assert (workers.rank, workers.count, workers.group) == (2, 3, "group 1")
    assert workers.with_new_group().group == "group 2"
    assert workers.team([2, 1]).group == "group 4"
    assert made == [(None, "gloo"), (None, "gloo"), ([0, 1], "gloo"), ([2], "gloo")]
