"""Batches of the controller: the bound holds, no prompt is lost or overtaken, resumes repeat."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypo.config import CurriculumSection, FilterSection, RewardSection
from raypo.data.stream import ShuffledStream
from raypo.metrics.clock import Clock
from raypo.rollout.controller import RolloutController
from raypo.rollout.curriculum import CurriculumStream
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.step_batch import StepBatch
from raypo.types import Prompt, Rollout
from tests.unit.rollout.test_step_batch import rollout

PROMPTS_PER_STEP = 2


class Run:
    """A loop that trains nothing; its engine knows its version."""

    def __init__(
        self,
        *,
        max_staleness: int,
        num_steps: int = 8,
        settles: bool = False,
        is_ahead: bool = True,
        sampling_s: Callable[[int], float] = lambda group: 0.0,
        passes: Callable[[int], bool] | None = None,
        max_refills: int = 50,
        stream: ShuffledStream[Prompt] | None = None,
    ) -> None:
        prompts = [Prompt(i, "p", np.array([5], np.int32)) for i in range(5)]
        self.stream = stream or ShuffledStream(prompts, seed=3)
        self.prompts: dict[int, int] = {}
        """Index of the prompt of each draw that was sampled."""
        self.rates: list[dict[str, float]] = []
        """Metrics of the curriculum by step."""
        self.source = PromptSource(self.stream, 2)
        self.controller = RolloutController(
            self.source,
            lambda *args: self.scored(*args),
            lambda: StepBatch(
                missing_groups=PROMPTS_PER_STEP,
                filter=self.filter,
                reward=RewardSection(max_failed_fraction=1.0),
            ),
            prompts_per_step=PROMPTS_PER_STEP,
            max_staleness=max_staleness,
            overlaps=max_staleness > 0 and not settles,
            settles=settles,
            num_steps=num_steps,
            is_ahead=is_ahead,
        )
        self.num_steps = num_steps
        self.version = 0
        self.last_step = 0
        self.sampling_s = sampling_s
        self.passes = passes or (lambda group: True)
        self.filter = FilterSection(enabled=passes is not None, max_refills=max_refills)
        self.max_staleness_trained: int | None = None
        self.trained: list[tuple[int, list[tuple[int, int]]]] = []
        """Of each step: its number, and group and version of each group's first token."""
        self.last_versions: list[int] = []
        """Of the last token of each rollout that was trained."""
        self.figures: list[dict[str, float]] = []
        """The accounts of each step."""
        self.under_way = self.most_under_way = 0

    def scored(self, draws: Sequence[Prompt], clock: Clock) -> list[Rollout]:
        first = self.version
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.prompts |= {draw.group_index: draw.index for draw in draws}
        for draw in draws:
            time.sleep(self.sampling_s(draw.group_index))
        clock.lap("time/generate_s")
        self.under_way -= 1
        return [
            replace(
                rollout(draw.group_index, sample),
                weight_version=first,
                later_versions=((2, self.version),),
                score=float(sample if self.passes(draw.group_index) else 0),
            )
            for draw in draws
            for sample in range(2)
        ]

    def push(self, version: int) -> None:
        self.controller.settle().result()
        self.version = version
        self.controller.arrived(version)

    def begin(self) -> None:
        self.controller.begin(last_step=self.last_step)

    def go(self, until: int | None = None, update_s: float = 0.0) -> None:
        self.begin()
        for step in range(self.last_step + 1, (until or self.num_steps) + 1):
            collected = self.controller.take(step).result()
            rollouts = collected.trained
            groups = {each.group_index: each.weight_version for each in rollouts}
            self.trained.append((step, list(groups.items())))
            self.last_versions += [int(each.weight_versions[-1]) for each in rollouts]
            counts, rates = self.controller.accounts(collected)
            self.figures.append(collected.counts(step, self.max_staleness_trained) | counts)
            self.rates.append(rates)
            time.sleep(update_s)
            self.push(step)
            self.last_step = step

    def groups(self) -> list[int]:
        return [group for _, rows in self.trained for group, _ in rows]

    def staleness(self) -> list[int]:
        return [step - 1 - version for step, rows in self.trained for _, version in rows]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@given(
    max_staleness=st.integers(0, 4),
    delays=st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=16, max_size=16),
    update_s=st.sampled_from([0.0, 0.002]),
)
@settings(max_examples=15, deadline=None)
def test_every_prompt_is_trained_once_in_order_and_none_is_too_stale(
    max_staleness: int, delays: list[float], update_s: float
):
    run = Run(max_staleness=max_staleness, sampling_s=lambda group: delays[group])
    run.go(update_s=update_s)
    assert run.groups() == list(range(PROMPTS_PER_STEP * run.num_steps))
    assert_within_the_bound(run, max_staleness)


