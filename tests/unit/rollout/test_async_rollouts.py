"""Rollouts ahead of the update: the bound holds, no prompt is lost or overtaken, resumes repeat."""

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

from raypo.collectives import Workers
from raypo.config import CurriculumSection, FilterSection, RewardSection
from raypo.data.stream import ShuffledStream
from raypo.metrics.clock import Clock
from raypo.rollout.async_rollouts import AsyncRollouts
from raypo.rollout.curriculum import CurriculumStream
from raypo.rollout.dynamic_sampling import StepBatch
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.sample_counts import sample_count_metrics
from raypo.types import Prompt, Rollout
from tests.unit.learner.plain import on_workers
from tests.unit.rollout.test_dynamic_sampling import rollout

PROMPTS_PER_STEP = 2


class Run:
    """A loop that trains nothing; its engine knows its version."""

    def __init__(
        self,
        *,
        max_staleness: int,
        num_steps: int = 8,
        settles: bool = False,
        sampling_s: Callable[[int], float] = lambda group: 0.0,
        workers: Workers | None = None,
        passes: Callable[[int], bool] | None = None,
        max_refills: int = 50,
        stream: ShuffledStream[Prompt] | None = None,
    ) -> None:
        prompts = [Prompt(i, "p", np.array([5], np.int32)) for i in range(5)]
        self.stream = stream or ShuffledStream(prompts, seed=3)
        self.prompts: dict[int, int] = {}
        """Index of the prompt of each draw that this worker sampled."""
        self.rates: list[dict[str, float]] = []
        """Metrics of the curriculum by step."""
        self.workers = workers or Workers()
        self.ahead = AsyncRollouts(
            PromptSource(self.stream, 2),
            lambda *args: self.scored(*args),
            lambda: StepBatch(
                PROMPTS_PER_STEP, self.filter, RewardSection(max_failed_fraction=1.0)
            ),
            prompts_per_step=PROMPTS_PER_STEP,
            max_staleness=max_staleness,
            overlaps=max_staleness > 0 and not settles,
            settles=settles,
            num_steps=num_steps,
            workers=self.workers.beside(),
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

    def scored(self, draws: Sequence[Prompt], clock: Clock, workers: Workers) -> list[Rollout]:
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
        self.ahead.settle()
        self.workers.gather(None)
        self.version = version
        self.ahead.arrived(version)

    def begin(self) -> None:
        self.ahead.begin(last_step=self.last_step)

    def go(self, until: int | None = None, update_s: float = 0.0) -> None:
        self.begin()
        for step in range(self.last_step + 1, (until or self.num_steps) + 1):
            collected = self.ahead.take(step, Clock())
            rollouts = collected.trained
            groups = {each.group_index: each.weight_version for each in rollouts}
            self.trained.append((step, list(groups.items())))
            self.last_versions += [int(each.weight_versions[-1]) for each in rollouts]
            figures = sample_count_metrics(
                self.ahead.counts(collected),
                collected,
                self.workers,
                step=step,
                max_staleness=self.max_staleness_trained,
            )
            self.figures.append(collected.metrics | figures)
            self.rates.append(self.ahead.pass_rates(collected, self.workers))
            time.sleep(update_s)
            self.push(step)
            self.last_step = step

    def groups(self) -> list[int]:
        return [group for _, rows in self.trained for group, _ in rows]

    def staleness(self) -> list[int]:
        return [step - 1 - version for step, rows in self.trained for _, version in rows]


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


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_last_step_of_a_filter_draws_no_more_than_it_lacks(num_workers: int):
    def go(workers: Workers) -> tuple[list[int], float]:
        run = Run(max_staleness=2, workers=workers, passes=lambda group: group % 3 < 2)
        run.sampling_s = lambda group: 0.003 * workers.rank
        run.go()
        return run.groups(), run.figures[-1]["rollout/samples_carried"]

    told = on_workers(num_workers, go)
    trained = sorted(group for groups, _ in told for group in groups)
    assert trained == [group for group in range(24) if group % 3 < 2][: 8 * PROMPTS_PER_STEP]
    assert {carried for _, carried in told} == {0.0}


def test_two_batches_of_a_filter_are_sampled_at_the_same_time():
    run = Run(max_staleness=2, sampling_s=lambda group: 0.01, passes=lambda group: group % 3 > 0)
    run.go()
    assert run.most_under_way >= 2


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


def test_without_staleness_every_batch_is_of_the_newest_weights():
    run = Run(max_staleness=0)
    run.go()
    assert set(run.staleness()) == {0}


@pytest.mark.parametrize(("sampling_s", "update_s"), [(0.0, 0.004), (0.004, 0.0)])
def test_one_step_off_is_one_version_behind_whoever_is_slower(sampling_s: float, update_s: float):
    run = Run(max_staleness=1, settles=True, sampling_s=lambda batch: sampling_s)
    run.go(update_s=update_s)
    assert run.staleness() == [0] * PROMPTS_PER_STEP + [1] * PROMPTS_PER_STEP * 7


def test_the_next_batch_is_sampled_while_the_learner_updates():
    run = Run(max_staleness=1)
    run.begin()
    run.ahead.take(1, Clock())
    following = run.ahead._batches[2].result(10)  # the update of step 1 has not ended
    assert {each.weight_version for each in following.trained} == {0}
    assert not run.ahead._batches[3].done()


def test_what_ends_the_collecting_ends_the_step_that_wants_it():
    run = Run(max_staleness=2)

    def scored(draws: Sequence[Prompt], clock: Clock, workers: Workers) -> list[Rollout]:
        raise RuntimeError("the judge has left")

    run.scored = scored
    run.begin()
    with pytest.raises(RuntimeError, match="the judge has left"):
        run.ahead.take(1, Clock())
    with pytest.raises(RuntimeError, match="the judge has left"):
        run.ahead.take(2, Clock())


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


def test_a_worker_whose_collecting_fails_does_not_wait_for_the_others_before_a_push():
    """They wait for it, with the batch after this step's half collected."""

    def fails(workers: Workers) -> str:
        run = Run(max_staleness=1, settles=True, workers=workers)

        def scored(draws: Sequence[Prompt], clock: Clock, beside: Workers) -> list[Rollout]:
            if workers.rank == 1 and draws[0].group_index >= PROMPTS_PER_STEP:
                raise RuntimeError("the engine has left")
            return run.scored(draws, clock, beside)

        run.ahead.sample_and_score = scored
        run.begin()
        run.ahead.take(1, Clock())
        if workers.rank == 0:
            return "waits"
        with pytest.raises(RuntimeError, match="the engine has left"):
            run.push(1)
        return "fails"

    assert on_workers(2, fails) == ["waits", "fails"]


def test_what_was_collected_has_spans_of_its_own():
    run = Run(max_staleness=1, settles=True)
    run.go()
    names = [name for name, _, _ in run.ahead.spans()]
    versions = [0, *range(run.num_steps - 1)]
    assert names == [f"time/generate_v{version}_s" for version in versions]
    assert run.ahead.spans() == []


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
    first.ahead.save(tmp_path, first.workers)
    first.ahead.close()
    second = new()
    second.version = second.last_step = killed_after
    second.ahead.restore(tmp_path, second.workers)
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
    first = run.ahead.take(1, Clock())
    counts = run.ahead.prompts.sample_counts
    while counts.carried != 3 * 2 * PROMPTS_PER_STEP:  # those of steps 2 and 3
        time.sleep(0.001)
    assert run.ahead.counts(first) == (12, 0, 8)
    run.ahead.save(tmp_path, run.workers)
    assert run.ahead.position() == {"position": PROMPTS_PER_STEP}
    go_on.set()
    resumed = Run(max_staleness=3)
    resumed.ahead.restore(tmp_path, resumed.workers)
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
    state = json.loads(json.dumps({"stream": first.ahead.position()}))
    first.ahead.save(tmp_path, first.workers)
    first.ahead.close()
    second = new()
    second.version = second.last_step = killed_after
    second.ahead.load_state_dict(state, second.workers)
    second.ahead.restore(tmp_path, second.workers)
    second.go()
    assert first.groups() + second.groups() == whole.groups()
    drawn = first.prompts | second.prompts
    assert {group: drawn[group] for group in whole.groups()} == {
        group: whole.prompts[group] for group in whole.groups()
    }
    assert first.rates + second.rates == whole.rates
    assert_accounts_close(first.figures + second.figures)


@pytest.mark.parametrize("has_filter", [False, True])
def test_two_workers_of_different_speed_draw_what_one_worker_draws(has_filter: bool):
    def go(workers: Workers) -> tuple[dict[int, int], list[dict[str, float]]]:
        run = Curriculum(max_staleness=2, has_filter=has_filter, workers=workers)
        run.sampling_s = lambda group: 0.003 * workers.rank
        run.go()
        return run.prompts, run.rates

    ((whole, rates),) = on_workers(1, go)
    (one, told), (other, others_told) = on_workers(2, go)
    assert one | other == whole
    assert told == others_told == rates


def two_workers_of_different_speed(workers: Workers, folder: Path) -> tuple[list[int], list[int]]:
    run = Run(
        max_staleness=2,
        workers=workers,
        sampling_s=lambda group: 0.004 * workers.rank,
        passes=lambda group: group % 3 > 0,
    )
    run.go(until=5, update_s=0.002)
    run.ahead.save(folder, workers)
    restored = Run(max_staleness=2, workers=workers)
    restored.ahead.restore(folder, workers)
    held = sorted(restored.ahead._batches)
    run.ahead.close()
    return held, run.staleness()


def test_workers_that_differ_in_speed_keep_the_same_whole_batches(tmp_path: Path):
    (held, lags), (others_held, others_lags) = on_workers(
        2, lambda workers: two_workers_of_different_speed(workers, tmp_path)
    )
    assert held == others_held
    assert held == list(range(6, 6 + len(held)))
    assert all(0 <= lag <= 2 for lag in lags + others_lags)
