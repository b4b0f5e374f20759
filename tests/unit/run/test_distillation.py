"""Which teacher is asked about what."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from raypo.cluster.placement import served_roles
from raypo.collectives import Workers
from raypo.config import DistillationConfig
from raypo.data.stream import ShuffledStream
from raypo.learner.distillation_task import DistillationTask
from raypo.recipes.distillation import DistillationRecipe
from raypo.rollout.teacher_prompts import teacher_prompts
from raypo.run.served_roles import class_and_arguments
from raypo.types import Example, Rollout, Taught
from tests.stand_ins import completed
from tests.unit.learner.plain import on_workers
from tests.unit.run.test_rejection_sampling import scored

CONFIG = DistillationConfig.parse(
    {
        "name": "d",
        "model": {"policy": "p", "teacher": {"a": "one", "b": "other", "c": "one"}},
        "data": {"prompts": ["a.jsonl", "b.jsonl", "c.jsonl"], "response_key": "text"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 1},
        "distillation": {"on_policy_fraction": 0.25, "top_k": 1},
    }
)


def of_source(group: int, source: str) -> Rollout:
    return replace(scored(group, 0, 0.0), data_source=source)


class Teacher:
    def __init__(self, number: int) -> None:
        self.number, self.responses = number, []

    def top_log_probs(self, sequences: list, count: int, vocabulary: int) -> Future[list]:
        self.responses += [bytes(response.astype(np.uint8)).decode() for _, response in sequences]
        told = [np.full((len(response), count), -1.0, np.float32) for _, response in sequences]
        return completed([(each, np.full(each.shape, self.number, np.int32)) for each in told])


def text(written: str) -> Example:
    return Example(
        np.zeros(1, np.int32), np.frombuffer(written.encode(), np.uint8).astype(np.int32)
    )


def made(
    config: DistillationConfig,
    *,
    texts: Any = None,
    workers: Workers | None = None,
    teachers: dict[str, Any] | None = None,
) -> DistillationRecipe:
    """A recipe without a run's files; its tokenizer knows characters."""

    def tokenizer(texts: Any, **options: Any) -> dict[str, list]:
        coded = [[ord(c) for c in one] for one in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": coded[0] if isinstance(texts, str) else coded}

    recipe: Any = object.__new__(DistillationRecipe)
    recipe.run = SimpleNamespace(config=config, workers=workers or Workers())
    recipe.inputs = SimpleNamespace(tokenizer=tokenizer)
    recipe.services = SimpleNamespace(references=teachers)
    recipe.texts, recipe._vocabulary = texts, 300
    recipe.teacher_prompts = teacher_prompts(config.distillation)
    return recipe


def test_a_teacher_in_vllm_has_room_for_the_longest_prompt_that_it_may_get():
    values = CONFIG.model_dump() | {
        "model": {"policy": "p", "teacher": "t"},
        "data": {"prompts": "a.jsonl", "max_prompt_tokens": 64},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 8},
        "placement": {"frozen": {"reference": {"backend": "vllm"}}},
    }
    longest = {}
    for shown in (None, "success"):
        most = {"max_teacher_prompt_tokens": 256} if shown else {}
        config = DistillationConfig.parse(
            values | {"distillation": {"teacher_prompt": shown, **most}}
        )
        for role in served_roles(config, num_workers=1, use_gpu=True):
            longest[role.kind, shown] = class_and_arguments(role, config)[1]["max_model_len"]
    assert longest == {
        ("engine", None): 72,
        ("engine", "success"): 72,
        ("reference", None): 72,
        ("reference", "success"): 264,
    }


def test_each_teacher_is_asked_about_its_own_sources():
    one, other = Teacher(0), Teacher(1)
    texts = [("a", text("at")), ("b", text("bt")), ("c", text("ct"))]
    teachers = {"reference_0": one, "reference_1": other}
    recipe = made(CONFIG, texts=ShuffledStream(texts, seed=0), teachers=teachers)
    samples = [of_source(0, "a"), of_source(1, "b"), of_source(2, "c"), of_source(3, "b")]

    found, _ = recipe.select(samples, 1)

    assert sorted(one.responses) == ["0.0", "2.0", "at", "ct"]
    assert sorted(other.responses) == ["1.0", "3.0", "bt"]
    assert len(found) == 7
    for taught in found.values():
        written = bytes(taught.response_ids.astype(np.uint8)).decode()
        assert taught.teacher_ids.max() == (0 if written in one.responses else 1)
        assert taught.teacher_log_probs.shape == (len(written), 1)


