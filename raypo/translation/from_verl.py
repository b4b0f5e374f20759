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
_SEQUENCE_LOSSES = ("gspo", "sapo", "geo_mean")
"""Losses that verl averages over sequences regardless of `loss_agg_mode`."""
_FUNCTION_HINT = "verl chooses a score by data_source: file.py:name, or, with verl installed, "
_FUNCTION_HINT += "verl.utils.reward_score:default_compute_score"
_UNLIMITED_REFILLS = 1_000_000
"""`ppo.filter.max_refills` if verl has no limit."""


def from_verl(foreign: ForeignArguments) -> Settings:
    """Return the keys that are computed from verl's arguments."""
    estimator = foreign.get("algorithm.adv_estimator")
    if estimator not in _ESTIMATORS:
        raise ConfigError(
            f"algorithm.adv_estimator ({estimator}): has no counterpart in raypo. It has "
            f"{', '.join(_ESTIMATORS)}; docs/methods.md lists all of ppo.advantage."
        )
    settings: Settings = {}
    foreign.copy(settings, {"data.train_batch_size": "rollout.prompts_per_step"})
    foreign.copy(settings, {f"{_ROLLOUT}n": "rollout.samples_per_prompt"})
    minibatch_size = foreign.number(f"{_ACTOR}ppo_mini_batch_size") * foreign.number(f"{_ROLLOUT}n")
    settings["ppo.minibatch_size"] = (
        or_todo(minibatch_size),
        f"{_ACTOR}ppo_mini_batch_size x {_ROLLOUT}n",
    )
    settings["ppo.advantage"] = _ESTIMATORS[estimator], foreign.origin("algorithm.adv_estimator")
    if settings["ppo.advantage"][0] == "grpo" and not foreign.get(
        "algorithm.norm_adv_by_std_in_grpo"
    ):
        settings["ppo.advantage"] = "dr_grpo", "algorithm.norm_adv_by_std_in_grpo"
    if estimator == "gdpo":
        keys = foreign.get("algorithm.gdpo_reward_keys") or []
        weights = foreign.get("algorithm.gdpo_reward_weights") or [1.0] * len(keys)
        parts = dict(zip(keys, weights, strict=False))
        settings["ppo.part_weights"] = parts or TODO, "algorithm.gdpo_reward_keys: {name: weight}"
    _set_critic(foreign, settings, is_used=estimator == "gae")
    _set_loss(foreign, settings)
    _set_kl(foreign, settings)
    _set_correction(foreign, settings)
    foreign.set_workers(settings, gpus="trainer.n_gpus_per_node", nodes="trainer.nnodes")
    _set_model(foreign, settings)
    _set_data(foreign, settings)
    _set_rewards(foreign, settings)
    _set_steps(foreign, settings)
    _set_evaluation(foreign, settings)
    _set_loggers(foreign, settings)
    return settings


def _set_critic(foreign: ForeignArguments, settings: Settings, *, is_used: bool) -> None:
    """Set the critic's keys. verl, too, ignores them if there is no critic."""
    if not is_used:
        foreign.ignore("critic.*", "trainer.critic_warmup", "algorithm.lam", "algorithm.gamma")
        return
    actor_names = {key: key.replace("critic.", _ACTOR, 1) for key in foreign.arguments}
    foreign.ignore(
        *[
            key
            for key, actor_name in actor_names.items()
            if key != actor_name and foreign.arguments[key] == foreign.value(actor_name)
        ]
    )


def _set_model(foreign: ForeignArguments, settings: Settings) -> None:
    model = "actor_rollout_ref.model."
    is_megatron = bool(foreign.get(f"{model}lora.rank"))
    suffixes = ("lora.rank", "lora.alpha") if is_megatron else ("lora_rank", "lora_alpha")
    modules = f"{model}{'lora.' * is_megatron}target_modules"
    foreign.set_lora(
        settings, rank=f"{model}{suffixes[0]}", alpha=f"{model}{suffixes[1]}", modules=modules
    )
    if is_megatron:
        hint = (
            f"{modules} {foreign.get(modules)}: Megatron's names; all-linear, or names like q_proj"
        )
        settings["model.lora.target_modules"] = TODO, hint
    if not foreign.get("actor_rollout_ref.hybrid_engine"):
        settings["placement.mode"] = "dedicated", "actor_rollout_ref.hybrid_engine"


