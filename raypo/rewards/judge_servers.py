"""Client of judges on servers with OpenAI's protocol."""

from __future__ import annotations

import asyncio
from typing import Any

from raypo.config import JudgeSection
from raypo.rewards.judge import Answer
from raypo.rewards.remote import JsonServers, Post, RemoteRewardError


class JudgeServers:
    """`Ask` function that sends each prompt in a request of its own.

    All requests of a call are sent in one event loop. `JsonServers` limits the number of requests
    in flight, retries failed requests, and balances the load.
    """

    def __init__(self, section: JudgeSection, servers: JsonServers) -> None:
        """Store the settings.

        Args:
            section: Name of the model, protocol and sampling parameters.
            servers: The judge's servers.
        """
        self._section, self._servers = section, servers

    def __str__(self) -> str:
        return str(self._servers)

    async def __call__(self, prompts: list[str]) -> list[Answer | Exception]:
        """Return the answer to each prompt, or the error of its last attempt."""
        async with self._servers.open() as post:
            return await asyncio.gather(*(self._answer(post, prompt) for prompt in prompts))

    async def _answer(self, post: Post, prompt: str) -> Answer | Exception:
        section, content = self._section, dict[str, Any](prompt=prompt)
        if section.chat:
            content = {"messages": [{"role": "user", "content": prompt}]}
        try:
            return await post(
                {"model": section.model, **content, **section.merged_sampling}, self._read
            )
        except RemoteRewardError as error:
            return error

    def _read(self, body: Any, seconds: float) -> Answer:
        """Return the text of a response, and its duration in seconds.

        Raises:
            ValueError: the response does not follow OpenAI's protocol.
        """
        try:
            (choice,) = body["choices"]
            text = choice["message"]["content"] if self._section.chat else choice["text"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"the answer does not have exactly one choice with a text: {body!r:.200}"
            ) from None
        return text or "", seconds
