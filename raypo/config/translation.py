"""Translation of a TRL script, or of a verl or OpenRLHF command, into a run file.

The script or command is read, not executed. A value is copied if the tables of
`raypo.config.migration` say that it has the same meaning. Batch sizes, the KL and the estimator are
computed here. Every other value becomes a note, and so does a value that raypo refuses. A required
key without a value is TODO, which raypo refuses until it is set.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from string import Template
from typing import Any

from yaml import YAMLError

from raypo.config.base import ConfigError, RunFile, known_keys, nested, parsed
from raypo.config.migration import Counterpart, rows_of
from raypo.config.recipe_config import RECIPES
from raypo.config.sources import DATA_FILES

Settings = dict[str, tuple[Any, str]]
"""Dotted key -> its value, and the name of the argument that it comes from."""
TRL_RECIPES = {"GRPO": "ppo", "SFT": "sft", "DPO": "dpo", "Reward": "reward_model"}
"""Prefix of the names of TRL's trainers and configs -> recipe."""
_LEARNED = ("ppo.", "rollout.", "data.max_", "dpo.", "learner.", "eval.temperature")
"""Prefixes of keys that change what is learned. If such a key is not given, the other project's
default is written into the run file."""
_NOT_LEARNED = ("rollout.engine.", "learner.zero_", "learner.activation_", "learner.max_tokens_")
_DEFAULT = "'s default"
_TODO = "TODO"
_COUNTED = ("num_steps", "learner.lr_warmup_steps")
"""Numbers that are TODO if the rows are not known."""
_EPOCHS = {"TRL": "num_train_epochs", "verl": "trainer.total_epochs"}
_EPOCHS |= {"OpenRLHF": "train.num_episodes"}
_WORDS = {
    **{"group_norm": "grpo", "reinforce_plus_plus": "reinforce"},
    **{"reinforce_plus_plus_baseline": "reinforce_baseline"},
    **{"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"},
    **{"seq-mean-token-sum-norm": "constant", "vanilla": "ppo", "geo_mean": "gmpo"},
    **{"low_var_kl": "k3", "mse": "k2", "kl": "k1"},
}
"""Value of verl or OpenRLHF -> value of raypo."""
_LOSS_TYPES = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "constant"}
_LOSS_TYPES |= dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), "token_mean")
"""TRL's loss_type -> ppo.aggregation."""
_CORRECTIONS = {"token_truncate": "tis", "sequence_truncate": "sequence_tis"}
_CORRECTIONS |= {"token_mask": "icepop", "sequence_mask": "sequence_tis"}
"""TRL's vllm_importance_sampling_mode -> ppo.correction.kind."""
_TRL_IDLE = {"eval_strategy": ("no", "steps"), "vllm_mode": ("colocate",)}
"""TRL's argument -> its values that need no counterpart, besides the table's."""


