"""Keys that are computed from OpenRLHF's arguments."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from raypo.config.base import TODO, ConfigError, parsed
from raypo.config.sources import DATA_FILES
from raypo.translation.foreign_arguments import ForeignArguments, Settings, or_todo

_ESTIMATORS = {name: name for name in ("gae", "reinforce", "rloo", "reinforce_baseline", "dr_grpo")}
_ESTIMATORS |= {"group_norm": "grpo"}
_AGGREGATIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}


def from_openrlhf(get: ForeignArguments) -> Settings:
    """Return the keys that are computed from OpenRLHF's arguments."""
    done: Settings = {}
    _set_loss(get, done)
    lora = "ds.lora."
    get.set_lora(done, rank=f"{lora}rank", alpha=f"{lora}alpha", modules=f"{lora}target_modules")
    get.set_workers(done, gpus="actor.num_gpus_per_node", nodes="actor.num_nodes")
    _set_prompts(get, done)
    _set_lengths(get, done)
    _set_batches(get, done)
    _set_schedule(get, done)
    _set_models(get, done)
    _set_evaluation(get, done)
    _set_logging(get, done)
    return done


def _set_loss(get: ForeignArguments, done: Settings) -> None:
    """Set the keys of the estimator, the clips and the KL."""
    name = "algo.advantage.estimator"
    estimator, origin = get(name), get.origin(name)
    if estimator not in _ESTIMATORS:
        raise ConfigError(
            f"{origin} ({estimator}): has no counterpart in raypo. It has "
            f"{', '.join(_ESTIMATORS)}; docs/methods.md lists all of ppo.advantage."
        )
    done["ppo.advantage"] = _ESTIMATORS[estimator], origin
    if get("algo.advantage.no_std_norm") and estimator == "group_norm":
        done["ppo.advantage"] = "dr_grpo", get.origin("algo.advantage.no_std_norm")
    elif get.has("algo.advantage.no_std_norm"):
        get.used.discard(get.origin("algo.advantage.no_std_norm"))
    if estimator != "gae":
        get.pass_over("critic.*", "critic_*", "algo.advantage.lambd")
    mode = get("actor.loss_agg_mode")
    done["ppo.aggregation"] = _AGGREGATIONS.get(mode, TODO), get.origin("actor.loss_agg_mode")
    if get("actor.policy_loss_type") == "gspo":  # a mean over sequences there, too
        done["ppo.aggregation"] = "sequence_mean", get.origin("actor.policy_loss_type")
        done["ppo.policy_loss"] = "gspo", get.origin("actor.policy_loss_type")
    elif not get.is_dotted:
        done["ppo.aggregation"] = TODO, "OpenRLHF 0.6: sequence_mean; since 0.8: token_mean"
    if estimator == "gae" and not get.is_dotted:
        for name, key, old, new in (
            ("algo.advantage.lambd", "ppo.gae_lambda", 0.95, 1),
            ("critic.value_clip", "ppo.value_clip", 0.2, 0.5),
        ):
            if not get.has(name):
                done[key] = TODO, f"the default of OpenRLHF 0.6 and before is {old}, later {new}"
    _set_kl(get, done)
    _set_clips(get, done, is_shaped=estimator in ("gae", "reinforce"))
    _set_filters(get, done)


def _set_kl(get: ForeignArguments, done: Settings) -> None:
    """Set the keys of the KL."""
    if get("algo.kl.use_loss"):
        get.set_kl_loss(done, "algo.kl.estimator", placement=get.origin("algo.kl.use_loss"))
    elif (kind := get("algo.kl.estimator")) != "k1":
        why = f"{get.origin('algo.kl.estimator')} {kind}: k1, the only one of raypo in the reward"
        done["ppo.kl.estimator"] = TODO if get.number("algo.kl.init_coef") else "k1", why
    if (
        get("train.agent_func_path")
        and not get("algo.kl.use_loss")
        and get("algo.kl.init_coef")
        and done["ppo.advantage"][0] not in ("gae", "reinforce")
    ):
        why = "OpenRLHF subtracts the KL from an agent's score; raypo: loss, or ppo.kl.coef 0"
        done["ppo.kl.placement"] = TODO, why
    if get("algo.kl.target"):
        names = {"target": "target", "horizon": "horizon"}
        get.copy(done, {f"algo.kl.{a}": f"ppo.kl.{b}" for a, b in names.items()})
        done["ppo.kl.controller"] = "adaptive", get.origin("algo.kl.target")
    else:
        get.pass_over("algo.kl.horizon")


