"""Keys that are computed from OpenRLHF's arguments."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from raypo.config.base import TODO, ConfigError, parse_yaml
from raypo.config.sources import DATA_FILES
from raypo.translation.foreign_arguments import ForeignArguments, Settings, or_todo

_ESTIMATORS = {name: name for name in ("gae", "reinforce", "rloo", "reinforce_baseline", "dr_grpo")}
_ESTIMATORS |= {"group_norm": "grpo"}
_AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}


def from_openrlhf(foreign: ForeignArguments) -> Settings:
    """Return the keys that are computed from OpenRLHF's arguments."""
    settings: Settings = {}
    _set_loss(foreign, settings)
    lora = "ds.lora."
    foreign.set_lora(
        settings, rank=f"{lora}rank", alpha=f"{lora}alpha", modules=f"{lora}target_modules"
    )
    foreign.set_workers(settings, gpus="actor.num_gpus_per_node", nodes="actor.num_nodes")
    _set_prompts(foreign, settings)
    foreign.set_images(settings, "data.image_key", frozen="actor.freeze_visual_encoder")
    _set_lengths(foreign, settings)
    _set_batches(foreign, settings)
    _set_schedule(foreign, settings)
    _set_models(foreign, settings)
    _set_evaluation(foreign, settings)
    _set_logging(foreign, settings)
    return settings


