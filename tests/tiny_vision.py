"""Vision-language models for tests: real folders with a tokenizer, a processor and pictures."""

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from tests.tiny import TOKENS, character_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_qwen_vl(folder: str | Path, *, seed: int = 0, hidden: int = 64, layers: int = 2) -> Path:
    """Save a random float32 Qwen2.5-VL with its tokenizer and processor into `folder`."""
    tokenizer = character_tokenizer(further_tokens=VISION_TOKENS, chat_template=CHAT_TEMPLATE)
    vocabulary = tokenizer.get_vocab()
    sizes: dict[str, Any] = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    pixels: dict[str, Any] = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes, **pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes, **pixels),
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    ids = {token: vocabulary[token] for token in VISION_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            **TOKENS,
            "vocab_size": len(vocabulary),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.1,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [hidden // 16, hidden // 8 - hidden // 16, hidden // 8],
                "rope_theta": 10000.0,
            },
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    model.generation_config = GenerationConfig(**TOKENS)
    model.save_pretrained(folder)
    return Path(folder)


def picture(color: Any, size: tuple[int, int] = (56, 56)) -> bytes:
    """Return a picture of one colour as PNG."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()