def _set_clips(get: ForeignArguments, done: Settings, *, is_shaped: bool) -> None:
    """Set the bounds of the ratio and of the score, and the normalization of the score."""
    low, high = "ppo.shaping.clip_low", "ppo.shaping.clip_high"
    pairs = [("actor.eps_clip_low_high", "ppo.clip_low", "ppo.clip_high")]
    if is_shaped:
        pairs.append(("reward.clip_range", low, high))
    for name, lower, upper in pairs:
        bounds = get(name)
        if isinstance(bounds, list | tuple) and len(bounds) == 2:
            done |= {k: (v, get.origin(name)) for k, v in zip((lower, upper), bounds, strict=True)}
    if "ppo.clip_low" in done:  # OpenRLHF ignores it beside the pair
        get.pass_over("actor.eps_clip")
    if get("reward.normalize_enable"):
        row = get.row("reward.normalize_enable")
        done["ppo.shaping.normalize"] = True, get.origin("reward.normalize_enable")
        get.leave("reward.normalize_enable", f"ppo.shaping.normalize. {row.note if row else ''}")


def _set_filters(get: ForeignArguments, done: Settings) -> None:
    """Set the correction of the engine's log-probs and the filter of groups."""
    _set_correction(get, done)
    if get("algo.dynamic_filtering_enable"):
        done["ppo.filter.enabled"] = True, get.origin("algo.dynamic_filtering_enable")
        bounds = get("algo.dynamic_filtering_range")
        for key, bound in zip(("low", "high"), bounds, strict=True):
            done[f"ppo.filter.{key}"] = bound, get.origin("algo.dynamic_filtering_range")
    else:
        get.pass_over("algo.dynamic_filtering_range")


def _set_correction(get: ForeignArguments, done: Settings) -> None:
    """Set the correction of the engine's log-probs."""
    level, mode = (f"algo.advantage.is_correction_{name}" for name in ("level", "mode"))
    gating, threshold = (f"algo.advantage.is_correction_{n}" for n in ("gating", "threshold"))
    if get("algo.advantage.is_correction_enable"):
        origin = get.origin("algo.advantage.is_correction_enable")
        why = "tis with cap, icepop or mis with low and high; OpenRLHF's versions differ"
        done["ppo.correction.kind"] = TODO, f"{origin}, {threshold} {get(threshold)}: {why}"
    elif get(level) == "off":
        get.pass_over(level, mode, gating, threshold)
    elif (get(level), get(mode), get(gating)) == ("token", "mask", "ratio"):
        done["ppo.correction.kind"] = "icepop", get.origin(level)
        bounds = get(threshold)
        low, high = bounds if isinstance(bounds, list) else (0.0, bounds)
        done["ppo.correction.low"] = low, get.origin(threshold)
        done["ppo.correction.high"] = high, get.origin(threshold)
    else:
        what = ", ".join(f"{name} {get(name)}" for name in (level, mode, gating, threshold))
        done["ppo.correction.kind"] = TODO, f"{what}: docs/methods.md lists raypo's corrections"


def _set_prompts(get: ForeignArguments, done: Settings) -> None:
    """Set `data.prompts` with the options of each source."""
    name, split = "data.prompt_dataset", get("data.prompt_split")
    prompts, origin = get(name), get.origin(name)
    if not isinstance(prompts, str):
        return
    paths = prompts.split(",")
    entries: list[dict[str, Any]] = [{"path": path} for path in paths]
    for path, entry in zip(paths, entries, strict=True):
        if _is_hub_id(path):
            entry |= {} if split == "train" else {"split": split}
        elif split != "train":
            get.leave("data.prompt_split", f"data.prompts. {path} is not a hub id.")
    if get.has("data.max_samples"):
        get.leave(
            "data.max_samples",
            "data.prompts. It is a limit: cut longer files by hand, and a longer data set of the "
            "hub with `{path, split: 'train[:N]'}`.",
        )
    if weights := get("data.prompt_probs"):
        for entry, weight in zip(entries, map(parsed, str(weights).split(",")), strict=False):
            entry["weight"] = weight
    sources = [entry if len(entry) > 1 else entry["path"] for entry in entries]
    done["data.prompts"] = sources, origin


