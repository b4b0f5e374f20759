"""Tiny random vision-language models for tests, and what a processor would make of images."""

import hashlib
from typing import Any

import numpy as np
import torch
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
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
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
    inputs = {"pixel_values": pixels}
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
