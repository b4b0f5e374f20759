"""Keys that are computed from verl's arguments."""

from __future__ import annotations

from raypo.translation.foreign_arguments import (
    DEFAULT,
    TODO,
    WORDS,
    Arguments,
    Settings,
    set_lora,
    set_workers,
)

_LOGGERS = {"wandb": "logging.wandb.project", "mlflow": "logging.mlflow.experiment"}
_NO_FUNCTION = "verl chooses a score by data_source: file.py:name, or, with verl installed, "
_NO_FUNCTION += "verl.utils.reward_score:default_compute_score"


def from_verl(get: Arguments, recipe: str) -> tuple[Settings, list[str]]:
    """Return the keys that are computed from verl's arguments, and notes for the user."""
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    samples = get(f"{rollout}n")
    rows = get(f"{actor}ppo_mini_batch_size") * samples
    done: Settings = {"ppo.minibatch_size": (rows, "ppo_mini_batch_size x n")}
    done["rollout.samples_per_prompt"] = samples, f"{rollout}n"
    for name, key in (
        ("algorithm.adv_estimator", "ppo.advantage"),
        (f"{actor}loss_agg_mode", "ppo.aggregation"),
        (f"{actor}policy_loss.loss_mode", "ppo.policy_loss"),
    ):
        done[key] = WORDS.get(get(name), get(name)), name
    if done["ppo.advantage"][0] == "grpo" and not get("algorithm.norm_adv_by_std_in_grpo"):
        done["ppo.advantage"] = "dr_grpo", "algorithm.norm_adv_by_std_in_grpo"
    in_loss, in_reward = get(f"{actor}use_kl_loss"), get("algorithm.use_kl_in_reward")
    coef = f"{actor}kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    if in_loss:
        kind = get(f"{actor}kl_loss_type")
        done["ppo.kl.placement"] = "loss", f"{actor}use_kl_loss"
        done["ppo.kl.estimator"] = WORDS.get(kind, kind), f"{actor}kl_loss_type"
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
    if top_k := max(get(f"{rollout}top_k"), 0):
        done["rollout.top_k"] = top_k, f"{rollout}top_k"
    custom = "reward.custom_reward_function."
    if path := get(f"{custom}path"):
        done["reward.function"] = f"{path}:{get(f'{custom}name')}", "custom_reward_function"
    else:
        done["reward.function"] = TODO, _NO_FUNCTION
    return done, _set_loggers(get, done)


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