def translate(project: str, given: Mapping[str, Any], recipe: str = "ppo") -> str:
    """Return a run file. Comments give the origin of each key, and what was not translated.

    Args:
        project: TRL, verl or OpenRLHF.
        given: Argument of that project -> value. An `ast.AST` is an expression of unknown value.
        recipe: The recipe that the arguments are for.
    """
    known = known_keys(RECIPES[recipe])
    rows = [*rows_of(project), *(rows_of("peft") if project == "TRL" else ())]
    by_name = {name: row for row in rows for name in row.names}
    values = _Values(given, by_name)
    done, notes = _COMPUTED[project](values, recipe)
    epochs = values(_EPOCHS[project])
    for name in [name for name in given if name not in values.used]:
        row, value = by_name.get(name), given[name]
        keys = row.keys_in(known) if row else ()
        shown = ast.unparse(value) if isinstance(value, ast.AST) else value
        if row and row.is_same and keys and not isinstance(value, ast.AST):
            done |= {key: (value, name) for key in keys}
        elif row and (row.is_automatic or (not row.keys and row.default == str(shown).lower())):
            values.idle.append(f"{name} ({shown})")
        else:
            why = f"{' and '.join(keys)}. {row.note}" if row else "No counterpart is known."
            notes.append(f"{name} ({shown}): {why.removeprefix('. ').strip()}")
    done = {key: each for key, each in done.items() if each[0] == each[0]}  # not NaN
    for row in [row for row in rows if row.is_same and row.default]:
        for key in () if given.keys() & row.names else row.keys_in(known):
            is_idle = key.startswith("eval.") and "eval.prompts" not in done
            if key.startswith(_LEARNED) and not key.startswith(_NOT_LEARNED) and not is_idle:
                done.setdefault(key, (parsed(row.default), f"{row.names[0]}{_DEFAULT}"))
    if recipe == "ppo":
        done.setdefault("num_steps", _steps(epochs, _EPOCHS[project], done))
    config = _accepted(done, notes, recipe)
    required = [f"{key}: {why}" for key, (value, why) in done.items() if value == _TODO]
    head = [f"Translated from {project} by raypo init; keys not shown have raypo's defaults."]
    left = [" ".join(each.split()) for each in notes]  # a value may have several lines
    for title, each in (("REQUIRED, TODO below:", required), ("Left to you:", left)):
        head += [title, *(f"- {line}" for line in each)] if each else []
    head += [f"Needs nothing here: {', '.join(values.idle)}."] if values.idle else []
    text = config.to_yaml(shown=[key for key in done if _is_explicit(done[key], given)])
    return "\n".join([*(f"# {line}" for line in head), *_with_origins(text, done)]) + "\n"


def _set_todo(done: Settings, recipe: str) -> None:
    """Set the required keys that have no value to TODO."""
    for key, why in (
        ("name", "the run's folder is storage_path/name"),
        ("model.policy", "a folder or a hub id"),
        ("data.prompts", "files or a hub id"),
    ):
        done.setdefault(key, (_TODO, why))
    if recipe == "ppo" and not {"reward.function", "reward.url", "model.reward"} & done.keys():
        done["reward.function"] = _TODO, "file.py:name, or set model.reward or reward.url"
    if recipe == "ppo":
        done.setdefault("num_steps", (_TODO, "a number of rollout batches"))


def _is_explicit(setting: tuple[Any, str], given: Mapping[str, Any]) -> bool:
    """Return whether a value comes from an argument, so that it is written even as a default."""
    value, origin = setting
    words = re.findall(r"[\w.]+", origin)
    named = any(name.endswith(f".{word}") for name in given for word in words)
    return value == _TODO or (
        not origin.endswith(_DEFAULT) and (named or not given.keys().isdisjoint(words))
    )


