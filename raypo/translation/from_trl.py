"""Keys that are computed from TRL's arguments."""

from __future__ import annotations

import ast
import math
from pathlib import Path

from raypo.translation.foreign_arguments import DEFAULT, TODO, Arguments, Settings

_LOSS_TYPES = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "constant"}
_LOSS_TYPES |= dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), "token_mean")
"""Value of ppo.aggregation for each loss_type of TRL."""
_CORRECTIONS = {"token_truncate": "tis", "sequence_truncate": "sequence_tis"}
_CORRECTIONS |= {"token_mask": "icepop", "sequence_mask": "sequence_tis"}
"""Value of ppo.correction.kind for each vllm_importance_sampling_mode of TRL."""
_IDLE = {"eval_strategy": ("no", "steps"), "vllm_mode": ("colocate",)}
"""Values of TRL's arguments that need no counterpart, besides those that the table in
`raypo.config.migration` marks."""
_OBJECTS = {"model": "model.policy", "train_dataset": "data.prompts"}
_LEARNING_RATES = {"sft": 2e-5, "dpo": 1e-6, "reward_model": 1e-4}
"""TRL's default learning rate for each recipe that learns from examples."""
_BATCH = "per_device_train_batch_size x gradient_accumulation_steps"
_ONE_PROCESS = "these count one process. Multiply by the number of processes."
_DPO = {"beta": "beta", "loss_type": "loss"}


def from_trl(get: Arguments, recipe: str) -> tuple[Settings, list[str]]:
    """Return the keys that are computed from TRL's arguments, and notes for the user."""
    done: Settings = {"recipe": (recipe, "the trainer")}
    notes: list[str] = []
    held_out = "eval.pairs" if recipe == "dpo" else "eval.prompts"
    for name, key in (*_OBJECTS.items(), ("eval_dataset", held_out)):
        if (value := get(name)) is not None:
            done[key] = value, name
    if folder := get("output_dir"):
        done["name"], done["storage_path"] = (
            (each, "output_dir") for each in (Path(folder).name, str(Path(folder).parent))
        )
    updates = 1.0
    if recipe == "ppo":
        updates = _set_batches(get, done, notes)
        done |= _loss(get, notes) | _correction(get, notes)
        notes += _several_rewards(get)
    else:
        done |= _examples(get, recipe, notes)
    steps = get("max_steps") / updates
    if steps > 0:
        done["num_steps"] = math.ceil(steps), "max_steps"
    done |= _schedule(get, steps, updates)
    done |= _lora(get, notes)
    done |= _logging(get)
    if isinstance(get.given.get("bf16"), bool) and "fp16" not in get.given:
        done["model.dtype"] = "bfloat16" if get("bf16") else "float32", "bf16"
    idle = [name for name, values in _IDLE.items() if str(get.given.get(name)) in values]
    get.used.update(idle)
    get.idle += [f"{name} ({get.given[name]})" for name in idle]
    return done, notes


def _examples(get: Arguments, recipe: str, notes: list[str]) -> Settings:
    """Return the keys of a recipe that learns from examples."""
    done: Settings = {"learner.batch_size": (_batch(get), _BATCH)}
    notes.append(f"learner.batch_size: {_ONE_PROCESS}")
    if "learning_rate" not in get.given:
        done["learner.lr"] = _LEARNING_RATES[recipe], f"learning_rate{DEFAULT}"
    if get("max_steps") <= 0:
        done["num_epochs"] = get("num_train_epochs"), "num_train_epochs"
    given = [name for name in _DPO if name in get.given and recipe == "dpo"]
    return done | {f"dpo.{_DPO[name]}": (get(name), name) for name in given}


def _batch(get: Arguments) -> int:
    return get("per_device_train_batch_size") * get("gradient_accumulation_steps")


