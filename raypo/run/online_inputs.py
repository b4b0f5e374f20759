"""Inputs of a run that trains on sampled responses: prompts, tokenizer and user functions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
from raypo.rollout.image_reader import image_reader
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.reward_trial import first_of_each, try_before_start
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.run.text_metrics import TextMetrics
from raypo.types import Prompt
from raypo.weight_sync.probe import NUM_PROBES


@dataclass(frozen=True)
class RolloutInputs:
    """Inputs of sampling and scoring, which only rank 0 needs."""

    source: PromptSource
    """Source that draws training prompts."""
    held_out: Sequence[Prompt]
    texts: TextMetrics
    reward_function: RewardFunction | None
    reward_servers: Mapping[str, RewardFunction]
    """Functions that call reward servers, by score source (`Scorer.servers`)."""
    eval_function: RewardFunction | None
    sampling: Sampling

    @classmethod
    def load(cls, run: Run[OnlineConfig], tokenizer: Any, attempt: str) -> RolloutInputs:
        """Load the prompts and the user's functions.

        The functions' worker processes are stopped at the end of the run.
        """
        config, runtime = run.config, run.runtime
        loaded_prompts = load_checked(run, config.data, tokenizer, key="data.prompts")
        per_step = config.rollout.prompts_per_step
        for note in few_rows_notes(config.data, loaded_prompts.sizes, per_step):
            run.tell.message(note)
        eval_prompts: LoadedPrompts | None = None
        trial_prompts = [first_of_each(loaded_prompts)]
        if config.eval.prompts:
            eval_prompts = load_held_out(run, tokenizer)
            trial_prompts.append(first_of_each(eval_prompts))
        stop = stop_token_ids(config.model.policy, tokenizer)
        episodes = open_episodes(config, config.model.policy, tokenizer, stop)
        if episodes:
            run.at_end.callback(episodes.close)
        reward_function = open_function(
            config.reward, runtime.reward_fn, functions_of(config.data.prompts), log=run.log_path
        )
        run.at_end.callback(close_function, reward_function)
        if reward_function is not None and config.reward.processes:
            run.tell.message(f"output of the reward function's processes: {run.log_path}")
        eval_function = evaluation_function(config.eval, None if episodes else reward_function)
        if not episodes:
            _try_functions(run, [reward_function, eval_function], trial_prompts, tokenizer)
        mix = mix_of(config.data, loaded_prompts.sizes, per_step)
        stream = ShuffledStream(loaded_prompts.prompts, seed=config.seed, mix=mix)
        if curriculum := config.curriculum:
            stream = CurriculumStream(
                loaded_prompts.prompts,
                curriculum,
                seed=config.seed,
                block=per_step,
                mix=mix,
                lag=config.draws_in_flight,
            )
            if note := few_draws_note(len(loaded_prompts.prompts), config.num_steps * per_step):
                run.tell.message(note)
        return cls(
            source=PromptSource(stream, config.rollout.samples_per_prompt),
            held_out=eval_prompts.prompts if eval_prompts else [],
            texts=TextMetrics.of(
                loaded_prompts, eval_prompts, tokenizer, is_episodic=bool(episodes)
            ),
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
        """Return a scorer that combines all sources of scores with the reference model."""
        section, judge = config.reward.judge, None
        if section and services.judge:
            deployed_judge, max_attempts = (
                DeployedJudge(services.judge),
                config.reward.request.max_attempts,
            )
            judge = Judge(section, deployed_judge, max_attempts=max_attempts)
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
    """Inputs that are loaded before any model, so that invalid data and functions fail early."""

    tokenizer: Any
    attempt: str
    """Unique id of this attempt of the run, because engines may outlive an attempt."""
    first_prompts: Sequence[Prompt]
    """First prompts of the run, with which pushes are probed."""
    has_reward_function: bool
    """True if a reward function scores the samples."""
    rollouts: RolloutInputs | None
    """Inputs of sampling and scoring. None on ranks above 0."""

    @classmethod
    def load(cls, run: Run[OnlineConfig]) -> OnlineInputs:
        """Load the inputs. All workers call this. Rank 0 loads the prompts."""
        for key, path in run.config.own_functions.items():
            load_function(path, key=key)  # fail early if a function is invalid
        tokenizer = load_tokenizer(run.config.model.policy)
        rollout_inputs: RolloutInputs | None = None
        shared: Any = None
        if run.workers.rank == 0:
            new_attempt = uuid.uuid4().hex
            rollout_inputs = RolloutInputs.load(run, tokenizer, new_attempt)
            first_prompts = list(islice(rollout_inputs.source.stream.items, NUM_PROBES))
            shared = new_attempt, first_prompts, rollout_inputs.reward_function is not None
        attempt, first_prompts, has_reward_function = run.workers.broadcast(shared)
        return cls(tokenizer, attempt, first_prompts, has_reward_function, rollout_inputs)


def load_checked(run: Run[Any], section: Any, tokenizer: Any, *, key: str) -> LoadedPrompts:
    """Load prompts, report omitted rows, and check that the policy can process the prompts.

    Args:
        run: The run.
        section: Section `data` of the config, with the sources to load.
        tokenizer: The policy's tokenizer.
        key: Config key of the sources.
    """
    checks = label_checks(run.config, key, has_reward_fn=run.runtime.reward_fn is not None)
    policy = run.config.model.policy
    reader = cache(partial(image_reader, policy))
    loaded_prompts = load_prompts(section, tokenizer, key=key, label_checks=checks, reader=reader)
    for note in loaded_prompts.notes(key):
        run.tell.message(note)
    Limits.of(policy).check([[loaded_prompts.highest]], tokenizer, key=key)
    return loaded_prompts


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
    """Try the reward functions of training and evaluation on their first prompts."""
    tried: list[RewardFunction] = []
    for function, trial_prompts in zip(functions, prompts, strict=False):
        if function is not None and function not in tried:
            tried.append(function)
            try_before_start(function, trial_prompts, tokenizer, run.tell.message)