def _steps(epochs: float, name: str, done: Settings, most: Any = None) -> tuple[Any, str]:
    """Return the number of steps if the rows are known, else TODO.

    Args:
        epochs: Passes over the rows.
        name: The argument that gives `epochs`.
        done: The keys so far. Rows of its parquet files are counted.
        most: Number of rows that are used at most, and exactly if the rows cannot be counted.
    """
    from pyarrow import parquet

    prompts: Any = done.get("rollout.prompts_per_step", ("rollout.prompts_per_step",))[0]
    files = done.get("data.prompts", ("",))[0]
    rows, counted = most, "rows of max_samples"
    with suppress(OSError, ValueError, TypeError):  # no file, or no parquet
        paths = [Path(each).expanduser() for each in ([files] if isinstance(files, str) else files)]
        rows = min(sum(parquet.read_metadata(path).num_rows for path in paths), most or math.inf)
        counted = "rows"
    with suppress(ValueError, TypeError):  # not known
        if steps := int(rows // prompts * epochs):
            return steps, f"{rows} {counted} // {prompts} prompts x {epochs} of {name}"
    times = name if math.isnan(epochs) else f"{epochs} of {name}"
    each = "rollout.prompts_per_step" if prompts != prompts else f"{prompts} prompts"  # NaN
    return _TODO, f"rows / {each} x {times}"


def read_script(source: str) -> tuple[str, dict[str, Any]]:
    """Return the recipe and the arguments of a script's TRL trainer and its configs.

    Raises:
        ConfigError: the script is not Python, or creates no trainer with a counterpart in raypo.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError as error:
        raise ConfigError(f"--from-trl: line {error.lineno} is not Python: {error.msg}.") from None
    assigned = [each for each in nodes if isinstance(each, ast.Assign)]
    constants = {ast.unparse(each.targets[0]): each.value for each in assigned}
    recipe, given, has_lora = "", {}, False
    for node in nodes:
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        match = re.fullmatch(r"(\w+?)(Trainer|Config)", name)
        if not isinstance(node, ast.Call) or not match or match[1] not in {*TRL_RECIPES, "Lora"}:
            continue
        recipe = TRL_RECIPES.get(match[1], recipe)
        named: dict[str, ast.expr] = {each.arg: each.value for each in node.keywords if each.arg}
        if match[2] == "Trainer":
            named |= dict(zip(("model", "reward_funcs"), node.args, strict=False))
        for key in ("args", "processing_class"):  # their own calls are nodes too
            named.pop(key, None)
        given |= {key: _literal(value, constants) for key, value in named.items()}
        has_lora = has_lora or match[1] == "Lora"
    if not recipe:
        which = ", ".join(f"{each}Trainer" for each in TRL_RECIPES)
        raise ConfigError(f"--from-trl: no {which} of TRL is made in it. Give a script with one.")
    return recipe, given | ({"peft_config": "LoraConfig"} if has_lora else {})


def read_command(text: str, project: str) -> dict[str, Any]:
    """Return the arguments of a shell command: `key=value` of verl, `--key value` of OpenRLHF.

    Raises:
        ConfigError: the command has an open quotation, or is not OpenRLHF's PPO.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    try:
        text = "\n".join(lines).replace("\\\n", " ")
        # Keep an arithmetic expression in one word.
        text = re.sub(r"\$\(\(.*?\)\)", lambda each: "".join(each[0].split()), text)
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--from-{project.lower()}: cannot be read as a shell command ({error}). Give the "
            f"command alone, without comments behind it."
        ) from None
    variables = {"HOME": str(Path.home())}
    for place, word in enumerate(words):
        word = Template(word).safe_substitute(variables)
        words[place] = word = re.sub(
            r"\$\{(\w+):?-([^{}]*)\}", lambda use: variables.get(use[1], use[2]), word
        )
        name, is_assigned, value = word.partition("=")
        if is_assigned and re.fullmatch(r"\w+", name):
            variables[name] = value
    if project == "verl":
        pairs = [re.fullmatch(r"[+~]*(\w+(?:\.\w+)+)=(.*)", word, re.DOTALL) for word in words]
        return {pair[1]: _parsed(pair[2]) for pair in pairs if pair}
    # `ray job submit` and Python have flags of their own before the module.
    modules = [place for place, word in enumerate(words) if re.search(r"\bopenrlhf\.cli\.", word)]
    words = words[modules[-1] if modules else 0 :]
    if modules and ".train_ppo" not in words[0]:
        raise ConfigError(
            f"--from-openrlhf ({words[0]}): only commands of train_ppo_ray are translated. Write "
            f"the run file by hand; docs/migrating.md has the keys."
        )
    given: dict[str, Any] = {}
    end = re.compile(r"--|[|;&<>]|\d>")  # a flag, a redirection or another command
    for start, word in enumerate(words):
        if word.startswith("--") and word != "--":
            name, _, value = word.removeprefix("--").partition("=")
            after = takewhile(lambda each: not end.match(each), words[start + 1 :])
            values = [value] if value else list(after)
            if len(values) > 1 and not any("$" in each for each in values):
                given[name] = list(map(_parsed, values))
            else:
                given[name] = _parsed(" ".join(values)) if values else True
    return given


def _parsed(text: str) -> Any:
    """Return a value; an expression if the shell has to compute it, as in `$((2 * N))`."""
    if "$" in text:
        return ast.Name(text)
    try:
        return parsed(text)
    except YAMLError:
        return text


