"""A language model as judge, behind servers that answer, misbehave, and fall silent."""

import math
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raypo.config import ConfigError, JudgeSection, ModelSection, PPOConfig, RewardSection
from raypo.rewards.functions import open_servers
from raypo.rewards.judge import DeployedJudge, Judge
from raypo.rewards.judge_servers import JudgeServers
from raypo.rewards.remote import JsonServers
from raypo.rewards.scoring import FailedScore, RewardError, parts_of, score, texts_of
from raypo.rewards.wire import from_answer, to_answer
from raypo.rollout.batch_scoring import Scorer, Scoring, source_weights
from raypo.run.rollout_metrics import rollout_metrics, sample_row
from raypo.storage.rollout_table import rollout_table
from raypo.types import Rollout
from tests.unit.rewards.scripted_server import scripted

TEMPLATE = 'Grade it as {"grade": 1} to 5. Request: {prompt} Answer: {response} Grade:'


def rollout(response: str, **changes: Any) -> Rollout:
    ids = np.arange(1, dtype=np.int32)
    log_probs, mask = np.zeros(1, np.float32), np.ones(1, bool)
    row = Rollout("2+2=", response, ids, ids, log_probs, mask, "4", 0, 0, "stop", 0)
    return replace(row, **changes)


def judge(url: str, **changes: Any) -> Judge:
    servers = {"max_concurrent": 4, "timeout_s": 5.0, "max_attempts": 3} | {
        name: changes.pop(name)
        for name in ("max_concurrent", "timeout_s", "max_attempts")
        if name in changes
    }
    values = {"url": url, "model": "judge", "template": TEMPLATE, "grades": [1, 5]} | changes
    section = JudgeSection.model_validate(values)
    servers_of = JsonServers([url], token=None, backoff_s=(0.01, 0.05), **servers)
    asked = JudgeServers(section, servers_of)
    return Judge(section, asked, max_attempts=servers["max_attempts"])


class Replicas:
    """A deployed judge that answers each call from a list, and keeps what it was asked."""

    def __init__(self, *calls: list[str | ValueError]) -> None:
        self.calls, self.asked = list(calls), list[list[str]]()

    def answers(self, prompts: list[str]) -> Future[list[str | ValueError]]:
        self.asked.append(prompts)
        future: Future[list[str | ValueError]] = Future()
        future.set_result(self.calls.pop(0))
        return future


def deployed(replicas: Replicas, **changes: Any) -> Judge:
    values = {"path": "p", "template": "{response}?", "grades": [1, 5]} | changes
    section = JudgeSection.model_validate(values)
    return Judge(section, DeployedJudge(replicas), max_attempts=3)


def said(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": text}}]}


def prompt_of(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"]


def graded(answer: Callable[[dict[str, Any], int], tuple[int, Any]], *responses: str, **changes):
    with scripted(answer) as (url, requests):
        return score(judge(url, **changes), [rollout(each) for each in responses]), requests


def test_a_grade_is_a_score_and_the_answer_of_the_judge_is_kept():
    (found,), (request,) = graded(lambda *_: said("Good work. Grade: 4"), "four")
    assert found == 0.75
    assert texts_of(found) == {"judge": "Good work. Grade: 4"}
    assert parts_of(found)["judge_ungraded"] == 0.0
    assert 0.0 < parts_of(found)["judge_s"] < 5.0
    text = 'Grade it as {"grade": 1} to 5. Request: 2+2= Answer: four Grade:'
    assert request["messages"] == [{"role": "user", "content": text}]
    assert request["model"] == "judge"
    assert request["temperature"] == 0.0


def test_a_score_keeps_its_texts_between_workers_and_over_http():
    (found,), _ = graded(lambda *_: said("5"), "four")
    again = pickle.loads(pickle.dumps(found))
    assert (again, parts_of(again), texts_of(again)) == (found, parts_of(found), texts_of(found))
    (served,) = from_answer(to_answer([found]), 1)
    assert served == {"score": 1.0, "judge": "5", **parts_of(found)}


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("3", 0.5),
        ("I saw 2 errors, so: 4", 0.75),
        ("4/5", 0.75),
        ("**Grade**: 2 out of 5.", 0.25),
        ("3.0/5.0", 0.5),
        ("I give it a grade of 5.", 1.0),
        ("4/50", None),
        ("2.5", 0.375),
        ("6", None),
        ("-3", None),
        ("40%", None),
        ("", None),
        ("very friendly", None),
        ("g4", None),
    ],
)
def test_the_last_number_in_range_is_the_grade(text, grade):
    assert judge("http://a").parse(text) == grade


