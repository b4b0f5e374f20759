"""A language model as judge: it is told by a prompt what a good response is, and gives a grade.

The judge is whatever speaks OpenAI's protocol: here `raypo serve ... --name judge`.
"""

from __future__ import annotations

import asyncio
import os
import re

from openai import APIError, AsyncOpenAI

from raypo import Rollout

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("JUDGE_MODEL", "judge")
GRADES = range(1, 6)
PROMPT = """\
How friendly is what a writer answered? From 1 (rude) to 5 (very friendly).

Request: Say something about the bus this morning.
Answer: It was late again, and I hated every minute of it.
Grade: 1

Request: Tell me about your lunch.
Answer: I had soup, bread and an apple.
Grade: 3

Request: What about the new library?
Answer: What a wonderful place, I loved it!
Grade: 5

Request: {request}
Answer: {response}
Grade:"""
"""Completed as a text, with examples: asked in a chat, so small a model rarely names a grade."""


async def grade(rollouts: list[Rollout]) -> list[float | APIError | None]:
    """The judge's grade of each response, 0 to 1.

    None where it names no grade, and the error where it could not be asked: such samples are left
    out of training, up to `reward.max_failed_fraction` of a step.
    """
    key = os.environ.get("RAYPO_API_KEY", "none")
    async with AsyncOpenAI(base_url=URL, api_key=key, timeout=60, max_retries=3) as judge:

        async def ask(rollout: Rollout) -> float | APIError | None:
            request = rollout.messages[-1]["content"] if rollout.messages else rollout.prompt
            prompt = PROMPT.format(request=request, response=rollout.response)
            try:
                answer = await judge.completions.create(
                    model=MODEL, prompt=prompt, temperature=0, max_tokens=4
                )
            except APIError as error:
                return error
            return parse(answer.choices[0].text)

        return await asyncio.gather(*map(ask, rollouts))


def parse(text: str) -> float | None:
    """Return the first number, if it is a grade: 1 is 0.0, 5 is 1.0; None for 1.5 or -3."""
    found = re.search(r"-?\d+(?:\.\d+)?", text)
    if found is None or float(found[0]) not in GRADES:
        return None
    return (float(found[0]) - GRADES[0]) / (GRADES[-1] - GRADES[0])
