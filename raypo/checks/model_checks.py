"""Checks of the models that a run loads: their folders, shapes, positions and tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raypo.cluster.placement import served_roles
from raypo.config import (
    AnyConfig,
    ConfigError,
    DistillationConfig,
    OnlineConfig,
    PolicyExamplesConfig,
    RewardModelConfig,
)
from raypo.data.chat_messages import MessageError, check_variables
from raypo.models.model_files import (
    REPLAYED,
    ROUTED,
    cached_folder,
    looks_like_hub_id,
    max_positions,
    refuse_quantized,
    rotation_limit,
    stored_files,
)
from raypo.models.model_files import config_of as model_config_of
from raypo.models.model_shape import ModelShape

JUDGE, DRAFT = "reward.judge.path", "rollout.engine.speculation.model"
NOT_ON_CPUS = ("deepseek_v32", "glm_moe_dsa", "gpt_oss", "nemotron_h")
"""Model types without a kernel for CPUs in vLLM (0.32), for sparse attention or for experts."""


CPU_HEAD_MULTIPLE = 32
"""Dimensions of a head must be a multiple of it for vLLM's FP8 KV cache on CPUs (0.23 to 0.32)."""


def check_model(key: str, path: str, *, is_trained: bool = False) -> None:
    """Refuse a model that is neither a hub id nor a complete folder.

    Args:
        key: Config key of the model, for messages.
        path: Folder or hub id.
        is_trained: Whether the model is trained. It must then not be quantized.

    Raises:
        ConfigError: the model is refused.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        values = model_config_of(folder, key)
        if is_trained:
            refuse_quantized(values, path, key)
        stored_files(folder, key)
        return
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    if not looks_like_hub_id(path) or (offline and cached_folder(path) is None):
        why = "and HF_HUB_OFFLINE is set" if offline else "and it is not a hub id"
        raise ConfigError(
            f"{key} ({path}): there is no such folder, {why}. Give a folder written by "
            f"save_pretrained, or a hub id like organisation/model."
        )


def models_of(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Yield config key and path of each model in the config."""
    model: Any = config.model
    for name in ("policy", "critic", "reference"):
        if (path := getattr(model, name, None)) is not None:
            yield f"model.{name}", path
    if isinstance(config, DistillationConfig):
        by_source = not isinstance(config.model.teacher, str)
        for name, path in config.teacher_of.items():
            yield f"model.teacher.{name}" if by_source else "model.teacher", path
    for entry in getattr(model, "reward", None) or ():
        yield "model.reward", entry.path
    if (rollout := getattr(config, "rollout", None)) and rollout.engine.speculation.model:
        yield DRAFT, rollout.engine.speculation.model
    if isinstance(config, OnlineConfig):
        for path in config.judge_models.values():
            yield JUDGE, path


def check_shards(config: OnlineConfig | PolicyExamplesConfig) -> None:
    """Refuse local models that vLLM cannot shard. vLLM itself checks models from the hub."""
    for role in served_roles(config, num_workers=1, use_gpu=False):
        size, shape = role.num_devices, _local_shape(role.model)
        if size > 1 and shape and (rest := shape.does_not_divide(size)):
            fits = max(n for n in range(1, size) if shape.does_not_divide(n) is None)
            names = {"engine": "model.policy", "judge": JUDGE}
            raise ConfigError(
                f"{role.devices_key} ({size}): must divide the {rest} of "
                f"{names.get(role.kind, f'model.{role.kind}')} ({role.model}). Set it to {fits}."
            )


def _local_shape(path: str) -> ModelShape | None:
    if not (Path(path) / "config.json").exists():
        return None
    try:
        return ModelShape.read(path)
    except ConfigError:  # an architecture that raypo does not know, but vLLM may
        return None