class _Values:
    """Lookup of given values, with the other project's defaults. It records the names used.

    A number that is given by an expression is NaN, and so is all that is computed from it.
    """

    def __init__(self, given: Mapping[str, Any], rows: Mapping[str, Counterpart]) -> None:
        self.given, self.rows, self.used = given, rows, set[str]()
        self.idle: list[str] = []
        """Arguments that need nothing in raypo, with their values, for a note."""

    def __call__(self, name: str, usual: Any = None) -> Any:
        """Return the value given under a name or one of its older names.

        If none is given, return the other project's default, or `usual` if there is no default.
        """
        row = self.rows.get(name)
        default = parsed(row.default) if row and row.default else usual
        for each in row.names if row else (name,):
            if each in self.given:
                is_number = type(default) in (int, float)
                value = self.given[each]
                if isinstance(value, ast.AST) or (is_number and isinstance(value, str)):
                    return math.nan if is_number else default
                self.used.add(each)
                return self.given[each]
        return default

    def origin(self, name: str) -> str:
        """Return the name under which a value is given, or say that it is a default."""
        row = self.rows[name]
        given = [
            each
            for each in row.names
            if each in self.given and not isinstance(self.given[each], ast.AST)
        ]
        return given[0] if given else f"{row.names[0]}{_DEFAULT}"


