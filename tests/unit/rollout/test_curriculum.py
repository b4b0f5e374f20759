"""Prompts chosen by their pass rate: which ones, by what estimates, and the same after a resume."""

import json
from dataclasses import replace

import numpy as np
import pytest

from raypo.config import CurriculumSection
from raypo.data.stream import Mix
from raypo.rollout.curriculum import CurriculumStream, Outcome, few_draws_note
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.step_batch import StepBatch
from raypo.types import Prompt
from tests.unit.rollout.test_step_batch import rollout

BLOCK = 4


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, "p", np.array([5], np.int32)) for i in range(count)]


def stream(count: int = 12, **changes: object) -> CurriculumStream:
    arguments: dict = {"seed": 3, "block": BLOCK} | changes
    section = arguments.pop("section", CurriculumSection())
    return CurriculumStream(prompts(count), section, **arguments)


def run(
    it: CurriculumStream, draws: int, passed: dict[int, int], at_once: int = BLOCK
) -> list[int]:
    """Take draws; of 8 samples of each, as many pass as `passed` says of the prompt."""
    taken = []
    for _ in range(0, draws, at_once):
        new = it.take(at_once)
        outcomes = {d: Outcome(passed[p.index], 8 - passed[p.index]) for d, p in new}
        it.learn(outcomes, until=new[-1][0] + 1)
        taken += [prompt.index for _, prompt in new]
    return taken


def test_most_draws_are_of_prompts_near_the_target():
    passed = {i: 4 if i < 10 else (0 if i % 2 else 8) for i in range(100)}  # 10 of 100 suit
    taken = run(stream(100), 100 * BLOCK, passed)
    late = taken[-50 * BLOCK :]
    assert np.mean([passed[i] == 4 for i in late]) > 0.9
    assert len(set(late)) > 10  # the others are tried now and then


def test_estimates_are_the_discounted_beta_posterior_of_the_paper():
    """alpha' = memory alpha + (1 - memory) + passed, of Qu et al. 2025; all sampled twice."""
    it = stream(BLOCK, section=CurriculumSection(memory=0.25))
    passed = {0: 0, 1: 2, 2: 5, 3: 8}
    run(it, 2 * BLOCK, passed)
    expected = {}
    for place, n in passed.items():
        alpha, beta = 1.0 + n, 1.0 + 8 - n
        alpha, beta = 0.25 * alpha + 0.75 + n, 0.25 * beta + 0.75 + 8 - n
        expected[place] = alpha / (alpha + beta)
    metrics = it.settled(2 * BLOCK)
    assert metrics["curriculum/seen_fraction"] == 1.0
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        wanted = np.quantile(list(expected.values()), share)
        assert metrics[f"curriculum/pass_rate_{name}"] == pytest.approx(wanted, abs=1e-12)


def test_a_block_has_no_prompt_twice_unless_there_are_too_few():
    passed = dict.fromkeys(range(12), 4)
    taken = run(stream(12), 10 * BLOCK, passed)
    blocks = [taken[i : i + BLOCK] for i in range(0, len(taken), BLOCK)]
    assert all(len(set(block)) == BLOCK for block in blocks)
    assert sorted(run(stream(2), BLOCK, passed)) == [0, 0, 1, 1]


def test_sources_keep_their_shares():
    mix = Mix((30, 10), (3.0, 1.0), BLOCK)
    passed = {i: 0 if i < 30 else 4 for i in range(40)}  # only the second source suits
    taken = run(stream(40, mix=mix), 50 * BLOCK, passed)
    assert sum(i < 30 for i in taken) == 150


@pytest.mark.parametrize("lag", [0, BLOCK])
@pytest.mark.parametrize("stopped", [1, 3, 4, 9])
def test_a_resumed_stream_draws_the_same(stopped: int, lag: int):
    at_once = BLOCK if not lag else 1
    stopped *= at_once
    passed = {i: i % 9 for i in range(12)}
    section = CurriculumSection(memory=0.5)
    whole = run(stream(lag=lag, section=section), 48, passed, at_once)
    first = stream(lag=lag, section=section)
    begin = run(first, stopped, passed, at_once)
    first.settled(stopped)
    state = json.loads(json.dumps(first.state_dict(stopped)))
    second = stream(lag=lag, section=section)
    second.load_state_dict(state)
    assert begin + run(second, 48 - stopped, passed, at_once) == whole


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_draws_do_not_depend_on_how_many_are_taken_at_once(at_once: int):
    """With a lag of a block, as for a filter that draws replacements, a take may cross blocks."""
    passed = {i: i % 9 for i in range(12)}
    assert run(stream(lag=BLOCK), 48, passed, at_once) == run(stream(lag=BLOCK), 48, passed)


def test_estimates_outlive_a_change_of_the_block_but_not_of_the_data():
    passed = {i: i % 9 for i in range(12)}
    it = stream()
    run(it, 3 * BLOCK, passed)
    state = it.state_dict(3 * BLOCK)
    others = [replace(each, token_ids=np.array([6], np.int32)) for each in prompts(12)]
    changed = CurriculumStream(others, CurriculumSection(), seed=3, block=BLOCK)
    known, new = stream(block=5), stream(13)
    for other in (known, new, changed):
        other.load_state_dict(state)
        assert other.take(2)[0][0] == 3 * BLOCK
    assert known.settled(3 * BLOCK) == it.settled(3 * BLOCK)
    for other in (new, changed):
        assert other.settled(3 * BLOCK) == {"curriculum/seen_fraction": 0.0}


def test_a_checkpoint_without_a_curriculum_begins_with_the_prior():
    it = stream()
    it.load_state_dict({"position": 6})
    assert [draw for draw, _ in it.take(BLOCK)] == [6, 7, 8, 9]
    assert it.settled(6) == {"curriculum/seen_fraction": 0.0}


def test_samples_without_a_score_do_not_count():
    scored = [
        replace(rollout(5, n), score=score) for n, score in enumerate([1.0, 0.1, float("nan"), 2.0])
    ]
    assert stream().outcomes(scored) == {5: Outcome(2, 1)}
    assert stream(section=CurriculumSection(pass_score=0.1)).outcomes(scored) == {5: Outcome(3, 0)}


def test_a_run_that_never_repeats_a_prompt_is_told():
    assert few_draws_note(100, 101) is None
    note = few_draws_note(100, 100)
    assert note is not None
    assert "data.curriculum" in note


def test_without_a_curriculum_there_is_nothing_to_learn_and_no_metric():
    from raypo.data.stream import ShuffledStream

    source = PromptSource(ShuffledStream(prompts(3), seed=0), 2)
    source.draw(2)
    source.learn([], until=2)
    assert source.pass_rates(StepBatch([], [], 0, {}), 2) == {}
    assert source.position(2) == {"position": 2}
