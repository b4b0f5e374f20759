"""Generative judge: a language model grades responses by a prompt template.

Each request asks the judge for the grade of one criterion of one response. The judge answers by a
function (`Ask`): a server (`raypo.rewards.judge_servers`), or a deployment of the run.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from raypo.config import Criterion, JudgeSection
from raypo.rewards.scoring import SCORE, RewardError
from raypo.types import Rollout

Answer = tuple[str, float]
"""Answer of the judge, and the seconds that it took."""
Ask = Callable[[list[str]], Awaitable[Sequence[Answer | Exception]]]
"""Function that returns the judge's answer to each prompt, or the exception of a failed request."""
_NUMBER = re.compile(r"(?<![\w.,])[-+]?\d+(?:\.\d+)?(?![\w%]|[.,]\d)")
"""A number that stands alone: not part of a word, of a percentage or of a longer number."""


class NoGrade(ValueError):
    """The judge answered without a grade."""


@dataclass(frozen=True)
class _Grade:
    """Grade of one criterion of one response."""

    score: float | None
    """Score of the grade, or None if the request failed, or if the judge named no grade."""
    text: str
    """Last answer of the judge."""
    seconds: float
    """Total duration of the answered requests, in seconds."""
    error: Exception | None = None


class Answering(Protocol):
    """Interface of a deployed judge. `JudgeClient` implements it."""

    def answers(self, prompts: list[str]) -> Future[list[str | ValueError]]:
        """Return a future of the answer to each prompt, or the reason why there is none."""
        ...


@dataclass(frozen=True)
class DeployedJudge:
    """`Ask` function that sends all prompts to a deployed judge in one call."""

    judge: Answering

    def __str__(self) -> str:
        return "replicas of the run"

    async def __call__(self, prompts: list[str]) -> list[Answer | Exception]:
        """Return the answers. The duration of each is that of the call."""
        begin = time.monotonic()
        answers = await asyncio.wrap_future(self.judge.answers(prompts))
        took = time.monotonic() - begin
        return [(answer, took) if isinstance(answer, str) else answer for answer in answers]


