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


def from_trl(foreign: ForeignArguments) -> Settings:
    """Return the keys that are computed from the fields of a config of TRL."""
    settings: Settings = {"recipe": (foreign.recipe, "the config's class")}
    folder = foreign.get("output_dir") or "trainer_output"
    if foreign.has("output_dir") and folder != "trainer_output":
        foreign.set_folder(settings, "output_dir")
    foreign.ignore("output_dir")
    if foreign.arguments.get("run_name") == folder:  # the default of older versions
        del foreign.arguments["run_name"]
    elif run_name := foreign.get("run_name"):
        settings["name"] = run_name, "run_name"
    if not (foreign.get("accelerator_config") or {}).get("split_batches"):
        foreign.arguments.pop("accelerator_config", None)  # it has only defaults
    if foreign.arguments.get("pad_to_multiple_of") is None:
        foreign.arguments.pop("pad_to_multiple_of", None)
    updates_per_step: float = 1
    if foreign.recipe == "ppo":
        updates_per_step = _set_sampling(foreign, settings)
    else:
        _set_examples(foreign, settings)
    _set_schedule(foreign, settings, updates_per_step)
    betas = [foreign.get("adam_beta1"), foreign.get("adam_beta2")]
    is_given = foreign.has("adam_beta1") or foreign.has("adam_beta2")
    origin = "adam_beta1, adam_beta2" if is_given else foreign.origin("adam_beta1")
    settings["learner.adam_betas"] = betas, origin
    if foreign.get("optim") in _ADAMW:
        foreign.ignore("optim")
    elif foreign.get("optim") == "muon":
        settings["learner.optimizer"] = "muon", "optim"
    else:
        settings["learner.optimizer"] = TODO, f"optim {foreign.get('optim')}: adamw or muon"
    is_bf16 = foreign.get("bf16")
    if isinstance(is_bf16, bool) and not foreign.get("fp16"):
        settings["model.dtype"] = "bfloat16" if is_bf16 else "float32", "bf16"
    _set_logging(foreign, settings)
    return settings


