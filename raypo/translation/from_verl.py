"""Keys that are computed from verl's arguments."""

from __future__ import annotations

import math

from raypo.translation.foreign_arguments import (
    DEFAULT,
    TODO,
    WORDS,
    Arguments,
    Settings,
    set_kl_loss,
    set_lora,
    set_workers,
)

_LOGGERS = {"wandb": "logging.wandb.project", "mlflow": "logging.mlflow.experiment"}
_PER_SEQUENCE = ("gspo", "sapo", "geo_mean")
"""Losses of verl that are means over sequences, whatever `loss_agg_mode` is."""
_NO_FUNCTION = "verl chooses a score by data_source: file.py:name, or, with verl installed, "
_NO_FUNCTION += "verl.utils.reward_score:default_compute_score"


def from_verl(get: Arguments, recipe: str) -> tuple[Settings, list[str]]:
    """Return the keys that are computed from verl's arguments, and notes for the user."""
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    samples = get(f"{rollout}n")
    rows = get(f"{actor}ppo_mini_batch_size") * samples
    done: Settings = {"ppo.minibatch_size": (rows, "ppo_mini_batch_size x n")}
    done["rollout.samples_per_prompt"] = samples, f"{rollout}n"
    notes: list[str] = []
    done |= _loss(get, actor, notes)
    estimator = get("algorithm.adv_estimator")
    done["ppo.advantage"] = WORDS.get(estimator, estimator), "algorithm.adv_estimator"
    if done["ppo.advantage"][0] == "grpo" and not get("algorithm.norm_adv_by_std_in_grpo"):
        done["ppo.advantage"] = "dr_grpo", "algorithm.norm_adv_by_std_in_grpo"
    in_loss, in_reward = get(f"{actor}use_kl_loss"), get("algorithm.use_kl_in_reward")
    coef = f"{actor}kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    if in_loss:
        done["ppo.kl.placement"] = "loss", f"{actor}use_kl_loss"
        mode = get(f"{actor}loss_agg_mode")
        if get(f"{actor}policy_loss.loss_mode") in _PER_SEQUENCE and mode != "seq-mean-token-mean":
            notes.append(
                f"{actor}loss_agg_mode ({mode}): verl's KL in the loss has this mean, and its "
                f"policy loss a mean over sequences; ppo.aggregation is the mean of both."
            )
        name = f"{actor}kl_loss_type"
        set_kl_loss(done, kind=str(get(name)), origin=name)
        if in_reward:
            notes.append(
                "algorithm.use_kl_in_reward (True): ppo.kl.placement. verl has a second KL in the "
                "reward here; raypo has one, in the loss."
            )
    done["ppo.kl.coef"] = (get(coef), coef) if in_loss or in_reward else (0, "no KL there")
    model = "actor_rollout_ref.model."
    set_lora(get, done, rank=f"{model}lora_rank", alpha=f"{model}lora_alpha")
    set_workers(get, done, gpus="trainer.n_gpus_per_node", nodes="trainer.nnodes")
    if get("data.filter_overlong_prompts"):
        done["data.too_long"] = "skip", "data.filter_overlong_prompts"
        get("data.truncation")  # used, but without effect: nothing is left to cut
    elif get("data.truncation") == "error":
        is_given = "data.truncation" in get.given
        done["data.too_long"] = "error", f"data.truncation{'' if is_given else DEFAULT}"
    else:
        get.used.discard("data.truncation")  # left, right and middle become a note
    if top_k := max(get(f"{rollout}top_k"), 0):
        done["rollout.top_k"] = top_k, f"{rollout}top_k"
    custom = "reward.custom_reward_function."
    if path := get(f"{custom}path"):
        done["reward.function"] = f"{path}:{get(f'{custom}name')}", "custom_reward_function"
    else:
        done["reward.function"] = TODO, _NO_FUNCTION
    return done, notes + _set_loggers(get, done)


def _loss(get: Arguments, actor: str, notes: list[str]) -> Settings:
    """Return the keys of the policy's loss, its mean and its clips."""
    loss, mode = get(f"{actor}policy_loss.loss_mode"), get(f"{actor}loss_agg_mode")
    done: Settings = {
        "ppo.policy_loss": (WORDS.get(loss, loss), f"{actor}policy_loss.loss_mode"),
        "ppo.aggregation": (WORDS.get(mode, mode), f"{actor}loss_agg_mode"),
    }
    if loss in _PER_SEQUENCE:
        done["ppo.aggregation"] = "sequence_mean", f"{actor}policy_loss.loss_mode {loss}"
        # verl has no dual clip in them. It is a part of raypo's gspo, so that the key must be null.
        done["ppo.dual_clip"] = None, f"clip_ratio_c{DEFAULT}"
        names = (f"{actor}loss_agg_mode", f"{actor}clip_ratio_c")
        get.used.update(names)
        get.idle += [f"{name} ({get.given[name]}), {loss}" for name in names if name in get.given]
    both = f"{actor}clip_ratio"
    low, high = (_bound(get, f"{both}{each}", both) for each in ("_low", "_high"))
    bounds = {"ppo.clip_low": (get(low), low), "ppo.clip_high": (get(high), high)}
    if both in get.used and get(both) != 0.2:
        notes.append(f"{both} ({get(both)}): {get.rows[both].note}")
    elif both in get.given and both not in (low, high):
        get.used.add(both)
        get.idle.append(f"{both} ({get.given[both]})")
    if loss == "geo_mean":  # verl clips the logarithm of the ratio, raypo the ratio
        return done | {
            "ppo.clip_low": (1 - math.exp(-get(low)), f"1 - exp(-low), {get.origin(low)}"),
            "ppo.clip_high": (math.exp(get(high)) - 1, f"exp(high) - 1, {get.origin(high)}"),
        }
    if loss == "cispo":  # the lower bound of its weights has a key of its own
        bounds["ppo.cispo_low"] = bounds.pop("ppo.clip_low")
    return done | {key: (value, get.origin(name)) for key, (value, name) in bounds.items()}


def _bound(get: Arguments, name: str, both: str) -> str:
    """Return the argument that gives a clip bound: `name`, or `both` if only that one is given."""
    if get.given.get(name) is not None or not {name, both} & get.given.keys():
        return name
    return both


def _set_loggers(get: Arguments, done: Settings) -> list[str]:
    """Set the logging keys in `done`, and return notes on verl's loggers that raypo lacks."""
    loggers = get("trainer.logger") if "trainer.logger" in get.given else ()
    notes = []
    for logger in [loggers] if isinstance(loggers, str) else loggers:
        if logger in _LOGGERS:
            done[_LOGGERS[logger]] = get("trainer.project_name"), "trainer.project_name"
        elif logger not in ("console", "tensorboard"):
            notes.append(f"trainer.logger ({logger}): No counterpart is known.")
    return notes
