"""Keys that are computed from the fields of TRL's configs."""

from __future__ import annotations

import math
from typing import Any

from raypo.config.base import TODO, ConfigError
from raypo.translation.foreign_arguments import ForeignArguments, Settings

_LOSS_TYPES = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "constant"}
_LOSS_TYPES |= dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), "token_mean")
"""Value of ppo.aggregation for each loss_type of TRL."""
_CORRECTIONS = {"token_truncate": "tis", "sequence_truncate": "sequence_tis"}
_CORRECTIONS |= {"token_mask": "icepop", "sequence_mask": "sequence_tis"}
"""Value of ppo.correction.kind for each vllm_importance_sampling_mode of TRL."""
_DPO_LOSSES = ("sigmoid", "sigmoid_norm", "robust", "hinge", "ipo")
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_8bit")
_ADAMW += ("adamw_bnb_8bit", "paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit")
_SINKS: dict[str, Any] = {"wandb": {}, "mlflow": {}, "tensorboard": True}


def from_trl(get: ForeignArguments) -> Settings:
    """Return the keys that are computed from the fields of a config of TRL."""
    done: Settings = {"recipe": (get.recipe, "the config's class")}
    folder = get("output_dir") or "trainer_output"
    if get.has("output_dir") and folder != "trainer_output":
        get.set_folder(done, "output_dir")
    get.pass_over("output_dir")
    if get.arguments.get("run_name") == folder:  # the default of older versions
        del get.arguments["run_name"]
    elif run := get("run_name"):
        done["name"] = run, "run_name"
    if not (get("accelerator_config") or {}).get("split_batches"):
        get.arguments.pop("accelerator_config", None)  # of defaults
    if get.arguments.get("pad_to_multiple_of") is None:
        get.arguments.pop("pad_to_multiple_of", None)
    updates: float = 1
    if get.recipe == "ppo":
        updates = _set_sampling(get, done)
    else:
        _set_examples(get, done)
    _set_schedule(get, done, updates)
    betas = [get("adam_beta1"), get("adam_beta2")]
    is_given = get.has("adam_beta1") or get.has("adam_beta2")
    origin = "adam_beta1, adam_beta2" if is_given else get.origin("adam_beta1")
    done["learner.adam_betas"] = betas, origin
    if get("optim") in _ADAMW:
        get.pass_over("optim")
    elif get("optim") == "muon":
        done["learner.optimizer"] = "muon", "optim"
    else:
        done["learner.optimizer"] = TODO, f"optim {get('optim')}: adamw or muon"
    is_half = get("bf16")
    if isinstance(is_half, bool) and not get("fp16"):
        done["model.dtype"] = "bfloat16" if is_half else "float32", "bf16"
    _set_logging(get, done)
    return done


def _set_examples(get: ForeignArguments, done: Settings) -> None:
    """Set the keys of a recipe that learns from examples."""
    batch = get("per_device_train_batch_size") * get("gradient_accumulation_steps")
    processes = get.arguments.pop("world_size", None)  # of an object; a JSON does not have it
    done["learner.batch_size"] = (
        batch * processes if processes else TODO,
        f"{batch} of per_device_train_batch_size x gradient_accumulation_steps, x processes",
    )
    if get("max_steps") > 0:
        get.copy(done, {"max_steps": "num_steps"})
        get.pass_over("num_train_epochs")
    else:
        get.copy(done, {"num_train_epochs": "num_epochs"})
    if (length := get("max_length")) is not None:
        for key in ("data.max_prompt_tokens", "data.max_response_tokens"):
            done[key] = length, get.origin("max_length")
        get.notes.append(
            f"max_length ({length}): TRL cuts a row to this length; in raypo its prompt and its "
            "response may each have it, and longer rows are refused (data.too_long: error)."
        )
    else:
        for key in ("data.max_prompt_tokens", "data.max_response_tokens"):
            done[key] = TODO, "max_length None: the tokens of your longest row"
    done["data.too_long"] = "error", "max_length"
    if get.recipe == "dpo":
        get.copy(done, {"beta": "dpo.beta", "label_smoothing": "dpo.label_smoothing"})
        losses = get("loss_type")
        losses = [losses] if isinstance(losses, str) else losses
        is_known = len(losses) == 1 and losses[0] in _DPO_LOSSES
        done["dpo.loss"] = losses[0] if is_known else TODO, f"loss_type {losses}"
    if get.recipe == "sft":
        done["data.response_key"] = "completion", "TRL's column; conversations: messages_key"
    if get.recipe == "sft" and get("loss_type", "nll") != "nll":
        raise ConfigError(
            f"loss_type ({get('loss_type')}): raypo's SFT has the loss nll alone. Set it to nll."
        )
    if get("packing"):
        get.leave(
            "packing",
            "TRL counts a packed row as an example of the batch; raypo counts "
            "the examples in it, so learner.batch_size must be larger.",
        )