def _set_batches(get: Arguments, done: Settings, notes: list[str]) -> float:
    """Set the batch sizes of GRPO in `done`, and return the optimizer steps in a step of raypo.

    The result is NaN if it depends on the number of processes.
    """
    batch, samples, repeated = _batch(get), get("num_generations"), get("num_iterations")
    generated = get("generation_batch_size", math.nan)
    # The other batch sizes are those of one process.
    counts_all = get.given.get("generation_batch_size") is not None
    if not counts_all:
        steps = get("steps_per_generation", get("gradient_accumulation_steps"))
        generated = get("per_device_train_batch_size") * steps
    done["rollout.samples_per_prompt"] = samples, "num_generations"
    done["rollout.prompts_per_step"] = (
        generated // samples,
        "responses of a generation / num_generations",
    )
    done["ppo.minibatch_size"] = batch, _BATCH
    names = ["ppo.minibatch_size"]
    if generated % samples > 0:  # False for NaN, a number that is not known
        times = "" if counts_all else " x processes"
        done["rollout.prompts_per_step"] = (
            TODO,
            f"{generated} responses{times} / {samples} of num_generations",
        )
    elif not counts_all:
        names.insert(0, "rollout.prompts_per_step")
    notes.append(f"{' and '.join(names)}: {_ONE_PROCESS}")
    if not counts_all:
        return max(generated // batch, 1) * repeated
    if get("max_steps") > 0:
        size, own = ("?" if each != each else each for each in (generated, batch))
        done["num_steps"] = (
            TODO,
            f"{get('max_steps')} of max_steps / ({size} of generation_batch_size / "
            f"({own} x processes) x {repeated} of num_iterations)",
        )
    return math.nan


def _loss(get: Arguments, notes: list[str]) -> Settings:
    """Return the keys of GRPO's loss."""
    done: Settings = {"ppo.preset": ("grpo", "GRPOTrainer"), "ppo.kl.coef": (get("beta"), "beta")}
    done["ppo.num_epochs"] = get("num_iterations"), "num_iterations"
    loss, low, high = get("loss_type"), get("epsilon"), get("epsilon_high")
    if isinstance(get.given.get("epsilon_high"), ast.AST):
        high = math.nan
    done["ppo.clip_low"] = low, "epsilon"
    done["ppo.clip_high"] = (low, "epsilon") if high is None else (high, "epsilon_high")
    if loss in _LOSS_TYPES:
        done["ppo.aggregation"] = _LOSS_TYPES[loss], "loss_type"
        if loss in ("cispo", "sapo", "vespo"):
            done["ppo.policy_loss"] = loss, "loss_type"
        if loss == "cispo":  # TRL bounds the weight itself, raypo its excess over 1
            bound = (4.0, "ScaleRL's 5 - 1") if high is None else (high - 1, "epsilon_high - 1")
            done["ppo.clip_high"] = bound
    else:
        notes.append(
            f"loss_type ({loss}): no counterpart is known; docs/methods.md lists all losses."
        )
    if (scale := get("scale_rewards")) in (False, "none"):
        done["ppo.advantage"] = "dr_grpo", "scale_rewards"
    elif scale not in (True, "group"):
        notes.append(f"scale_rewards ({scale}): ppo.advantage. docs/methods.md lists its values.")
    return done


def _correction(get: Arguments, notes: list[str]) -> Settings:
    """Return the keys of the correction of vLLM's log-probs, which TRL applies by default."""
    done: Settings = {}
    correction = "vllm_importance_sampling_"
    is_corrected, mode = get(f"{correction}correction", True), get(f"{correction}mode")
    cap, has_vllm = get(f"{correction}clip_max"), get.given.get("use_vllm") is True
    if has_vllm and is_corrected and mode not in _CORRECTIONS:
        notes.append(f"{correction}mode ({mode}): ppo.correction.kind. No counterpart is known.")
    elif has_vllm and is_corrected:
        kind = _CORRECTIONS[mode]
        done["ppo.correction.kind"] = kind, f"{correction}mode with use_vllm"
        bound = "ppo.correction.high" if kind == "icepop" else "ppo.correction.cap"
        done[bound] = cap, f"{correction}clip_max"
        if kind == "icepop":
            done["ppo.correction.low"] = 0.0, "no lower bound in TRL"
        if mode == "sequence_mask":
            notes.append(
                f"{correction}mode (sequence_mask, TRL's default): TRL drops responses whose ratio "
                f"is above {cap:g}; ppo.correction gives them the weight {cap:g}. Other responses "
                f"have the same weight in both."
            )
    return done


def _schedule(get: Arguments, steps: float, updates: float) -> Settings:
    """Return the learning-rate schedule, and the keys whose values are numbers of steps.

    Args:
        get: Lookup of TRL's arguments.
        steps: Steps of the run; 0 or less if unknown.
        updates: Optimizer steps in a step of raypo. If there are several, TRL's step counts are not
            translated, and each becomes a note.
    """
    done: Settings = {}
    if get.given.get("lr_scheduler_type") == "constant_with_warmup":
        get.used.add("lr_scheduler_type")
        done["learner.lr_schedule"] = "constant", "lr_scheduler_type"
    counts = {"save_steps": "checkpoint.every"}
    if get.given.get("eval_strategy") == "steps":
        counts["eval_steps"] = "eval.every"
    for name, key in counts.items():
        if updates == 1 and isinstance(get.given.get(name), int):
            done[key] = get(name), name
    warmup = get.given.get("warmup_steps") or get.given.get("warmup_ratio")
    if isinstance(warmup, float) and warmup < 1 and steps > 0:
        origin = f"warmup_ratio {warmup:g} of max_steps"
        done["learner.lr_warmup_steps"] = math.ceil(warmup * math.ceil(steps)), origin
    elif isinstance(warmup, int) and updates == 1:
        done["learner.lr_warmup_steps"] = warmup, "warmup_steps"
    if "learner.lr_warmup_steps" in done:
        get.used.update(("warmup_steps", "warmup_ratio"))
    return done


def _lora(get: Arguments, notes: list[str]) -> Settings:
    """Return the keys of a LoraConfig, with peft's defaults."""
    if not get("peft_config"):
        return {}
    done: Settings = {
        key: (get(name), name)
        for name, key in (("r", "model.lora.rank"), ("lora_alpha", "model.lora.alpha"))
    }
    if get.given.get("target_modules") is None:
        get.used.add("target_modules")
        done["model.lora.target_modules"] = ["q_proj", "v_proj"], "peft's default"
        notes.append(
            "target_modules (None): peft chooses by the architecture: q_proj and v_proj for "
            "Llama, Qwen, Mistral and Gemma. For other models set model.lora.target_modules; "
            "raypo's default is all-linear."
        )
    return done


def _logging(get: Arguments) -> Settings:
    given = get.given.get("report_to")
    sinks = [given] if isinstance(given, str) else given
    if not isinstance(sinks, list) or not {*sinks} <= {"wandb", "mlflow", "tensorboard", "none"}:
        return {}
    get.used.add("report_to")
    values = {"wandb": {}, "mlflow": {}, "tensorboard": True}
    done: Settings = {
        f"logging.{each}": (values[each], "report_to") for each in sinks if each in values
    }
    return done or {"logging.tensorboard": (False, "report_to")}


def _several_rewards(get: Arguments) -> list[str]:
    """Return a note with a function that adds up several or weighted `reward_funcs`, if any."""
    given = get.given.get("reward_funcs")
    each = given.elts if isinstance(given, ast.List | ast.Tuple) else []
    names = [name.id for name in each if isinstance(name, ast.Name)]
    weights = get.given.get("reward_weights") or [1.0] * len(each)
    if not names or len(names) != len(each) or not isinstance(weights, list):
        return []
    if len(weights) != len(names) or (len(names) == 1 and weights == [1.0]):
        return []
    get.used.update(("reward_funcs", "reward_weights"))
    scores = [f"s{place}" for place in range(1, len(names) + 1)]
    total = " + ".join(f"{weight} * {each}" for weight, each in zip(weights, scores, strict=True))
    parts = ", ".join(f'"{name}": {each}' for name, each in zip(names, scores, strict=True))
    calls = ", ".join(f"{name}(completions=completions, **columns)" for name in names)
    return [
        f"reward_funcs ([{', '.join(names)}]), reward_weights ({weights}): reward.function takes "
        "one function. Write it in the file that has these functions, and set reward.function: "
        f'file.py:reward. def reward(completions, **columns): return [{{"score": {total}, '
        f"{parts}}} for {', '.join(scores)} in zip({calls})]"
    ]
