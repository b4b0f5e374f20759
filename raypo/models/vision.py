"""Images in packed rows: their vectors in the place of their tokens, and their positions.

N packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from raypo.models.model_files import VISION
from raypo.models.packing import Packed
from raypo.models.shares import workers_of_shards
from raypo.types import Images, to_device


def parts_outside_decoder(model: Any) -> dict[str, nn.Module]:
    """Return a multimodal model's parts beside its language model, by name.

    These are the vision tower and whatever brings its vectors to the width of the language model,
    called merger, projector or connector.
    """
    if model.config.get_text_config() is model.config:
        return {}
    decoder = model.get_decoder()
    children = model.base_model.named_children()
    return {name: child for name, child in children if child is not decoder}


def modules_of_decoder(model: Any) -> list[nn.Module]:
    """Return all modules of a model that are not in `parts_outside_decoder`."""
    outside = {inner for part in parts_outside_decoder(model).values() for inner in part.modules()}
    return [module for module in model.modules() if module not in outside]


def freeze(model: Any, parts: Sequence[str]) -> None:
    """Exclude parts of a model from training, as `model.freeze` names them."""
    if "vision" in parts:
        for part in parts_outside_decoder(model).values():
            part.requires_grad_(False)


def placeholder_id(config: Any) -> int | None:
    """Return the token that stands for each vector of an image, if a model could sample it."""
    if config.model_type not in VISION:
        return None
    token: int = config.image_token_id
    return token if token < config.get_text_config().vocab_size else None


def image_inputs(backbone: Any, packed: Packed) -> dict[str, Any]:
    """Return the arguments that images add to a packed forward pass.

    The vision tower reads the images of a prompt once, for all its responses.

    Args:
        backbone: A Hugging Face model without a head.
        packed: The packed rows.
    """
    if backbone.config.model_type not in VISION:
        return {}
    device = packed.layout.device
    distinct = {images.digest: images for images in packed.images if images}
    outputs = []
    for images in [*distinct.values(), *_read_for_others(backbone, [*distinct.values()])]:
        inputs = {name: to_device(each, device) for name, each in _tensors(images).items()}
        outputs.append(backbone.get_image_features(**inputs, return_dict=True))
    if not distinct:
        return {}
    of_digest = dict(zip(distinct, outputs, strict=False))
    features = _joined([of_digest[images.digest] for images in packed.images if images])
    arguments: dict[str, Any] = {"mm_encoder_outputs": {"image": features}}
    if hasattr(backbone, "get_rope_index"):
        arguments["position_ids"] = to_device(_positions(backbone, packed), device)
    return arguments


def _read_for_others(backbone: Any, own: list[Images]) -> list[Images]:
    """Return images to read only because another worker has more of them.

    At ZeRO stage 3 the workers gather the vision tower's weights together, so all of them have to
    call it equally often. There are none if the model is not in shards.
    """
    workers = workers_of_shards(backbone)
    counts = workers.gather(len(own))
    some = own
    if max(counts) and not min(counts):
        some = [*chain(*workers.gather(own[:1]))]
    return some[:1] * (max(counts) - len(own))


def _tensors(images: Images) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in images.inputs.items()}


def _joined(outputs: list[Any]) -> SimpleNamespace:
    """Join what the vision tower returned for several prompts, as if it had read them together."""
    pooled = [output.pooler_output for output in outputs]
    is_tensor = isinstance(pooled[0], Tensor)
    joined = SimpleNamespace(pooler_output=torch.cat(pooled) if is_tensor else [*chain(*pooled)])
    if hasattr(outputs[0], "deepstack_features"):  # Qwen3-VL: for each of some layers
        layers = zip(*(output.deepstack_features for output in outputs), strict=True)
        joined.deepstack_features = [[*chain(*of_layer)] for of_layer in layers]
    return joined


def _positions(backbone: Any, packed: Packed) -> Tensor:
    """Return the temporal, vertical and horizontal position of each token, [3, 1, N] on the CPU.

    A prompt's are those of the model. All its responses go on after its largest position.
    """
    positions = packed.layout.segments_on_host[2].long().expand(3, -1).clone()  # [3, N]
    ids = packed.input_ids[0].cpu()
    for group, images in zip(packed.layout.groups, packed.images, strict=True):
        if images is None:
            continue
        prompt = ids[None, group.prompt_slice]
        own, delta = backbone.get_rope_index(
            prompt,
            mm_token_type_ids=(prompt == images.placeholder_id).int(),
            image_grid_thw=_tensors(images)["image_grid_thw"],
        )
        positions[:, group.prompt_slice] = own[:, 0]
        positions[:, group.responses_slice] += int(delta)
    return positions[:, None]
