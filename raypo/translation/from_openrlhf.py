"""Keys that are computed from OpenRLHF's arguments."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from raypo.config.base import parsed
from raypo.config.sources import DATA_FILES
from raypo.translation.foreign_arguments import (
    TODO,
    WORDS,
    Arguments,
    Settings,
    set_kl_loss,
    set_lora,
    set_workers,
    steps_of,
)


def from_openrlhf(get: Arguments, recipe: str) -> tuple[Settings, list[str]]:
    """Return the keys that are computed from OpenRLHF's arguments, and notes for the user."""
    notes: list[str] = []
    done = _loss(get, notes)
    set_lora(get, done, rank="ds.lora.rank", alpha="ds.lora.alpha")
    if get("ds.lora.rank"):
        modules = get("ds.lora.target_modules")
        done["model.lora.target_modules"] = modules, get.origin("ds.lora.target_modules")
    else:  # at rank 0, OpenRLHF ignores them too
        names = [get.origin(f"ds.lora.{each}") for each in ("rank", "alpha", "target_modules")]
        get.idle += [name for name in names if name in get.given]
        get.used.update(names)
    set_workers(get, done, gpus="actor.num_gpus_per_node", nodes="actor.num_nodes")
    done |= _prompts(get, notes)
    done |= _lengths(get, notes)
    _batches(get, notes, done)
    done |= _schedule(get, done)
    done |= _models(get, notes)
    return done | _logging(get), notes


def _loss(get: Arguments, notes: list[str]) -> Settings:
    """Return the keys of the estimator, the clips and the KL."""
    estimator = get("algo.advantage.estimator")
    done: Settings = {
        "ppo.advantage": (WORDS.get(estimator, estimator), get.origin("algo.advantage.estimator"))
    }
    if get("actor.policy_loss_type") == "gspo":  # a mean over sequences there, too
        done["ppo.aggregation"] = "sequence_mean", get.origin("actor.policy_loss_type")
    get.used.discard(get.origin("actor.policy_loss_type"))  # it is copied, too
    if get("algo.kl.use_loss"):
        done["ppo.kl.placement"] = "loss", get.origin("algo.kl.use_loss")
        kind, origin = get("algo.kl.estimator"), get.origin("algo.kl.estimator")
        set_kl_loss(done, kind=str(kind), origin=origin)
    if get("algo.kl.target"):
        done["ppo.kl.target"] = get("algo.kl.target"), get.origin("algo.kl.target")
        done["ppo.kl.controller"] = "adaptive", get.origin("algo.kl.target")
    clips = [("actor.eps_clip_low_high", ("ppo.clip_low", "ppo.clip_high"))]
    if estimator in ("gae", "reinforce"):
        clips.append(("reward.clip_range", ("ppo.shaping.clip_low", "ppo.shaping.clip_high")))
    for name, keys in clips:
        bounds = get(name)
        if isinstance(bounds, list) and len(bounds) == 2:
            done |= {
                key: (bound, get.origin(name)) for key, bound in zip(keys, bounds, strict=True)
            }
    eps = get.origin("actor.eps_clip")
    if "ppo.clip_low" in done and eps in get.given:  # OpenRLHF ignores it beside the pair
        get.used.add(eps)
        get.idle.append(f"{eps} ({get.given[eps]})")
    if get("reward.normalize_enable"):
        origin = get.origin("reward.normalize_enable")
        done["ppo.shaping.normalize"] = True, origin
        notes.append(f"{origin}: ppo.shaping.normalize. {get.rows[origin].note}")
    return done


def _logging(get: Arguments) -> Settings:
    """Return the keys of the run's name, its folder and the loggers."""
    done: Settings = {}
    folder = get("ckpt.output_dir")
    if (origin := get.origin("ckpt.output_dir")) in get.used:
        done["name"] = Path(str(folder)).name, origin
        done["storage_path"] = str(Path(str(folder)).parent), origin
    if get("logger.wandb.run_name"):
        done["name"] = get("logger.wandb.run_name"), get.origin("logger.wandb.run_name")
    keys = [name for name in get.rows["logger.wandb.key"].names if get.given.get(name)]
    if keys:  # their value is a secret and not written
        get.used.update(keys)
        done["logging.wandb.project"] = get("logger.wandb.project"), keys[0]
        if get("logger.wandb.org"):
            done["logging.wandb.entity"] = get("logger.wandb.org"), get.origin("logger.wandb.org")
    return done


def _prompts(get: Arguments, notes: list[str]) -> Settings:
    """Return `data.prompts` with the options of each source."""
    name, most, split = "data.prompt_dataset", get("data.max_samples"), get("data.prompt_split")
    most = most if isinstance(most, int | float) else None
    prompts, origin = get(name), get.origin(name)
    if not isinstance(prompts, str):
        return {}
    paths = prompts.split(",")
    entries: list[dict[str, Any]] = [{"path": path} for path in paths]
    is_cut = False
    for path, entry in zip(paths, entries, strict=True):
        is_hub_id = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path)) and not Path(path).exists()
        if is_hub_id and not path.lower().endswith(DATA_FILES):
            is_cut = bool(most) and len(paths) == 1
            rows = f"{split}[:{most:.0f}]" if is_cut else split
            entry |= {} if rows == "train" else {"split": rows}
        elif split != "train":
            notes.append(f"prompt_split ({split}): data.prompts. {path} is not a hub id.")
    if most and not is_cut:
        notes.append(f"max_samples ({most:g}): shorten the files of data.prompts by hand.")
    if weights := get("data.prompt_probs"):
        for entry, weight in zip(entries, map(parsed, str(weights).split(",")), strict=False):
            entry["weight"] = weight
    sources = [entry if len(entry) > 1 else entry["path"] for entry in entries]
    return {"data.prompts": (sources, origin)}