def assert_within_the_bound(run: Run, max_staleness: int) -> None:
    assert all(0 <= lag <= max_staleness for lag in run.staleness())
    steps = [step for step, rows in run.trained for _ in rows for _ in range(2)]
    assert all(last < step for step, last in zip(steps, run.last_versions, strict=True))


@given(
    max_staleness=st.integers(1, 4),
    delays=st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=7, max_size=7),
    passing=st.lists(st.booleans(), min_size=5, max_size=11).filter(any),
    max_refills=st.sampled_from([1, 50]),
    update_s=st.sampled_from([0.0, 0.002]),
)
@settings(max_examples=25, deadline=None)
def test_with_a_filter_every_step_trains_the_groups_that_a_synchronous_run_trains(
    max_staleness: int,
    delays: list[float],
    passing: list[bool],
    max_refills: int,
    update_s: float,
):
    """Refills take what was begun for the steps after; nothing is drawn that is then left out."""

    def of(staleness: int, delay: Callable[[int], float]) -> Run:
        run = Run(
            max_staleness=staleness,
            sampling_s=delay,
            passes=lambda group: passing[group % len(passing)],
            max_refills=max_refills,
        )
        run.go(update_s=update_s)
        return run

    run = of(max_staleness, lambda group: delays[group % 7])
    in_turn = of(0, lambda group: 0.0)
    assert [[group for group, _ in rows] for _, rows in run.trained] == [
        [group for group, _ in rows] for _, rows in in_turn.trained
    ]
    assert_within_the_bound(run, max_staleness)
    assert run.figures[-1]["rollout/samples_carried"] == 0
    outcomes = ("trained", "filtered", "failed")
    for mine, theirs in zip(run.figures, in_turn.figures, strict=True):
        for name in outcomes:
            assert mine[f"rollout/samples_{name}"] == theirs[f"rollout/samples_{name}"]


def test_for_a_learner_that_waits_all_batches_of_the_bound_are_sampled_at_the_same_time():
    run = Run(max_staleness=3, sampling_s=lambda group: 0.02 * group)
    run.go()
    assert run.most_under_way == 4
    assert max(run.staleness()) == 3


def test_no_batch_is_begun_earlier_than_the_learner_needs_it():
    run = Run(max_staleness=3, num_steps=14)
    run.sampling_s = lambda group: 0.1 if group < 5 * PROMPTS_PER_STEP else 0.0
    run.go(update_s=0.04)
    lags = run.staleness()[::PROMPTS_PER_STEP]
    assert max(lags[:7]) == 3  # the learner had to wait for these
    assert lags[-1] == 1


@pytest.mark.parametrize(("sampling_s", "update_s"), [(0.0, 0.004), (0.004, 0.0)])
def test_one_step_off_is_one_version_behind_whoever_is_slower(sampling_s: float, update_s: float):
    run = Run(max_staleness=1, settles=True, sampling_s=lambda batch: sampling_s)
    run.go(update_s=update_s)
    assert run.staleness() == [0] * PROMPTS_PER_STEP + [1] * PROMPTS_PER_STEP * 7


def test_the_next_batch_is_sampled_while_the_learner_updates():
    run = Run(max_staleness=1)
    run.begin()
    run.controller.take(1).result()
    wait_until(lambda: 2 in run.controller._batches)  # the update of step 1 has not ended
    following = run.controller._batches[2]
    assert {rollout.weight_version for rollout in following.trained} == {0}
    assert 3 not in run.controller._batches