def _set_examples(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of a recipe that learns from examples (SFT, DPO, reward model)."""
    batch = foreign.get("per_device_train_batch_size") * foreign.get("gradient_accumulation_steps")
    processes = foreign.arguments.pop("world_size", None)  # absent from the JSON
    settings["learner.batch_size"] = (
        batch * processes if processes else TODO,
        f"{batch} of per_device_train_batch_size x gradient_accumulation_steps, x processes",
    )
    if foreign.get("max_steps") > 0:
        foreign.copy(settings, {"max_steps": "num_steps"})
        foreign.ignore("num_train_epochs")
    else:
        foreign.copy(settings, {"num_train_epochs": "num_epochs"})
    if (max_length := foreign.get("max_length")) is not None:
        for key in ("data.max_prompt_tokens", "data.max_response_tokens"):
            settings[key] = max_length, foreign.origin("max_length")
        foreign.notes.append(
            f"max_length ({max_length}): TRL cuts a row to this length; in raypo its prompt and "
            "its response may each have it, and longer rows are refused (data.too_long: error)."
        )
    else:
        for key in ("data.max_prompt_tokens", "data.max_response_tokens"):
            settings[key] = TODO, "max_length None: the tokens of your longest row"
    settings["data.too_long"] = "error", "max_length"
    if foreign.recipe == "dpo":
        foreign.copy(settings, {"beta": "dpo.beta", "label_smoothing": "dpo.label_smoothing"})
        losses = foreign.get("loss_type")
        losses = [losses] if isinstance(losses, str) else losses
        is_known = len(losses) == 1 and losses[0] in _DPO_LOSSES
        settings["dpo.loss"] = losses[0] if is_known else TODO, f"loss_type {losses}"
    if foreign.recipe == "sft":
        settings["data.response_key"] = "completion", "TRL's column; conversations: messages_key"
    if foreign.recipe == "sft" and foreign.get("loss_type", "nll") != "nll":
        raise ConfigError(
            f"loss_type ({foreign.get('loss_type')}): raypo's SFT has the loss nll alone. Set it "
            "to nll."
        )
    if foreign.get("packing"):
        foreign.leave_to_user(
            "packing",
            "TRL counts a packed row as an example of the batch; raypo counts "
            "the examples in it, so learner.batch_size must be larger.",
        )


def _set_sampling(foreign: ForeignArguments, settings: Settings) -> float:
    """Set the keys of GRPO or RLOO, and return the optimizer steps per step of raypo."""
    samples_per_prompt = foreign.number("num_generations")
    device_microbatch = foreign.get("per_device_train_batch_size")
    device_batch_size = device_microbatch * foreign.get("gradient_accumulation_steps")
    generation_batch = foreign.get("generation_batch_size")
    per_generation = foreign.get("steps_per_generation") or foreign.get(
        "gradient_accumulation_steps"
    )
    # A config of TRL has the numbers of the process that made it.
    processes = generation_batch / (device_microbatch * per_generation) if generation_batch else 1
    generation_batch = generation_batch or device_microbatch * per_generation
    processes_text = f"of {processes:g} process{'es' * (processes > 1)} in this config"
    foreign.copy(settings, {"num_generations": "rollout.samples_per_prompt"})
    settings["rollout.prompts_per_step"] = (
        int(generation_batch // samples_per_prompt)
        if generation_batch % samples_per_prompt == 0
        else TODO,
        f"{generation_batch} of generation_batch_size (steps_per_generation {per_generation}) / "
        f"{samples_per_prompt:g} of num_generations, {processes_text}",
    )
    settings["ppo.minibatch_size"] = (
        int(device_batch_size * processes),
        f"per_device_train_batch_size x gradient_accumulation_steps, {processes_text}",
    )
    foreign.notes.append(
        f"rollout.prompts_per_step, ppo.minibatch_size: {processes_text}. TRL started on more "
        "processes has more responses in both: multiply them."
    )
    updates_per_step = max(generation_batch / (device_batch_size * processes), 1) * foreign.get(
        "num_iterations"
    )
    foreign.copy(settings, {"num_iterations": "ppo.num_epochs"})
    if foreign.kind == "RLOOConfig":
        _set_rloo(foreign, settings, updates_per_step)
    else:
        _set_loss(foreign, settings)
        _set_correction(foreign, settings)
    if foreign.get("cast_lm_head_to_fp32"):
        settings["model.head_dtype"] = "float32", "cast_lm_head_to_fp32"
    if not foreign.get("sync_ref_model"):
        foreign.ignore("ref_model_mixup_alpha", "ref_model_sync_steps")
    max_prompt_length = foreign.get("max_prompt_length")  # an argument of older versions
    max_model_length = foreign.get("vllm_max_model_length")
    max_completion_length = foreign.get("max_completion_length")
    settings["data.too_long"] = "error", "TRL skips no prompt"
    if max_prompt_length is not None:
        foreign.copy(settings, {"max_prompt_length": "data.max_prompt_tokens"})
        foreign.leave_to_user("max_prompt_length", "TRL cuts longer prompts; raypo refuses them.")
    elif max_model_length and max_completion_length:
        settings["data.max_prompt_tokens"] = (
            max_model_length - max_completion_length,
            "vllm_max_model_length - max_completion_length",
        )
    else:
        settings["data.max_prompt_tokens"] = (
            TODO,
            "the tokens of your longest prompt: TRL has no limit",
        )
    top_k = foreign.get("top_k") or 0
    settings["rollout.top_k"] = (top_k if top_k > 0 else None), "top_k"
    if foreign.get("max_tool_calling_iterations") is not None:
        foreign.used.discard("max_tool_calling_iterations")
    if foreign.get("shuffle_dataset"):
        foreign.ignore("shuffle_dataset")
    steps = foreign.get("max_steps") / updates_per_step
    epochs = foreign.number("num_train_epochs")
    if steps > 0:
        settings["num_steps"] = (
            math.ceil(steps),
            f"{foreign.get('max_steps')} of max_steps / {updates_per_step:g}",
        )
        foreign.ignore("num_train_epochs")
    else:
        settings["num_steps"] = foreign.steps(settings, epochs, foreign.origin("num_train_epochs"))
    return updates_per_step


def _set_rloo(foreign: ForeignArguments, settings: Settings, updates_per_step: float) -> None:
    """Set the keys of RLOO's loss."""
    settings["ppo.preset"] = "rloo", "RLOOConfig"
    foreign.copy(settings, {"beta": "ppo.kl.coef", "epsilon": "ppo.clip_low"})
    name = "epsilon" if foreign.get("epsilon_high") is None else "epsilon_high"
    settings["ppo.clip_high"] = foreign.get(name), foreign.origin(name)
    if updates_per_step > 1:  # else every ratio is 1
        hint = "TRL takes the ratio of a whole response; ppo of each token, gspo their mean"
        settings["ppo.policy_loss"] = (
            TODO,
            f"RLOOConfig, {updates_per_step:g} updates of a batch: {hint}",
        )
    if foreign.get("normalize_advantages"):
        settings["ppo.advantage"] = TODO, "normalize_advantages: raypo's rloo has no deviation"
    bounds = foreign.get("reward_clip_range")
    if isinstance(bounds, list | tuple) and len(bounds) == 2:
        clip_keys = ("ppo.shaping.clip_low", "ppo.shaping.clip_high")
        settings |= {
            key: (bound, "reward_clip_range") for key, bound in zip(clip_keys, bounds, strict=True)
        }
    else:
        foreign.used.discard("reward_clip_range")
    max_grad_norm, max_completion_length = (
        foreign.get("max_grad_norm"),
        foreign.get("max_completion_length"),
    )
    if max_grad_norm and max_completion_length:  # TRL sums the losses of a response's tokens
        origin = "max_grad_norm / max_completion_length, by which raypo's loss is smaller"
        settings["learner.max_grad_norm"] = max_grad_norm / max_completion_length, origin


def _set_loss(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the keys of GRPO's loss."""
    settings["ppo.preset"] = "grpo", "GRPOConfig"
    foreign.copy(settings, {"beta": "ppo.kl.coef", "epsilon": "ppo.clip_low"})
    foreign.copy(settings, {"delta": "ppo.dual_clip"})
    _set_policy_loss(foreign, settings)
    _set_advantage(foreign, settings)
    if (
        foreign.get("beta")
        and foreign.get("use_bias_correction_kl")
        and not foreign.lacks("use_bias_correction_kl")
    ):
        origin = foreign.origin("use_bias_correction_kl")
        settings["ppo.kl.importance_weights"] = True, origin
    foreign.ignore("use_bias_correction_kl")


def _set_policy_loss(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the policy loss, its aggregation and its clip bounds."""
    loss, epsilon_high = foreign.get("loss_type"), foreign.get("epsilon_high")
    if foreign.lacks("loss_type"):
        loss = "a version of TRL without it"
    clip_high, origin = (
        (foreign.get("epsilon"), "epsilon")
        if epsilon_high is None
        else (epsilon_high, "epsilon_high")
    )
    settings["ppo.clip_high"] = clip_high, foreign.origin(origin)
    aggregation = _LOSS_TYPES.get(loss, TODO)
    settings["ppo.aggregation"] = (
        aggregation,
        foreign.origin("loss_type") if aggregation != TODO else f"loss_type {loss}",
    )
    if loss in ("cispo", "sapo", "vespo"):
        settings["ppo.policy_loss"] = loss, foreign.origin("loss_type")
    if loss in ("sapo", "vespo"):  # these losses have no clip
        del settings["ppo.clip_low"], settings["ppo.clip_high"]
        foreign.ignore("epsilon", "epsilon_high")
    elif loss == "cispo":  # TRL bounds the weight itself, raypo its excess over 1
        excess = (TODO, "epsilon_high - 1: TRL bounds the weight itself")
        settings["ppo.clip_high"] = (
            excess if epsilon_high is None else (epsilon_high - 1, "epsilon_high - 1")
        )
        del settings["ppo.clip_low"]
        foreign.ignore("epsilon")
    elif aggregation == TODO and loss not in _LOSS_TYPES:
        settings["ppo.policy_loss"] = TODO, f"loss_type {loss}: docs/methods.md lists the losses"
    if foreign.get("importance_sampling_level") == "sequence":
        settings["ppo.policy_loss"] = "gspo", "importance_sampling_level"
    elif foreign.get("importance_sampling_level") != "token":
        hint = f"importance_sampling_level {foreign.get('importance_sampling_level')}"
        settings["ppo.policy_loss"] = TODO, hint


def _set_advantage(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the advantage and the entropy bonus."""
    scale: Any = foreign.get("scale_rewards")
    scale = {True: "group", False: "none"}.get(scale, scale)
    advantages = {"group": "grpo", "none": "dr_grpo"}
    hint = f"scale_rewards {scale}: grpo divides by the group's deviation, dr_grpo by none"
    settings["ppo.advantage"] = advantages.get(scale, TODO), hint
    if foreign.get("multi_objective_aggregation") == "normalize_then_sum":
        settings["ppo.advantage"] = "gdpo", "multi_objective_aggregation"
        settings["ppo.part_weights"] = TODO, "{name of a reward function: its reward_weights}"
    if foreign.get("use_adaptive_entropy"):
        keys = {"entropy_target": "ppo.entropy_target", "entropy_coef_delta": "ppo.entropy_delta"}
        origin = foreign.origin("use_adaptive_entropy")
        settings |= {
            key: (foreign.get(name), f"{origin}, {foreign.origin(name)}")
            for name, key in keys.items()
        }
    else:
        foreign.ignore("use_adaptive_entropy", "entropy_target", "entropy_coef_delta")
        foreign.ignore("entropy_coef_min", "entropy_coef_max")


def _set_correction(foreign: ForeignArguments, settings: Settings) -> None:
    """Set the correction of vLLM's log-probs, which TRL applies by default."""
    prefix = "vllm_importance_sampling_"
    is_corrected = foreign.get(f"{prefix}correction") and not foreign.lacks(f"{prefix}correction")
    if not foreign.get("use_vllm") or not is_corrected:
        suffixes = ("correction", "mode", "clip_max", "clip_min")
        foreign.ignore(*[f"{prefix}{suffix}" for suffix in suffixes])
        return
    if foreign.get("loss_type") == "vespo":
        hint = "TRL puts these ratios into the kernel of vespo: none, or ppo.old_log_probs: engine"
        settings["ppo.correction.kind"] = TODO, f"{prefix}correction: {hint}"
        return
    mode = "token_truncate" if foreign.lacks(f"{prefix}mode") else foreign.get(f"{prefix}mode")
    kind, origin = _CORRECTIONS.get(mode, TODO), f"{foreign.origin(f'{prefix}mode')} {mode}"
    settings["ppo.correction.kind"] = kind, origin
    low, high = foreign.get(f"{prefix}clip_min"), foreign.get(f"{prefix}clip_max")
    if kind == "icepop":
        settings["ppo.correction.low"] = low or 0.0, foreign.origin(f"{prefix}clip_min")
        settings["ppo.correction.high"] = high, foreign.origin(f"{prefix}clip_max")
    elif kind != TODO:
        settings["ppo.correction.cap"] = high, foreign.origin(f"{prefix}clip_max")
        foreign.used.discard(f"{prefix}clip_min")
    if mode == "sequence_mask":
        foreign.notes.append(
            f"{prefix}mode (sequence_mask): ppo.correction.kind. TRL drops responses whose ratio "
            f"is above {high:g}; raypo gives them the weight {high:g}. Other responses have the "
            "same weight in both."
        )


def _set_schedule(foreign: ForeignArguments, settings: Settings, updates_per_step: float) -> None:
    """Set the learning-rate schedule and the keys that count steps.

    Args:
        foreign: Fields of a TRL config.
        settings: Settings so far.
        updates_per_step: Optimizer steps per step of raypo. If it is above 1, only the warm-up is
            translated; the other step counts become notes.
    """
    kind, options = foreign.get("lr_scheduler_type"), foreign.get("lr_scheduler_kwargs") or {}
    foreign.set_lr_schedule(settings, "lr_scheduler_type")
    if options and not (kind == "cosine_with_min_lr" and set(options) == {"min_lr_rate"}):
        foreign.used.discard("lr_scheduler_kwargs")
    elif options:
        settings["learner.lr_floor"] = options["min_lr_rate"], "lr_scheduler_kwargs"
    if foreign.get("eval_strategy") == "steps" and updates_per_step == 1:
        eval_steps = foreign.get("eval_steps") or foreign.get("logging_steps")
        settings["eval.every"] = eval_steps, foreign.origin("eval_steps")
    else:
        foreign.ignore("eval_steps")
    if foreign.get("eval_strategy") == "no":
        foreign.ignore("eval_strategy", "per_device_eval_batch_size")
    if (
        foreign.get("save_strategy") == "steps"
        and updates_per_step == 1
        and isinstance(foreign.get("save_steps"), int)
    ):
        foreign.copy(settings, {"save_steps": "checkpoint.every"})
    warmup = foreign.get("warmup_steps") or foreign.get("warmup_ratio") or 0
    if kind == "constant" or not warmup:  # Hugging Face's constant schedule ignores the warm-up
        foreign.ignore("warmup_steps", "warmup_ratio")
    elif warmup < 1:
        foreign.set_warmup(settings, "warmup_steps", warmup)
    else:
        settings["learner.lr_warmup_steps"] = (
            int(warmup) if updates_per_step == 1 else math.ceil(warmup / updates_per_step),
            f"{warmup} of warmup_steps / {updates_per_step:g} updates of a step",
        )


def _set_logging(foreign: ForeignArguments, settings: Settings) -> None:
    report_to = foreign.get("report_to")
    sinks = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if not foreign.has("report_to") or not {*sinks} <= {*_SINKS, "none", "all"}:
        foreign.used.discard("report_to")
        return
    for sink in sinks:
        if sink in _SINKS:
            settings[f"logging.{sink}"] = _SINKS[sink], "report_to"