def shown(teacher: str | None, **section: Any) -> DistillationConfig:
    return DistillationConfig.parse(
        {
            "name": "d",
            "model": {"policy": "p", "teacher": teacher},
            "data": {"prompts": "a.jsonl", "label_key": "answer"},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 3},
            "distillation": {"top_k": 1} | section,
        }
    )


def written(ids: np.ndarray) -> str:
    return "".join(map(chr, ids))


def test_a_teacher_reads_the_responses_behind_its_own_prompt():
    read: list[str] = []

    class Reads(Teacher):
        def top_log_probs(self, sequences: list, count: int, vocabulary: int) -> Future[list]:
            read.extend(written(prompt) for prompt, _ in sequences)
            return super().top_log_probs(sequences, count, vocabulary)

    teachers = {"reference": Reads(4)}
    recipe = made(shown("one", teacher_prompt="solution"), teachers=teachers)
    found, metrics = recipe.select([of_source(0, "a"), of_source(1, "a")], 1)
    solved = "A correct solution is:\n\n7\n\n"
    assert read == [f"{solved}prompt 0", f"{solved}prompt 1"]
    assert metrics == {"selection/responses": 2.0, "selection/prompts_too_long": 0.0}
    for taught in found.values():
        assert taught.prompt_ids.tolist() == [0, 0]  # what the policy learns from
        assert taught.teacher_ids.max() == 4


def test_a_sample_without_a_prompt_for_the_teacher_or_with_a_long_one_is_not_learned():
    config = shown(None, teacher_prompt="success", max_teacher_prompt_tokens=40)
    samples = [
        *(scored(0, number, score) for number, score in enumerate([1.0, 0.0, 0.0])),
        *(scored(1, number, 0.0) for number in range(3)),  # nobody passes
        scored(2, 0, 1.0, "a long success"),
        scored(2, 1, 0.0),
    ]
    found, metrics = made(config).select(samples, 1)
    assert sorted(found) == [(0, 1), (0, 2)]  # the one that passes has no other to learn from
    assert metrics == {"selection/responses": 2.0, "selection/prompts_too_long": 1.0}
    prompt = found[0, 1].teacher_prompt_ids
    assert prompt is not None
    assert written(prompt) == "A correct solution is:\n\n0.0\n\nprompt 0"


def as_own_teacher(workers: Workers) -> dict[Any, str]:
    """Return what the policy says as teacher; a reply repeats its prompt."""
    recipe = made(shown(None, teacher_prompt="success"), workers=workers)
    samples = [
        scored(group, number, float(number == 0), response)
        for group in range(3)
        for number, response in enumerate(["yes", f"no {group}", f"nope {group}"])
    ]
    selected = {} if workers.rank else recipe.select(samples, 1)[0]

    def asked(items: list[Taught], ask: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(each.prompt_ids.astype(np.float32), each.response_ids) for each in items]

    task = object.__new__(DistillationTask)
    learner: Any = SimpleNamespace(task=task, asked=asked, data=workers)
    found = recipe.prepare_items(selected, learner)
    for where, taught in found.items():
        assert written(taught.teacher_ids) == written(taught.response_ids)
        assert taught.prompt_ids.tolist() == [0, 0]
        assert written(taught.response_ids).endswith(str(where[0]))
    return {
        where: written(taught.teacher_log_probs.astype(np.int32)) for where, taught in found.items()
    }


def test_two_workers_ask_the_policy_what_one_asks():
    (whole,) = on_workers(1, as_own_teacher)
    one, other = on_workers(2, as_own_teacher)
    assert (one, other) == (whole, {})
    assert whole[1, 2] == "A correct solution is:\n\nyes\n\nprompt 1"
