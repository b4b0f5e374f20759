"""Tiny random vision-language models for tests, and what a processor would make of images."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    LlavaConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from raypo.types import Images

IMAGE, VIDEO, START, END = 4, 5, 6, 7
"""Token ids: placeholders of image and video, and what stands around an image."""
PATCH, MERGE, CHANNELS = 4, 2, 3
SIDE = 16
"""Height and width of an image in pixels, for models whose images all have one size."""
TEXT: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "initializer_range": 0.3,
}
SQUARES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "initializer_range": 0.3,
}
IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
ROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
CONFIGS: dict[str, Any] = {
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": dict(ROPE)},
        vision_config={**TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        tie_word_embeddings=False,
        **IDS,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE | {"mrope_interleaved": True}},
        vision_config={
            **TOWER,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        tie_word_embeddings=False,
        **IDS,
    ),
    "smolvlm": lambda: SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config=SQUARES, image_token_id=IMAGE
    ),
    "idefics3": lambda: Idefics3Config(
        text_config={**TEXT, "model_type": "llama"}, vision_config=SQUARES, image_token_id=IMAGE
    ),
    "llava": lambda: LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**SQUARES, "model_type": "clip_vision_model"},
        image_token_index=IMAGE,
    ),
}
"""Configs by model type."""


def tiny_vision_model(kind: str, *, seed: int = 0) -> Any:
    """Return a random float32 model of a model type in `CONFIGS`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(CONFIGS[kind](), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms, too
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def made_up_images(kind: str, *sizes: tuple[int, int], seed: int = 0) -> Images:
    """Return random images as the processor of a model type would.

    Args:
        kind: Model type.
        sizes: Height and width of each image, in tokens, if images of the model type have sizes.
        seed: Seed of the pixels.
    """
    grid = np.array([(1, MERGE * height, MERGE * width) for height, width in sizes], np.int64)
    shapes: dict[str, tuple[int, ...]] = {
        "qwen": (int(grid.prod(1).sum()), CHANNELS * 2 * PATCH**2),
        "llav": (len(sizes), CHANNELS, SIDE, SIDE),
        "smol": (1, len(sizes), CHANNELS, SIDE, SIDE),
        "idef": (1, len(sizes), CHANNELS, SIDE, SIDE),
    }
    pixels = np.random.default_rng(seed).normal(size=shapes[kind[:4]]).astype(np.float32)
    inputs: dict[str, np.ndarray] = {"pixel_values": pixels}
    if kind.startswith("qwen"):
        inputs["image_grid_thw"] = grid
    elif not kind.startswith("llav"):  # below, an image has padding
        inputs["pixel_attention_mask"] = np.ones((1, len(sizes), SIDE, SIDE), np.int64)
        inputs["pixel_attention_mask"][0, -1, SIDE // 2 :] = 0
    digest = hashlib.sha256(pixels.tobytes() + grid.tobytes()).hexdigest()
    return Images((), inputs, IMAGE, digest)


def prompt_of(kind: str, images: Images | None, *text: int) -> np.ndarray:
    """Return the token ids of a prompt with images, each before one of the tokens of a text."""
    if images is None:
        return np.array(text, np.int64)
    if kind.startswith("qwen"):
        counts = images.inputs["image_grid_thw"].prod(1) // MERGE**2
    else:
        patches = (SIDE // PATCH) ** 2
        pixels = images.inputs["pixel_values"]
        counts = [patches if kind == "llava" else patches // 4] * (
            pixels.size // CHANNELS // SIDE**2
        )
    ids: list[int] = []
    for place, token in enumerate(text):
        if place < len(counts):
            ids += [START, *[IMAGE] * int(counts[place]), END]
        ids.append(token)
    return np.array(ids, np.int64)


Row = tuple[Images | None, list[int], list[int]]
"""Images of a prompt, its text, and a response."""


def all_rows(kind: str) -> list[Row]:
    """Return rows with one, two and no images; `one` and `other` have equal token ids."""
    one, other = (made_up_images(kind, (2, 3), seed=seed) for seed in (0, 2))
    two = made_up_images(kind, (1, 2), (3, 2), seed=1)
    return [
        (one, [9, 10, 11], [15, 16, 17]),
        (one, [9, 10, 11], [18]),
        (None, [9, 10], [19, 20]),
        (two, [12, 13, 14], [21, 22, 23, 24]),
        (other, [9, 10, 11], [15, 16]),
        (two, [12, 13, 14], [25, 26]),
        (None, [20, 21, 22], [27]),
        (one, [30], [28, 29]),
    ]


def rows(kind: str, *which: int) -> dict[str, Any]:
    """Return the arguments of `pack` for some rows of `all_rows`, or without numbers for all."""
    of_kind = all_rows(kind)
    of_rows = [of_kind[row] for row in which] or of_kind
    return {
        "prompts": [prompt_of(kind, images, *text) for images, text, _ in of_rows],
        "responses": [np.array(response) for *_, response in of_rows],
        "images": [images for images, *_ in of_rows],
    }


def of_transformers(model: Any, prompt: np.ndarray, response: np.ndarray, images: Any) -> Any:
    """Return what a model's own forward gives for one row, without packing."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    inputs: dict[str, Tensor] = {}
    if images is not None:
        inputs = {name: torch.from_numpy(values) for name, values in images.inputs.items()}
        if hasattr(model.base_model, "get_rope_index"):
            inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return model(input_ids=ids, **inputs)


def separate_log_probs(model: Any, *, temperature: float = 1.0, **rows: list[Any]) -> Tensor:
    """Return the log-probs of all response tokens, [M], by transformers alone."""
    log_probs = []
    for prompt, response, images in zip(*rows.values(), strict=True):
        logits = of_transformers(model, prompt, response, images).logits[0, len(prompt) - 1 : -1]
        logits = logits.index_fill(1, torch.tensor([IMAGE]), -torch.inf)  # cannot be sampled
        ids = torch.from_numpy(response)[:, None]
        log_probs.append((logits / temperature).log_softmax(-1).gather(-1, ids)[:, 0])
    return torch.cat(log_probs)
