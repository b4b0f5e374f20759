"""Keys that are computed from verl's arguments."""

from __future__ import annotations

import math

from raypo.config.base import TODO, ConfigError
from raypo.translation.foreign_arguments import (
    DEFAULT,
    KL_ESTIMATORS,
    ForeignArguments,
    Settings,
    or_todo,
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_TEMPLATE = "data.apply_chat_template_kwargs."
_ESTIMATORS = {name: name for name in ("gae", "grpo", "rloo", "opo", "gdpo")}
_ESTIMATORS |= {"reinforce_plus_plus": "reinforce", "grpo_vectorized": "grpo"}
_ESTIMATORS |= {"reinforce_plus_plus_baseline": "reinforce_baseline", "rloo_vectorized": "rloo"}
_LOSSES = {name: name for name in ("gspo", "cispo", "sapo", "clip_cov", "kl_cov")}
_LOSSES |= {"vanilla": "ppo", "geo_mean": "gmpo", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl"}
_MEANS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
_MEANS |= {"seq-mean-token-sum-norm": "constant"}
_LOGGERS = {"wandb": "logging.wandb.project", "mlflow": "logging.mlflow.experiment"}
_PER_SEQUENCE = ("gspo", "sapo", "geo_mean")
"""Losses of verl that are means over sequences, whatever `loss_agg_mode` is."""
_NO_FUNCTION = "verl chooses a score by data_source: file.py:name, or, with verl installed, "
_NO_FUNCTION += "verl.utils.reward_score:default_compute_score"
_NO_LIMIT = 1_000_000
"""`ppo.filter.max_refills` where verl has no limit."""


def from_verl(get: ForeignArguments) -> Settings:
    """Return the keys that are computed from verl's arguments."""
    estimator = get("algorithm.adv_estimator")
    if estimator not in _ESTIMATORS:
        raise ConfigError(
            f"algorithm.adv_estimator ({estimator}): has no counterpart in raypo. It has "
            f"{', '.join(_ESTIMATORS)}; docs/methods.md lists all of ppo.advantage."
        )
    done: Settings = {}
    get.copy(done, {"data.train_batch_size": "rollout.prompts_per_step"})
    get.copy(done, {f"{_ROLLOUT}n": "rollout.samples_per_prompt"})
    rows = get.number(f"{_ACTOR}ppo_mini_batch_size") * get.number(f"{_ROLLOUT}n")
    done["ppo.minibatch_size"] = or_todo(rows), f"{_ACTOR}ppo_mini_batch_size x {_ROLLOUT}n"
    done["ppo.advantage"] = _ESTIMATORS[estimator], get.origin("algorithm.adv_estimator")
    if done["ppo.advantage"][0] == "grpo" and not get("algorithm.norm_adv_by_std_in_grpo"):
        done["ppo.advantage"] = "dr_grpo", "algorithm.norm_adv_by_std_in_grpo"
    if estimator == "gdpo":
        keys = get("algorithm.gdpo_reward_keys") or []
        weights = get("algorithm.gdpo_reward_weights") or [1.0] * len(keys)
        parts = dict(zip(keys, weights, strict=False))
        done["ppo.part_weights"] = parts or TODO, "algorithm.gdpo_reward_keys: {name: weight}"
    _set_critic(get, done, is_used=estimator == "gae")
    _set_loss(get, done)
    _set_kl(get, done)
    _set_correction(get, done)
    get.set_workers(done, gpus="trainer.n_gpus_per_node", nodes="trainer.nnodes")
    _set_model(get, done)
    _set_data(get, done)
    _set_rewards(get, done)
    _set_steps(get, done)
    _set_evaluation(get, done)
    _set_loggers(get, done)
    return done


def _set_critic(get: ForeignArguments, done: Settings, *, is_used: bool) -> None:
    """Set the critic's keys; without a critic verl ignores its arguments, too."""
    if not is_used:
        get.pass_over("critic.*", "trainer.critic_warmup", "algorithm.lam", "algorithm.gamma")
        return
    twins = {name: name.replace("critic.", _ACTOR, 1) for name in get.arguments}
    get.pass_over(
        *[n for n, twin in twins.items() if n != twin and get.arguments[n] == get.value(twin)]
    )


def _set_model(get: ForeignArguments, done: Settings) -> None:
    model = "actor_rollout_ref.model."
    is_megatron = bool(get(f"{model}lora.rank"))
    names = ("lora.rank", "lora.alpha") if is_megatron else ("lora_rank", "lora_alpha")
    modules = f"{model}{'lora.' * is_megatron}target_modules"
    get.set_lora(done, rank=f"{model}{names[0]}", alpha=f"{model}{names[1]}", modules=modules)
    if is_megatron:
        why = f"{modules} {get(modules)}: Megatron's names; all-linear, or names like q_proj"
        done["model.lora.target_modules"] = TODO, why
    if not get("actor_rollout_ref.hybrid_engine"):
        done["placement.mode"] = "dedicated", "actor_rollout_ref.hybrid_engine"


def _set_data(get: ForeignArguments, done: Settings) -> None:
    if get.has("data.train_files"):
        get.copy(done, {"data.train_files": "data.prompts"})
    if get("data.filter_overlong_prompts"):
        done["data.too_long"] = "skip", "data.filter_overlong_prompts"
        get.pass_over("data.truncation")  # without effect: nothing is left to cut
    elif get("data.truncation") == "error":
        done["data.too_long"] = "error", get.origin("data.truncation")
    if not get.number("data.train_max_samples") > 0:
        get.pass_over("data.train_max_samples")
    else:
        get.leave("data.train_max_samples", "shorten the files of data.prompts by hand.")
    if get("data.shuffle"):
        get.pass_over("data.shuffle")
    top_k = get(f"{_ROLLOUT}top_k")
    done["rollout.top_k"] = (top_k if top_k == TODO or top_k > 0 else None), f"{_ROLLOUT}top_k"
    template = [name for name in get.arguments if name.startswith(_TEMPLATE)]
    if template:
        values = {name.removeprefix(_TEMPLATE): get(name) for name in template}
        done["data.chat_template_kwargs"] = values, ", ".join(template)
    turns, loop = f"{_ROLLOUT}multi_turn.", f"{_ROLLOUT}agent.default_agent_loop"
    if get(f"{turns}enable") or get(loop) != "single_turn_agent":
        origin = f"{turns}enable {get(f'{turns}enable')}, {loop} {get(loop)}"
        why = f"{origin}: file.py:Class, with verl's tools and turns (docs/environments.md)"
        done["rollout.environment"] = TODO, why
        get.copy(done, {"data.max_response_length": "rollout.max_episode_tokens"})
        if get(f"{turns}max_assistant_turns") is None:
            done["rollout.max_turns"] = TODO, f"{turns}max_assistant_turns: verl has no limit"
    else:
        get.pass_over(f"{turns}*")


def _set_loss(get: ForeignArguments, done: Settings) -> None:
    """Set the keys of the policy's loss, its mean and its clips."""
    loss, mode = get(f"{_ACTOR}policy_loss.loss_mode"), get(f"{_ACTOR}loss_agg_mode")
    origin = get.origin(f"{_ACTOR}policy_loss.loss_mode")
    what = f"{origin} {loss}: docs/methods.md lists the losses of raypo"
    done["ppo.policy_loss"] = (_LOSSES[loss], origin) if loss in _LOSSES else (TODO, what)
    mean = _MEANS.get(mode, TODO)
    origin = get.origin(f"{_ACTOR}loss_agg_mode")
    done["ppo.aggregation"] = mean, origin if mean != TODO else f"{origin} {mode}"
    if loss in _PER_SEQUENCE:
        done["ppo.aggregation"] = "sequence_mean", f"{_ACTOR}policy_loss.loss_mode {loss}"
        # verl has no dual clip in them. It is a part of raypo's gspo, so that the key must be null.
        done["ppo.dual_clip"] = None, f"clip_ratio_c{DEFAULT}"
        get.pass_over(f"{_ACTOR}loss_agg_mode", f"{_ACTOR}clip_ratio_c")
    elif get.lacks(f"{_ACTOR}clip_ratio_c"):
        done["ppo.dual_clip"] = None, "a version of verl without a dual clip"
    both = f"{_ACTOR}clip_ratio"
    low, high = (_bound(get, f"{both}{end}", both) for end in ("_low", "_high"))
    lower, upper = get.number(low), get.number(high)
    if both in get.used and get(both) != 0.2:
        get.leave(both, "verl since 0.4 uses it only for a bound that is null.")
    elif both not in (low, high):
        get.pass_over(both)
    if loss == "geo_mean":  # verl clips the logarithm of the ratio, raypo the ratio
        done["ppo.clip_low"] = (
            or_todo(1 - math.exp(-lower)),
            f"1 - exp(-low), {get.origin(low)}",
        )
        done["ppo.clip_high"] = (
            or_todo(math.exp(upper) - 1),
            f"exp(high) - 1, {get.origin(high)}",
        )
        return
    # The lower bound of cispo's weights has a key of its own.
    done["ppo.cispo_low" if loss == "cispo" else "ppo.clip_low"] = (
        or_todo(lower),
        get.origin(low),
    )
    done["ppo.clip_high"] = or_todo(upper), get.origin(high)


def _bound(get: ForeignArguments, name: str, both: str) -> str:
    """Return the argument that gives a clip bound: `name`, or `both` if only that one is given."""
    has_neither = get.arguments.keys().isdisjoint((name, both))
    return name if has_neither or get.arguments.get(name) is not None else both


def _set_kl(get: ForeignArguments, done: Settings) -> None:
    """Set the keys of the KL, which is in the loss or in the reward."""
    in_loss, in_reward = get(f"{_ACTOR}use_kl_loss"), get("algorithm.use_kl_in_reward")
    coef = "algorithm.kl_ctrl.kl_coef"
    if get.lacks("algorithm.use_kl_in_reward"):  # verl before 0.2.1
        in_reward = not in_loss
    is_told = in_loss or in_reward or get.has("algorithm.use_kl_in_reward")
    if not is_told and get.has(coef) and get(coef):
        done["ppo.kl.coef"] = (
            TODO,
            f"{get(coef)} of {coef}, in the reward, if verl is older than 0.2.1; else 0, because "
            "use_kl_in_reward is not given",
        )
        return
    if not in_loss and not in_reward:
        done["ppo.kl.coef"] = 0.0, "no KL there"
        get.pass_over("algorithm.kl_ctrl.*", "algorithm.kl_penalty")
        get.pass_over(f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type")
        return
    if in_loss:
        coef = f"{_ACTOR}kl_loss_coef"
        get.set_kl_loss(done, f"{_ACTOR}kl_loss_type", placement=f"{_ACTOR}use_kl_loss")
        mode = get(f"{_ACTOR}loss_agg_mode")
        if get(f"{_ACTOR}policy_loss.loss_mode") in _PER_SEQUENCE and mode != "seq-mean-token-mean":
            get.leave(
                f"{_ACTOR}loss_agg_mode",
                "verl's KL in the loss has this mean, and its policy loss a mean over sequences; "
                "ppo.aggregation is the mean of both.",
            )
        if in_reward:
            get.leave(
                "algorithm.use_kl_in_reward",
                "ppo.kl.placement. verl has a second KL in the reward here; raypo has one, in the "
                "loss.",
            )
        else:
            get.pass_over("algorithm.kl_ctrl.*", "algorithm.kl_penalty")
            get.pass_over("algorithm.use_kl_in_reward")
    else:
        get.pass_over(f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type")
        kind, origin = get("algorithm.kl_penalty"), get.origin("algorithm.kl_penalty")
        estimator = KL_ESTIMATORS.get(kind)
        done["ppo.kl.placement"] = "reward", "algorithm.use_kl_in_reward"
        done["ppo.kl.estimator"] = (
            ("k1", origin) if estimator == "k1" else (TODO, f"{origin} {kind}: k1 in the reward")
        )
        if get("algorithm.kl_ctrl.type") == "adaptive":
            names = {"type": "controller", "target_kl": "target", "horizon": "horizon"}
            get.copy(done, {f"algorithm.kl_ctrl.{a}": f"ppo.kl.{b}" for a, b in names.items()})
        else:
            get.pass_over("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl")
            get.pass_over("algorithm.kl_ctrl.horizon")
    get.copy(done, {coef: "ppo.kl.coef"})


def _set_correction(get: ForeignArguments, done: Settings) -> None:
    """Set the correction of the engine's log-probs, and the filter of groups."""
    name = "algorithm.rollout_correction.rollout_is"
    kinds = {"token": "tis", "sequence": "sequence_tis"}
    if kind := get(name):
        done["ppo.correction.kind"] = kinds.get(kind, TODO), get.origin(name)
        get.copy(done, {f"{name}_threshold": "ppo.correction.cap"})
    old = f"{_ACTOR}tis_imp_ratio_cap"  # of verl 0.5
    if old in get.arguments and get.number(old) > 0:
        done["ppo.correction.kind"] = "tis", old
        get.copy(done, {old: "ppo.correction.cap"})
    if get("algorithm.rollout_correction.bypass_mode"):
        bypass = "algorithm.rollout_correction.bypass_mode"
        done["ppo.old_log_probs"] = "engine", bypass
    filtered = "algorithm.filter_groups."
    if get(f"{filtered}enable"):
        done["ppo.filter.enabled"] = True, f"{filtered}enable"
        most = get(f"{filtered}max_num_gen_batches")
        refills = _NO_LIMIT if not most > 0 else most - 1
        done["ppo.filter.max_refills"] = refills, f"{most} of {filtered}max_num_gen_batches"
        if get(f"{filtered}metric") in ("reward", "score", "seq_reward", "seq_final_reward"):
            get.pass_over(f"{filtered}metric")
        else:
            get.used.discard(f"{filtered}metric")
    else:
        get.pass_over(f"{filtered}*")


def _set_rewards(get: ForeignArguments, done: Settings) -> None:
    """Set the score: a function, or verl's reward model, which takes its place."""
    custom, model = "reward.custom_reward_function.", "reward.reward_model."
    path = get(f"{custom}path")
    if path:
        function = TODO if path == TODO else f"{path}:{get(f'{custom}name')}"
        done["reward.function"] = function, get.origin(f"{custom}path")
    has_model = get(f"{model}enable")
    if has_model:
        origins = get.origin(f"{model}enable"), get.origin(f"{model}model_path")
        done["model.reward"] = get(f"{model}model_path", TODO), " and ".join(origins)
        if path:
            get.leave(
                f"{model}enable",
                "in verl the function replaces or calls this model; raypo adds the scores of both.",
            )
    else:
        get.pass_over(f"{model}model_path")
    if not path and not has_model:
        done["reward.function"] = TODO, _NO_FUNCTION
    manager = get("reward.reward_manager.name")
    if manager in ("naive", "batch", "dapo", "prime"):
        get.pass_over("reward.reward_manager.name")
    enable = "reward_model.overlong_buffer.enable"
    if get(enable):
        keys = {"len": "overlong_buffer_tokens", "penalty_factor": "overlong_factor"}
        for name, key in keys.items():
            own = f"reward_model.overlong_buffer.{name}"
            done[f"ppo.shaping.{key}"] = get(own, TODO), f"{get.origin(own)}, {get.origin(enable)}"
    else:
        names = ("enable", "len", "penalty_factor", "log")
        get.pass_over(*[f"reward_model.overlong_buffer.{name}" for name in names])


def _set_steps(get: ForeignArguments, done: Settings) -> None:
    """Set the number of steps, and the learning-rate schedule that depends on it."""
    name = "trainer.total_training_steps"
    most, epochs = get(name), get.number("trainer.total_epochs")
    origin = get.origin("trainer.total_epochs")
    rows = get.number("data.train_max_samples")
    steps, why = get.steps(done, epochs, origin, most=rows if rows > 0 else math.inf)
    if most is not None and steps != TODO and most != TODO:
        steps, why = min((steps, why), (most, get.origin(name)))
    elif most is not None:
        why = f"the smaller of {most} of {get.origin(name)} and of {why}"
    done["num_steps"] = steps, why
    optim = f"{_ACTOR}optim."
    kind = get(f"{optim}lr_scheduler_type")
    get.set_lr_schedule(done, f"{optim}lr_scheduler_type")
    if kind == "cosine" and get(f"{optim}min_lr_ratio"):
        get.copy(done, {f"{optim}min_lr_ratio": "learner.lr_floor"})
    elif kind == "constant":
        get.pass_over(f"{optim}min_lr_ratio", f"{optim}num_cycles")
    warmup, ratio = get(f"{optim}lr_warmup_steps"), get.number(f"{optim}lr_warmup_steps_ratio")
    if isinstance(warmup, int) and warmup > 0:
        get.copy(done, {f"{optim}lr_warmup_steps": "learner.lr_warmup_steps"})
    elif not ratio:
        get.pass_over(f"{optim}lr_warmup_steps")
    else:
        get.set_warmup(done, f"{optim}lr_warmup_steps_ratio", ratio, int)
    if str(get(f"{optim}optimizer")).lower() in ("adamw", "torch.optim.adamw"):
        get.pass_over(f"{optim}optimizer")


def _set_evaluation(get: ForeignArguments, done: Settings) -> None:
    """Set held-out prompts, if verl measures them, and the checkpoints."""
    validation = f"{_ROLLOUT}val_kwargs."
    if get.has("data.val_files") and get.number("trainer.test_freq") > 0:
        get.copy(done, {"data.val_files": "eval.prompts", "trainer.test_freq": "eval.every"})
        get.copy(done, {f"{validation}n": "eval.samples_per_prompt"})
        is_sampled = get(f"{validation}do_sample")
        heat = get(f"{validation}temperature") if is_sampled else 0
        done["eval.temperature"] = heat, get.origin(f"{validation}temperature")
    else:
        get.pass_over("data.val_files", "trainer.test_freq", "data.val_max_samples")
        get.pass_over(f"{validation}*")
    if get.number("trainer.save_freq") > 0:
        get.copy(done, {"trainer.save_freq": "checkpoint.every"})
    else:
        get.pass_over("trainer.save_freq")


def _set_loggers(get: ForeignArguments, done: Settings) -> None:
    loggers = get("trainer.logger") if get.has("trainer.logger") else ()
    for logger in [loggers] if isinstance(loggers, str) else loggers:
        if logger in _LOGGERS:
            done[_LOGGERS[logger]] = get("trainer.project_name"), "trainer.project_name"
        elif logger not in ("console", "tensorboard"):
            get.minor.append(f"trainer.logger ({logger})")