def _set_loss(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of the estimator, the clips and the KL."""
    name = "algo.advantage.estimator"
    estimator, origin = foreign.get(name), foreign.origin(name)
    if estimator not in _ESTIMATORS:
        raise ConfigError(
            f"{origin} ({estimator}): has no counterpart in raypo. It has "
            f"{', '.join(_ESTIMATORS)}; docs/methods.md lists all of ppo.advantage."
        )
    settings["ppo.advantage"] = _ESTIMATORS[estimator], origin
    if foreign.get("algo.advantage.no_std_norm") and estimator == "group_norm":
        settings["ppo.advantage"] = "dr_grpo", foreign.origin("algo.advantage.no_std_norm")
    elif foreign.has("algo.advantage.no_std_norm"):
        foreign.used.discard(foreign.origin("algo.advantage.no_std_norm"))
    if estimator != "gae":
        foreign.ignore("critic.*", "critic_*", "algo.advantage.lambd")
    mode = foreign.get("actor.loss_agg_mode")
    settings["ppo.aggregation"] = (
        _AGGREGATIONS.get(mode, TODO),
        foreign.origin("actor.loss_agg_mode"),
    )
    if foreign.get("actor.policy_loss_type") == "gspo":  # in OpenRLHF, too, a mean over sequences
        settings["ppo.aggregation"] = "sequence_mean", foreign.origin("actor.policy_loss_type")
        settings["ppo.policy_loss"] = "gspo", foreign.origin("actor.policy_loss_type")
    elif not foreign.is_dotted:
        settings["ppo.aggregation"] = TODO, "OpenRLHF 0.6: sequence_mean; since 0.8: token_mean"
    if estimator == "gae" and not foreign.is_dotted:
        for name, key, old_default, new_default in (
            ("algo.advantage.lambd", "ppo.gae_lambda", 0.95, 1),
            ("critic.value_clip", "ppo.value_clip", 0.2, 0.5),
        ):
            if not foreign.has(name):
                settings[key] = (
                    TODO,
                    f"the default of OpenRLHF 0.6 and before is {old_default}, later {new_default}",
                )
    _set_kl(foreign, settings)
    _set_clips(foreign, settings, is_shaped=estimator in ("gae", "reinforce"))
    _set_filters(foreign, settings)


def _set_kl(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of the KL."""
    if foreign.get("algo.kl.use_loss"):
        foreign.set_kl_loss(
            settings, "algo.kl.estimator", placement=foreign.origin("algo.kl.use_loss")
        )
    elif (kind := foreign.get("algo.kl.estimator")) != "k1":
        hint = (
            f"{foreign.origin('algo.kl.estimator')} {kind}: k1, the only one of raypo in the reward"
        )
        settings["ppo.kl.estimator"] = TODO if foreign.number("algo.kl.init_coef") else "k1", hint
    if (
        foreign.get("train.agent_func_path")
        and not foreign.get("algo.kl.use_loss")
        and foreign.get("algo.kl.init_coef")
        and settings["ppo.advantage"][0] not in ("gae", "reinforce")
    ):
        hint = "OpenRLHF subtracts the KL from an agent's score; raypo: loss, or ppo.kl.coef 0"
        settings["ppo.kl.placement"] = TODO, hint
    if foreign.get("algo.kl.target"):
        keys = {"target": "target", "horizon": "horizon"}
        foreign.copy(settings, {f"algo.kl.{name}": f"ppo.kl.{key}" for name, key in keys.items()})
        settings["ppo.kl.controller"] = "adaptive", foreign.origin("algo.kl.target")
    else:
        foreign.ignore("algo.kl.horizon")


def _set_clips(foreign: ForeignArguments, settings: Settings, *, is_shaped: bool) -> None:
    """Set the clip bounds of the ratio and the score, and the normalization of the score."""
    low, high = "ppo.shaping.clip_low", "ppo.shaping.clip_high"
    pairs = [("actor.eps_clip_low_high", "ppo.clip_low", "ppo.clip_high")]
    if is_shaped:
        pairs.append(("reward.clip_range", low, high))
    for name, lower, upper in pairs:
        bounds = foreign.get(name)
        if isinstance(bounds, list | tuple) and len(bounds) == 2:
            settings |= {
                key: (bound, foreign.origin(name))
                for key, bound in zip((lower, upper), bounds, strict=True)
            }
    if "ppo.clip_low" in settings:  # OpenRLHF ignores eps_clip if the pair is set
        foreign.ignore("actor.eps_clip")
    if foreign.get("reward.normalize_enable"):
        row = foreign.counterpart("reward.normalize_enable")
        settings["ppo.shaping.normalize"] = True, foreign.origin("reward.normalize_enable")
        foreign.leave_to_user(
            "reward.normalize_enable", f"ppo.shaping.normalize. {row.note if row else ''}"
        )


def _set_filters(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the correction of the engine's log-probs and the filter of groups."""
    _set_correction(foreign, settings)
    if foreign.get("algo.dynamic_filtering_enable"):
        settings["ppo.filter.enabled"] = True, foreign.origin("algo.dynamic_filtering_enable")
        bounds = foreign.get("algo.dynamic_filtering_range")
        for key, bound in zip(("low", "high"), bounds, strict=True):
            settings[f"ppo.filter.{key}"] = bound, foreign.origin("algo.dynamic_filtering_range")
    else:
        foreign.ignore("algo.dynamic_filtering_range")


def _set_correction(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the correction of the engine's log-probs."""
    level, mode = (f"algo.advantage.is_correction_{name}" for name in ("level", "mode"))
    gating, threshold = (
        f"algo.advantage.is_correction_{suffix}" for suffix in ("gating", "threshold")
    )
    if foreign.get("algo.advantage.is_correction_enable"):
        origin = foreign.origin("algo.advantage.is_correction_enable")
        hint = "tis with cap, icepop or mis with low and high; OpenRLHF's versions differ"
        settings["ppo.correction.kind"] = (
            TODO,
            f"{origin}, {threshold} {foreign.get(threshold)}: {hint}",
        )
    elif foreign.get(level) == "off":
        foreign.ignore(level, mode, gating, threshold)
    elif (foreign.get(level), foreign.get(mode), foreign.get(gating)) == ("token", "mask", "ratio"):
        settings["ppo.correction.kind"] = "icepop", foreign.origin(level)
        bounds = foreign.get(threshold)
        low, high = bounds if isinstance(bounds, list) else (0.0, bounds)
        settings["ppo.correction.low"] = low, foreign.origin(threshold)
        settings["ppo.correction.high"] = high, foreign.origin(threshold)
    else:
        arguments_text = ", ".join(
            f"{name} {foreign.get(name)}" for name in (level, mode, gating, threshold)
        )
        settings["ppo.correction.kind"] = (
            TODO,
            f"{arguments_text}: docs/methods.md lists raypo's corrections",
        )


def _set_prompts(foreign: ForeignArguments, settings: Settings) -> None:
    """Set `data.prompts` with the options of each source."""
    name, split = "data.prompt_dataset", foreign.get("data.prompt_split")
    dataset, origin = foreign.get(name), foreign.origin(name)
    if not isinstance(dataset, str):
        return
    paths = dataset.split(",")
    entries: list[dict[str, Any]] = [{"path": path} for path in paths]
    for path, entry in zip(paths, entries, strict=True):
        if _is_hub_id(path):
            entry |= {} if split == "train" else {"split": split}
        elif split != "train":
            foreign.leave_to_user("data.prompt_split", f"data.prompts. {path} is not a hub id.")
    if foreign.has("data.max_samples"):
        foreign.leave_to_user(
            "data.max_samples",
            "data.prompts. It is a limit: cut longer files by hand, and a longer data set of the "
            "hub with `{path, split: 'train[:N]'}`.",
        )
    if weights := foreign.get("data.prompt_probs"):
        for entry, weight in zip(entries, map(parse_yaml, str(weights).split(",")), strict=False):
            entry["weight"] = weight
    sources = [entry if len(entry) > 1 else entry["path"] for entry in entries]
    settings["data.prompts"] = sources, origin


def _is_hub_id(path: str) -> bool:
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None
    return is_name and not path.lower().endswith(DATA_FILES) and not Path(path).exists()


def _set_batches(foreign: ForeignArguments, settings: Settings) -> None:
    """Set batch sizes and the number of steps."""
    prompts_per_step, samples_per_prompt = (
        foreign.number("rollout.batch_size"),
        foreign.number("rollout.n_samples_per_prompt"),
    )
    foreign.copy(settings, {"rollout.batch_size": "rollout.prompts_per_step"})
    foreign.copy(settings, {"rollout.n_samples_per_prompt": "rollout.samples_per_prompt"})
    minibatch_size, origin = foreign.number("train.batch_size"), foreign.origin("train.batch_size")
    settings["ppo.minibatch_size"] = or_todo(minibatch_size), origin
    if (
        minibatch_size == minibatch_size
        and (prompts_per_step * samples_per_prompt) % minibatch_size
    ):
        settings["ppo.minibatch_size"] = (
            TODO,
            f"{origin} {minibatch_size:g}: a divisor of a step's "
            f"{or_todo(prompts_per_step * samples_per_prompt)} responses",
        )
    max_rows = foreign.number("data.max_samples") if foreign.has("data.max_samples") else math.inf
    epochs = foreign.number("train.num_episodes")
    settings["num_steps"] = foreign.steps(
        settings, epochs, foreign.origin("train.num_episodes"), max_rows=max_rows
    )
    if foreign.get("train.async_enable"):
        settings["rollout.mode"] = "async", foreign.origin("train.async_enable")
        settings["placement.mode"] = "dedicated", foreign.origin("train.async_enable")
        foreign.copy(settings, {"train.async_queue_size": "rollout.max_staleness"})


def _set_lengths(foreign: ForeignArguments, settings: Settings) -> None:
    max_length, max_new_tokens = foreign.get("data.max_len"), foreign.get("rollout.max_new_tokens")
    prompt_max_length = foreign.get("data.prompt_max_len")
    has_old_names = not foreign.is_dotted and not foreign.has("data.max_len")
    total_text = (
        "1024 in OpenRLHF with flat names, else max_len"
        if has_old_names
        else f"data.max_len {max_length},"
    )
    if max_new_tokens is not None:
        foreign.copy(settings, {"rollout.max_new_tokens": "rollout.max_new_tokens"})
    else:
        settings["rollout.max_new_tokens"] = (
            TODO,
            f"{total_text} less the prompt's length; raypo has one limit for prompts, one for "
            "responses",
        )
    if prompt_max_length is not None:
        foreign.copy(settings, {"data.prompt_max_len": "data.max_prompt_tokens"})
    elif isinstance(max_new_tokens, int) and foreign.has("data.max_len"):
        origin = f"{foreign.origin('data.max_len')} - {foreign.origin('rollout.max_new_tokens')}"
        settings["data.max_prompt_tokens"] = max(max_length - max_new_tokens, 1), origin
    else:
        settings["data.max_prompt_tokens"] = TODO, f"{total_text} less rollout.max_new_tokens"


def _set_schedule(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of the learning-rate schedule and of the critic's warm-up."""
    kind = foreign.get("actor.lr_scheduler")
    foreign.set_lr_schedule(settings, "actor.lr_scheduler")
    if kind == "cosine_with_min_lr":
        foreign.copy(settings, {"actor.min_lr_ratio": "learner.lr_floor"})
    else:
        foreign.ignore("actor.min_lr_ratio")
    ratio = foreign.number("actor.lr_warmup_ratio")
    if ratio != 0 and kind != "constant":  # transformers' constant schedule ignores warm-up
        foreign.set_warmup(settings, "actor.lr_warmup_ratio", ratio)
    else:
        foreign.ignore("actor.lr_warmup_ratio")
    if foreign.number("critic.freezing_steps") > 0 and settings["ppo.advantage"][0] == "gae":
        foreign.copy(settings, {"critic.freezing_steps": "ppo.critic_warmup_steps"})
    if foreign.get("actor.optim") == "muon":
        settings["learner.optimizer"] = "muon", foreign.origin("actor.optim")
        settings["learner.policy_lr"] = (
            foreign.get("actor.muon.lr"),
            foreign.origin("actor.muon.lr"),
        )
        foreign.leave_to_user(
            "actor.optim", "raypo scales Muon's updates, so that AdamW's rates can be kept."
        )


def _set_models(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of the reward, the data type, the offload and the weight transport."""
    agent_path = foreign.get("train.agent_func_path")
    reward_url = None if agent_path else foreign.get("reward.remote_url")
    origin = foreign.origin("reward.remote_url")
    reward_models = foreign.get("reward.model_name_or_path")
    row = foreign.counterpart("reward.remote_url")
    if agent_path:
        foreign.ignore("reward.remote_url")  # OpenRLHF replaces it by the agent
        foreign.leave_to_user(
            "train.agent_func_path", "rollout.agent. An agent of raypo is a coroutine."
        )
        settings["rollout.agent"] = TODO, f"train.agent_func_path {agent_path}: file.py:name"
        max_prompt_tokens, max_length = (
            settings["data.max_prompt_tokens"][0],
            foreign.get("data.max_len"),
        )
        is_known = isinstance(max_prompt_tokens, int) and foreign.has("data.max_len")
        settings["rollout.max_episode_tokens"] = (
            max_length - max_prompt_tokens if is_known else TODO,
            f"{foreign.origin('data.max_len')} - data.max_prompt_tokens",
        )
    if str(reward_url).startswith("http"):
        settings["reward.url"] = str(reward_url).split(","), origin
        foreign.leave_to_user("reward.remote_url", f"reward.url. {row.note if row else ''}")
    elif reward_url:
        settings["reward.function"] = f"{reward_url}:reward_func", origin
        foreign.leave_to_user(
            "reward.remote_url",
            "reward.function. OpenRLHF calls reward_func(queries, prompts, labels); raypo takes "
            "its own form, TRL's or verl's (docs/rewards.md).",
        )
    if isinstance(reward_models, str) and not reward_url and not agent_path:
        settings["model.reward"] = (
            reward_models.split(","),
            foreign.origin("reward.model_name_or_path"),
        )
    else:  # OpenRLHF does not load it next to a server, a function or an agent
        foreign.ignore("reward.model_name_or_path")
    penalty = foreign.get("reward.stop_properly_penalty_coef")
    if penalty is not None:
        key = "truncated_score" if penalty < 0 else "truncated_scale"
        settings[f"ppo.shaping.{key}"] = (
            penalty,
            foreign.origin("reward.stop_properly_penalty_coef"),
        )
    if foreign.get(name := "ds.param_dtype") in ("bf16", True):
        foreign.ignore(name)  # the default of raypo on GPUs
        if foreign.has(name):
            settings["model.dtype"] = "bfloat16", foreign.origin(name)
    if foreign.get("ds.adam_offload"):
        offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
        settings["learner.deepspeed"] = offload, foreign.origin("ds.adam_offload")
    if foreign.get("vllm.num_engines") == 0:
        foreign.ignore("vllm.num_engines")
    foreign.ignore("vllm.sync_backend")  # `auto` chooses by the placement


def _set_evaluation(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of the evaluation, if OpenRLHF evaluates, and of the checkpoints."""
    names = ("eval.temperature", "eval.n_samples_per_prompt", "eval.split")
    if foreign.get("eval.dataset") and foreign.number("eval.steps") > 0:
        path, split = foreign.get("eval.dataset"), foreign.get("eval.split")
        is_split = split != "train" and _is_hub_id(path)
        entry = {"path": path, "split": split} if is_split else path
        settings["eval.prompts"] = [entry], foreign.origin("eval.dataset")
        keys = ("eval.temperature", "eval.samples_per_prompt")
        foreign.copy(
            settings, dict(zip((*names[:2], "eval.steps"), (*keys, "eval.every"), strict=True))
        )
    else:
        foreign.ignore("eval.dataset", "eval.steps", *names)
    if foreign.number("ckpt.save_steps") > 0:
        foreign.copy(settings, {"ckpt.save_steps": "checkpoint.every"})
    else:
        foreign.ignore("ckpt.save_steps")


def _set_logging(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of the run's name, its folder and the loggers."""
    if foreign.has("ckpt.output_dir"):
        foreign.set_folder(settings, "ckpt.output_dir")
    if foreign.get("logger.wandb.run_name"):
        settings["name"] = (
            foreign.get("logger.wandb.run_name"),
            foreign.origin("logger.wandb.run_name"),
        )
    keys = [name for name in foreign.names("logger.wandb.key") if foreign.arguments.get(name)]
    if keys:  # their value is a secret, which must not be written
        foreign.used.update(keys)
        settings["logging.wandb.project"] = foreign.get("logger.wandb.project"), keys[0]
        if foreign.get("logger.wandb.org"):
            settings["logging.wandb.entity"] = (
                foreign.get("logger.wandb.org"),
                foreign.origin("logger.wandb.org"),
            )
