"""Sizes of a language model, read from config.json and safetensors headers but not the weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from raypo.config import AnyConfig, ConfigError, DPOConfig, ExamplesConfig, PPOConfig
from raypo.models.model_files import ATTENTION_LAYERS

PLAIN_MLP = ("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "mpt")
"""Model types whose MLP has two matrices. All others are assumed to have three, with a gate."""
NOT_TILED = ("opt", "bloom", "mpt")
"""Model types without modules for their MLPs, or whose MLPs read more than the hidden states."""
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
"""Names of the same config keys in older architectures."""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "fp8": 1}
_HUB_TIMEOUT_S = 5.0
VOCABULARY_PAD = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer that determine its memory; counts of elements, not bytes."""

    parameters: int
    """Number of weights; a tied head counts once."""
    largest_tensor: int
    """Elements of the largest weight."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """MLP width that one token uses: the sum over its active experts."""
    vocabulary: int
    tied: bool
    gated: bool
    is_exact: bool
    """True if `parameters` was counted in safetensors headers, not computed from config.json."""
    expert_bytes: int = 0
    """Bytes of a token's experts in all layers, as an engine records them; 0 without experts."""
    tiles_mlps: bool = True
    """True if the MLPs of all layers can be computed in tiles (`learner.mlp_tile_tokens`)."""
    shares_rows: bool = True
    """True if workers can share the tokens of its rows (`learner.sequence_parallel`)."""

    @property
    def backbone_parameters(self) -> int:
        """Weights without the language-model head."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def attention(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of all key heads together, and also of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each linear layer that a token uses in a decoder layer, by name."""
        gate = {"gate_proj": (self.hidden, self.intermediate)} if self.gated else {}
        return {
            "q_proj": (self.hidden, self.attention),
            "k_proj": (self.hidden, self.key_value),
            "v_proj": (self.hidden, self.key_value),
            "o_proj": (self.attention, self.hidden),
            **gate,
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer_weights(self) -> int:
        """Number of weights in `linears`."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    def kv_bytes_per_token(self, dtype: str, *, tensor_parallel: int = 1) -> int:
        """Return the bytes of one token's keys and values in a device's cache, over all layers.

        Args:
            dtype: Precision of the cache (`EngineSection.kv_dtype`).
            tensor_parallel: Number of devices that share the heads.
        """
        heads = max(1, self.kv_heads // tensor_parallel)  # at least one on each device, as in vLLM
        return 2 * self.layers * heads * self.head_dim * ITEMSIZE[dtype]

    def does_not_divide(self, size: int) -> str | None:
        """Return a description of a dimension that vLLM cannot split into `size` equal shards.

        The result is None if vLLM can split all dimensions.
        """
        # With more shards than key-value heads, vLLM repeats the heads.
        shared_heads = size > self.kv_heads and size % self.kv_heads == 0
        cut = {
            "attention heads": self.heads,
            "key-value heads": size if shared_heads else self.kv_heads,
            "columns of the MLP": self.intermediate,
            f"rows of the vocabulary (padded to a multiple of {VOCABULARY_PAD})": (
                -(-self.vocabulary // VOCABULARY_PAD) * VOCABULARY_PAD
            ),
        }
        return next((f"{n} {what}" for what, n in cut.items() if n % size), None)

    @classmethod
    def read(cls, path: str, *, key: str = "model.policy") -> ModelShape:
        """Read the shape of a model.

        Args:
            path: Hugging Face folder, or hub id, of which only config.json is downloaded.
            key: Config key of the model, for messages.

        Raises:
            ConfigError: there is no config.json, or it lacks a size of a transformer.
        """
        folder = _folder(path, key)
        values = _json(folder / "config.json", f"{key} ({path})")
        counted = _count_in_headers(folder)
        try:
            return from_config(values, counted=counted)
        except KeyError as error:
            raise ConfigError(
                f"{key} ({path}): its config.json has no {error.args[0]}, so its memory cannot be "
                f"predicted. Give a folder of a transformer with a language-model head."
            ) from None


@dataclass(frozen=True)
class Models:
    """Shapes of a run's models."""

    policy: ModelShape
    critic: ModelShape | None
    references: dict[str, ModelShape]
    """Reference models by role."""
    rewards: dict[str, ModelShape]
    """Reward models by role; they are loaded without a language-model head."""
    judges: dict[str, ModelShape] = field(default_factory=dict)
    """The judge that the run deploys, by role."""
    drafter: ModelShape | None = None
    """The draft model of the engines (`rollout.engine.speculation.model`)."""

    @property
    def trained(self) -> list[ModelShape]:
        """Policy, and critic if there is one."""
        return [shape for shape in (self.policy, self.critic) if shape is not None]

    @property
    def frozen(self) -> dict[str, ModelShape]:
        """Reward models, reference models and the judge, by role."""
        return self.rewards | self.references | self.judges

    @classmethod
    def read(cls, config: AnyConfig) -> Models:
        """Read the shapes from folders or the hub, each path once."""
        read: dict[str, ModelShape] = {}

        def shape(key: str, path: str) -> ModelShape:
            if path not in read:
                read[path] = ModelShape.read(path, key=key)
            return read[path]

        policy = shape("model.policy", config.model.policy)
        rollout = getattr(config, "rollout", None)
        drafts = rollout and rollout.engine.speculation.model
        drafter = shape("rollout.engine.speculation.model", drafts) if drafts else None
        if isinstance(config, ExamplesConfig):
            named = config.model.reference if isinstance(config, DPOConfig) else None
            references = {"reference": shape("model.reference", named)} if named else {}
            return cls(policy, None, references, {}, drafter=drafter)
        rewards = {
            role: shape("model.reward", entry.path) for role, entry in config.reward_models.items()
        }
        first = next(iter(rewards.values()), policy)
        critic = first if first.vocabulary == policy.vocabulary else policy
        if isinstance(config, PPOConfig) and config.model.critic:
            critic = shape("model.critic", config.model.critic)
        return cls(
            policy,
            critic if config.needs_critic else None,
            {r: shape("model.reference", path) for r, path in config.references.items()},
            rewards,
            {r: shape("reward.judge.path", path) for r, path in config.judge_models.items()},
            drafter,
        )


def from_config(values: dict[str, Any], *, counted: tuple[int, int] | None = None) -> ModelShape:
    """Return the shape that a config.json describes.

    Args:
        values: Content of config.json; sizes may be in a nested text_config.
        counted: Number of elements of all weights and of the largest tensor, from headers. None
            means that both are computed from `values`.

    Raises:
        KeyError: a size is missing.
    """
    outer, values = values, values.get("text_config", values)
    hidden = int(_size(values, "hidden_size"))
    layers, heads = (
        int(_size(values, f"num_{name}")) for name in ("hidden_layers", "attention_heads")
    )
    vocabulary = int(values["vocab_size"])
    gated = values.get("model_type") not in PLAIN_MLP
    width = int(_size(values, "intermediate_size", None if gated else 4 * hidden))
    counts = (values.get(f"{name}_experts") for name in ("num_local", "num", "n_routed"))
    experts = int(next(filter(None, counts), 1))
    active = int(values.get("num_experts_per_tok") or 1) if experts > 1 else 1
    width = int(values.get("moe_intermediate_size") or width) if experts > 1 else width
    # transformers keeps all experts of a layer in one tensor, and their files have one for each.
    fused = (2 if gated else 1) * experts * width * hidden if experts > 1 else 0
    tied = bool(outer.get("tie_word_embeddings", values.get("tie_word_embeddings", True)))
    shape = ModelShape(
        parameters=0,
        largest_tensor=max(vocabulary * hidden, fused),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or hidden // heads),
        intermediate=width * active,
        vocabulary=vocabulary,
        tied=tied,
        gated=gated,
        is_exact=counted is not None,
        expert_bytes=layers * active * (1 if experts <= 256 else 2) if experts > 1 else 0,
        tiles_mlps=experts == 1 and values.get("model_type") not in NOT_TILED,
        shares_rows="vision_config" not in outer
        and not values.get("full_attention_interval")  # linear attention in the other layers
        and set(values.get("layer_types") or ()) <= ATTENTION_LAYERS,
    )
    if counted is None:
        return replace(shape, parameters=_computed(shape, values, width * experts))
    return replace(shape, parameters=counted[0], largest_tensor=max(counted[1], fused))


def _computed(shape: ModelShape, values: dict[str, Any], width: int) -> int:
    """Compute the number of a model's weights from its sizes.

    The layers of a model with a gated MLP are assumed to be built like Llama's, all others like
    GPT-2's.

    Args:
        shape: The model's sizes. Its `parameters` are ignored.
        values: Content of config.json, which tells about biases and norms.
        width: MLP width of a layer, summed over all experts.
    """
    hidden, attention, key_value = shape.hidden, shape.attention, shape.key_value
    layer = 2 * hidden * attention + 2 * hidden * key_value + 2 * hidden  # two norms
    layer += (3 if shape.gated else 2) * hidden * width
    kind = values.get("model_type")
    if values.get("attention_bias") or kind in ("qwen2", "qwen2_moe"):
        layer += attention + 2 * key_value
    if kind in ("qwen3", "qwen3_moe"):
        layer += 2 * shape.head_dim
    if not shape.gated:  # biases, and a second vector of each norm
        layer += attention + 2 * key_value + 2 * hidden + width + 2 * hidden
    outside = hidden * shape.vocabulary * (1 if shape.tied else 2) + hidden
    if not shape.gated:
        outside += hidden + hidden * int(values.get("n_positions") or 0)
    return shape.layers * layer + outside


def _size(values: dict[str, Any], name: str, default: Any = None) -> Any:
    for key in (name, *OTHER_NAMES.get(name, ())):
        if values.get(key) is not None:
            return values[key]
    if default is None:
        raise KeyError(name)
    return default


def _folder(path: str, key: str) -> Path:
    """Return the folder with the model's files: `path` itself, or a folder in the hub's cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    import huggingface_hub  # only a hub id needs it

    try:
        is_local = not _hub_answers(path)
        file = huggingface_hub.hf_hub_download(path, "config.json", local_files_only=is_local)
        return Path(file).parent
    except huggingface_hub.errors.LocalEntryNotFoundError:
        raise ConfigError(
            f"{key} ({path}): there is no such folder, and the hub could not be reached to look "
            "up a model with this id. Connect to the hub, or give a local folder."
        ) from None
    except Exception as error:  # huggingface_hub raises a dozen unrelated types
        raise ConfigError(
            f"{key} ({path}): its config.json cannot be loaded: {type(error).__name__}. Give a "
            "local folder, or correct the hub id."
        ) from None


def _hub_answers(path: str) -> bool:
    """Ask the hub once for a model's config.json: a download would retry for 25 s."""
    import huggingface_hub

    try:
        url = huggingface_hub.hf_hub_url(path, "config.json")
        huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S)
    except huggingface_hub.errors.HfHubHTTPError:
        return True
    except Exception:  # its type depends on the HTTP client
        return False
    return True


def _json(path: Path, what: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {path} cannot be read: {error}. Correct the file.") from None


def _count_in_headers(folder: Path) -> tuple[int, int] | None:
    """Return the number of elements of all weights and of the largest weight, from the headers.

    The result is None if the folder has no safetensors files, or if one is incomplete or missing.
    """
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError:  # a Git LFS pointer, or an incomplete file
            return None
        sizes |= {name: math.prod(part.get_shape()) for name, part in slices.items()}
    index = folder / "model.safetensors.index.json"
    if index.is_file() and set(_json(index, str(folder)).get("weight_map", ())) - set(sizes):
        return None  # a file of the index is missing
    return (sum(sizes.values()), max(sizes.values())) if sizes else None
