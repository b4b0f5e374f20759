"""Generative judge: a language model grades responses by a prompt template.

Each request asks the judge for the grade of one criterion of one response. A call of `Judge` sends
its requests concurrently, in one event loop. `JsonServers` limits the number of requests in flight,
retries failed requests, and balances the load.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass
from typing import Any

import httpx

from raypo.config import Criterion, JudgeSection
from raypo.rewards.remote import JsonServers, Post, RemoteRewardError
from raypo.rewards.scoring import SCORE, RewardError
from raypo.types import Rollout

_SAMPLING = {"temperature": 0.0, "max_tokens": 512}
_NUMBER = re.compile(r"(?<![\w.,])[-+]?\d+(?:\.\d+)?(?![\w%]|[.,]\d)")
"""A number that stands alone: not part of a word, of a percentage or of a longer number."""


class NoGrade(ValueError):
    """The judge answered without a grade."""


@dataclass(frozen=True)
class _Grade:
    """Grade of one criterion of one response."""

    score: float | None
    """Score of the grade, or None if a request failed, or if the judge named no grade."""
    text: str = ""
    """Answer of the judge."""
    seconds: float = 0.0
    """Total duration of the answered requests, in seconds."""
    error: Exception | None = None


class Judge:
    """Reward function that asks a language model for grades.

    A score has these named parts: the grade of each criterion, `judge_ungraded` (fraction of the
    criteria without a grade) and `judge_s` (mean seconds of the requests for a criterion). It also
    has the judge's answers as named texts, called `judge` or `judge/<criterion>`.

    Paper: Gunjal et al. 2025, arXiv:2507.17746, eq. 1, for the weighted mean over criteria.
    """

    def __init__(self, section: JudgeSection, servers: JsonServers, *, max_attempts: int) -> None:
        """Store the settings.

        Args:
            section: Template, criteria and grades.
            servers: The judge's servers.
            max_attempts: Maximum number of requests until the judge names a grade, if the
                temperature is above 0. With temperature 0 there is one request.
        """
        self._section, self._servers = section, servers
        self._sampling = {
            name: value
            for name, value in {**_SAMPLING, **section.sampling}.items()
            if value is not None
        }
        self._criteria = section.criteria or {"": Criterion(text="one grade")}
        # With temperature 0, another request would return the same answer.
        self._attempts = max_attempts if self._sampling.get("temperature") else 1

    def __str__(self) -> str:
        return f"{self._section.model} at {self._servers}"

    async def __call__(self, rollouts: list[Rollout]) -> list[dict[str, Any]]:
        """Return a score and its named parts per rollout.

        If a grade is missing, and `ungraded_score` does not replace it, the score is an exception.

        Raises:
            RewardError: a row lacks a column that the template names.
        """
        for rollout in rollouts:
            self._refuse_missing_columns(rollout)
        async with self._servers.open() as post:
            return await asyncio.gather(*(self._score(post, rollout) for rollout in rollouts))

    async def _score(self, post: Post, rollout: Rollout) -> dict[str, Any]:
        criteria = self._criteria
        graded = await asyncio.gather(
            *(self._grade(post, rollout, each.text) for each in criteria.values())
        )
        grades = dict(zip(criteria, graded, strict=True))
        names = {name: f"judge/{name}" if name else "judge" for name in grades}
        scores = {
            name: self._section.ungraded_score
            if each.score is None and isinstance(each.error, NoGrade)
            else each.score
            for name, each in grades.items()
        }
        missing = next(
            (grades[name].error for name, score in scores.items() if score is None), None
        )
        total = math.fsum(criteria[name].weight * (score or 0.0) for name, score in scores.items())
        weights = math.fsum(each.weight for each in criteria.values())
        ungraded = sum(isinstance(each.error, NoGrade) for each in graded)
        return {
            **{name: score for name, score in scores.items() if name},
            **{names[name]: each.text for name, each in grades.items()},
            "judge_ungraded": ungraded / len(grades),
            "judge_s": math.fsum(each.seconds for each in graded) / len(grades),
            SCORE: missing or total / weights,
        }

    async def _grade(self, post: Post, rollout: Rollout, criterion: str) -> _Grade:
        body, text, seconds = self._body(rollout, criterion), "", 0.0
        for _ in range(self._attempts):
            try:
                text, took = await post(body, self._read)
            except RemoteRewardError as error:
                return _Grade(None, text, seconds, error)
            seconds += took
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
            *_, place = [None, *re.finditer(section.pattern, text)]
            if place is None:
                return None
            text = (place[1] if place.re.groups else place[0]) or ""
        if isinstance(section.grades, dict):
            by_word = {word.strip().casefold(): score for word, score in section.grades.items()}
            words = "|".join(map(re.escape, sorted(by_word, key=len, reverse=True)))
            found = re.findall(rf"(?<!\w)(?:{words})(?!\w)", text.casefold())
            return by_word[found[-1]] if found else None
        lowest, highest = section.grades
        # With 5 as the highest grade, read 4/5 and 4.0 of 5.0 as 4.
        text = re.sub(
            rf"(?:\s*(?:/|out of)|(?<=\d)\s+of)\s*{highest:g}(?:\.0+)?(?!\w|\.\d)", "", text
        )
        numbers = _NUMBER.findall(text)
        grade = float(numbers[-1]) if numbers else math.nan
        return (grade - lowest) / (highest - lowest) if lowest <= grade <= highest else None

    def _body(self, rollout: Rollout, criterion: str) -> dict[str, Any]:
        prompt = self._prompt(rollout, criterion)
        content = {"prompt": prompt}
        if self._section.chat:
            content = {"messages": [{"role": "user", "content": prompt}]}
        return {"model": self._section.model, **content, **self._sampling}

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
            lambda found: str(fields[found[1]]) if found[1] in fields else found[0],
            self._section.template,
        )

    def _refuse_missing_columns(self, rollout: Rollout) -> None:
        if missing := [each for each in self._section.columns if each not in rollout.row]:
            raise RewardError(
                f"reward.judge.template: names {{{missing[0]}}}, but row {rollout.prompt_index} "
                f"has no such column. It has {', '.join(rollout.row) or 'none'}. Add the column, "
                "or correct the template."
            )

    def _read(self, response: httpx.Response) -> tuple[str, float]:
        """Return the text of a response, and its duration in seconds.

        Raises:
            ValueError: the response does not follow OpenAI's protocol.
        """
        body = response.json()
        try:
            (choice,) = body["choices"]
            text = choice["message"]["content"] if self._section.chat else choice["text"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"the answer does not have exactly one choice with a text: {body!r:.200}"
            ) from None
        return text or "", response.elapsed.total_seconds()


def _conversation(rollout: Rollout) -> str:
    """Return the prompt as text. If it has several chat messages, each begins with its role."""
    if not rollout.messages:
        return rollout.prompt
    if len(rollout.messages) == 1:
        return str(rollout.messages[0]["content"])
    return "\n\n".join(f"{each['role']}: {each['content']}" for each in rollout.messages)