def _set_data(foreign: ForeignArguments, settings: Settings) -> None:
    foreign.set_images(settings, "data.image_key", frozen=f"{_ACTOR}freeze_vision_tower")
    if foreign.has("data.train_files"):
        foreign.copy(settings, {"data.train_files": "data.prompts"})
    if foreign.get("data.filter_overlong_prompts"):
        settings["data.too_long"] = "skip", "data.filter_overlong_prompts"
        foreign.ignore("data.truncation")  # without effect: nothing is left to cut
    elif foreign.get("data.truncation") == "error":
        settings["data.too_long"] = "error", foreign.origin("data.truncation")
    if not foreign.number("data.train_max_samples") > 0:
        foreign.ignore("data.train_max_samples")
    else:
        foreign.leave_to_user(
            "data.train_max_samples", "shorten the files of data.prompts by hand."
        )
    if foreign.get("data.shuffle"):
        foreign.ignore("data.shuffle")
    top_k = foreign.get(f"{_ROLLOUT}top_k")
    settings["rollout.top_k"] = (top_k if top_k == TODO or top_k > 0 else None), f"{_ROLLOUT}top_k"
    template_arguments = [name for name in foreign.arguments if name.startswith(_TEMPLATE)]
    if template_arguments:
        values = {name.removeprefix(_TEMPLATE): foreign.get(name) for name in template_arguments}
        settings["data.chat_template_kwargs"] = values, ", ".join(template_arguments)
    multi_turn, agent_loop = f"{_ROLLOUT}multi_turn.", f"{_ROLLOUT}agent.default_agent_loop"
    enable = f"{multi_turn}enable"
    if foreign.get(enable) or foreign.get(agent_loop) != "single_turn_agent":
        origin = f"{enable} {foreign.get(enable)}, {agent_loop} {foreign.get(agent_loop)}"
        hint = f"{origin}: file.py:Class, with verl's tools and turns (docs/environments.md)"
        settings["rollout.environment"] = TODO, hint
        foreign.copy(settings, {"data.max_response_length": "rollout.max_episode_tokens"})
        if foreign.get(f"{multi_turn}max_assistant_turns") is None:
            settings["rollout.max_turns"] = (
                TODO,
                f"{multi_turn}max_assistant_turns: verl has no limit",
            )
    else:
        foreign.ignore(f"{multi_turn}*")