def check_kernels(config: Any) -> None:
    """Refuse a policy that vLLM's engines cannot run on CPUs, for a run without GPUs."""
    if not config.needs_engine:
        return
    path = config.model.policy
    kind = (_config_of("model.policy", path) or {}).get("model_type")
    if kind in NOT_ON_CPUS:
        raise ConfigError(
            f"model.policy ({path}): vLLM has no kernels for the architecture {kind} on CPUs, but "
            "the run has no GPUs. Run it on GPUs, or give a model of another architecture."
        )
    kv_dtype, shape = config.rollout.engine.kv_cache_dtype, _local_shape(path)
    if kv_dtype and shape and shape.head_dim % CPU_HEAD_MULTIPLE:
        raise ConfigError(
            f"rollout.engine.kv_cache_dtype ({kv_dtype}): on CPUs, vLLM needs heads of a multiple "
            f"of {CPU_HEAD_MULTIPLE} dimensions for it, but those of model.policy ({path}) have "
            f"{shape.head_dim}. Set rollout.engine.kv_cache_dtype to null."
        )


def check_positions(config: Any) -> None:
    """Refuse a config, as vLLM would, if prompt plus response may exceed a model's positions."""
    for key, path in models_of(config):
        if key == JUDGE:
            _check_positions_of_judge(config, path)
        elif key != "model.reward":  # a reward model may use its own tokenizer
            check_positions_of(config, key, path)
    if isinstance(config, DistillationConfig) and config.distillation.teacher_prompt:
        _check_teacher_prompts(config)


def _check_teacher_prompts(config: DistillationConfig) -> None:
    """Refuse a config if teacher prompt plus response may exceed a teacher's positions."""
    for key, path in models_of(config):
        if not key.startswith("model.teacher") and (key != "model.policy" or config.teacher_of):
            continue
        positions = _positions(key, path)
        if positions is not None and config.max_teacher_len > positions:
            raise ConfigError(
                f"distillation.max_teacher_prompt_tokens + {config.rollout.length_key} "
                f"({config.max_teacher_len}): {key} ({path}) has positions for {positions} "
                f"tokens. Lower their sum by {config.max_teacher_len - positions}."
            )


def _check_positions_of_judge(config: OnlineConfig, path: str) -> None:
    """Refuse a judge that could not read a prompt and a response and answer."""
    longest, positions = config.judged_tokens, _positions(JUDGE, path)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"{JUDGE} ({path}): has positions for {positions} tokens, and the judge may have to "
            f"read and write {longest}, besides its template (data.max_prompt_tokens, "
            f"{config.rollout.length_key}, max_tokens of reward.judge.sampling). Lower these, or "
            f"take a judge with more positions."
        )


def check_positions_of(config: Any, key: str, path: str) -> None:
    """Refuse a config if prompt plus response may exceed the given model's positions."""
    longest, positions = config.max_model_len, _positions(key, path)
    if positions is not None and longest > positions:
        response = config.rollout.length_key
        raise ConfigError(
            f"data.max_prompt_tokens + {response} ({longest}): {key} ({path}) has positions for "
            f"{positions} tokens. Lower their sum by {longest - positions}."
        )


def check_rotations(config: Any, *, on_hub: bool) -> None:
    """Refuse a model whose log-probs of a row would depend on the rows beside it.

    Args:
        config: The config of a run.
        on_hub: Check the models from the hub, whose configs transformers reads, and no folders.
    """
    for key, path in models_of(config):
        if key == JUDGE or Path(path).expanduser().is_dir() == on_hub:
            continue
        if on_hub:
            from raypo.models.checkpoint import read_config

            _check_rotations_of(config, key, path, read_config(path, key=key).to_dict())
        elif values := _config_of(key, path):
            _check_rotations_of(config, key, path, values)


def _check_rotations_of(config: Any, key: str, path: str, values: dict[str, Any]) -> None:
    limit = rotation_limit(values)
    if limit is None:
        return
    lengths = {}
    if config.needs_engine:
        lengths[config.rollout.length_key] = config.max_model_len
    if (response := getattr(config.data, "max_response_tokens", None)) is not None:
        lengths["data.max_response_tokens"] = config.data.max_prompt_tokens + response
    for name, longest in lengths.items():
        if longest > limit:
            raise ConfigError(
                f"data.max_prompt_tokens + {name} ({longest}): {key} ({path}) rotates all rows "
                f"of a pass by other factors if one of them has more than {limit} tokens. Lower "
                f"their sum by {longest - limit}, or remove rope_scaling from its config.json."
            )


