"""Tiny random models of every architecture that transformers can build, for tests and their table.

`python -m tests.every_model [CLASS [ARCHITECTURE ...]]` prints a line for each: what held, or why
it could not be built. With --write it rewrites the table of docs/models.md.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.models.auto import modeling_auto

from raypo.collectives import Workers
from raypo.config import ConfigError
from raypo.config.supervised_config import ExamplesLearnerSection
from raypo.learner import export
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import PairTask, ResponseTask
from raypo.models.checkpoint import network_class
from raypo.models.loading import (
    check_classifier,
    check_trainable,
    language_class,
    load_causal_lm,
    load_reward_model,
)
from raypo.models.model_files import VISION
from raypo.types import Example, Pair

CAUSAL, CLASSIFIER, MULTIMODAL = "causal", "classifier", "multimodal"
KINDS: dict[str, Any] = {
    CAUSAL: AutoModelForCausalLM,
    CLASSIFIER: AutoModelForSequenceClassification,
    MULTIMODAL: AutoModelForImageTextToText,
}
NAMES: dict[str, Any] = {
    CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    CLASSIFIER: modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MULTIMODAL: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
"""Architectures with such a class."""
SIZES: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "n_vocab", "vocab_size_per_layer_input"], 96),
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "n_embed", "embed_dim"], 32),
    **dict.fromkeys(["emb_dim", "embedding_size", "d_embed", "decoder_hidden_size"], 32),
    **dict.fromkeys(["word_embed_proj_dim", "lru_width", "hidden_dim"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "d_inner", "d_ff"], 48),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "dff"], 48),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["expert_ffn_hidden_size", "shared_intermediate_size"], 16),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "intermediate_size_mlp"], 16),
    **dict.fromkeys(["feed_forward_size", "mlp_hidden_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 4),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "depth", "num_decoder_layers"], 2),
    **dict.fromkeys(["num_encoder_layers", "num_blocks"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads"], 2),
    **dict.fromkeys(["head_dim", "global_head_dim", "rotary_dim", "attention_head_size"], 8),
    **dict.fromkeys(["kv_channels", "attention_key_channels", "swa_head_dim"], 8),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["moe_num_experts", "num_routed_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"], 1),
    **dict.fromkeys(
        ["num_shared_experts", "moe_num_shared_experts", "interleave_moe_layer_step"], 1
    ),
    **dict.fromkeys(["q_lora_rank", "o_lora_rank"], 16),
    **dict.fromkeys(["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8),
    **dict.fromkeys(["linear_num_value_heads", "linear_num_key_heads"], 4),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 64),
    **dict.fromkeys(["max_source_positions", "max_target_positions", "max_sequence_length"], 64),
    **dict.fromkeys(["sliding_window", "attention_window", "local_attention"], 16),
    **dict.fromkeys(["pad_token_id"], 0),
    **dict.fromkeys(["bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"], 1),
    "decoder_start_token_id": 1,
    "initializer_range": 0.1,
    "is_decoder": True,
    **dict.fromkeys(["entity_vocab_size", "num_latents"], 8),
    # Parts that text does not pass through.
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
}
"""Small values of the configs' attributes, by name."""
LATENT = {"num_key_value_heads": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"], LATENT),
    **dict.fromkeys(["glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"], LATENT),
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"] * 2},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": 0.0,
    },
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "qwen2_5_vl": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        }
    },
    "t5": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {"d_latents": 32, "num_self_attends_per_block": 2, "max_position_embeddings": 64},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 4,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values of architectures for which `SIZES` does not fit."""
LR = 1e-2
PROMPT = np.arange(9, 15, dtype=np.int32)
RESPONSE = np.array([*range(30, 38), 1], dtype=np.int32)  # some classifiers want an end of sequence
OTHER = np.array([*range(60, 66), 1], dtype=np.int32)
PAGE, MARK = (
    Path(__file__).parents[1] / "docs" / "models.md",
    "| outcome | architecture |\n|---|---|\n",
)
HOLDS = "holds"
CLOSE = 2e-4
"""Nats; all in float32 on a CPU."""


class CannotBuildError(Exception):
    """transformers cannot build, save or run a tiny random model of this architecture."""


def tiny_config(
    architecture: str,
    sizes: Mapping[str, Any] = SIZES,
    special: Mapping[str, dict[str, Any]] = SPECIAL,
) -> PretrainedConfig:
    """Return a config of the architecture with small sizes.

    Raises:
        CannotBuildError: the config refuses them.
    """
    try:
        return _shrunk(CONFIG_MAPPING[architecture], sizes, special.get(architecture, {}))
    except Exception as error:
        raise CannotBuildError(f"config: {shown(error)}") from error


def _shrunk(
    kind: type[PretrainedConfig], sizes: Mapping[str, Any], special: dict[str, Any]
) -> PretrainedConfig:
    default = kind()
    values = {
        name: value
        for name, value in sizes.items()
        if name in vars(default) and vars(default)[name] is not None
    }
    for name in kind.sub_configs or {}:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            values[name] = _shrunk(type(part), sizes, special.get(name, {}))
    return kind(**values | {k: v for k, v in special.items() if k not in (kind.sub_configs or {})})


def build(
    kind: str,
    architecture: str,
    folder: Path,
    sizes: Mapping[str, Any] = SIZES,
    special: Mapping[str, dict[str, Any]] = SPECIAL,
) -> Any:
    """Save a random model into a folder, with random values in its buffers; return the model.

    Raises:
        CannotBuildError: it cannot be built, saved, loaded again or run by transformers alone.
    """
    config: Any = tiny_config(architecture, sizes, special)
    if kind == CLASSIFIER:
        config.num_labels = 1
    torch.manual_seed(0)
    try:
        model = KINDS[kind].from_config(config).eval()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in model.state_dict() and buffer.is_floating_point():
                    buffer.add_(torch.rand_like(buffer) * 0.2)
            for parameter in model.parameters():  # norms and biases, too
                parameter.add_(torch.randn_like(parameter) * 0.02)
        model.save_pretrained(folder)
        before = outputs(model)
        again = KINDS[kind].from_pretrained(folder).eval()
        gap = float((outputs(again) - before).abs().max())
    except Exception as error:
        raise CannotBuildError(f"transformers: {shown(error)}") from error
    if not gap < CLOSE:
        raise CannotBuildError(
            f"transformers: save_pretrained and from_pretrained differ by {gap:.2g}"
        )
    return model


def outputs(model: Any) -> Tensor:
    """Return log-probs of the response [T], or the score of a classifier [1], by transformers."""
    ids = torch.from_numpy(np.concatenate([PROMPT, RESPONSE])).long()
    is_classifier = "SequenceClassification" in type(model).__name__
    read = ids if is_classifier else ids[:-1]  # the attention of some models sees later tokens
    with torch.no_grad():
        logits = model(input_ids=read[None]).logits.float()
    if is_classifier:
        return logits[0]
    log_probs = logits[0, len(PROMPT) - 1 :].log_softmax(-1)
    return log_probs.gather(-1, ids[len(PROMPT) :, None])[:, 0]


def train(kind: str, folder: Path) -> SupervisedLearner[Any]:
    """Load a model as a run does, and train it by one step."""
    if kind == CLASSIFIER:
        check_classifier("model.policy", str(folder))
        task: Any = PairTask(load_reward_model(str(folder), dtype="float32"), centering_coef=0.0)
        items: list[Any] = [Pair(PROMPT, RESPONSE, OTHER)]
    else:
        task = ResponseTask(load_causal_lm(str(folder), dtype="float32"))
        items = [Example(PROMPT, RESPONSE), Example(OTHER, PROMPT)]
    section = ExamplesLearnerSection(lr=LR, lr_schedule="constant")
    learner: SupervisedLearner[Any] = SupervisedLearner(
        task, section, dtype="float32", num_steps=1, workers=Workers()
    )
    learner.update(items, step=1)
    return learner


def own_outputs(learner: SupervisedLearner[Any], kind: str) -> Tensor:
    """Return `outputs` as raypo computes them."""
    with torch.no_grad():
        if kind == CLASSIFIER:
            return learner.task.module([PROMPT], [RESPONSE]).cpu()
        from raypo.learner.tasks import response_batch

        return learner.log_probs(response_batch([Example(PROMPT, RESPONSE)]))[0]


class NoTokenizer:
    """A tokenizer that saves nothing."""

    def save_pretrained(self, folder: Path) -> None:
        """Save nothing."""


def check(kind: str, architecture: str, folder: Path) -> str:
    """Build, load, pass, train, export and load again; return what was seen in one line.

    Raises:
        CannotBuildError: transformers alone fails.
        ConfigError: raypo refuses the architecture.
        AssertionError: raypo and transformers differ.
    """
    if kind == MULTIMODAL and architecture not in (*NAMES[CAUSAL], *VISION):
        try:
            network_class(AutoModelForCausalLM, CONFIG_MAPPING[architecture](), architecture)
        except ConfigError:
            raise
        except ValueError as error:
            raise CannotBuildError(f"config: {shown(error)}") from error
    base = folder / "base"
    built = outputs(build(kind, architecture, base))
    check_trainable("model.policy", str(base))
    learner = train(kind, base)
    network: Any = learner.task.network
    buffers = [n for n, _ in network.named_buffers() if n in network.state_dict()]
    with patch.object(export, "SHARD_BYTES", 20_000):  # many files, and tensors larger than two
        learner.model_export(NoTokenizer()).save(folder / "out", Workers())
    # Of some multimodal models, the causal language model is only a part.
    own = language_class(str(folder / "out")) if kind == MULTIMODAL else KINDS[kind]
    exported: Any = own.from_pretrained(folder / "out").eval()
    after = outputs(exported)
    assert not torch.equal(after, built), "the step changed nothing"
    stored = exported.state_dict()
    for name, tensor in network.state_dict().items():
        assert torch.equal(stored[name], tensor), f"{name} differs"
    gap = float((own_outputs(learner, kind) - after).abs().max())
    assert gap < 10 * CLOSE, f"the export is {gap:.2g} off the trained model"
    return f"equal within {gap:.0e}, {len(buffers)} buffers"


def shown(error: Exception) -> str:
    """Return an error's type and the beginning of its message, in one line."""
    text = re.sub(r" \(/\S+\)", "", " ".join(str(error).split()))  # no temporary folder
    text = re.sub(r"/tmp/\w+", "FOLDER", text)
    return f"{type(error).__name__}: {text[:150]}"


