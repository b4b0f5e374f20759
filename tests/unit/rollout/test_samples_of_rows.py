"""An agent's episode is one sample, however many rows it has and whoever holds them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from raypo.collectives import Workers
from raypo.config import EvalSection, PPOConfig, PPOSection
from raypo.ppo.controllers import ReferenceKL, UpdateState
from raypo.ppo.covariance import with_covariant_tokens
from raypo.ppo.estimators import with_advantages
from raypo.ppo.objective import StepCounts
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import Sampler
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.sharding import deal, to_experience
from raypo.rollout.step_batch import StepBatch
from raypo.run.rollout_metrics import rollout_metrics
from raypo.run.utilization import step_work
from raypo.types import Episode, Experience, Prompt, Rollout, ToolUse
from tests.stand_ins import Engine, Lossy
from tests.unit.config.test_run_config import with_keys
from tests.unit.learner.plain import on_workers
from tests.unit.rollout.test_step_batch import rollout
from tests.unit.test_known_bugs import SAMPLING

TOKENS = [(0, 0, [4, 3, 5]), (0, 1, [2]), (1, 0, [3, 3]), (1, 1, [5, 1])]
"""Group, sample, and the tokens of each row."""
SCORES = {(0, 0): 3.0, (0, 1): 1.0, (1, 0): -1.0, (1, 1): 2.0}


def rows() -> list[Rollout]:
    return [
        replace(
            rollout(group, sample, tokens),
            row_index=number,
            prompt_ids=np.full(2 + number, 3, np.int32),
            episode=Episode(SCORES[group, sample], len(lengths), 0.0),
            score=SCORES[group, sample],
        )
        for group, sample, lengths in TOKENS
        for number, tokens in enumerate(lengths)
    ]


def experience(share: list[Rollout]) -> Experience:
    """With log-probs that say which group, sample, row and token they are of."""
    batch = to_experience(share)
    assert batch.sample_index is not None
    assert batch.row_index is not None
    rank = batch.group_index * 11 + batch.sample_index * 5 + batch.row_index * 2
    seeds = rank.unsqueeze(1) + torch.arange(batch.response_mask.shape[1])
    old = torch.where(batch.response_mask, -1.0 - (seeds % 4), 0.0)
    above = torch.where(batch.response_mask, 0.25, 0.0)
    return batch.with_(
        old_log_probs=old, ref_log_probs=old - above, advantages=torch.ones_like(old) * old.sign()
    )


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_tokens_are_held_back_whoever_holds_the_rows_and_in_whatever_order(loss: str, count: int):
    """Many products are equal here, and only what a row is called decides between them."""
    ppo = PPOSection.model_validate(
        {
            "policy_loss": loss,
            "covariance": {"fraction": 0.3}
            | ({"low": -9.0, "high": 9.0} if loss == "clip_cov" else {}),
        }
    )

    def held(deal: list[Rollout], workers: Workers) -> set[tuple[int, ...]]:
        batch = with_covariant_tokens(experience(deal), ppo, workers, seed=1, step=2)
        assert batch.covariant is not None
        names = [(r.group_index, r.sample_index, r.row_index) for r in deal]
        return {(*names[row], place) for row, place in batch.covariant.nonzero().tolist()}

    alone = held(rows(), Workers())
    order = np.random.default_rng(count).permutation(len(rows()))
    shares = [[rows()[place] for place in part] for part in np.array_split(order, count)]

    assert len(alone) == int(0.3 * sum(sum(lengths) for *_, lengths in TOKENS))
    assert set().union(*on_workers(count, lambda w: held(shares[w.rank], w))) == alone


@pytest.mark.parametrize("count", [1, 2])
def test_the_kl_of_an_episode_is_that_of_all_its_rows_and_one_response(count: int):
    kl = {"coef": 0.1, "controller": "adaptive", "target": 1.0, "horizon": 4.0}
    ppo = PPOSection.model_validate({"kl": kl})

    def measured(workers: Workers) -> ReferenceKL:
        return ReferenceKL.measure(experience(rows()[workers.rank :: workers.count]), workers)

    state = UpdateState.initial(ppo)
    for kl in on_workers(count, measured):
        num_tokens = sum(sum(lengths) for *_, lengths in TOKENS)
        assert kl.response_mean == pytest.approx(0.25 * num_tokens / 4)
        steered = state.after_step(scores=state.scores, kl=kl, entropy=None)
        assert steered.kl.coef == pytest.approx(0.1 * (1 + 0.2 * 4 / 4))


def test_an_episode_counts_once_in_the_running_normalisation():
    ppo = PPOSection.model_validate(
        {"advantage": "reinforce", "kl": {"coef": 0.0}, "shaping": {"normalize": True}}
    )
    state = UpdateState.initial(ppo)
    _, _, moments = with_advantages(
        experience(rows()), ppo, state, Workers(), max_new_tokens=9, step=1
    )
    scores = list(SCORES.values())
    assert (moments.count, moments.mean) == (4, pytest.approx(sum(scores) / 4))
    assert moments.variance == pytest.approx(np.var(scores))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_episode_counts_once_in_the_loss_whoever_holds_its_rows(count: int):
    ppo = PPOSection.model_validate({"advantage": "grpo", "mask_truncated": True})
    truncated = {(0, 0, 1), (1, 1, 0), (1, 1, 1)}  # one row of a sample, and all of another
    samples = {(0, 0): 4 + 5, (0, 1): 2, (1, 0): 3 + 3}

    def step_counts(workers: Workers) -> tuple[StepCounts, dict[tuple[int, ...], int]]:
        mine = rows()[workers.rank :: workers.count]
        names = [(r.group_index, r.sample_index, r.row_index) for r in mine]
        batch = experience(mine).with_(truncated=torch.tensor([n in truncated for n in names]))
        batch, _, _ = with_advantages(
            batch, ppo, UpdateState.initial(ppo), workers, max_new_tokens=9, step=1
        )
        assert batch.sample_tokens is not None
        told = dict(zip(names, batch.sample_tokens.tolist(), strict=True))
        return StepCounts.of(batch, ppo, workers), told

    for counts, told in on_workers(count, step_counts):
        assert (counts.tokens, counts.sequences, counts.responses) == (17, pytest.approx(3), 3)
        assert told == {name: samples.get(name[:2], 0) for name in told}


def test_rows_of_a_sample_are_of_one_minibatch():
    for seed in range(20):
        (dealt,) = deal(rows(), minibatch_size=1, seed=(seed, 1), num_workers=1)
        of_sample: dict[tuple[int, int], set[int]] = {}
        for each in dealt:
            name = each.group_index, each.sample_index
            of_sample.setdefault(name, set()).add(each.minibatch)
        assert sorted(map(list, of_sample.values())) == [[0], [1], [2], [3]]


def test_lengths_are_of_samples():
    figures = rollout_metrics(rows())
    assert figures["rollout/response_tokens"] == 26.0
    assert figures["rollout/response_tokens_mean"] == 26 / 4
    assert figures["rollout/response_tokens_max"] == 12.0
    assert figures["rollout/prompt_tokens_mean"] == pytest.approx((2 * 4 + 3 * 3 + 4) / 8)


def test_the_spread_of_scores_is_of_samples_and_keeps_a_large_offset():
    far = [replace(each, score=1e8 + each.score) for each in rows()]
    for given in (rows(), far):
        found = rollout_metrics(given)["rollout/score_std"]
        assert found == pytest.approx(np.std(list(SCORES.values())), rel=1e-12)
    failed = rollout_metrics([replace(each, score=math.nan) for each in rows()])
    assert math.isnan(failed["rollout/score_std"])
    assert math.isnan(failed["rollout/score_mean"])


def test_an_episode_is_truncated_once_if_any_of_its_conversations_is():
    ends = {(0, 0, 1): "length", (0, 0, 2): "length", (1, 1, 0): "length"}
    told = [replace(each, finish_reason=ends.get(each.key, "stop")) for each in rows()]
    assert rollout_metrics(told)["rollout/truncated_fraction"] == 2 / 4


def test_tools_and_what_an_episode_measured_are_counted_once():
    uses = (ToolUse("calculator", 0.5, turn=1), ToolUse("", 0.0, "not JSON", turn=2))
    episode = Episode(1.0, 2, 0.0, metrics={"hits": 3.0}, tool_uses=uses)
    told = [replace(each, episode=episode) if each.group_index == 0 else each for each in rows()]
    figures = rollout_metrics(told)
    assert figures["episode/hits"] == 3.0
    assert figures["tools/calls_mean"] == 2 * 2 / 4
    assert figures["tools/failures"] == 2.0
    assert figures["perf/tools_s_mean"] == 2 * 0.5 / 4


def test_work_is_counted_by_samples_and_no_row_is_taken_for_another_update():
    config = PPOConfig.parse(with_keys(rollout__prompts_per_step=2, rollout__samples_per_prompt=2,
                                       ppo__minibatch_size=4))  # fmt: skip
    work = step_work(StepBatch(rows(), rows(), 0, {}), None, config, step=1)
    assert {name: each.samples for name, each in work.items()} == dict.fromkeys(work, 4.0)
    assert work["generate"].tokens == 26.0


class Twice:
    """Plays each prompt as an agent would that begins a second conversation."""

    def play(self, draws, engines, sampling) -> list[Rollout]:
        return [
            replace(
                rollout(draw.group_index, 0, tokens),
                row_index=number,
                episode=Episode(1.0, 2, 0.0, metrics={"hits": 2.0 * draw.group_index}),
            )
            for draw in draws
            for number, tokens in enumerate((3, 5))
        ]

    def waited_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


def test_held_out_episodes_tell_their_length_and_what_a_reward_function_names():
    def judge(rollouts: list[Rollout]) -> list[dict[str, float]]:
        return [{"score": 0.5, "format": float(each.row_index)} for each in rollouts]

    prompts = [Prompt(index, "p", np.array([5], np.int32)) for index in range(2)]
    figures, _ = evaluate_policy(
        prompts,
        Sampler(
            Engine(lambda requests: []),
            Lossy(),
            replace(SAMPLING, samples_per_prompt=1, episodes=Twice()),
        ),
        None,
        section=EvalSection(),
        scorer=Scorer(judge, (), {}),
    )
    assert figures["eval/response_tokens_mean"] == 8.0
    assert figures["eval/episode/hits"] == 1.0
    assert figures["eval/score_mean"] == 1.5
    assert figures["eval/reward/format"] == 0.0
    assert not any(math.isnan(value) for value in figures.values())
