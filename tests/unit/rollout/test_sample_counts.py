"""Every sample has a fate: over filters, failures, drops and resumed runs the accounts close."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.step_batch import StepBatch
from raypo.storage.summary import FATES, sample_totals
from raypo.types import Rollout
from tests.unit.rollout.test_controller import Run, assert_accounts_close
from tests.unit.rollout.test_step_batch import prompts, rollout


def collected(*versions: int) -> StepBatch:
    scored = [
        replace(rollout(0, number), weight_version=version, score=1.0)
        for number, version in enumerate(versions)
    ]
    return StepBatch(scored, scored, 0, {"rollout/samples_trained": float(len(scored))})


def test_a_sample_of_which_no_token_is_new_enough_is_dropped_and_not_trained():
    """At step 6 the newest weights are of version 5, and what is of version 3 or older is stale."""
    scored = collected(5, 4, 3, 2)
    late = replace(scored.scored[3], later_versions=((2, 4),))  # its last token is not
    scored.trained[3] = late
    figures = scored.counts(6, 1)
    assert figures["rollout/samples_dropped"] == 1
    assert figures["rollout/samples_trained"] == 3


def test_conversations_of_an_episode_are_one_sample_and_dropped_only_together():
    both = collected(1, 5)
    second = replace(both.scored[1], sample_index=0, row_index=1)
    both.trained[1] = second
    figures = both.counts(6, 1)
    assert figures["rollout/samples_dropped"] == 0


def test_what_was_lost_at_a_checkpoint_is_asked_for_again_first():
    source = PromptSource(prompts(), 2, num_carried=12, num_lost=8)
    source.draw(3)
    source.draw(3)
    assert list(source.counts(collected()).values()) == [4, 8, 16]
    assert list(source.counts(collected(0, 0, 0, 0)).values()) == [0, 0, 12]


@given(
    max_staleness=st.integers(0, 3),
    drops_from=st.sampled_from([None, 0, 1]),
    killed_after=st.integers(1, 5),
    fates=st.lists(st.sampled_from(["passes", "is alike", "fails"]), min_size=3, max_size=9),
    max_refills=st.sampled_from([0, 2]),
)
@settings(max_examples=20, deadline=None)
def test_accounts_close_in_every_step_and_over_a_run_that_was_killed(
    tmp_path_factory,
    max_staleness: int,
    drops_from: int | None,
    killed_after: int,
    fates: list[str],
    max_refills: int,
):
    class Judged(Run):
        def scored(self, draws, clock):
            def judge(each: Rollout) -> float:
                sample, group = each.sample_index, each.group_index
                fate = fates[group % len(fates)]
                return {"passes": sample, "is alike": 1.0}.get(fate, math.nan if sample else 1.0)

            scored = super().scored(draws, clock)
            return [replace(each, score=float(judge(each))) for each in scored]

    def new() -> Run:
        run = Judged(
            max_staleness=max_staleness,
            num_steps=6,
            passes=lambda group: True,
            max_refills=max_refills,
            sampling_s=lambda group: 0.002 * (group % 2),
        )
        run.max_staleness_trained = drops_from
        return run

    folder = tmp_path_factory.mktemp("checkpoint")
    first, second = new(), new()
    first.go(until=killed_after)
    first.controller.save(folder)
    first.controller.close()
    second.version = second.last_step = killed_after
    second.controller.restore(folder)
    second.go()
    second.controller.close()
    rows = first.figures + second.figures
    assert_accounts_close(rows)
    totals = sample_totals([{"step": step} | row for step, row in enumerate(rows, start=1)])
    assert totals["sampled"] == sum(totals[name] for name in (*FATES, "carried"))


def test_a_synchronous_run_carries_nothing():
    run = Run(max_staleness=0, is_ahead=False, passes=lambda group: group % 3 > 0)
    run.go()
    assert_accounts_close(run.figures)
    assert {row["rollout/samples_carried"] for row in run.figures} == {0.0}
    assert sum(row["rollout/samples_filtered"] for row in run.figures) > 0