def outcome(kind: str, architecture: str) -> tuple[str, str]:
    """Return (holds | cannot be built | refused | FAILS, detail)."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return HOLDS, check(kind, architecture, Path(folder))
        except CannotBuildError as error:
            return "cannot be built", str(error)
        except ConfigError as error:
            return "refused", shown(error)
        except Exception as error:
            return "FAILS", shown(error)


def table(kind: str, outcomes: Mapping[str, tuple[str, str]]) -> str:
    """Return the rows of a class of models in docs/models.md."""
    whole = [name for name, (state, _) in outcomes.items() if state == HOLDS]
    rows = [f"| {kind}: {HOLDS} ({len(whole)}) | {', '.join(whole)} |"]
    names_of: dict[tuple[str, str], list[str]] = {}
    for name, (state, detail) in outcomes.items():
        if state != HOLDS:
            text = detail.replace("|", "/").partition(" Give a ")[0]
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "NAME", text)
            names_of.setdefault((state, text), []).append(name)
    for (state, text), names in names_of.items():
        rows.append(f"| {kind}: {state} | {', '.join(names)}: {text} |")
    return "\n".join(rows) + "\n"


def rewrite(kind: str, rows: str) -> None:
    """Replace the rows of a class of models in docs/models.md, or append them."""
    before, _, after = PAGE.read_text().partition(MARK)
    lines = after.splitlines(keepends=True)
    others = [line for line in lines if not line.startswith(f"| {kind}: ")]
    first = next((i for i, line in enumerate(lines) if line not in others), len(others))
    PAGE.write_text(before + MARK + "".join(others[:first]) + rows + "".join(others[first:]))


def told(kind: str) -> dict[str, str]:
    """Return the outcome of each architecture of a class, as docs/models.md has it."""
    states: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith(f"| {kind}: "):
            state, names = line.strip("| ").removeprefix(f"{kind}: ").split(" | ", 1)
            state = HOLDS if state.startswith(HOLDS) else state
            states |= dict.fromkeys(names.partition(": ")[0].split(", "), state)
    return states


def main() -> None:
    """Print a line for each architecture, or with --write the tables of docs/models.md."""
    import torch.distributed as dist
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ["LOCAL_RANK"] = "0"
    arguments = [each for each in sys.argv[1:] if each != "--write"]
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        for kind in arguments[:1] or list(KINDS):
            outcomes = {}
            for architecture in arguments[1:] or NAMES[kind]:
                start = time.monotonic()
                outcomes[architecture] = state, detail = outcome(kind, architecture)
                took = time.monotonic() - start
                print(f"{kind}\t{architecture}\t{state}\t{detail}\t{took:.1f}", flush=True)
            if "--write" in sys.argv:
                rewrite(kind, table(kind, outcomes))


if __name__ == "__main__":
    main()
