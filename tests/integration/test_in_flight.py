"""Batches sampled ahead by a real engine whose weights change all the time, under injected delays.

The weights have other versions and the same values, so that all lengths are of one distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ks_2samp
from transformers import AutoModelForCausalLM

from raypo.config import EngineSection, FilterSection, InFlight, RewardSection
from raypo.data.stream import ShuffledStream
from raypo.deployment.handle import local_handle
from raypo.metrics.clock import Clock
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.controller import RolloutController
from raypo.rollout.engines import PolicyEngines, Pushes
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.step_batch import StepBatch
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine
from raypo.types import Prompt, Rollout
from tests.integration.test_engine import Pair
from tests.stand_ins import Lossy
from tests.tiny import tiny_policy

END = 7
"""Any token out of a hundred ends a response with it: lengths are spread widely."""
LONGEST = 250
PROMPTS_PER_STEP, SAMPLES, STEPS, STALENESS = 6, 4, 7, 2
SURELY = 1e-3
"""A probability below which two samples are not of one distribution."""
PROMPTS = [Prompt(i, "p", np.array([5 + i, 6], np.int32)) for i in range(11)]
SAMPLING = Sampling(SAMPLES, LONGEST, 1.0, 1.0, (END,), seed=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = str(tiny_policy(tmp_path_factory.mktemp("policy")))
    section = EngineSection(kv_cache_gb=0.1, extra={"max_num_seqs": 48})
    engine = Engine(folder, section=section, dtype="float32", max_model_len=LONGEST + 8)
    made = Pair(folder, engine, AutoModelForCausalLM.from_pretrained(folder).eval())
    made.version = -1
    yield made
    made.engine.shutdown()


@dataclass
class Run:
    """A loop whose update changes no weight, and whose pushes come while the engine samples."""

    pair: Pair
    in_flight: InFlight
    slow_scorer_s: float = 0.0
    slow_learner_s: float = 0.0
    passes: Callable[[int], bool] = lambda group: True
    """A filter's opinion of a group."""
    last_step: int = 0

    def __post_init__(self) -> None:
        self.pushes = Pushes()
        client = EngineClient(local_handle(self.pair.engine))
        self.engines = PolicyEngines(client, self.pushes, joins=True)
        self.controller = RolloutController(
            PromptSource(ShuffledStream(PROMPTS, seed=1), SAMPLES),
            self._scored,
            lambda: StepBatch(
                missing_groups=PROMPTS_PER_STEP,
                filter=FilterSection(enabled=True),
                reward=RewardSection(),
            ),
            prompts_per_step=PROMPTS_PER_STEP,
            max_staleness=STALENESS,
            overlaps=True,
            num_steps=STEPS,
            is_ahead=True,
        )
        self.trained: list[tuple[int, Rollout]] = []
        """With the step that trained it."""
        self.counts: dict[str, float] = {}
        self.requested = np.zeros(2, int)
        """Samples requested, and requested again."""

    def push(self, version: int) -> None:
        self.pair.version = version - 1
        with self.pushes.push():
            self.pair.engine.pause(self.in_flight)
            self.pair.engine.load_weights(self.pair.push())
            self.pair.engine.resume()
        self.controller.arrived(version)

    def go(self, until: int = STEPS) -> None:
        self.push(self.last_step)
        self.controller.begin(last_step=self.last_step)
        for step in range(self.last_step + 1, until + 1):
            batch = self.controller.take(step).result()
            taken, (self.counts, _) = batch.trained, self.controller.accounts(batch)
            self.requested += np.array(list(self.counts.values())[:2], int)
            self.trained += [(step, each) for each in taken]
            time.sleep(self.slow_learner_s)
            self.push(step)
        self.last_step = until

    def _scored(self, draws: Sequence[Prompt], clock: Clock) -> list[Rollout]:
        rollouts = Sampler(self.engines, Lossy(), SAMPLING).sample(draws)
        time.sleep(self.slow_scorer_s)
        return [
            replace(each, score=float(each.sample_index * self.passes(each.group_index)))
            for each in rollouts
        ]


def assert_none_lost_and_none_twice(
    trained: list[tuple[int, Rollout]], passes: Callable[[int], bool] = lambda group: True
) -> None:
    drawn = [group for group in range(2 * STEPS * PROMPTS_PER_STEP) if passes(group)]
    expected = [(group, n) for group in drawn for n in range(SAMPLES)][: len(trained)]
    assert len(trained) == STEPS * PROMPTS_PER_STEP * SAMPLES
    assert [(each.group_index, each.sample_index) for _, each in trained] == expected


def assert_every_token_keeps_the_bound(trained: list[tuple[int, Rollout]]) -> None:
    for step, each in trained:
        lags = step - 1 - each.weight_versions
        assert lags.min() >= 0
        assert lags.max() <= STALENESS


def lengths(rollouts: Sequence[Rollout]) -> list[int]:
    return [len(each.response_ids) for each in rollouts]


def of_one_distribution(one: list[int], other: list[int]) -> float:
    """How probable such a distance is where both are (Kolmogorov and Smirnov)."""
    return float(ks_2samp(one, other)[1])  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> list[int]:
    """Lengths of other samples of the same prompts, none of which any push has met."""
    pair.engine.load_weights(pair.push())
    source = PromptSource(ShuffledStream(PROMPTS, seed=1), 1)
    draws = source.draw(STEPS * PROMPTS_PER_STEP)
    other = Sampling(SAMPLES, LONGEST, 1.0, 1.0, (END,), seed=4)
    engines = PolicyEngines(EngineClient(local_handle(pair.engine)))
    return lengths(Sampler(engines, Lossy(), other).sample(draws))


@pytest.mark.parametrize(
    ("in_flight", "scorer_s", "learner_s"),
    [("keep", 0.0, 0.1), ("restart", 0.0, 0.0), ("recompute", 0.2, 0.0)],
)
def test_every_sample_is_trained_once_within_the_bound_and_long_ones_are_not_rarer(
    pair: Pair, undisturbed: list[int], in_flight: InFlight, scorer_s: float, learner_s: float
):
    run = Run(pair, in_flight, slow_scorer_s=scorer_s, slow_learner_s=learner_s)
    run.go()
    rollouts = [each for _, each in run.trained]
    assert_none_lost_and_none_twice(run.trained)
    assert_every_token_keeps_the_bound(run.trained)
    assert of_one_distribution(lengths(rollouts), undisturbed) > SURELY
    if in_flight == "restart":  # how many meet a push otherwise is a matter of timing: test_ahead
        assert not any(each.later_versions for each in rollouts)


def test_a_run_that_is_killed_and_resumed_trains_every_sample_once(pair: Pair, tmp_path: Path):
    first = Run(pair, "recompute")
    first.go(until=3)
    first.controller.save(tmp_path)  # and what comes after it is lost
    first.controller.close()

    second = Run(pair, "recompute", last_step=3)
    second.controller.restore(tmp_path)
    restored = second.controller.source
    # The batches of two or three steps.
    possible = [n * PROMPTS_PER_STEP * SAMPLES for n in (STALENESS, STALENESS + 1)]
    assert restored.num_carried in possible
    lost = restored.num_lost
    second.go()
    (asked, again), left = second.requested, second.counts["rollout/samples_carried"]
    assert (again, left) == (lost, 0)
    assert first.requested[0] + asked == STEPS * PROMPTS_PER_STEP * SAMPLES
    assert_none_lost_and_none_twice(first.trained + second.trained)
    assert_every_token_keeps_the_bound(first.trained + second.trained)
