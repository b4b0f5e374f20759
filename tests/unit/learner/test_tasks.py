"""Losses of sft and reward_model: by hand, and whatever the cut and the padding."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from raypo.learner.tasks import PairTask, ResponseTask, response_batch
from raypo.models.networks import SequenceScorer
from raypo.types import Example, Pair
from tests.tiny import tiny_policy


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, np.int32)


EXAMPLES = [
    Example(ids(5, 6, 7), ids(8, 9, 2)),
    Example(ids(10), ids(11, 2)),
    Example(ids(4, 5, 6, 7, 8), ids(2)),
]
PAIRS = [
    Pair(ids(5, 6), ids(7, 2), ids(8, 9, 10, 2)),
    Pair(ids(11), ids(12, 13, 2), ids(2), margin=0.5),
]


pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_policy(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def language_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def classifier(folder):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)


def test_the_sft_loss_is_that_of_transformers_on_the_response_alone(language_model):
    task = ResponseTask(language_model)
    total, sums = task.loss(task.module, EXAMPLES, "cpu")
    expected = 0.0
    for example in EXAMPLES:
        whole = torch.from_numpy(np.concatenate([example.prompt_ids, example.response_ids])).long()
        labels = whole.clone()
        labels[: len(example.prompt_ids)] = -100
        mean = language_model(whole[None], labels=labels[None]).loss
        expected += float(mean) * len(example.response_ids)
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert sums["loss"] == (pytest.approx(expected, rel=1e-5), 6.0)
    assert sum(task.weight(example) for example in EXAMPLES) == 6.0


def test_the_sft_loss_of_a_batch_is_the_sum_of_its_parts(language_model):
    task = ResponseTask(language_model)
    whole = float(task.loss(task.module, EXAMPLES, "cpu")[0])
    parts = sum(float(task.loss(task.module, [example], "cpu")[0]) for example in EXAMPLES)
    assert whole == pytest.approx(parts, rel=1e-5)


def test_what_others_wrote_is_read_and_not_learned(language_model):
    task, example = ResponseTask(language_model), EXAMPLES[0]
    masked = replace(example, mask=np.array([True, False, True]))
    begun = Example(example.prompt_ids, example.response_ids[:1])
    given = Example(
        np.concatenate([example.prompt_ids, example.response_ids[:2]]), example.response_ids[2:]
    )
    parts = sum(float(task.loss(task.module, [each], "cpu")[0]) for each in (begun, given))
    total, sums = task.loss(task.module, [masked, EXAMPLES[1]], "cpu")
    other = float(task.loss(task.module, [EXAMPLES[1]], "cpu")[0])
    assert float(total) == pytest.approx(parts + other, rel=1e-5)
    assert sums["loss"][1] == task.weight(masked) + task.weight(EXAMPLES[1]) == 4.0


def test_examples_that_lie_side_by_side_do_not_see_each_other(language_model):
    task = ResponseTask(language_model)
    others = [Example(ids(90, 91), ids(80, 81, 2)), Example(EXAMPLES[0].prompt_ids, ids(70, 2))]
    alone, _ = task.module(response_batch(EXAMPLES[:1]))
    beside, _ = task.module(response_batch([others[0], EXAMPLES[0], others[1]]))
    torch.testing.assert_close(beside[1], alone[0], rtol=1e-5, atol=1e-6)


class FixedScores(torch.nn.Module):
    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = torch.tensor(scores)

    def forward(self, ids, mask):
        return self.scores


def test_the_pair_loss_by_hand(classifier):
    task = PairTask(classifier, centering_coef=0.1)
    total, sums = task.loss(FixedScores(1.0, 0.0, -1.0, 0.5), PAIRS, "cpu")
    # pair 0: gap 2, sum 0; pair 1: gap -0.5 less the margin 0.5, sum 0.5
    expected = math.log1p(math.exp(-2.0)) + math.log1p(math.exp(1.0)) + 0.1 * 0.25
    assert float(total) == pytest.approx(expected)
    assert sums["accuracy"] == (1.0, 2.0)
    assert sums["score_gap_mean"] == (pytest.approx(1.5), 2.0)
    assert sums["pair_score_mean"] == (pytest.approx(0.5), 4.0)


def test_equal_scores_are_half_right(classifier):
    task = PairTask(classifier, centering_coef=0.0)
    _, sums = task.loss(FixedScores(1.0, 1.0, 1.0, 1.0), PAIRS, "cpu")
    assert sums["accuracy"] == (1.0, 2.0)


def test_scores_are_those_of_plain_transformers_wherever_the_prompt_ends(classifier):
    scorer = SequenceScorer(classifier)
    sequences = [torch.tensor([5, 6, 7, 2]), torch.tensor([8, 2])]
    classifier.config.pad_token_id = None
    alone = [float(classifier(s[None]).logits) for s in sequences]
    rows = [s.numpy() for s in sequences]
    nothing = [np.zeros(0, np.int64)] * 2
    assert scorer(rows, nothing).tolist() == pytest.approx(alone, abs=1e-5)
    begun, ended = [row[:-1] for row in rows], [row[-1:] for row in rows]
    assert scorer(begun, ended).tolist() == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("name", ["responses", "pairs"])
def test_the_blank_example_is_a_legal_pass(name, language_model, classifier):
    task = (
        ResponseTask(language_model)
        if name == "responses"
        else PairTask(classifier, centering_coef=0.0)
    )
    total, _ = task.loss(task.module, [task.blank], "cpu")  # type: ignore[list-item]
    assert math.isfinite(float(total))