def test_a_synchronous_batch_is_begun_when_it_is_asked_for():
    run = Run(max_staleness=0, is_ahead=False)
    run.begin()
    run.controller.take(1).result()
    run.push(1)
    time.sleep(0.05)  # an evaluation, for which the engines are free
    assert run.source.drawn == PROMPTS_PER_STEP
    batch = run.controller.take(2).result()
    assert {rollout.weight_version for rollout in batch.trained} == {1}
    assert batch.clock.laps["time/generate_s"] > 0.0
    assert "perf/generate_s" not in batch.metrics


def test_what_ends_the_collecting_ends_the_step_that_wants_it():
    run = Run(max_staleness=2)

    def scored(draws: Sequence[Prompt], clock: Clock) -> list[Rollout]:
        raise RuntimeError("the judge has left")

    run.scored = scored
    run.begin()
    with pytest.raises(RuntimeError, match="the judge has left"):
        run.controller.take(1).result()
    with pytest.raises(RuntimeError, match="the judge has left"):
        run.controller.take(2).result()


def test_what_ends_the_drawing_of_prompts_ends_the_step_that_wants_them():
    run = Run(max_staleness=2)
    take = run.stream.take

    def fails(count: int) -> list[tuple[int, Prompt]]:
        if run.stream.state_dict()["position"] >= 2 * PROMPTS_PER_STEP:
            raise MemoryError("no room for another epoch's order")
        return take(count)

    run.stream.take = fails
    with pytest.raises(MemoryError, match="no room for another epoch's order"):
        run.go()
    assert len(run.trained) <= 2


def test_a_batch_that_fails_ends_the_wait_before_a_push():
    run = Run(max_staleness=1, settles=True)
    sample = run.scored

    def scored(draws: Sequence[Prompt], clock: Clock) -> list[Rollout]:
        if draws[0].group_index >= PROMPTS_PER_STEP:
            raise RuntimeError("the engine has left")
        return sample(draws, clock)

    run.scored = scored
    run.begin()
    run.controller.take(1).result()
    with pytest.raises(RuntimeError, match="the engine has left"):
        run.push(1)


def test_what_was_collected_has_spans_of_its_own():
    run = Run(max_staleness=1, settles=True)
    run.go()
    names = [name for name, _, _ in run.controller.spans()]
    versions = [0, *range(run.num_steps - 1)]
    assert names == [f"time/generate_v{version}_s" for version in versions]
    assert run.controller.spans() == []


@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("killed_after", [1, 4, 7])
@pytest.mark.parametrize("passes", [None, lambda group: group % 3 > 0], ids=["all", "filter"])
def test_a_resumed_run_trains_what_the_undisturbed_one_trains(
    tmp_path: Path, settles: bool, killed_after: int, passes: Callable[[int], bool] | None
):
    def new() -> Run:
        return Run(max_staleness=1, settles=settles, passes=passes)

    whole = new()
    whole.go()
    first = new()
    first.go(until=killed_after)
    first.controller.save(tmp_path)
    first.controller.close()
    second = new()
    second.version = second.last_step = killed_after
    second.controller.restore(tmp_path)
    second.go()
    assert first.groups() + second.groups() == whole.groups()
    if settles:  # else it depends on timing which version a batch is of
        assert first.trained + second.trained == whole.trained
    assert_accounts_close(first.figures + second.figures)


def assert_accounts_close(figures: list[dict[str, float]]) -> None:
    """What was asked for is trained, filtered, failed, dropped, or carried on."""
    carried = asked = settled = 0.0
    for each in figures:
        now = {name.removeprefix("rollout/samples_"): value for name, value in each.items()}
        done = now["trained"] + now["filtered"] + now["failed"] + now["dropped"]
        assert now["sampled"] == done
        assert carried + now["asked"] == done + now["carried"]
        carried, asked, settled = now["carried"], asked + now["asked"], settled + done
    assert asked == settled + carried