def _positions(key: str, path: str) -> int | None:
    """Return the number of positions of a local model.

    None means that the model has no limit, or is not on this machine.
    """
    values = _config_of(key, path)
    return max_positions(values) if values else None


def _config_of(key: str, path: str) -> dict[str, Any] | None:
    folder = Path(path).expanduser()
    known = (folder / "config.json").is_file()
    return model_config_of(folder, key) if known else None


def check_models(config: AnyConfig) -> None:
    """Refuse models that would be loaded wrongly, before Ray starts.

    This imports transformers, and reads headers of weight files, configs and tokenizers, but no
    weights. For hub ids, it reads only configs and tokenizers.

    Raises:
        ConfigError: a folder lacks weights of its model or has unexpected weights; two models that
            read the same token ids have different tokens; a token has no row in the embedding; or
            LoRA cannot train the requested layers.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification

    from raypo.models import checkpoint, loading, lora, model_folder

    model: Any = config.model
    is_reward_model = isinstance(config, RewardModelConfig)
    classifier = AutoModelForSequenceClassification
    kinds = {"model.critic": AutoModel, "model.reward": classifier}
    if is_reward_model:
        kinds["model.policy"] = classifier
    for key, path in models_of(config):
        kind = kinds.get(key) or loading.language_class(path, key=key)
        if kind is classifier:
            loading.check_classifier(key, path)
        if key in ("model.policy", "model.critic"):
            loading.check_trainable(key, path)
            model_folder.check_saveable(key, path, loading.load_tokenizer(model.policy))
        checkpoint.check_weights(key, path, kind, new_head=is_reward_model)
    check_rotations(config, on_hub=True)
    _check_speculation(config)
    _check_routers(config)
    _check_router_replay(config)
    check_shared_rows(config)
    check_tiles(config)
    loading.check_tokens(model.policy)
    _check_template_kwargs(config)
    for key, path in models_of(config):
        if key != "model.policy":
            _check_tokenizer(config, key, path)
    if model.lora is not None:
        kind = kinds.get("model.policy") or loading.language_class(model.policy)
        lora.check_targets(model.policy, kind, model.lora)
        if getattr(config, "needs_critic", False) and model.critic is not None:
            lora.check_targets(model.critic, AutoModel, model.lora, key="model.critic")


def _check_speculation(config: Any) -> None:
    """Refuse speculation for a policy that could sample an image's placeholder.

    Engines exclude the placeholder in every request, with or without images.
    """
    from raypo.models.checkpoint import read_config
    from raypo.models.vision import placeholder_id

    if not config.needs_engine:
        return
    kind, policy = config.rollout.engine.speculation.kind, config.model.policy
    if kind != "none" and placeholder_id(read_config(policy)) is not None:
        raise ConfigError(
            f"rollout.engine.speculation.kind ({kind}): model.policy ({policy}) reads images, and "
            "while vLLM speculates, it cannot exclude their placeholder from the responses. Set it "
            "to none."
        )


def _check_routers(config: AnyConfig) -> None:
    """Refuse a loss that balances experts, if the policy has no experts or unknown routers."""
    from raypo.models.checkpoint import read_config

    policy, coef = config.model.policy, config.learner.router_aux_coef
    kind = read_config(policy).get_text_config().model_type if coef else None
    if coef and kind not in ROUTED:
        raise ConfigError(
            f"learner.router_aux_coef ({coef}): raypo knows no routers of model.policy ({policy}), "
            f"whose architecture is {kind}, but only of {', '.join(ROUTED)}. Set it to 0."
        )


def _check_router_replay(config: AnyConfig) -> None:
    """Refuse a policy whose experts cannot be recorded by an engine and replayed by the learner."""
    from raypo.models.checkpoint import read_config

    if not isinstance(config, OnlineConfig) or config.rollout.router_replay == "off":
        return
    replay, policy = config.rollout.router_replay, config.model.policy
    text = read_config(policy).get_text_config()
    reason = None
    if text.model_type not in REPLAYED:
        reason = f"architecture is {text.model_type}, not one of {', '.join(REPLAYED)}"
    elif getattr(text, "sliding_window", None):
        reason = "attention has sliding windows, so the KV cache does not keep all tokens"
    if reason:
        raise ConfigError(
            f"rollout.router_replay ({replay}): the experts of model.policy ({policy}) cannot be "
            f"replayed, because its {reason}. Set it to off."
        )


def check_shared_rows(config: AnyConfig) -> None:
    """Refuse trained models that do not support sequence parallelism."""
    from raypo.models.packed_attention import can_read_packed

    size = config.learner.sequence_parallel
    for name, model in _trained_without_weights(config) if size > 1 else ():
        reason = None
        if hasattr(model.config, "vision_config"):
            reason = "it reads images"
        elif not can_read_packed(model):
            reason = "not all of its layers have full or sliding attention over earlier tokens"
        if reason:
            raise ConfigError(
                f"learner.sequence_parallel ({size}): workers cannot share the rows of {name}: "
                f"{reason}. Set learner.sequence_parallel to 1, or give another model."
            )


def check_tiles(config: AnyConfig) -> None:
    """Refuse models to train without MLPs that can be computed in tiles."""
    from raypo.models.activation_memory import dense_mlps

    tile = config.learner.mlp_tile_tokens
    for name, model in _trained_without_weights(config) if tile else ():
        if not dense_mlps(model):
            raise ConfigError(
                f"learner.mlp_tile_tokens ({tile}): {name} has no dense MLPs that raypo can tile. "
                "Set learner.mlp_tile_tokens to null."
            )


def _trained_without_weights(config: AnyConfig) -> Iterator[tuple[str, Any]]:
    """Yield a description and the modules of each model to train, on the meta device."""
    import torch
    from transformers import AutoModel

    from raypo.models.checkpoint import network_class, read_config

    for key, path in models_of(config):
        if key in ("model.policy", "model.critic"):
            values = read_config(path, key=key)
            with torch.device("meta"):
                model = network_class(AutoModel, values, path, key=key)(values)
            yield f"{key} ({path}, {values.model_type})", model


def _check_template_kwargs(config: AnyConfig) -> None:
    """Refuse variables that the policy's chat template does not read."""
    from raypo.models.loading import load_tokenizer

    variables = config.data.chat_template_kwargs
    if not variables:
        return
    try:
        check_variables(load_tokenizer(config.model.policy), variables)
    except MessageError as error:
        raise ConfigError(f"data.{error}. Remove it (data.chat_template_kwargs).") from None