def _is_hub_id(path: str) -> bool:
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None
    return is_name and not path.lower().endswith(DATA_FILES) and not Path(path).exists()


def _set_batches(get: ForeignArguments, done: Settings) -> None:
    """Set batch sizes and the number of steps."""
    batch, samples = get.number("rollout.batch_size"), get.number("rollout.n_samples_per_prompt")
    get.copy(done, {"rollout.batch_size": "rollout.prompts_per_step"})
    get.copy(done, {"rollout.n_samples_per_prompt": "rollout.samples_per_prompt"})
    updated, origin = get.number("train.batch_size"), get.origin("train.batch_size")
    done["ppo.minibatch_size"] = or_todo(updated), origin
    if updated == updated and (batch * samples) % updated:
        done["ppo.minibatch_size"] = (
            TODO,
            f"{origin} {updated:g}: a divisor of a step's {or_todo(batch * samples)} responses",
        )
    most = get.number("data.max_samples") if get.has("data.max_samples") else math.inf
    epochs = get.number("train.num_episodes")
    done["num_steps"] = get.steps(done, epochs, get.origin("train.num_episodes"), most=most)
    if get("train.async_enable"):
        done["rollout.mode"] = "async", get.origin("train.async_enable")
        done["placement.mode"] = "dedicated", get.origin("train.async_enable")
        get.copy(done, {"train.async_queue_size": "rollout.max_staleness"})


def _set_lengths(get: ForeignArguments, done: Settings) -> None:
    total, response = get("data.max_len"), get("rollout.max_new_tokens")
    prompt = get("data.prompt_max_len")
    is_old = not get.is_dotted and not get.has("data.max_len")
    whole = "1024 in OpenRLHF with flat names, else max_len" if is_old else f"data.max_len {total},"
    if response is not None:
        get.copy(done, {"rollout.max_new_tokens": "rollout.max_new_tokens"})
    else:
        done["rollout.max_new_tokens"] = (
            TODO,
            f"{whole} less the prompt's length; raypo has one limit for prompts, one for responses",
        )
    if prompt is not None:
        get.copy(done, {"data.prompt_max_len": "data.max_prompt_tokens"})
    elif isinstance(response, int) and get.has("data.max_len"):
        origin = f"{get.origin('data.max_len')} - {get.origin('rollout.max_new_tokens')}"
        done["data.max_prompt_tokens"] = max(total - response, 1), origin
    else:
        done["data.max_prompt_tokens"] = TODO, f"{whole} less rollout.max_new_tokens"


def _set_schedule(get: ForeignArguments, done: Settings) -> None:
    """Set the keys of the learning-rate schedule and of the critic's warm-up."""
    kind = get("actor.lr_scheduler")
    get.set_lr_schedule(done, "actor.lr_scheduler")
    if kind == "cosine_with_min_lr":
        get.copy(done, {"actor.min_lr_ratio": "learner.lr_floor"})
    else:
        get.pass_over("actor.min_lr_ratio")
    ratio = get.number("actor.lr_warmup_ratio")
    if ratio != 0 and kind != "constant":  # transformers' constant schedule ignores warm-up
        get.set_warmup(done, "actor.lr_warmup_ratio", ratio)
    else:
        get.pass_over("actor.lr_warmup_ratio")
    if get.number("critic.freezing_steps") > 0 and done["ppo.advantage"][0] == "gae":
        get.copy(done, {"critic.freezing_steps": "ppo.critic_warmup_steps"})
    if get("actor.optim") == "muon":
        done["learner.optimizer"] = "muon", get.origin("actor.optim")
        done["learner.policy_lr"] = get("actor.muon.lr"), get.origin("actor.muon.lr")
        get.leave("actor.optim", "raypo scales Muon's updates, so that AdamW's rates can be kept.")