@pytest.mark.parametrize(
    ("text", "grade"),
    [("It is not WRONG. CORRECT", 1.0), ("incorrect", 0.25), ("wrong.", 0.0), ("correctly", None)],
)
def test_a_word_may_be_the_grade(text, grade):
    words = {"CORRECT": 1.0, "INCORRECT": 0.25, "WRONG": 0.0}
    assert judge("http://a", grades=words).parse(text) == grade


def test_a_pattern_says_where_the_grade_is():
    by_pattern = judge("http://a", pattern=r"Grade: (\S+)")
    assert by_pattern.parse("Grade: 1? No. Grade: 2, as 3 of 5 points are missing") == 0.25
    assert by_pattern.parse("2") is None


def test_criteria_are_named_parts_and_the_score_is_their_weighted_mean():
    def answer(body: dict[str, Any], _: int) -> tuple[int, Any]:
        return said("5" if "right" in prompt_of(body) else "2")

    (found,), requests = graded(
        answer,
        "four",
        template="Is {response} {criterion}?",
        criteria={"correct": {"text": "right", "weight": 3}, "polite": "kind"},
    )
    assert sorted(map(prompt_of, requests)) == ["Is four kind?", "Is four right?"]
    assert found == pytest.approx((3 * 1.0 + 1 * 0.25) / 4)
    assert parts_of(found)["correct"] == 1.0
    assert parts_of(found)["polite"] == 0.25
    assert texts_of(found) == {"judge/correct": "5", "judge/polite": "2"}


def test_the_template_names_columns_and_what_a_response_writes_is_not_replaced():
    with scripted(lambda *_: said("1")) as (url, requests):
        asked = judge(url, template="{rubric}|{prompt}|{label}|{response}")
        messages = [{"role": "user", "content": "2+2?"}]
        score(asked, [rollout("{label}{rubric}", row={"rubric": "be kind"}, messages=messages)])
        with pytest.raises(RewardError, match=r"template: names \{rubric\}, but row 0 has no such"):
            score(asked, [rollout("four")])
    assert [prompt_of(each) for each in requests] == ["be kind|2+2?|4|{label}{rubric}"]


def test_a_conversation_is_written_with_its_roles():
    with scripted(lambda *_: said("1")) as (url, requests):
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        score(judge(url, template="{prompt}|{response}"), [rollout("x", messages=messages)])
    assert prompt_of(requests[0]) == "system: Be kind.\n\nuser: Hi|x"


@pytest.mark.parametrize("begin", [[], [{"role": "system", "content": "Be kind."}]])
def test_a_prompt_with_images_is_written_with_their_places(begin: list[Any]):
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    with scripted(lambda *_: said("1")) as (url, requests):
        messages = [*begin, {"role": "user", "content": parts}]
        score(judge(url, template="{prompt}|{response}"), [rollout("x", messages=messages)])
    written = "system: Be kind.\n\nuser: " if begin else ""
    assert prompt_of(requests[0]) == f"{written}<image>What is it?|x"


def test_a_base_model_completes_a_text():
    (found,), (request,) = graded(
        lambda *_: (200, {"choices": [{"text": " 5"}]}),
        "four",
        chat=False,
        sampling={"max_tokens": 4, "stop": ["\n"], "temperature": None},
    )
    assert found == 1.0
    assert request["prompt"].endswith("Answer: four Grade:")
    assert (request["max_tokens"], request["stop"]) == (4, ["\n"])
    assert "temperature" not in request


def test_an_answer_without_a_grade_is_a_failed_sample_and_is_counted():
    (found, other), requests = graded(
        lambda body, _: said("no idea" if "four" in prompt_of(body) else "5"), "four", "five"
    )
    assert isinstance(found, FailedScore)
    assert "named no grade (reward.judge.grades) in 'no idea'" in found.reason
    assert parts_of(found)["judge_ungraded"] == 1.0
    assert texts_of(found) == {"judge": "no idea"}
    assert other == 1.0
    assert len(requests) == 2  # at temperature 0 the same answer would come again