def _check_tokenizer(config: Any, key: str, path: str) -> None:
    """Refuse a model that could not read what it gets: the policy's token ids, or messages."""
    from raypo.models.loading import load_tokenizer, same_vocabulary

    policy = config.model.policy
    if key == "model.reward":
        if isinstance(config, OnlineConfig) and same_vocabulary(path, policy, key=key):
            check_positions_of(config, key, path)
    elif key != JUDGE:
        _check_same_tokens(key, path, policy)
    elif config.reward.judge.chat and not load_tokenizer(path, key=key).chat_template:
        raise ConfigError(
            f"reward.judge.chat (True): the tokenizer of {key} ({path}) has no chat template. Set "
            f"it to false, then the prompt is a text that the model completes."
        )


def _check_same_tokens(key: str, path: str, policy: str) -> None:
    """Refuse a model that would read the policy's token ids as other tokens.

    If a critic or a reference model was saved without a tokenizer, only the sizes of the
    vocabularies are compared.
    """
    from raypo.models.loading import reads_tokens, same_vocabulary, vocabulary_size

    is_teacher = key.startswith("model.teacher")
    by_token = is_teacher or key == DRAFT  # its predictions are compared token by token
    try:
        compared = same_vocabulary if by_token else reads_tokens
        is_same = compared(path, policy, key=key)
    except ConfigError:
        if by_token:
            raise
        is_same = vocabulary_size(path) == vocabulary_size(policy)
    if is_same:
        return
    remedy = "or train on its texts with the recipe sft" if is_teacher else f"or remove {key}"
    if key == DRAFT:
        remedy = "or set rollout.engine.speculation.kind to ngram"
    raise ConfigError(
        f"{key} ({path}): its vocabulary is not that of model.policy ({policy}), but it reads the "
        f"policy's token ids. Give a model with the same tokenizer, {remedy}."
    )
