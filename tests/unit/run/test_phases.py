"""The phases of a colocated step: order, barriers, who leaves and who comes; without a GPU."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from raypo.collectives import Workers
from raypo.run.phases import ALLOWED, PRESENT, Phase, PhaseError, Phases
from tests.stand_ins import completed

STEP = [Phase.PUSH, Phase.PROBE, Phase.GENERATE, Phase.SCORE, Phase.LEARN]


@dataclass(frozen=True)
class Recorder(Workers):
    """Learner, engines, frozen models and workers that write down what is asked of them."""

    count: int = 2
    log: list[str] = field(default_factory=list)

    def barrier(self) -> None:
        self.log.append("barrier")

    def offload_training_state(self) -> None:
        self.log.append("learner: training state off")

    def offload_parameters(self) -> None:
        self.log.append("learner: parameters off")

    def reload(self) -> None:
        self.log.append("learner: back")

    def events(self) -> list[str]:
        """What was done since the last time this was asked."""
        log = self.log.copy()
        self.log.clear()
        return log


@dataclass
class Handle:
    name: str
    recorder: Recorder

    def sleep(self, before_push: bool = False) -> list[Future[None]]:
        how = " without weights" if before_push else ""
        self.recorder.log.append(f"{self.name}: sleep{how}")
        return [completed(None)]

    def wake_up(self, *parts: str) -> list[Future[None]]:
        self.recorder.log.append(" ".join([f"{self.name}:", "wake_up", *parts]))
        return [completed(None)]


def phases(recorder: Recorder, *, offloads: bool = True, at: Phase = Phase.LEARN) -> Phases:
    engines, *frozen = (cast(Any, Handle(n, recorder)) for n in ("engines", "reference", "reward"))
    return Phases(
        recorder,
        offloads=offloads,
        engines=engines,
        frozen=frozen,
        learner=recorder,
        now=at,
    )


def test_one_worker_alone_does_not_move_the_learners():
    with pytest.raises(PhaseError, match="one worker alone cannot change from phase learn"):
        phases(Recorder(), at=Phase.LEARN).turn(Phase.GENERATE)


def test_a_step_goes_through_the_phases_of_the_design():
    recorder = Recorder()
    step = phases(recorder)
    done = {}
    for phase in STEP:
        step.enter(phase)
        done[phase] = recorder.events()
    assert done == {
        Phase.PUSH: [
            "barrier",
            "learner: training state off",
            "barrier",
            "engines: wake_up weights",
            "barrier",
        ],
        Phase.PROBE: ["barrier", "barrier", "engines: wake_up kv_cache", "barrier"],
        Phase.GENERATE: ["barrier", "learner: parameters off", "barrier", "barrier"],
        Phase.SCORE: [
            "barrier",
            "engines: sleep",
            "barrier",
            "reference: wake_up",
            "reward: wake_up",
            "barrier",
        ],
        Phase.LEARN: [
            "barrier",
            "reference: sleep",
            "reward: sleep",
            "barrier",
            "learner: back",
            "barrier",
        ],
    }


def test_weights_that_a_push_replaces_are_not_kept_over_the_update():
    recorder = Recorder()
    step = phases(recorder, at=Phase.GENERATE)
    step.turn(Phase.SCORE, before_push=True)
    assert "engines: sleep without weights" in recorder.events()


def test_who_has_started_sleeps_already_when_the_learner_is_made():
    recorder = Recorder()
    start = phases(recorder, at=Phase.START)
    start.learner = None
    start.enter(Phase.LEARN)
    assert recorder.events() == [
        "barrier",
        "barrier",
        "barrier",
    ]


def test_after_a_checkpoint_the_engines_wake_with_the_weights_that_they_have():
    recorder = Recorder()
    phases(recorder).enter(Phase.GENERATE)
    assert recorder.events() == [
        "barrier",
        "learner: training state off",
        "learner: parameters off",
        "barrier",
        "engines: wake_up weights",
        "engines: wake_up kv_cache",
        "barrier",
    ]


def test_other_ranks_meet_the_same_barriers_and_leave_the_engines_to_rank_0():
    first, second = Recorder(rank=0), Recorder(rank=1)
    for recorder in (first, second):
        step = phases(recorder)
        for phase in STEP:
            step.enter(phase)
    mine = [event for event in first.log if event.startswith(("barrier", "learner"))]
    assert second.log == mine


def test_staying_in_a_phase_is_no_event():
    recorder = Recorder()
    phases(recorder).enter(Phase.LEARN)
    assert recorder.events() == []


@pytest.mark.parametrize("offloads", [True, False])
def test_a_phase_out_of_order_is_refused_and_nothing_moves(offloads: bool):
    for before, after in itertools.product(Phase, Phase):
        if before == after or after in ALLOWED[before]:
            continue
        recorder = Recorder()
        step = phases(recorder, offloads=offloads, at=before)
        with pytest.raises(PhaseError, match=f"phase {after} cannot follow {before}"):
            step.enter(after)
        assert (step.now, recorder.events()) == (before, [])


def test_where_nothing_is_offloaded_only_the_order_counts():
    recorder = Recorder()
    step = phases(recorder, offloads=False)
    for phase in STEP:
        step.enter(phase)
    assert (step.now, recorder.events()) == (Phase.LEARN, [])


def test_no_phase_has_learner_and_frozen_models_and_engine_at_once():
    for phase, present in PRESENT.items():
        owners = {name.split()[0] for name in present}
        assert owners != {"training", "KV"}, phase
        assert not ("training state" in present and "KV cache" in present), phase
        assert not ("parameters" in present and "frozen models" in present), phase
