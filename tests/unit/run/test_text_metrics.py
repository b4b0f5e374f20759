"""Metrics for the rules on prompts, labels and templates, of real prompts and a real template."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from raypo.collectives import Workers
from raypo.config import DataSection
from raypo.data.prompts import LoadedPrompts, load_prompts
from raypo.health.rules import findings
from raypo.metrics.reduce import slowest
from raypo.rollout.sharding import to_experience
from raypo.run.rollout_metrics import rollout_metrics
from raypo.run.text_metrics import TextMetrics, turn_header
from raypo.run.utilization import slowest_worker
from raypo.types import Rollout
from tests.tiny import tiny_tokenizer
from tests.unit.learner.plain import on_workers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def loaded(folder: Path, sums: list[tuple[int, int]], tokenizer, *, shift: int = 0):
    labels = [str(a + b) for a, b in sums]
    labels = labels[-shift:] + labels[:-shift]
    path = folder / f"{len(sums)}-{shift}.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "label": c} for (a, b), c in zip(sums, labels, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(DataSection(prompts=(str(path),), label_key="label"), tokenizer)


def answers(of: LoadedPrompts, responses: list[str], tokenizer) -> list[Rollout]:
    """Samples, one of each prompt."""
    rollouts = []
    for prompt, text in zip(of.prompts, responses, strict=True):
        ids = np.asarray(tokenizer(text)["input_ids"], np.int32)
        rollouts.append(
            Rollout(
                prompt=prompt.text,
                response=text,
                prompt_ids=prompt.token_ids,
                response_ids=ids,
                log_probs=np.zeros(len(ids), np.float32),
                response_mask=np.ones(len(ids), bool),
                label=prompt.label,
                prompt_index=prompt.index,
                sample_index=0,
                finish_reason="stop",
                weight_version=0,
                group_index=prompt.index,
                score=float(text == prompt.label),
            )
        )
    return rollouts


SUMS = [(a, 3 * a) for a in range(10)]


def test_copies_and_held_out_prompts_in_the_training_data_are_counted(tokenizer, tmp_path: Path):
    train = loaded(tmp_path, [*SUMS, *SUMS[:2]], tokenizer)
    held_out = loaded(tmp_path, [(5, 15), (1, 1), (2, 2), (3, 3)], tokenizer)
    metrics = TextMetrics.of(train, held_out, tokenizer).metrics([], step=1)
    assert metrics == pytest.approx(
        {"data/duplicate_fraction": 2 / 12, "data/held_out_overlap": 0.25}
    )
    rules = [finding.rule for finding in findings([{"step": 1, **metrics}])]
    assert rules == ["duplicated_prompts", "held_out_in_training"]
    assert TextMetrics.of(train, held_out, tokenizer).metrics([], step=2) == {}


@pytest.mark.parametrize(("shift", "which"), [(1, "next"), (-1, "previous")])
def test_labels_that_are_shifted_by_a_row_are_named(shift, which, tokenizer, tmp_path: Path):
    prompts = loaded(tmp_path, SUMS, tokenizer, shift=shift)
    texts = TextMetrics.of(prompts, None, tokenizer)
    right = [str(a + b) for a, b in SUMS]
    step = texts.metrics(answers(prompts, right, tokenizer), step=2)
    assert step[f"rollout/{which}_label_fraction"] == 1.0
    assert step["rollout/own_label_fraction"] == 0.0
    # The first and the last row have one neighbour; in others a label is a number of the prompt.
    assert step["rollout/labels_compared"] == {1: 6.0, -1: 8.0}[shift]
    rows = [{"step": number, **step} for number in range(1, 6)]
    (finding,) = findings(rows)
    assert (finding.rule, finding.step) == ("shifted_labels", 5)
    assert f"label of the {which} row" in finding.text


def test_prompts_of_episodes_are_not_compared(tokenizer, tmp_path: Path):
    train = loaded(tmp_path, [*SUMS, *SUMS[:2]], tokenizer)
    texts = TextMetrics.of(train, train, tokenizer, is_episodic=True)
    assert texts.metrics([], step=1) == {}


def test_rows_with_the_same_prompt_and_another_label_are_no_copies(tokenizer, tmp_path: Path):
    sums = SUMS[:4] * 2
    shifted = loaded(tmp_path, sums, tokenizer, shift=1)
    other = loaded(tmp_path, SUMS[:4], tokenizer)
    texts = TextMetrics.of(other, shifted, tokenizer)
    assert texts.of_data == {"data/duplicate_fraction": 0.0, "data/held_out_overlap": 0.0}


def test_labels_that_stand_in_the_prompt_are_left_out(tokenizer, tmp_path: Path):
    prompts = loaded(
        tmp_path, [(a, 0) for a in range(10)], tokenizer
    )  # each label is in its prompt
    responses = [str(a + 1) for a in range(10)]
    samples = answers(prompts, responses, tokenizer)
    metrics = TextMetrics.of(prompts, None, tokenizer).metrics(samples, step=2)
    assert "rollout/labels_compared" not in metrics


def test_a_label_is_looked_for_as_a_word(tokenizer, tmp_path: Path):
    prompts = loaded(tmp_path, SUMS, tokenizer)
    longer = [f"1{a + b}" for a, b in SUMS]
    metrics = TextMetrics.of(prompts, None, tokenizer).metrics(
        answers(prompts, longer, tokenizer), step=2
    )
    assert metrics["rollout/own_label_fraction"] == 0.0


def test_a_header_of_the_template_in_responses_is_counted(tokenizer, tmp_path: Path):
    assert tokenizer.decode(turn_header(tokenizer)) == "assistant:"
    prompts = loaded(tmp_path, SUMS[:4], tokenizer)
    responses = ["assistant: 0", "4", "8\nuser: x\nassistant: y", "assistant"]
    texts = TextMetrics.of(prompts, None, tokenizer)
    metrics = texts.metrics(answers(prompts, responses, tokenizer), step=2)
    assert metrics["rollout/turn_header_fraction"] == 0.5


def test_a_header_between_two_turns_is_not_the_policys(tokenizer, tmp_path: Path):
    prompts = loaded(tmp_path, SUMS[:1], tokenizer)
    (sample,) = answers(prompts, ["8\nuser: x\nassistant: 4"], tokenizer)
    ends = np.ones(len(sample.response_ids), bool)
    ends[1:-1] = False
    texts = TextMetrics.of(prompts, None, tokenizer)
    for mask, share in ((ends, 0.0), (sample.response_mask, 1.0)):
        metrics = texts.metrics([replace(sample, response_mask=mask)], step=2)
        assert metrics["rollout/turn_header_fraction"] == share


def test_a_tokenizer_without_a_template_has_no_header(tokenizer, tmp_path: Path):
    plain = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    plain.chat_template = None
    assert turn_header(plain) is None


def test_how_scores_depend_on_lengths(tokenizer, tmp_path: Path):
    prompts = loaded(tmp_path, SUMS[:4], tokenizer)
    samples = answers(prompts, ["a", "aa", "aaa", "aaaaaaaa"], tokenizer)
    samples = [
        replace(s, group_index=0, sample_index=n, score=float(len(s.response_ids)))
        for n, s in enumerate(samples)
    ]
    samples[3] = replace(samples[3], finish_reason="length")
    metrics = rollout_metrics(samples)
    assert metrics["rollout/score_length_correlation"] == pytest.approx(1.0)
    assert metrics["rollout/truncated_score_gap"] == pytest.approx(2.0 - 8.0)
    assert metrics["rollout/tail_fraction"] == 0.0  # of four samples, none is beyond 97 %
    apart = [replace(sample, group_index=sample.sample_index) for sample in samples]
    assert "rollout/score_length_correlation" not in rollout_metrics(apart)
    many = [replace(samples[0], sample_index=number) for number in range(99)]
    many.append(replace(samples[3], sample_index=99))
    assert rollout_metrics(many)["rollout/tail_fraction"] == pytest.approx(1.0 - 1 / 8)


def test_the_slowest_worker_is_compared_with_the_median_of_the_others(
    tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert slowest([1.0, 4.0, 2.0, 1.0]) == (1, 4.0)
    prompts = loaded(tmp_path, SUMS[:2], tokenizer)
    experience = to_experience(answers(prompts, ["0", "4"], tokenizer))

    def measured(workers: Workers) -> dict[str, float]:
        return slowest_worker(0.3 if workers.rank == 2 else 0.1, experience, workers)

    measured_on_all = on_workers(3, measured)
    for metrics in measured_on_all:
        assert metrics["perf/slowest_worker"] == 2.0
        assert metrics["perf/slowest_worker_ratio"] == pytest.approx(3.0)

    # Workers that share rows: those compared are 0, 2 and 4 of all learner workers.
    monkeypatch.setattr("torch.distributed.get_global_rank", lambda group, rank: group[rank])

    def grouped(workers: Workers) -> dict[str, float]:
        object.__setattr__(workers, "group", [0, 2, 4])
        return measured(workers)

    assert {metrics["perf/slowest_worker"] for metrics in on_workers(3, grouped)} == {4.0}
    rows = [{"step": step, **measured_on_all[0]} for step in range(1, 6)]
    (finding,) = findings(rows)
    assert (finding.rule, finding.step) == ("straggler", 5)
    assert "learner worker 2 is 3.0 times as slow" in finding.text
    (quick,) = on_workers(1, measured)
    assert quick == {}