def test_a_judge_with_a_temperature_is_asked_again():
    answers = ["no idea", "hm", "5"]
    (found,), requests = graded(
        lambda _, number: said(answers[number - 1]), "four", sampling={"temperature": 1}
    )
    assert found == 1.0
    assert len(requests) == 3
    (failed,), requests = graded(lambda *_: said("hm"), "four", sampling={"temperature": 1})
    assert isinstance(failed, FailedScore)
    assert len(requests) == 3


def test_a_key_gives_ungraded_answers_a_score_but_not_failed_requests():
    (found,), _ = graded(lambda *_: said("no idea"), "four", ungraded_score=-1.0)
    assert found == -1.0
    assert parts_of(found)["judge_ungraded"] == 1.0
    (failed,), _ = graded(lambda *_: (400, {"error": "no"}), "four", ungraded_score=-1.0)
    assert isinstance(failed, FailedScore)


@pytest.mark.parametrize(
    ("status", "content", "reason", "num_requests"),
    [
        (500, {"error": "out of order"}, "status 500: out of order", 3),
        (401, {"error": {"message": "the API key is wrong"}}, "the API key is wrong", 1),
        (200, b"<html>", "Expecting value", 1),
        (200, {"choices": []}, "does not have exactly one choice with a text", 1),
        (200, [1], "does not have exactly one choice with a text", 1),
        (200, {"choices": [{"message": {"content": None}}]}, "named no grade", 1),
    ],
)
def test_a_server_that_misbehaves_is_a_failed_sample(status, content, reason, num_requests):
    (found,), requests = graded(lambda *_: (status, content), "four")
    assert math.isnan(found)
    assert isinstance(found, FailedScore)
    assert reason in found.reason
    assert len(requests) == num_requests


def test_the_config_names_the_endpoint_and_the_variable_of_the_key(monkeypatch):
    monkeypatch.setenv("KEY_OF_A_JUDGE", "secret")
    keys: list[str | None] = []

    def answer(body: dict[str, Any], _: int) -> tuple[int, Any]:
        keys.append(body["model"])
        return said("10")

    with scripted(answer) as (url, _):
        section = RewardSection.model_validate(
            {
                "judge": {
                    "url": url.replace("/score", "/v1/"),
                    "model": "m",
                    "template": "{response}",
                    "api_key_variable": "KEY_OF_A_JUDGE",
                }
            }
        )
        opened = open_servers(section)
        assert score(opened["judge"], [rollout("four")]) == [1.0]
    assert str(opened["judge"]).endswith("/v1/chat/completions")
    assert keys == ["m"]


def test_a_run_measures_the_grades_and_keeps_the_answers():
    def answer(body: dict[str, Any], _: int) -> tuple[int, Any]:
        return said("no idea" if "five" in prompt_of(body) else "I say 10")

    with scripted(answer) as (url, _):
        reward = {"judge": {"url": url, "model": "m", "template": "{response}"}}
        section = RewardSection.model_validate(reward | {"weights": {"judge": 2}})
        model = ModelSection(policy="p")
        servers = open_servers(section)
        scorer = Scorer(None, (), source_weights(section, model), servers)
        scored = scorer.score([rollout("four"), rollout("five", sample_index=1)])
    assert scored[0].score == 2.0
    assert math.isnan(scored[1].score)
    figures = rollout_metrics(scored)
    assert figures["rollout/score_mean"] == 2.0
    assert figures["reward/judge_ungraded"] == 0.5
    assert figures["reward/judge_s"] > 0.0
    rows = rollout_table([sample_row(each) for each in scored]).to_pylist(maps_as_pydicts="strict")
    assert [row["score"] for row in rows] == [2.0, None]
    assert [row["reward_texts"] for row in rows] == [{"judge": "I say 10"}, {"judge": "no idea"}]