def _set_loss(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of the policy loss, its aggregation and its clip bounds."""
    loss, mode = (
        foreign.get(f"{_ACTOR}policy_loss.loss_mode"),
        foreign.get(f"{_ACTOR}loss_agg_mode"),
    )
    origin = foreign.origin(f"{_ACTOR}policy_loss.loss_mode")
    hint = f"{origin} {loss}: docs/methods.md lists the losses of raypo"
    settings["ppo.policy_loss"] = (_LOSSES[loss], origin) if loss in _LOSSES else (TODO, hint)
    aggregation = _MEANS.get(mode, TODO)
    origin = foreign.origin(f"{_ACTOR}loss_agg_mode")
    settings["ppo.aggregation"] = aggregation, origin if aggregation != TODO else f"{origin} {mode}"
    if loss in _SEQUENCE_LOSSES:
        settings["ppo.aggregation"] = "sequence_mean", f"{_ACTOR}policy_loss.loss_mode {loss}"
        # verl has no dual clip in them. It is a part of raypo's gspo, so that the key must be null.
        settings["ppo.dual_clip"] = None, f"clip_ratio_c{DEFAULT}"
        foreign.ignore(f"{_ACTOR}loss_agg_mode", f"{_ACTOR}clip_ratio_c")
    elif foreign.lacks(f"{_ACTOR}clip_ratio_c"):
        settings["ppo.dual_clip"] = None, "a version of verl without a dual clip"
    symmetric = f"{_ACTOR}clip_ratio"
    low_name, high_name = (
        _bound_name(foreign, f"{symmetric}{end}", symmetric) for end in ("_low", "_high")
    )
    low, high = foreign.number(low_name), foreign.number(high_name)
    if symmetric in foreign.used and foreign.get(symmetric) != 0.2:
        foreign.leave_to_user(symmetric, "verl since 0.4 uses it only for a bound that is null.")
    elif symmetric not in (low_name, high_name):
        foreign.ignore(symmetric)
    if loss == "geo_mean":  # verl clips the logarithm of the ratio, raypo the ratio
        settings["ppo.clip_low"] = (
            or_todo(1 - math.exp(-low)),
            f"1 - exp(-low), {foreign.origin(low_name)}",
        )
        settings["ppo.clip_high"] = (
            or_todo(math.exp(high) - 1),
            f"exp(high) - 1, {foreign.origin(high_name)}",
        )
        return
    # The lower bound of cispo's weights has a key of its own.
    settings["ppo.cispo_low" if loss == "cispo" else "ppo.clip_low"] = (
        or_todo(low),
        foreign.origin(low_name),
    )
    settings["ppo.clip_high"] = or_todo(high), foreign.origin(high_name)


def _bound_name(foreign: ForeignArguments, name: str, symmetric: str) -> str:
    """Return `symmetric` if it is the only argument that sets a clip bound, else `name`."""
    has_neither = foreign.arguments.keys().isdisjoint((name, symmetric))
    return name if has_neither or foreign.arguments.get(name) is not None else symmetric


def _set_kl(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of the KL in the loss or in the reward."""
    in_loss, in_reward = (
        foreign.get(f"{_ACTOR}use_kl_loss"),
        foreign.get("algorithm.use_kl_in_reward"),
    )
    coef = "algorithm.kl_ctrl.kl_coef"
    if foreign.lacks("algorithm.use_kl_in_reward"):  # verl before 0.2.1
        in_reward = not in_loss
    is_explicit = in_loss or in_reward or foreign.has("algorithm.use_kl_in_reward")
    if not is_explicit and foreign.has(coef) and foreign.get(coef):
        settings["ppo.kl.coef"] = (
            TODO,
            f"{foreign.get(coef)} of {coef}, in the reward, if verl is older than 0.2.1; else 0, "
            "because use_kl_in_reward is not given",
        )
        return
    if not in_loss and not in_reward:
        settings["ppo.kl.coef"] = 0.0, "no KL there"
        foreign.ignore("algorithm.kl_ctrl.*", "algorithm.kl_penalty")
        foreign.ignore(f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type")
        return
    if in_loss:
        coef = f"{_ACTOR}kl_loss_coef"
        foreign.set_kl_loss(settings, f"{_ACTOR}kl_loss_type", placement=f"{_ACTOR}use_kl_loss")
        mode = foreign.get(f"{_ACTOR}loss_agg_mode")
        if (
            foreign.get(f"{_ACTOR}policy_loss.loss_mode") in _SEQUENCE_LOSSES
            and mode != "seq-mean-token-mean"
        ):
            foreign.leave_to_user(
                f"{_ACTOR}loss_agg_mode",
                "verl's KL in the loss has this mean, and its policy loss a mean over sequences; "
                "ppo.aggregation is the mean of both.",
            )
        if in_reward:
            foreign.leave_to_user(
                "algorithm.use_kl_in_reward",
                "ppo.kl.placement. verl has a second KL in the reward here; raypo has one, in the "
                "loss.",
            )
        else:
            foreign.ignore("algorithm.kl_ctrl.*", "algorithm.kl_penalty")
            foreign.ignore("algorithm.use_kl_in_reward")
    else:
        foreign.ignore(f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type")
        kind, origin = foreign.get("algorithm.kl_penalty"), foreign.origin("algorithm.kl_penalty")
        estimator = KL_ESTIMATORS.get(kind)
        settings["ppo.kl.placement"] = "reward", "algorithm.use_kl_in_reward"
        settings["ppo.kl.estimator"] = (
            ("k1", origin) if estimator == "k1" else (TODO, f"{origin} {kind}: k1 in the reward")
        )
        if foreign.get("algorithm.kl_ctrl.type") == "adaptive":
            keys = {"type": "controller", "target_kl": "target", "horizon": "horizon"}
            foreign.copy(
                settings,
                {f"algorithm.kl_ctrl.{name}": f"ppo.kl.{key}" for name, key in keys.items()},
            )
        else:
            foreign.ignore("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.target_kl")
            foreign.ignore("algorithm.kl_ctrl.horizon")
    foreign.copy(settings, {coef: "ppo.kl.coef"})


def _set_correction(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the correction of the engine's log-probs, and the filter of groups."""
    name = "algorithm.rollout_correction.rollout_is"
    kinds = {"token": "tis", "sequence": "sequence_tis"}
    if kind := foreign.get(name):
        settings["ppo.correction.kind"] = kinds.get(kind, TODO), foreign.origin(name)
        foreign.copy(settings, {f"{name}_threshold": "ppo.correction.cap"})
    old_name = f"{_ACTOR}tis_imp_ratio_cap"  # the name in verl 0.5
    if old_name in foreign.arguments and foreign.number(old_name) > 0:
        settings["ppo.correction.kind"] = "tis", old_name
        foreign.copy(settings, {old_name: "ppo.correction.cap"})
    if foreign.get("algorithm.rollout_correction.bypass_mode"):
        bypass = "algorithm.rollout_correction.bypass_mode"
        settings["ppo.old_log_probs"] = "engine", bypass
    filter_groups = "algorithm.filter_groups."
    if foreign.get(f"{filter_groups}enable"):
        settings["ppo.filter.enabled"] = True, f"{filter_groups}enable"
        max_batches = foreign.get(f"{filter_groups}max_num_gen_batches")
        refills = _UNLIMITED_REFILLS if not max_batches > 0 else max_batches - 1
        settings["ppo.filter.max_refills"] = (
            refills,
            f"{max_batches} of {filter_groups}max_num_gen_batches",
        )
        if foreign.get(f"{filter_groups}metric") in (
            "reward",
            "score",
            "seq_reward",
            "seq_final_reward",
        ):
            foreign.ignore(f"{filter_groups}metric")
        else:
            foreign.used.discard(f"{filter_groups}metric")
    else:
        foreign.ignore(f"{filter_groups}*")


def _set_rewards(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the reward: a function or a reward model."""
    function_prefix, model_prefix = "reward.custom_reward_function.", "reward.reward_model."
    function_path = foreign.get(f"{function_prefix}path")
    if function_path:
        function = (
            TODO
            if function_path == TODO
            else f"{function_path}:{foreign.get(f'{function_prefix}name')}"
        )
        settings["reward.function"] = function, foreign.origin(f"{function_prefix}path")
    has_model = foreign.get(f"{model_prefix}enable")
    if has_model:
        origins = (
            foreign.origin(f"{model_prefix}enable"),
            foreign.origin(f"{model_prefix}model_path"),
        )
        settings["model.reward"] = (
            foreign.get(f"{model_prefix}model_path", TODO),
            " and ".join(origins),
        )
        if function_path:
            foreign.leave_to_user(
                f"{model_prefix}enable",
                "in verl the function replaces or calls this model; raypo adds the scores of both.",
            )
    else:
        foreign.ignore(f"{model_prefix}model_path")
    if not function_path and not has_model:
        settings["reward.function"] = TODO, _FUNCTION_HINT
    manager = foreign.get("reward.reward_manager.name")
    if manager in ("naive", "batch", "dapo", "prime"):
        foreign.ignore("reward.reward_manager.name")
    enable = "reward_model.overlong_buffer.enable"
    if foreign.get(enable):
        keys = {"len": "overlong_buffer_tokens", "penalty_factor": "overlong_factor"}
        for name, key in keys.items():
            argument = f"reward_model.overlong_buffer.{name}"
            settings[f"ppo.shaping.{key}"] = (
                foreign.get(argument, TODO),
                f"{foreign.origin(argument)}, {foreign.origin(enable)}",
            )
    else:
        names = ("enable", "len", "penalty_factor", "log")
        foreign.ignore(*[f"reward_model.overlong_buffer.{name}" for name in names])


def _set_steps(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the number of steps, and the learning-rate schedule that depends on it."""
    name = "trainer.total_training_steps"
    max_steps, epochs = foreign.get(name), foreign.number("trainer.total_epochs")
    epochs_name = foreign.origin("trainer.total_epochs")
    rows = foreign.number("data.train_max_samples")
    steps, origin = foreign.steps(
        settings, epochs, epochs_name, max_rows=rows if rows > 0 else math.inf
    )
    if max_steps is not None and steps != TODO and max_steps != TODO:
        steps, origin = min((steps, origin), (max_steps, foreign.origin(name)))
    elif max_steps is not None:
        origin = f"the smaller of {max_steps} of {foreign.origin(name)} and of {origin}"
    settings["num_steps"] = steps, origin
    optim = f"{_ACTOR}optim."
    kind = foreign.get(f"{optim}lr_scheduler_type")
    foreign.set_lr_schedule(settings, f"{optim}lr_scheduler_type")
    if kind == "cosine" and foreign.get(f"{optim}min_lr_ratio"):
        foreign.copy(settings, {f"{optim}min_lr_ratio": "learner.lr_floor"})
    elif kind == "constant":
        foreign.ignore(f"{optim}min_lr_ratio", f"{optim}num_cycles")
    warmup, ratio = (
        foreign.get(f"{optim}lr_warmup_steps"),
        foreign.number(f"{optim}lr_warmup_steps_ratio"),
    )
    if isinstance(warmup, int) and warmup > 0:
        foreign.copy(settings, {f"{optim}lr_warmup_steps": "learner.lr_warmup_steps"})
    elif not ratio:
        foreign.ignore(f"{optim}lr_warmup_steps")
    else:
        foreign.set_warmup(settings, f"{optim}lr_warmup_steps_ratio", ratio, int)
    if str(foreign.get(f"{optim}optimizer")).lower() in ("adamw", "torch.optim.adamw"):
        foreign.ignore(f"{optim}optimizer")


def _set_evaluation(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of the evaluation, if verl evaluates, and of the checkpoints."""
    val_kwargs = f"{_ROLLOUT}val_kwargs."
    if foreign.has("data.val_files") and foreign.number("trainer.test_freq") > 0:
        foreign.copy(
            settings, {"data.val_files": "eval.prompts", "trainer.test_freq": "eval.every"}
        )
        foreign.copy(settings, {f"{val_kwargs}n": "eval.samples_per_prompt"})
        is_sampled = foreign.get(f"{val_kwargs}do_sample")
        temperature = foreign.get(f"{val_kwargs}temperature") if is_sampled else 0
        settings["eval.temperature"] = temperature, foreign.origin(f"{val_kwargs}temperature")
    else:
        foreign.ignore("data.val_files", "trainer.test_freq", "data.val_max_samples")
        foreign.ignore(f"{val_kwargs}*")
    if foreign.number("trainer.save_freq") > 0:
        foreign.copy(settings, {"trainer.save_freq": "checkpoint.every"})
    else:
        foreign.ignore("trainer.save_freq")


def _set_loggers(foreign: ForeignArguments, settings: Settings) -> None:
    loggers = foreign.get("trainer.logger") if foreign.has("trainer.logger") else ()
    for logger in [loggers] if isinstance(loggers, str) else loggers:
        if logger in _LOGGERS:
            settings[_LOGGERS[logger]] = foreign.get("trainer.project_name"), "trainer.project_name"
        elif logger not in ("console", "tensorboard"):
            foreign.minor.append(f"trainer.logger ({logger})")