def _set_sampling(get: ForeignArguments, done: Settings) -> float:
    """Set the keys of GRPO or RLOO, and return the optimizer steps in a step of raypo."""
    samples = get.number("num_generations")
    device = get("per_device_train_batch_size")
    own = device * get("gradient_accumulation_steps")
    generated = get("generation_batch_size")
    per_generation = get("steps_per_generation") or get("gradient_accumulation_steps")
    # A config of TRL has the numbers of the process that made it.
    processes = generated / (device * per_generation) if generated else 1
    generated = generated or device * per_generation
    what = f"of {processes:g} process{'es' * (processes > 1)} in this config"
    get.copy(done, {"num_generations": "rollout.samples_per_prompt"})
    done["rollout.prompts_per_step"] = (
        int(generated // samples) if generated % samples == 0 else TODO,
        f"{generated} of generation_batch_size (steps_per_generation {per_generation}) / "
        f"{samples:g} of num_generations, {what}",
    )
    done["ppo.minibatch_size"] = (
        int(own * processes),
        f"per_device_train_batch_size x gradient_accumulation_steps, {what}",
    )
    get.notes.append(
        f"rollout.prompts_per_step, ppo.minibatch_size: {what}. TRL started on more processes has "
        "more responses in both: multiply them."
    )
    updates = max(generated / (own * processes), 1) * get("num_iterations")
    get.copy(done, {"num_iterations": "ppo.num_epochs"})
    if get.kind == "RLOOConfig":
        _set_rloo(get, done, updates)
    else:
        _set_loss(get, done)
        _set_correction(get, done)
    if get("cast_lm_head_to_fp32"):
        done["model.head_dtype"] = "float32", "cast_lm_head_to_fp32"
    if not get("sync_ref_model"):
        get.pass_over("ref_model_mixup_alpha", "ref_model_sync_steps")
    prompt = get("max_prompt_length")  # of older versions
    limit = get("vllm_max_model_length")
    response = get("max_completion_length")
    done["data.too_long"] = "error", "TRL skips no prompt"
    if prompt is not None:
        get.copy(done, {"max_prompt_length": "data.max_prompt_tokens"})
        get.leave("max_prompt_length", "TRL cuts longer prompts; raypo refuses them.")
    elif limit and response:
        done["data.max_prompt_tokens"] = (
            limit - response,
            "vllm_max_model_length - max_completion_length",
        )
    else:
        done["data.max_prompt_tokens"] = TODO, "the tokens of your longest prompt: TRL has no limit"
    top_k = get("top_k") or 0
    done["rollout.top_k"] = (top_k if top_k > 0 else None), "top_k"
    if get("max_tool_calling_iterations") is not None:
        get.used.discard("max_tool_calling_iterations")
    if get("shuffle_dataset"):
        get.pass_over("shuffle_dataset")
    steps = get("max_steps") / updates
    epochs = get.number("num_train_epochs")
    if steps > 0:
        done["num_steps"] = math.ceil(steps), f"{get('max_steps')} of max_steps / {updates:g}"
        get.pass_over("num_train_epochs")
    else:
        done["num_steps"] = get.steps(done, epochs, get.origin("num_train_epochs"))
    return updates


def _set_rloo(get: ForeignArguments, done: Settings, updates: float) -> None:
    """Set the keys of RLOO's loss."""
    done["ppo.preset"] = "rloo", "RLOOConfig"
    get.copy(done, {"beta": "ppo.kl.coef", "epsilon": "ppo.clip_low"})
    name = "epsilon" if get("epsilon_high") is None else "epsilon_high"
    done["ppo.clip_high"] = get(name), get.origin(name)
    if updates > 1:  # else every ratio is 1
        why = "TRL takes the ratio of a whole response; ppo of each token, gspo their mean"
        done["ppo.policy_loss"] = TODO, f"RLOOConfig, {updates:g} updates of a batch: {why}"
    if get("normalize_advantages"):
        done["ppo.advantage"] = TODO, "normalize_advantages: raypo's rloo has no deviation"
    bounds = get("reward_clip_range")
    if isinstance(bounds, list | tuple) and len(bounds) == 2:
        names = ("ppo.shaping.clip_low", "ppo.shaping.clip_high")
        done |= {key: (v, "reward_clip_range") for key, v in zip(names, bounds, strict=True)}
    else:
        get.used.discard("reward_clip_range")
    norm, length = get("max_grad_norm"), get("max_completion_length")
    if norm and length:  # TRL sums the losses of a response's tokens
        origin = "max_grad_norm / max_completion_length, by which raypo's loss is smaller"
        done["learner.max_grad_norm"] = norm / length, origin


def _set_loss(get: ForeignArguments, done: Settings) -> None:
    """Set the keys of GRPO's loss."""
    done["ppo.preset"] = "grpo", "GRPOConfig"
    get.copy(done, {"beta": "ppo.kl.coef", "epsilon": "ppo.clip_low"})
    get.copy(done, {"delta": "ppo.dual_clip"})
    _set_policy_loss(get, done)
    _set_advantage(get, done)
    if get("beta") and get("use_bias_correction_kl") and not get.lacks("use_bias_correction_kl"):
        origin = get.origin("use_bias_correction_kl")
        done["ppo.kl.importance_weights"] = True, origin
    get.pass_over("use_bias_correction_kl")


def _set_policy_loss(get: ForeignArguments, done: Settings) -> None:
    """Set the policy's loss, its mean and its clip."""
    loss, high = get("loss_type"), get("epsilon_high")
    if get.lacks("loss_type"):
        loss = "a version of TRL without it"
    bound, origin = (get("epsilon"), "epsilon") if high is None else (high, "epsilon_high")
    done["ppo.clip_high"] = bound, get.origin(origin)
    mean = _LOSS_TYPES.get(loss, TODO)
    done["ppo.aggregation"] = mean, get.origin("loss_type") if mean != TODO else f"loss_type {loss}"
    if loss in ("cispo", "sapo", "vespo"):
        done["ppo.policy_loss"] = loss, get.origin("loss_type")
    if loss in ("sapo", "vespo"):  # they have no clip
        del done["ppo.clip_low"], done["ppo.clip_high"]
        get.pass_over("epsilon", "epsilon_high")
    elif loss == "cispo":  # TRL bounds the weight itself, raypo its excess over 1
        excess = (TODO, "epsilon_high - 1: TRL bounds the weight itself")
        done["ppo.clip_high"] = excess if high is None else (high - 1, "epsilon_high - 1")
        del done["ppo.clip_low"]
        get.pass_over("epsilon")
    elif mean == TODO and loss not in _LOSS_TYPES:
        done["ppo.policy_loss"] = TODO, f"loss_type {loss}: docs/methods.md lists the losses"
    if get("importance_sampling_level") == "sequence":
        done["ppo.policy_loss"] = "gspo", "importance_sampling_level"
    elif get("importance_sampling_level") != "token":
        why = f"importance_sampling_level {get('importance_sampling_level')}"
        done["ppo.policy_loss"] = TODO, why


def _set_advantage(get: ForeignArguments, done: Settings) -> None:
    """Set the advantage and the entropy bonus."""
    scale: Any = get("scale_rewards")
    scale = {True: "group", False: "none"}.get(scale, scale)
    advantages = {"group": "grpo", "none": "dr_grpo"}
    what = f"scale_rewards {scale}: grpo divides by the group's deviation, dr_grpo by none"
    done["ppo.advantage"] = advantages.get(scale, TODO), what
    if get("multi_objective_aggregation") == "normalize_then_sum":
        done["ppo.advantage"] = "gdpo", "multi_objective_aggregation"
        done["ppo.part_weights"] = TODO, "{name of a reward function: its reward_weights}"
    if get("use_adaptive_entropy"):
        names = {"entropy_target": "ppo.entropy_target", "entropy_coef_delta": "ppo.entropy_delta"}
        origin = get.origin("use_adaptive_entropy")
        done |= {key: (get(n), f"{origin}, {get.origin(n)}") for n, key in names.items()}
    else:
        get.pass_over("use_adaptive_entropy", "entropy_target", "entropy_coef_delta")
        get.pass_over("entropy_coef_min", "entropy_coef_max")


def _set_correction(get: ForeignArguments, done: Settings) -> None:
    """Set the correction of vLLM's log-probs, which TRL applies by default."""
    name = "vllm_importance_sampling_"
    is_corrected = get(f"{name}correction") and not get.lacks(f"{name}correction")
    if not get("use_vllm") or not is_corrected:
        names = ("correction", "mode", "clip_max", "clip_min")
        get.pass_over(*[f"{name}{suffix}" for suffix in names])
        return
    if get("loss_type") == "vespo":
        why = "TRL puts these ratios into the kernel of vespo: none, or ppo.old_log_probs: engine"
        done["ppo.correction.kind"] = TODO, f"{name}correction: {why}"
        return
    mode = "token_truncate" if get.lacks(f"{name}mode") else get(f"{name}mode")
    kind, origin = _CORRECTIONS.get(mode, TODO), f"{get.origin(f'{name}mode')} {mode}"
    done["ppo.correction.kind"] = kind, origin
    low, high = get(f"{name}clip_min"), get(f"{name}clip_max")
    if kind == "icepop":
        done["ppo.correction.low"] = low or 0.0, get.origin(f"{name}clip_min")
        done["ppo.correction.high"] = high, get.origin(f"{name}clip_max")
    elif kind != TODO:
        done["ppo.correction.cap"] = high, get.origin(f"{name}clip_max")
        get.used.discard(f"{name}clip_min")
    if mode == "sequence_mask":
        get.notes.append(
            f"{name}mode (sequence_mask): ppo.correction.kind. TRL drops responses whose ratio is "
            f"above {high:g}; raypo gives them the weight {high:g}. Other responses have the same "
            "weight in both."
        )


def _set_schedule(get: ForeignArguments, done: Settings, updates: float) -> None:
    """Set the learning-rate schedule, and the keys whose values are numbers of steps.

    Args:
        get: Lookup of TRL's fields.
        done: Settings so far.
        updates: Optimizer steps in a step of raypo. If there are several, TRL's numbers of steps
            are not translated, except the warm-up, and each becomes a note.
    """
    kind, options = get("lr_scheduler_type"), get("lr_scheduler_kwargs") or {}
    get.set_lr_schedule(done, "lr_scheduler_type")
    if options and not (kind == "cosine_with_min_lr" and set(options) == {"min_lr_rate"}):
        get.used.discard("lr_scheduler_kwargs")
    elif options:
        done["learner.lr_floor"] = options["min_lr_rate"], "lr_scheduler_kwargs"
    if get("eval_strategy") == "steps" and updates == 1:
        every = get("eval_steps") or get("logging_steps")
        done["eval.every"] = every, get.origin("eval_steps")
    else:
        get.pass_over("eval_steps")
    if get("eval_strategy") == "no":
        get.pass_over("eval_strategy", "per_device_eval_batch_size")
    if get("save_strategy") == "steps" and updates == 1 and isinstance(get("save_steps"), int):
        get.copy(done, {"save_steps": "checkpoint.every"})
    warmup = get("warmup_steps") or get("warmup_ratio") or 0
    if kind == "constant" or not warmup:  # Hugging Face's constant schedule ignores the warm-up
        get.pass_over("warmup_steps", "warmup_ratio")
    elif warmup < 1:
        get.set_warmup(done, "warmup_steps", warmup)
    else:
        done["learner.lr_warmup_steps"] = (
            int(warmup) if updates == 1 else math.ceil(warmup / updates),
            f"{warmup} of warmup_steps / {updates:g} updates of a step",
        )


def _set_logging(get: ForeignArguments, done: Settings) -> None:
    report_to = get("report_to")
    sinks = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if not get.has("report_to") or not {*sinks} <= {*_SINKS, "none", "all"}:
        get.used.discard("report_to")
        return
    for sink in sinks:
        if sink in _SINKS:
            done[f"logging.{sink}"] = _SINKS[sink], "report_to"