def test_a_checkpoint_while_batches_are_sampled_rewinds_their_prompts_and_counts_them(
    tmp_path: Path,
):
    go_on = threading.Event()

    def wait(group: int) -> float:
        if group >= PROMPTS_PER_STEP:
            go_on.wait(10)
        return 0.05  # so the learner waits, and is given two batches more

    run = Run(max_staleness=2, sampling_s=wait)
    run.begin()
    first = run.controller.take(1).result()
    wait_until(lambda: run.source.num_carried == 3 * 2 * PROMPTS_PER_STEP)
    assert list(run.controller.accounts(first)[0].values()) == [12, 0, 8]
    assert run.controller.save(tmp_path) == {"position": PROMPTS_PER_STEP}
    go_on.set()
    resumed = Run(max_staleness=3)
    resumed.controller.restore(tmp_path)
    resumed.last_step = resumed.version = 1
    resumed.go()
    assert resumed.groups() == list(range(PROMPTS_PER_STEP, PROMPTS_PER_STEP * resumed.num_steps))
    again = sum(each["rollout/samples_asked_again"] for each in resumed.figures)
    asked = sum(each["rollout/samples_asked"] for each in resumed.figures)
    assert (again, asked) == (8, 2 * PROMPTS_PER_STEP * (resumed.num_steps - 1) - 8)


class Curriculum(Run):
    """A run whose prompts are chosen; a prompt's samples pass by its index, not by its draw."""

    def __init__(self, *, max_staleness: int, has_filter: bool, **arguments: Any) -> None:
        prompts = [Prompt(i, "p", np.array([5], np.int32)) for i in range(9)]
        stream = CurriculumStream(
            prompts,
            CurriculumSection(memory=0.5),
            seed=3,
            block=PROMPTS_PER_STEP,
            lag=(max_staleness + 1) * PROMPTS_PER_STEP,
        )
        passes = (lambda group: self.prompts[group] % 3 > 0) if has_filter else None
        super().__init__(
            max_staleness=max_staleness,
            num_steps=12,
            passes=passes or (lambda group: self.prompts[group] % 2 > 0),
            stream=stream,
            **arguments,
        )
        self.filter = FilterSection(enabled=has_filter, max_refills=50)


@given(
    max_staleness=st.integers(0, 3),
    delays=st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=7, max_size=7),
    has_filter=st.booleans(),
    update_s=st.sampled_from([0.0, 0.002]),
)
@settings(max_examples=15, deadline=None)
def test_a_curriculum_draws_the_same_prompts_whatever_the_timing(
    max_staleness: int, delays: list[float], has_filter: bool, update_s: float
):
    def go(delay: Callable[[int], float], update_s: float) -> Curriculum:
        run = Curriculum(max_staleness=max_staleness, has_filter=has_filter, sampling_s=delay)
        run.go(update_s=update_s)
        return run

    run, other = go(lambda group: delays[group % 7], update_s), go(lambda group: 0.0, 0.0)
    assert run.groups() == other.groups()
    for group in run.groups():
        assert run.prompts[group] == other.prompts[group]
    assert run.rates == other.rates
    assert run.rates[-1]["curriculum/seen_fraction"] > 0.5


@pytest.mark.parametrize("has_filter", [False, True])
@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("killed_after", [1, 5, 8])
def test_a_resumed_curriculum_draws_what_the_undisturbed_one_draws(
    tmp_path: Path, settles: bool, killed_after: int, has_filter: bool
):
    def new() -> Curriculum:
        return Curriculum(max_staleness=2, has_filter=has_filter, settles=settles)

    whole = new()
    whole.go()
    first = new()
    first.sampling_s = lambda group: 0.003 * (group % 3)  # so that batches begun are lost
    first.go(until=killed_after)
    state = json.loads(json.dumps({"stream": first.controller.save(tmp_path)}))
    first.controller.close()
    second = new()
    second.version = second.last_step = killed_after
    second.controller.load_state_dict(state)
    second.controller.restore(tmp_path)
    second.go()
    assert first.groups() + second.groups() == whole.groups()
    drawn = first.prompts | second.prompts
    assert {group: drawn[group] for group in whole.groups()} == {
        group: whole.prompts[group] for group in whole.groups()
    }
    assert first.rates + second.rates == whole.rates
    assert_accounts_close(first.figures + second.figures)
