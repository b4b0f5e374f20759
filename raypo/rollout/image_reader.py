"""The reader of a policy's images."""

from __future__ import annotations

from raypo.config import ConfigError
from raypo.data.images import ImageReader
from raypo.models.checkpoint import read_config
from raypo.models.vision import placeholder_id


def image_reader(policy: str) -> ImageReader:
    """Return the reader of a policy's images.

    Args:
        policy: Folder or hub id of the policy.

    Raises:
        ConfigError: the policy reads no images, or has no processor for them.
    """
    token = placeholder_id(read_config(policy))
    if token is None:
        raise ConfigError(
            f"model.policy ({policy}): the prompts have images (data.image_key), which this model "
            "does not read. Give one that does, or remove data.image_key."
        )
    return ImageReader(policy, placeholder_id=token)
