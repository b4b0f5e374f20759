"""Run multi-turn episodes (step 4 of `raypo.recipes.ppo`): a coroutine for each, on shared engines.

    caller's thread           event loop (a daemon thread)                      engines
    ---------------           ----------------------------                      -------
    Episodes.play  --waits->  batch:    until all its episodes have ended
    (one for each             episode:  reset, then turn by turn
     batch; several                       session.generate  --waits->  TurnSampler --waits-> vLLM
     at a time with                       environment.step  --waits->  a thread, or a process of
     mode async)                                                       the UserCodePool
                              agent:    one call of `run`, a coroutine or a thread
                                          policy.generate, or requests to the AgentEndpoint,
                                          whose thread waits for the same session

One event loop, one endpoint and one pool serve all batches. Only the user's code can
block the loop; `EventLoop` then ends the run with an error that names the blocking line. With
`rollout.turns: in_step`, a turn is sampled only when all other episodes wait for a turn too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from raypo.config import ConfigError, OnlineConfig, RolloutSection
from raypo.custom.errors import located_text
from raypo.data.chat_messages import USUAL_FORMAT, ChatFormat, MessageError, check_tools
from raypo.data.tokenised_rows import chat_format
from raypo.data.turns import TurnTokens, is_ids, messages_of
from raypo.endpoint.agent_endpoint import AgentEndpoint
from raypo.models.loading import vocabulary_size
from raypo.rewards.scoring import score_of_parts
from raypo.rollout.agent_requests import answer
from raypo.rollout.collect import Sampling
from raypo.rollout.engines import Engines
from raypo.rollout.event_loop import EventLoop
from raypo.rollout.policy import EpisodeLimit, is_limit
from raypo.rollout.session import EpisodeSettings, Session
from raypo.rollout.turn_sampler import PolicyCalls, TurnSampler
from raypo.rollout.user_code import UserClass, UserObject, WrongAnswer, is_finite
from raypo.tools.calls import on_tool_use
from raypo.types import Episode, Prompt, Rollout

T = TypeVar("T")


def open_episodes(
    config: OnlineConfig, policy: str, tokenizer: Any, stop_token_ids: Sequence[int]
) -> Episodes | None:
    """Create the runner of a config's episodes, or return None if a sample is a single response.

    Args:
        config: The run's config.
        policy: Folder or hub id of the policy.
        tokenizer: The policy's tokenizer.
        stop_token_ids: Tokens that end a turn.
    """
    if not config.rollout.is_episodic:
        return None
    return Episodes(
        config.rollout,
        tokenizer,
        stop_token_ids,
        max_tokens=config.max_model_len,
        vocabulary_size=vocabulary_size(policy),
        chat=chat_format(config.data),
    )


class Episodes:
    """Runner of episodes. `Sampler.sample` uses it if each sample is an episode."""

    def __init__(
        self,
        section: RolloutSection,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        *,
        max_tokens: int,
        vocabulary_size: int,
        chat: ChatFormat = USUAL_FORMAT,
    ) -> None:
        """Load the user's class, and start the event loop.

        Args:
            section: The section `rollout` of the config.
            tokenizer: The policy's tokenizer.
            stop_token_ids: Tokens that end a turn.
            max_tokens: Longest conversation, prompt and response together, in tokens.
            vocabulary_size: Vocabulary size of the policy.
            chat: Variables for the template, and the treatment of special tokens in texts.

        Raises:
            ConfigError: the class is missing, or is neither an environment nor an agent.
        """
        self._section, self._class = section, UserClass(section)
        if self._class.tools and tokenizer.chat_template:
            try:
                check_tools(tokenizer, self._class.tools)
            except MessageError as error:
                self._class.close()
                raise ConfigError(
                    f"rollout.environment ({section.environment}): {error}."
                ) from None
        self._settings = EpisodeSettings(
            section,
            tokenizer,
            TurnTokens(tokenizer, stop_token_ids, chat),
            max_tokens,
            vocabulary_size,
        )
        self._endpoint = AgentEndpoint(section.endpoint_host, max_tokens)
        self._loop = EventLoop(section.step_timeout_s)
        self._waited_s = 0.0

    def waited_s(self) -> float:
        """Return the seconds training batches have waited for environments since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def close(self) -> None:
        """End the user's processes, the endpoint, and the event loop with all its tasks."""
        self._class.close()
        self._endpoint.close()
        self._loop.close()

    def play(
        self, prompts: Sequence[Prompt], engines: Engines, sampling: Sampling
    ) -> list[Rollout]:
        """Run `samples_per_prompt` episodes for each prompt, all concurrently.

        Every turn has its own seed, so an episode does not depend on other episodes.

        Args:
            prompts: The drawn prompts.
            engines: The engines.
            sampling: Sampling parameters.

        Returns:
            The rollouts of all episodes, in the order of prompts and samples.

        Raises:
            LoopStandsStill: user code blocked the event loop for too long.
        """
        samples = [(prompt, n) for prompt in prompts for n in range(sampling.samples_per_prompt)]
        clients, tasks = engines.per_engine(), []

        async def batch() -> float:
            sampler = TurnSampler(in_step=self._section.goes_in_step, num_episodes=len(samples))
            for number, (prompt, sample_index) in enumerate(samples):
                calls = PolicyCalls(sampler, clients[number * len(clients) // len(samples)])
                session = Session(self._settings, prompt, sample_index, sampling, calls)
                tasks.append(asyncio.create_task(self._episode(session)))
            await sampler.until_over(tasks)
            return sampler.waited_s

        try:
            waited_s = self._loop.run(batch())
        finally:
            self._loop.call_soon(lambda: [task.cancel() for task in tasks])
        if sampling.stream == 0:  # 0 is training; evaluations do not count
            self._waited_s += waited_s
        return [rollout for task in tasks for rollout in task.result()]

    async def _episode(self, session: Session) -> list[Rollout]:
        """Run one episode. An error in the user's code fails only this episode."""
        on_tool_use.set(session.record_tool)  # for tools that the user's code calls
        user, begin = UserObject(self._class), time.perf_counter()
        play = self._play_agent if self._section.has_agent else self._play_environment
        score, error = await _outcome(play(user, session))
        session.calls.close()
        took = time.perf_counter() - begin - session.calls.waited_s
        _, unclosed = await _outcome(user.close())
        error = error or unclosed
        score = math.nan if score is None or error else score
        uses = tuple(session.tool_uses)
        return session.rollouts(
            Episode(score, session.num_calls, took, error, session.metrics, uses)
        )

    async def _play_environment(self, environment: UserObject, session: Session) -> float:
        """Alternate policy and environment, and return the sum of the rewards.

        Raises:
            EpisodeLimit: there is no room for a single turn.
            Exception: any error of the environment, or TimeoutError if it took too long.
        """
        tools, total = self._class.tools, 0.0
        chat, ids = await self._first_observation(environment, session)
        while True:
            try:
                reply = await session.generate(ids, tools=tools)
            except EpisodeLimit:
                if not session.num_calls:
                    raise
                session.is_cut_off = True
                break
            action = reply.token_ids.tolist() if self._class.reads_ids else reply.text
            observation, reward, done = _checked(await environment.call("step", action))
            session.rows[-1].turns[-1].reward = reward
            total += reward
            if done:
                break
            between = session.tokens.between(reply.token_ids, observation, chat=chat, tools=tools)
            ids = np.concatenate([reply.conversation, between])
        session.metrics = environment.metrics()
        return total

    async def _first_observation(
        self, environment: UserObject, session: Session
    ) -> tuple[bool, np.ndarray]:
        """Reset the environment, and get its first observation.

        Returns:
            True if the episode is a chat, and the token ids of its first prompt.
        """
        prompt, tools = session.prompt, self._class.tools
        chat, ids = prompt.messages is not None, prompt.token_ids
        question = prompt.messages if chat else prompt.text
        first = await environment.call("reset", question, prompt.label)
        if first is None and chat and tools:
            first = prompt.messages  # the prompt's own ids were tokenised without the tools
        if first is not None:
            chat = chat or not (isinstance(first, str) or is_ids(first))
            session.first_text, ids = session.tokens.first(first, chat=chat, tools=tools)
            if not is_ids(first) and (chat or not isinstance(first, str)):
                session.first_messages = messages_of(first)
        if tools and not chat and not is_ids(first):
            raise WrongAnswer(
                "the environment has tools, which only a chat template can describe to the "
                "policy, but the prompt is a text: give prompts as messages, or return messages "
                "from reset"
            )
        return chat, ids

    async def _play_agent(self, agent: UserObject, session: Session) -> float:
        """Run the agent, which calls the policy whenever it wants, and return its score.

        If a limit of turns or tokens ends the episode and `rollout.limit_score` is set, the score
        is that value.

        Raises:
            Exception: any error of the agent, or TimeoutError if it took too long.
        """
        prompt, limit_score = session.prompt, self._section.limit_score
        question = prompt.text if prompt.messages is None else prompt.messages
        session.endpoint, session.work_time = self._endpoint, agent.work_time("run")
        try:
            with self._endpoint.open(partial(answer, session)) as session.api_key:
                score = await agent.call(
                    "run", question, prompt.label, session, work_time=session.work_time
                )
        except Exception as error:
            if limit_score is None or not session.num_calls or not is_limit(error):
                raise
            session.is_cut_off, score = True, limit_score
        if isinstance(score, Mapping):
            score = score_of_parts(score, session.sample_index, "run")
        if not is_finite(score):
            raise WrongAnswer(f"run returned {score!r:.100}, not a finite number of float32")
        session.metrics = agent.metrics()
        return score


def _checked(answer: Any) -> tuple[Any, float, bool]:
    """Check the value that `step` returned, and return observation, reward and done."""
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise WrongAnswer(f"step returned {answer!r:.100}, not (observation, reward, done)")
    observation, reward, done = answer
    if not is_finite(reward):
        raise WrongAnswer(
            f"step returned the reward {reward!r:.100}, not a finite number of float32"
        )
    if observation is None and not done:
        raise WrongAnswer("step returned no observation, but the episode is not done")
    return observation, float(reward), bool(done)


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, str | None]:
    """Return the result of the user's coroutine, or its error as text."""
    try:
        return await work, None
    except GeneratorExit:
        raise
    except BaseException as failure:  # a panic in Rust code, for example, is no Exception
        return None, located_text(failure)