def _trl(get: _Values, recipe: str) -> tuple[Settings, list[str]]:
    per_device, accumulated = get("per_device_train_batch_size"), get("gradient_accumulation_steps")
    batch, steps, updates = per_device * accumulated, get("max_steps"), 1
    origin = "per_device_train_batch_size x gradient_accumulation_steps"
    done: Settings = {"recipe": (recipe, "the trainer")}
    notes: list[str] = []
    for name, key in _TRL_OBJECTS.items():
        if (value := get(name)) is not None:
            done[key] = value, name
    if folder := get("output_dir"):
        done["name"], done["storage_path"] = (
            (each, "output_dir") for each in (Path(folder).name, str(Path(folder).parent))
        )
    if recipe != "ppo":
        done["learner.batch_size"] = batch, origin
        done |= {
            f"dpo.{key}": (get(name), name) for name, key in _TRL_DPO.items() if name in get.given
        }
        if steps <= 0:
            done["num_epochs"] = get("num_train_epochs"), "num_train_epochs"
    else:
        generated = get("generation_batch_size") or per_device * get(
            "steps_per_generation", accumulated
        )
        prompts = generated // get("num_generations")
        done["rollout.samples_per_prompt"] = get("num_generations"), "num_generations"
        done["rollout.prompts_per_step"] = prompts, "responses of a generation / num_generations"
        done["ppo.minibatch_size"] = batch, origin
        done |= _loss_of_trl(get, notes) | _correction_of_trl(get, notes)
        updates = max(generated // batch, 1) * get("num_iterations")
        steps /= updates
    if steps > 0:
        done["num_steps"] = math.ceil(steps), "max_steps"
    done |= _schedule_of_trl(get, steps, updates)
    done |= _lora_of_trl(get, notes)
    done |= _logging_of_trl(get)
    if isinstance(get.given.get("bf16"), bool) and "fp16" not in get.given:
        done["model.dtype"] = "bfloat16" if get("bf16") else "float32", "bf16"
    if recipe == "ppo":
        notes += _several_rewards(get)
    names = [each for each in done if each.endswith(("batch_size", "prompts_per_step"))]
    notes.append(f"{' and '.join(names)}: of one process. Multiply by the number of processes.")
    idle = [name for name, values in _TRL_IDLE.items() if str(get.given.get(name)) in values]
    get.used.update(idle)
    get.idle += [f"{name} ({get.given[name]})" for name in idle]
    return done, notes


def _loss_of_trl(get: _Values, notes: list[str]) -> Settings:
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
        notes.append(f"loss_type ({loss}): no counterpart is known; docs/methods.md has all.")
    if (scale := get("scale_rewards")) in (False, "none"):
        done["ppo.advantage"] = "dr_grpo", "scale_rewards"
    elif scale not in (True, "group"):
        notes.append(f"scale_rewards ({scale}): ppo.advantage. docs/methods.md has its values.")
    return done


def _correction_of_trl(get: _Values, notes: list[str]) -> Settings:
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


def _schedule_of_trl(get: _Values, steps: float, updates: float) -> Settings:
    """Return the keys that count steps.

    Args:
        get: Lookup of TRL's arguments.
        steps: Steps of the run; 0 or less if unknown.
        updates: Optimizer steps in a step of raypo. If there are several, counts are left as notes.
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


def _lora_of_trl(get: _Values, notes: list[str]) -> Settings:
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
            "target_modules (None): peft chooses by the architecture, for Llama, Qwen, Mistral and "
            "Gemma q_proj and v_proj. For others set model.lora.target_modules; raypo's default is "
            "all-linear."
        )
    return done


def _logging_of_trl(get: _Values) -> Settings:
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


def _several_rewards(get: _Values) -> list[str]:
    """Return a note with a function that adds several, if `reward_funcs` has several names."""
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
        f"reward_funcs ([{', '.join(names)}]), reward_weights ({weights}): reward.function is one "
        f"function. Write it beside them, and set reward.function: file.py:reward. def "
        f'reward(completions, **columns): return [{{"score": {total}, {parts}}} for '
        f"{', '.join(scores)} in zip({calls})]"
    ]


_TRL_OBJECTS = {"model": "model.policy", "train_dataset": "data.prompts"}
_TRL_OBJECTS |= {"eval_dataset": "eval.prompts"}
_TRL_DPO = {"beta": "beta", "loss_type": "loss"}


def _verl(get: _Values, recipe: str) -> tuple[Settings, list[str]]:
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
        done[key] = _WORDS.get(get(name), get(name)), name
    if done["ppo.advantage"][0] == "grpo" and not get("algorithm.norm_adv_by_std_in_grpo"):
        done["ppo.advantage"] = "dr_grpo", "algorithm.norm_adv_by_std_in_grpo"
    in_loss, in_reward = get(f"{actor}use_kl_loss"), get("algorithm.use_kl_in_reward")
    coef = f"{actor}kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    if in_loss:
        kind = get(f"{actor}kl_loss_type")
        done["ppo.kl.placement"] = "loss", f"{actor}use_kl_loss"
        done["ppo.kl.estimator"] = _WORDS.get(kind, kind), f"{actor}kl_loss_type"
    done["ppo.kl.coef"] = (get(coef), coef) if in_loss or in_reward else (0, "no KL there")
    model = "actor_rollout_ref.model."
    _set_lora(get, done, rank=f"{model}lora_rank", alpha=f"{model}lora_alpha")
    _set_workers(get, done, gpus="trainer.n_gpus_per_node", nodes="trainer.nnodes")
    if get("data.filter_overlong_prompts"):
        done["data.too_long"] = "skip", "data.filter_overlong_prompts"
        get("data.truncation")  # nothing is left to cut
    elif get("data.truncation") == "error":
        is_given = "data.truncation" in get.given
        done["data.too_long"] = "error", f"data.truncation{'' if is_given else _DEFAULT}"
    if top_k := max(get(f"{rollout}top_k"), 0):
        done["rollout.top_k"] = top_k, f"{rollout}top_k"
    custom = "reward.custom_reward_function."
    if path := get(f"{custom}path"):
        done["reward.function"] = f"{path}:{get(f'{custom}name')}", "custom_reward_function"
    else:
        done["reward.function"] = _TODO, _NO_FUNCTION
    return done, _set_loggers(get, done)


def _set_loggers(get: _Values, done: Settings) -> list[str]:
    """Set the sections of verl's loggers, and return notes on those that raypo lacks."""
    loggers = get("trainer.logger") if "trainer.logger" in get.given else ()
    notes = []
    for logger in [loggers] if isinstance(loggers, str) else loggers:
        if logger in _LOGGERS:
            done[_LOGGERS[logger]] = get("trainer.project_name"), "trainer.project_name"
        elif logger not in ("console", "tensorboard"):
            notes.append(f"trainer.logger ({logger}): No counterpart is known.")
    return notes


_LOGGERS = {"wandb": "logging.wandb.project", "mlflow": "logging.mlflow.experiment"}
_NO_FUNCTION = "verl chooses a score by data_source: file.py:name, or, with verl installed, "
_NO_FUNCTION += "verl.utils.reward_score:default_compute_score"


def _openrlhf(get: _Values, recipe: str) -> tuple[Settings, list[str]]:
    notes: list[str] = []
    done = _loss_of_openrlhf(get, notes)
    _set_lora(get, done, rank="ds.lora.rank", alpha="ds.lora.alpha")
    if get("ds.lora.rank"):
        modules = get("ds.lora.target_modules")
        done["model.lora.target_modules"] = modules, get.origin("ds.lora.target_modules")
    else:  # without effect there too
        names = [get.origin(f"ds.lora.{each}") for each in ("rank", "alpha", "target_modules")]
        get.idle += [name for name in names if name in get.given]
        get.used.update(names)
    _set_workers(get, done, gpus="actor.num_gpus_per_node", nodes="actor.num_nodes")
    done |= _prompts_of_openrlhf(get, notes)
    done |= _lengths_of_openrlhf(get, notes)
    _batches_of_openrlhf(get, notes, done)
    done |= _schedule_of_openrlhf(get, done)
    done |= _models_of_openrlhf(get, notes)
    return done | _logging_of_openrlhf(get), notes


def _loss_of_openrlhf(get: _Values, notes: list[str]) -> Settings:
    """Return the estimator, the clips and the KL."""
    estimator = get("algo.advantage.estimator")
    done: Settings = {
        "ppo.advantage": (_WORDS.get(estimator, estimator), get.origin("algo.advantage.estimator"))
    }
    if get("algo.kl.use_loss"):
        done["ppo.kl.placement"] = "loss", get.origin("algo.kl.use_loss")
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
    if get("reward.normalize_enable"):
        origin = get.origin("reward.normalize_enable")
        done["ppo.shaping.normalize"] = True, origin
        notes.append(f"{origin}: ppo.shaping.normalize. {get.rows[origin].note}")
    return done


def _logging_of_openrlhf(get: _Values) -> Settings:
    """Return the run's name and folder, and the loggers."""
    done: Settings = {}
    folder = get("ckpt.output_dir")
    if (origin := get.origin("ckpt.output_dir")) in get.used:
        done["name"] = Path(str(folder)).name, origin
        done["storage_path"] = str(Path(str(folder)).parent), origin
    if get("logger.wandb.run_name"):
        done["name"] = get("logger.wandb.run_name"), get.origin("logger.wandb.run_name")
    keys = [name for name in get.rows["logger.wandb.key"].names if get.given.get(name)]
    if keys:  # a secret, which is not written
        get.used.update(keys)
        done["logging.wandb.project"] = get("logger.wandb.project"), keys[0]
        if get("logger.wandb.org"):
            done["logging.wandb.entity"] = get("logger.wandb.org"), get.origin("logger.wandb.org")
    return done


def _prompts_of_openrlhf(get: _Values, notes: list[str]) -> Settings:
    """Return the sources of prompts."""
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
            notes.append(f"prompt_split ({split}): data.prompts. {path} is no hub id.")
    if most and not is_cut:
        notes.append(f"max_samples ({most:g}): data.prompts is cut by hand, as files are.")
    if weights := get("data.prompt_probs"):
        for entry, weight in zip(entries, map(parsed, str(weights).split(",")), strict=False):
            entry["weight"] = weight
    sources = [entry if len(entry) > 1 else entry["path"] for entry in entries]
    return {"data.prompts": (sources, origin)}


def _batches_of_openrlhf(get: _Values, notes: list[str], done: Settings) -> None:
    """Set the sizes of batches, the number of steps, and the intervals."""
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
    done["num_steps"] = _steps(episodes, get.origin("train.num_episodes"), done, most)
    for name in ("eval.steps", "ckpt.save_steps"):
        if (origin := get.origin(name)) in get.given and get(name) == -1:
            get.idle.append(f"{origin} (-1)")
        else:
            get.used.discard(origin)


def _lengths_of_openrlhf(get: _Values, notes: list[str]) -> Settings:
    total, response = get("data.max_len"), get("rollout.max_new_tokens")
    if response is None:
        notes.insert(
            0,
            f"max_len ({total:g}): data.max_prompt_tokens and rollout.max_new_tokens. OpenRLHF "
            f"gives a response what its prompt leaves of max_len; raypo has a limit for each.",
        )
        return {}
    done: Settings = {"rollout.max_new_tokens": (response, get.origin("rollout.max_new_tokens"))}
    if get("data.prompt_max_len") is None:
        origin = f"{get.origin('data.max_len')} - {get.origin('rollout.max_new_tokens')}"
        done["data.max_prompt_tokens"] = max(total - response, 1), origin
    else:
        get.used.discard(get.origin("data.prompt_max_len"))
    return done


def _schedule_of_openrlhf(get: _Values, done: Settings) -> Settings:
    """Return the schedule of the learning rates, and the steps that train only the critic."""
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
    if ratio > 0 and kind != "constant":  # its warm-up has no effect in transformers
        is_known = isinstance(steps, int)
        schedule["learner.lr_warmup_steps"] = (
            math.ceil(ratio * steps) if is_known else _TODO,
            f"{ratio:g} of num_steps, {get.origin('actor.lr_warmup_ratio')}",
        )
    if get("critic.freezing_steps") > 0:
        frozen = get.origin("critic.freezing_steps")
        schedule["ppo.critic_warmup_steps"] = get("critic.freezing_steps"), frozen
    return schedule


def _models_of_openrlhf(get: _Values, notes: list[str]) -> Settings:
    """Return the servers of scores, the data type, the offload and the transport of weights."""
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
            f"and nccl for engines on GPUs of their own (placement.mode: dedicated)."
        )
    return done