def _batches(get: Arguments, notes: list[str], done: Settings) -> None:
    """Set batch sizes and the number of steps in `done`, and mark intervals of -1 as idle."""
    batch, most = get("rollout.batch_size"), get("data.max_samples")
    done["rollout.prompts_per_step"] = batch, get.origin("rollout.batch_size")
    samples, updated = get("rollout.n_samples_per_prompt"), get("train.batch_size")
    done["rollout.samples_per_prompt"] = samples, get.origin("rollout.n_samples_per_prompt")
    done["ppo.minibatch_size"] = updated, get.origin("train.batch_size")
    responses = batch * samples
    if isinstance(responses, int) and isinstance(updated, int) and responses % max(updated, 1):
        fits, origin = math.gcd(responses, updated), get.origin("train.batch_size")
        done["ppo.minibatch_size"] = fits, f"divides {responses} responses, {origin} {updated}"
        notes.append(
            f"{origin} ({updated}): ppo.minibatch_size is {fits}. It must divide the {responses} "
            f"responses of a step."
        )
    episodes = get("train.num_episodes")
    done["num_steps"] = steps_of(episodes, get.origin("train.num_episodes"), done, most)
    for name in ("eval.steps", "ckpt.save_steps"):
        if (origin := get.origin(name)) in get.given and get(name) == -1:
            get.idle.append(f"{origin} (-1)")
        else:
            get.used.discard(origin)


def _lengths(get: Arguments, notes: list[str]) -> Settings:
    total, response = get("data.max_len"), get("rollout.max_new_tokens")
    if response is None:
        notes.insert(
            0,
            f"max_len ({total:g}): data.max_prompt_tokens and rollout.max_new_tokens. In "
            "OpenRLHF a response may use the tokens of max_len that its prompt leaves; raypo "
            "has a limit for each.",
        )
        return {}
    done: Settings = {"rollout.max_new_tokens": (response, get.origin("rollout.max_new_tokens"))}
    if get("data.prompt_max_len") is None:
        origin = f"{get.origin('data.max_len')} - {get.origin('rollout.max_new_tokens')}"
        done["data.max_prompt_tokens"] = max(total - response, 1), origin
    else:
        get.used.discard(get.origin("data.prompt_max_len"))
    return done


def _schedule(get: Arguments, done: Settings) -> Settings:
    """Return the keys of the learning-rate schedule and of the critic's warm-up."""
    schedule, kind = Settings(), get("actor.lr_scheduler")
    origin = get.origin("actor.lr_scheduler")
    if (name := kind.partition("_with_")[0]) in ("constant", "linear", "cosine"):
        schedule["learner.lr_schedule"] = name, origin
    else:
        get.used.discard(origin)
    if kind == "cosine_with_min_lr":
        floor = get.origin("actor.min_lr_ratio")
        schedule["learner.lr_floor"] = get("actor.min_lr_ratio"), floor
    ratio, steps = get("actor.lr_warmup_ratio"), done["num_steps"][0]
    if ratio > 0 and kind != "constant":  # transformers' constant schedule ignores warm-up
        is_known = isinstance(steps, int)
        schedule["learner.lr_warmup_steps"] = (
            math.ceil(ratio * steps) if is_known else TODO,
            f"{ratio:g} of num_steps, {get.origin('actor.lr_warmup_ratio')}",
        )
    if get("critic.freezing_steps") > 0:
        frozen = get.origin("critic.freezing_steps")
        schedule["ppo.critic_warmup_steps"] = get("critic.freezing_steps"), frozen
    return schedule


def _models(get: Arguments, notes: list[str]) -> Settings:
    """Return the keys of reward servers, reward models, data type, offload and weight transport."""
    done: Settings = {}
    server = get.origin("reward.remote_url")
    if str(get.given.get(server)).startswith("http"):
        done["reward.url"] = get("reward.remote_url").split(","), server
        notes.append(f"{server}: reward.url. {get.rows[server].note}")
    if isinstance(models := get("reward.model_name_or_path"), str):
        done["model.reward"] = models.split(","), get.origin("reward.model_name_or_path")
    origin = get.origin("ds.param_dtype")  # raypo's own choice is bfloat16 on GPUs, too
    if get.given.get(origin) in ("bf16", True):
        get.used.add(origin)
        done["model.dtype"] = "bfloat16", origin
    if get("ds.adam_offload"):
        offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
        done["learner.deepspeed"] = offload, get.origin("ds.adam_offload")
    backend = get("vllm.sync_backend")
    if (origin := get.origin("vllm.sync_backend")) in get.given:
        done["rollout.engine.transport"] = "auto", origin
        notes.append(
            f"{origin} ({backend}): rollout.engine.transport is auto: ipc for colocated engines, "
            "and nccl for engines on their own GPUs (placement.mode: dedicated)."
        )
    return done
