"""Inputs of a run that trains on sampled responses: prompts, tokenizer, the user's functions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from raypo.config import OnlineConfig, functions_of
from raypo.custom.loader import load_function
from raypo.data.mixing import few_rows_notes, mix_of
from raypo.data.prompts import LoadedPrompts, load_prompts
from raypo.data.stream import ShuffledStream
from raypo.models.loading import Limits, load_tokenizer, stop_token_ids
from raypo.rewards.functions import (
    close_function,
    evaluation_function,
    open_function,
    open_servers,
)
from raypo.rewards.judge import DeployedJudge, Judge
from raypo.rewards.labels import label_checks
from raypo.rewards.scoring import RewardFunction
from raypo.rollout.batch_scoring import Scorer, source_weights
from raypo.rollout.collect import Sampling
from raypo.rollout.curriculum import CurriculumStream, few_draws_note
from raypo.rollout.episodes import open_episodes
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.reward_trial import first_of_each, try_before_start
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.run.text_metrics import TextMetrics
from raypo.types import Prompt
from raypo.weight_sync.probe import NUM_PROBES


@dataclass(frozen=True)
class RolloutInputs:
    """Inputs of sampling and scoring, which only the first worker needs."""

    source: PromptSource
    """Source that draws from the prompts."""
    held_out: Sequence[Prompt]
    texts: TextMetrics
    reward_function: RewardFunction | None
    reward_servers: Mapping[str, RewardFunction]
    """Functions that call servers, by source of scores (`Scorer.servers`)."""
    eval_function: RewardFunction | None
    sampling: Sampling

    @classmethod
    def load(cls, run: Run[OnlineConfig], tokenizer: Any, attempt: str) -> RolloutInputs:
        """Load the prompts and the user's functions.

        Their worker processes are stopped at the run's end.
        """
        config, runtime = run.config, run.runtime
        loaded = load_checked(run, config.data, tokenizer, key="data.prompts")
        per_step = config.rollout.prompts_per_step
        for note in few_rows_notes(config.data, loaded.sizes, per_step):
            run.tell.message(note)
        of_eval: LoadedPrompts | None = None
        first = [first_of_each(loaded)]
        if config.eval.prompts:
            of_eval = load_held_out(run, tokenizer)
            first.append(first_of_each(of_eval))
        stop = stop_token_ids(config.model.policy, tokenizer)
        episodes = open_episodes(config, config.model.policy, tokenizer, stop)
        if episodes:
            run.at_end.callback(episodes.close)
        reward_function = open_function(
            config.reward, runtime.reward_fn, functions_of(config.data.prompts), log=run.log_path
        )
        run.at_end.callback(close_function, reward_function)
        if reward_function is not None and config.reward.processes:
            run.tell.message(f"what the reward function prints in its processes: {run.log_path}")
        eval_function = evaluation_function(config.eval, None if episodes else reward_function)
        if not episodes:
            _try_functions(run, [reward_function, eval_function], first, tokenizer)
        mix = mix_of(config.data, loaded.sizes, per_step)
        stream = ShuffledStream(loaded.prompts, seed=config.seed, mix=mix)
        if curriculum := config.curriculum:
            stream = CurriculumStream(
                loaded.prompts,
                curriculum,
                seed=config.seed,
                block=per_step,
                mix=mix,
                lag=config.draws_in_flight,
            )
            if note := few_draws_note(len(loaded.prompts), config.num_steps * per_step):
                run.tell.message(note)
        return cls(
            source=PromptSource(stream, config.rollout.samples_per_prompt),
            held_out=of_eval.prompts if of_eval else [],
            texts=TextMetrics.of(loaded, of_eval, tokenizer),
            reward_function=reward_function,
            reward_servers=open_servers(config.reward),
            eval_function=eval_function,
            sampling=Sampling.of(
                config.rollout,
                stop_token_ids=stop,
                seed=config.seed,
                samples_per_prompt=config.rollout.samples_per_prompt,
                adapter=run.name if config.pushes_adapter else None,
                owner=f"{run.name}/{attempt}",
                priority=None if config.rollout.has_requests_in_flight else 0,
                episodes=episodes,
                with_experts=config.rollout.router_replay == "engine",
            ),
        )

    def scorer(self, config: OnlineConfig, services: Services) -> Scorer:
        """Return the scorer: reward function, servers, judge, reward models and reference."""
        section, judge = config.reward.judge, None
        if section and services.judge:
            ask, max_attempts = DeployedJudge(services.judge), config.reward.request.max_attempts
            judge = Judge(section, ask, max_attempts=max_attempts)
        return Scorer(
            self.reward_function,
            tuple(services.rewards.values()),
            source_weights(config.reward, config.model),
            servers=self.reward_servers,
            judge=judge,
            processes=config.reward.processes,
            reference=services.reference,
            models_apart=services.models_apart,
        )


@dataclass(frozen=True)
class OnlineInputs:
    """Inputs that are loaded before any model. Invalid data and functions raise an error here."""

    tokenizer: Any
    attempt: str
    """Id of this attempt of the run. It is needed because engines may outlive an attempt."""
    first_prompts: Sequence[Prompt]
    """The first prompts of the run, with which a push is probed."""
    has_function: bool
    """True if a reward function scores the samples."""
    rollouts: RolloutInputs | None
    """Inputs of sampling and scoring. None on all workers except the first."""

    @classmethod
    def load(cls, run: Run[OnlineConfig]) -> OnlineInputs:
        """Load the inputs. All workers call this; the first one loads the prompts for all."""
        for key, path in run.config.own_functions.items():
            load_function(path, key=key)  # fail early: a bad function ends the run here
        tokenizer = load_tokenizer(run.config.model.policy)
        own: RolloutInputs | None = None
        shared: Any = None
        if run.workers.rank == 0:
            new = uuid.uuid4().hex
            own = RolloutInputs.load(run, tokenizer, new)
            first_prompts = list(islice(own.source.stream.items, NUM_PROBES))
            shared = new, first_prompts, own.reward_function is not None
        attempt, first, has_function = run.workers.broadcast(shared)
        return cls(tokenizer, attempt, first, has_function, own)


def load_checked(run: Run[Any], section: Any, tokenizer: Any, *, key: str) -> LoadedPrompts:
    """Load prompts, report the rows that were left out, and check that the policy can read them.

    Args:
        run: The run.
        section: Section `data` of the config, with the sources to load.
        tokenizer: The policy's tokenizer.
        key: Key of the sources.
    """
    checks = label_checks(run.config, key, has_reward_fn=run.runtime.reward_fn is not None)
    loaded = load_prompts(section, tokenizer, key=key, label_checks=checks)
    for note in loaded.notes(key):
        run.tell.message(note)
    Limits.of(run.config.model.policy).check([[loaded.highest]], tokenizer, key=key)
    return loaded


def load_held_out(run: Run[Any], tokenizer: Any) -> LoadedPrompts:
    """Load the prompts of `eval.prompts`."""
    section = run.config.data.model_copy(update={"prompts": run.config.eval.prompts})
    return load_checked(run, section, tokenizer, key="eval.prompts")


def _try_functions(
    run: Run[OnlineConfig],
    functions: Sequence[RewardFunction | None],
    prompts: Sequence[Sequence[Prompt]],
    tokenizer: Any,
) -> None:
    """Try the functions of training and of evaluation on their first prompts."""
    seen: list[RewardFunction] = []
    for function, first in zip(functions, prompts, strict=False):
        if function is not None and function not in seen:
            seen.append(function)
            try_before_start(function, first, tokenizer, run.tell.message)