def _set_lora(get: _Values, done: Settings, *, rank: str, alpha: str) -> None:
    if get(rank):  # 0 means no LoRA
        done["model.lora.rank"] = get(rank), get.origin(rank)
        done["model.lora.alpha"] = get(alpha), get.origin(alpha)


def _set_workers(get: _Values, done: Settings, *, gpus: str, nodes: str) -> None:
    if any(name in get.given for name in get.rows[gpus].names):
        done["learner.num_workers"] = get(gpus) * get(nodes, 1), f"{gpus} x {nodes}"


_COMPUTED: dict[str, Callable[[_Values, str], tuple[Settings, list[str]]]] = {
    "TRL": _trl,
    "verl": _verl,
    "OpenRLHF": _openrlhf,
}


def _accepted(done: Settings, notes: list[str], recipe: str) -> RunFile:
    """Return a config of the values that raypo accepts. Each refused value becomes a note."""
    while True:
        _set_todo(done, recipe)
        try:
            values = {
                key: value
                for key, (value, _) in done.items()
                if value != _TODO or key not in _COUNTED
            }
            return RECIPES[recipe].parse(nested(values))
        except ConfigError as error:
            lines = [line.removeprefix("config: ") for line in str(error).splitlines()]
            refused = {key: line for line in lines for key in done if re.match(rf"{key}\b", line)}
            if not refused:
                raise
            for key, line in refused.items():
                if not (origin := done.pop(key)[1]).endswith(_DEFAULT):
                    notes.append(f"{origin}: {line}")


def _with_origins(text: str, done: Settings) -> list[str]:
    """Return the lines of a run file, each with the origin of its key as a comment."""
    path, lines = [], []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path[depth:] = [line.strip().partition(":")[0]]
        value, origin = done.get(".".join(path), (None, ""))
        if value == _TODO and ".".join(path) in _COUNTED:
            line = f"{line.partition(':')[0]}: {_TODO}"
        lines.append(f"{line} # {origin}" if origin and not line.endswith(":") else line)
    return lines


def _literal(value: ast.expr, constants: Mapping[str, ast.expr]) -> Any:
    """Return the value of a literal, or of a variable that holds one.

    For a call of `load_dataset` return its arguments, for any other expression its syntax tree.
    """
    value = constants.get(ast.unparse(value), value)
    with suppress(ValueError, IndexError):
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("load_dataset"):
            named = {each.arg: each.value for each in value.keywords if each.arg == "split"}
            named |= dict(zip(("path", "config"), value.args, strict=False))
            return {name: ast.literal_eval(each) for name, each in named.items()}
        return ast.literal_eval(value)
    return value