def _set_models(get: ForeignArguments, done: Settings) -> None:
    """Set the score, the data type, the offload and the weight transport."""
    agent = get("train.agent_func_path")
    server = None if agent else get("reward.remote_url")
    origin = get.origin("reward.remote_url")
    models = get("reward.model_name_or_path")
    row = get.row("reward.remote_url")
    if agent:
        get.pass_over("reward.remote_url")  # OpenRLHF replaces it by the agent
        get.leave("train.agent_func_path", "rollout.agent. An agent of raypo is a coroutine.")
        done["rollout.agent"] = TODO, f"train.agent_func_path {agent}: file.py:name"
        prompt, total = done["data.max_prompt_tokens"][0], get("data.max_len")
        is_known = isinstance(prompt, int) and get.has("data.max_len")
        done["rollout.max_episode_tokens"] = (
            total - prompt if is_known else TODO,
            f"{get.origin('data.max_len')} - data.max_prompt_tokens",
        )
    if str(server).startswith("http"):
        done["reward.url"] = str(server).split(","), origin
        get.leave("reward.remote_url", f"reward.url. {row.note if row else ''}")
    elif server:
        done["reward.function"] = f"{server}:reward_func", origin
        get.leave(
            "reward.remote_url",
            "reward.function. OpenRLHF calls reward_func(queries, prompts, labels); raypo takes "
            "its own form, TRL's or verl's (docs/rewards.md).",
        )
    if isinstance(models, str) and not server and not agent:
        done["model.reward"] = models.split(","), get.origin("reward.model_name_or_path")
    else:  # OpenRLHF does not load it beside a server, a function or an agent
        get.pass_over("reward.model_name_or_path")
    penalty = get("reward.stop_properly_penalty_coef")
    if penalty is not None:
        key = "truncated_score" if penalty < 0 else "truncated_scale"
        done[f"ppo.shaping.{key}"] = penalty, get.origin("reward.stop_properly_penalty_coef")
    if get(name := "ds.param_dtype") in ("bf16", True):
        get.pass_over(name)  # raypo's own choice on GPUs
        if get.has(name):
            done["model.dtype"] = "bfloat16", get.origin(name)
    if get("ds.adam_offload"):
        offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
        done["learner.deepspeed"] = offload, get.origin("ds.adam_offload")
    if get("vllm.num_engines") == 0:
        get.pass_over("vllm.num_engines")
    get.pass_over("vllm.sync_backend")  # `auto` chooses by the placement


def _set_evaluation(get: ForeignArguments, done: Settings) -> None:
    """Set held-out prompts, if OpenRLHF measures them, and the checkpoints."""
    names = ("eval.temperature", "eval.n_samples_per_prompt", "eval.split")
    if get("eval.dataset") and get.number("eval.steps") > 0:
        path, split = get("eval.dataset"), get("eval.split")
        is_split = split != "train" and _is_hub_id(path)
        entry = {"path": path, "split": split} if is_split else path
        done["eval.prompts"] = [entry], get.origin("eval.dataset")
        keys = ("eval.temperature", "eval.samples_per_prompt")
        get.copy(done, dict(zip((*names[:2], "eval.steps"), (*keys, "eval.every"), strict=True)))
    else:
        get.pass_over("eval.dataset", "eval.steps", *names)
    if get.number("ckpt.save_steps") > 0:
        get.copy(done, {"ckpt.save_steps": "checkpoint.every"})
    else:
        get.pass_over("ckpt.save_steps")


def _set_logging(get: ForeignArguments, done: Settings) -> None:
    """Set the keys of the run's name, its folder and the loggers."""
    if get.has("ckpt.output_dir"):
        get.set_folder(done, "ckpt.output_dir")
    if get("logger.wandb.run_name"):
        done["name"] = get("logger.wandb.run_name"), get.origin("logger.wandb.run_name")
    keys = [name for name in get.names("logger.wandb.key") if get.arguments.get(name)]
    if keys:  # their value is a secret and not written
        get.used.update(keys)
        done["logging.wandb.project"] = get("logger.wandb.project"), keys[0]
        if get("logger.wandb.org"):
            done["logging.wandb.entity"] = get("logger.wandb.org"), get.origin("logger.wandb.org")