def test_a_deployed_judge_gets_all_requests_of_a_batch_in_one_call():
    replicas = Replicas(["5", "1", "too long?", "3"])
    asked = deployed(replicas, template="{response} {criterion}?", criteria={"a": "A", "b": "B"})
    first, second = score(asked, [rollout("four"), rollout("five", sample_index=1)])
    assert replicas.asked == [["four A?", "four B?", "five A?", "five B?"]]
    assert first == 0.5
    assert texts_of(first) == {"judge/a": "5", "judge/b": "1"}
    assert isinstance(second, FailedScore)
    assert "p at replicas of the run named no grade" in second.reason
    assert parts_of(second)["judge_ungraded"] == 0.5


def test_a_deployed_judge_is_asked_again_only_where_a_grade_is_missing():
    no_room = ValueError("reward.judge.max_model_len (8): leaves room for ...")
    replicas = Replicas(["hm", "2", no_room], ["hm"], ["4"])
    asked = deployed(replicas, sampling={"temperature": 1.0})
    found = score(asked, [rollout(text, sample_index=i) for i, text in enumerate("abc")])
    assert replicas.asked == [["a?", "b?", "c?"], ["a?"], ["a?"]]
    assert found[:2] == [0.75, 0.25]
    assert isinstance(found[2], FailedScore)
    assert "reward.judge.max_model_len (8)" in found[2].reason
    assert parts_of(found[2])["judge_ungraded"] == 0.0


def test_a_batch_is_judged_as_a_whole_after_sampling_wherever_the_judge_runs():
    section = RewardSection.model_validate(
        {"judge": {"path": "p", "template": "{response}"}, "weights": {"judge": 2}}
    )
    assert open_servers(section) == {}
    replicas = Replicas(["10", "1"])
    for models_apart in (False, True):
        scorer = Scorer(
            None,
            (),
            source_weights(section, ModelSection(policy="p")),
            judge=deployed(replicas, grades=[1, 10]),
            models_apart=models_apart,
        )
        scoring = Scoring(scorer)
        assert not scoring.scores_early
        replicas.calls[:] = [["10", "1"]]
        batch = [rollout("four"), rollout("five", sample_index=1)]
        scoring.add(batch)
        scored = scoring.results(batch)
        assert [each.score for each in scored] == [2.0, 0.0]
        assert [each.scores_by_source for each in scored] == [{"judge": 1.0}, {"judge": 0.0}]
    assert [len(prompts) for prompts in replicas.asked] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "127.0.0.1:8000"}, r"reward\.judge\.url \(127\.0\.0\.1:8000\): must begin"),
        ({"template": "no place"}, r"reward\.judge\.template: does not contain \{response\}"),
        ({"criteria": {"a": "b"}}, r"reward\.judge\.criteria \(a\): the template must contain"),
        ({"template": "{response}{criterion}"}, r"reward\.judge\.criteria \(none\)"),
        (
            {"criteria": {"score": "b"}, "template": "{response}{criterion}"},
            r"reward\.judge\.criteria \(score\): every score has a part of this name",
        ),
        (
            {"criteria": {"judge_s": "b"}, "template": "{response}{criterion}"},
            r"reward\.judge\.criteria \(judge_s\): every score has a part of this name",
        ),
        ({"grades": [5, 1]}, r"reward\.judge\.grades \(\[5\.0, 1\.0\]\): must increase"),
        (
            {"grades": {}},
            r"reward\.judge\.grades \(\{\}\): must contain words, and none may be empty",
        ),
        ({"pattern": "("}, r"reward\.judge\.pattern \(\(\): is not a regular expression"),
        ({"model": None}, r"reward\.judge\.path \(None\): no judge is named.*reward\.judge\.model"),
        ({"path": "p"}, r"reward\.judge\.model \(judge\): has no effect"),
        ({"max_model_len": 100}, r"reward\.judge\.max_model_len \(100\): has no effect"),
        (
            {"path": "p", "url": None, "model": None, "max_model_len": 1023},
            r"max_model_len \(1023\): the judge may have to read and write 1024 tokens",
        ),
    ],
)
def test_a_judge_that_cannot_work_is_refused(changes, message):
    values = {"url": "http://a/v1", "model": "judge", "template": "{response}"} | changes
    with pytest.raises(ConfigError, match=message):
        PPOConfig.parse(
            {
                "name": "judged",
                "model": {"policy": "p"},
                "data": {"prompts": "p.jsonl"},
                "rollout": {"max_new_tokens": 512},
                "reward": {"judge": values},
            }
        )
