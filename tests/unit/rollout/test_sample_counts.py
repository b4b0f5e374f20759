"""Every sample has a fate: over filters, failures, drops and resumed runs the accounts close."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from raypo.config import FilterSection
from raypo.metrics.clock import Clock
from raypo.rollout.controller import RolloutController
from raypo.rollout.dynamic_sampling import Collected, StepBatch
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.sample_counts import SampleCounts, sample_count_metrics
from raypo.storage.summary import FATES, sample_totals
from raypo.types import Prompt, Rollout
from tests.unit.rollout.test_dynamic_sampling import LENIENT, fill, prompts, rollout


def assert_accounts_close(figures: list[dict[str, float]]) -> None:
    """What was asked for is trained, filtered, failed, dropped, or carried on."""
    carried = 0.0
    for each in figures:
        now = {name.removeprefix("rollout/samples_"): value for name, value in each.items()}
        done = now["trained"] + now["filtered"] + now["failed"] + now["dropped"]
        assert now["sampled"] == done
        assert carried + now["asked"] == done + now["carried"]
        carried = now["carried"]


def collected(*versions: int) -> Collected:
    scored = [
        replace(rollout(0, number), weight_version=version, score=1.0)
        for number, version in enumerate(versions)
    ]
    return Collected(scored, scored, 0, {"rollout/samples_trained": float(len(scored))})


def test_a_sample_of_which_no_token_is_new_enough_is_dropped_and_not_trained():
    """At step 6 the newest weights are of version 5, and what is of version 3 or older is stale."""
    scored = collected(5, 4, 3, 2)
    late = replace(scored.scored[3], later_versions=((2, 4),))  # its last token is not
    scored.trained[3] = late
    figures = sample_count_metrics((4, 0, 0), scored, step=6, max_staleness=1)
    assert figures["rollout/samples_dropped"] == 1
    assert figures["rollout/samples_trained"] == 3


def test_conversations_of_an_episode_are_one_sample_and_dropped_only_together():
    both = collected(1, 5)
    second = replace(both.scored[1], sample_index=0, row_index=1)
    both.trained[1] = second
    figures = sample_count_metrics((1, 0, 0), both, step=6, max_staleness=1)
    assert figures["rollout/samples_dropped"] == 0


def test_what_was_lost_at_a_checkpoint_is_asked_for_again_first():
    ledger = SampleCounts(carried=12, lost=8)
    ledger.ask(6)
    ledger.ask(6)
    assert ledger.of_step(collected()) == (4, 8, 16)
    assert ledger.of_step(collected(0, 0, 0, 0)) == (0, 0, 12)


@given(
    is_ahead=st.booleans(),
    max_staleness=st.integers(0, 3),
    drops_from=st.sampled_from([None, 0, 1]),
    killed_after=st.integers(1, 5),
    fates=st.lists(st.sampled_from(["passes", "is alike", "fails"]), min_size=3, max_size=9),
    max_refills=st.sampled_from([0, 2]),
)
@settings(max_examples=20, deadline=None)
def test_accounts_close_in_every_step_and_over_a_run_that_was_killed(
    tmp_path_factory,
    is_ahead: bool,
    max_staleness: int,
    drops_from: int | None,
    killed_after: int,
    fates: list[str],
    max_refills: int,
):
    version, section = 0, FilterSection(enabled=True, max_refills=max_refills)

    def score_of(sample: int, group: int) -> float:
        fate = fates[group % len(fates)]
        return {"passes": float(sample), "is alike": 1.0}.get(fate, math.nan if sample else 1.0)

    def sampled(draws: Sequence[Prompt], clock: Clock) -> list[Rollout]:
        return [
            replace(
                rollout(d.group_index, n), weight_version=version, score=score_of(n, d.group_index)
            )
            for d in draws
            for n in range(2)
        ]

    def new() -> RolloutController:
        return RolloutController(
            PromptSource(prompts(), 2),
            sampled,
            lambda: StepBatch(4, section, LENIENT),
            num_steps=6,
            prompts_per_step=4,
            max_staleness=max_staleness if is_ahead else 0,
            is_ahead=is_ahead,
            overlaps=is_ahead,
        )

    def trained(controller: RolloutController, first: int, last: int) -> list[dict[str, float]]:
        nonlocal version
        figures = []
        controller.begin(last_step=first - 1)
        for step in range(first, last + 1):
            batch = controller.take(step).result(10)
            counts, _ = controller.accounts(batch)
            told = sample_count_metrics(counts, batch, step=step, max_staleness=drops_from)
            figures.append(batch.metrics | told)
            version = step
            controller.arrived(step)
        return figures

    folder = tmp_path_factory.mktemp("checkpoint")
    first, second = new(), new()
    rows = trained(first, 1, killed_after)
    position = first.save(folder)
    first.close()
    second.load_state_dict({"stream": position, "metrics": rows[-1]})
    second.restore(folder)
    rows += trained(second, killed_after + 1, 6)
    second.close()
    assert_accounts_close(rows)
    totals = sample_totals([{"step": step} | row for step, row in enumerate(rows, start=1)])
    assert totals["sampled"] == sum(totals[name] for name in (*FATES, "carried"))
    if not is_ahead:
        assert {row["rollout/samples_carried"] for row in rows} == {0.0}


def test_sampled_is_the_batch_of_the_step():
    step = fill(lambda group: (0.0, 1.0), section=FilterSection())
    assert step.metrics["rollout/samples_sampled"] == len(step.scored)