class Judge:
    """Reward function that asks a language model for grades.

    A score has these named parts: the grade of each criterion, `judge_ungraded` (fraction of the
    criteria without a grade) and `judge_s` (mean seconds of the requests for a criterion). It also
    has the judge's answers as named texts, called `judge` or `judge/<criterion>`.

    Paper: Gunjal et al. 2025, arXiv:2507.17746, eq. 1, for the weighted mean over criteria.
    """

    def __init__(self, section: JudgeSection, ask: Ask, *, max_attempts: int) -> None:
        """Store the settings.

        Args:
            section: Template, criteria and grades.
            ask: Function that gets the judge's answers.
            max_attempts: Maximum number of requests until the judge names a grade, if the
                temperature is above 0. With temperature 0 there is one request.
        """
        self._section, self._ask = section, ask
        self._criteria = section.criteria or {"": Criterion(text="one grade")}
        # With temperature 0, another request would return the same answer.
        self._attempts = max_attempts if section.merged_sampling.get("temperature") else 1

    def __str__(self) -> str:
        return f"{self._section.name} at {self._ask}"

    async def __call__(self, rollouts: list[Rollout]) -> list[dict[str, Any]]:
        """Return a score and its named parts per rollout.

        If a grade is missing, and `ungraded_score` does not replace it, the score is an exception.

        Raises:
            RewardError: a row lacks a column that the template names.
        """
        for rollout in rollouts:
            self._refuse_missing_columns(rollout)
        texts = [criterion.text for criterion in self._criteria.values()]
        graded = await self._grades([self._prompt(r, text) for r in rollouts for text in texts])
        size = len(texts)
        return [self._score(graded[row * size :][:size]) for row in range(len(rollouts))]

    def _score(self, graded: Sequence[_Grade]) -> dict[str, Any]:
        criteria = self._criteria
        grades = dict(zip(criteria, graded, strict=True))
        names = {name: f"judge/{name}" if name else "judge" for name in grades}
        scores = {
            name: self._section.ungraded_score
            if grade.score is None and isinstance(grade.error, NoGrade)
            else grade.score
            for name, grade in grades.items()
        }
        missing = next(
            (grades[name].error for name, score in scores.items() if score is None), None
        )
        total = math.fsum(criteria[name].weight * (score or 0.0) for name, score in scores.items())
        weights = math.fsum(criterion.weight for criterion in criteria.values())
        ungraded = sum(isinstance(grade.error, NoGrade) for grade in graded)
        return {
            **{name: score for name, score in scores.items() if name},
            **{names[name]: grade.text for name, grade in grades.items()},
            "judge_ungraded": ungraded / len(grades),
            "judge_s": math.fsum(grade.seconds for grade in graded) / len(grades),
            SCORE: missing or total / weights,
        }

    async def _grades(self, prompts: Sequence[str]) -> list[_Grade]:
        """Ask for a grade for each prompt, and again for those whose answer has none."""
        grades = [_Grade(None, "", 0.0)] * len(prompts)
        left = list(range(len(prompts)))
        for _ in range(self._attempts):
            answers = await self._ask([prompts[index] for index in left])
            for index, answer in zip(left, answers, strict=True):
                grades[index] = self._grade(answer, grades[index])
            left = [index for index in left if isinstance(grades[index].error, NoGrade)]
            if not left:
                break
        return grades

    def _grade(self, answer: Answer | Exception, earlier: _Grade) -> _Grade:
        if isinstance(answer, Exception):
            return _Grade(None, earlier.text, earlier.seconds, answer)
        text, seconds = answer[0], earlier.seconds + answer[1]
        if (score := self.parse(text)) is not None:
            return _Grade(score, text, seconds)
        error = NoGrade(f"the judge {self} named no grade (reward.judge.grades) in {text!r:.200}")
        return _Grade(None, text, seconds, error)

    def parse(self, text: str) -> float | None:
        """Return the score of the last grade in an answer of the judge.

        The result is None if the answer has no grade.
        """
        section = self._section
        if section.pattern is not None:
            *_, match = [None, *re.finditer(section.pattern, text)]
            if match is None:
                return None
            text = (match[1] if match.re.groups else match[0]) or ""
        if isinstance(section.grades, dict):
            by_word = {word.strip().casefold(): score for word, score in section.grades.items()}
            words = "|".join(map(re.escape, sorted(by_word, key=len, reverse=True)))
            mentioned = re.findall(rf"(?<!\w)(?:{words})(?!\w)", text.casefold())
            return by_word[mentioned[-1]] if mentioned else None
        lowest, highest = section.grades
        # With 5 as the highest grade, read 4/5 and 4.0 of 5.0 as 4.
        text = re.sub(
            rf"(?:\s*(?:/|out of)|(?<=\d)\s+of)\s*{highest:g}(?:\.0+)?(?!\w|\.\d)", "", text
        )
        numbers = _NUMBER.findall(text)
        grade = float(numbers[-1]) if numbers else math.nan
        return (grade - lowest) / (highest - lowest) if lowest <= grade <= highest else None

    def _prompt(self, rollout: Rollout, criterion: str) -> str:
        fields = {
            **rollout.row,
            "prompt": _conversation(rollout),
            "response": rollout.response,
            "label": rollout.label,
            "criterion": criterion,
        }
        # In one pass, so that braces in a response are not replaced.
        return re.sub(
            r"\{(\w+)\}",
            lambda match: str(fields[match[1]]) if match[1] in fields else match[0],
            self._section.template,
        )

    def _refuse_missing_columns(self, rollout: Rollout) -> None:
        if missing := [column for column in self._section.columns if column not in rollout.row]:
            raise RewardError(
                f"reward.judge.template: names {{{missing[0]}}}, but row {rollout.prompt_index} "
                f"has no such column. It has {', '.join(rollout.row) or 'none'}. Add the column, "
                "or correct the template."
            )


def _conversation(rollout: Rollout) -> str:
    """Return the prompt as text. If it has several chat messages, each begins with its role."""
    if not rollout.messages:
        return rollout.prompt
    if len(rollout.messages) == 1:
        return _text_of(rollout.messages[0])
    return "\n\n".join(f"{message['role']}: {_text_of(message)}" for message in rollout.messages)


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, list):  # with images, which a judge does not see
        return "".join(part.get("text", "<image>") for part in content)
    return str(content)
