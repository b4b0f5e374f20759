"""A model's folder apart from weights and tokenizer: read when it is loaded, written at its export.

transformers loads some configs that it refuses to save. So they are saved once when a model is
loaded: an error then costs a start, and not a run.
"""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from transformers import GenerationConfig, PretrainedConfig
from transformers.utils.hub import cached_file

from raypo.config import ConfigError
from raypo.models.checkpoint import first_line, read_config

COPIED = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "audio_tokenizer_config.json",
    "chat_template.json",
)
"""Files of a multimodal model's processor. The tokenizer saves its own files."""
REFUSED = re.compile(r"(?:^- `|')(\w+)[`']: ", re.MULTILINE)
"""Names of attributes in transformers' reasons for not saving a config."""


@dataclass(frozen=True)
class ModelFolder:
    """Content of a model's folder, apart from weights and tokenizer."""

    config: PretrainedConfig
    generation_config: GenerationConfig | None
    """None means that the model does not generate."""
    others: dict[str, bytes]
    """Further files, by name."""
    left_out: dict[str, Any]
    """Values in the base's configs that transformers refuses to save, by name."""

    @classmethod
    def of(
        cls,
        path: str,
        config: PretrainedConfig,
        generation_config: GenerationConfig | None,
        *,
        key: str = "model",
    ) -> Self:
        """Return the folder that a model's export will have, after saving it once.

        Args:
            path: Folder or hub id that the model was loaded from.
            config: Config of the model. It is not changed.
            generation_config: Its generation config, if it has one. It is not changed.
            key: The config key that names the model, for messages.

        Raises:
            ConfigError: transformers refuses to save a config, for more than the value of an
                attribute of generation.
        """
        config, generation_config = copy.deepcopy((config, generation_config))
        left_out = _make_saveable(config, f"{key} ({path}): its config.json")
        if generation_config is not None:
            what = f"{key} ({path}): its generation_config.json"
            left_out |= _make_saveable(generation_config, what)
        return cls(config, generation_config, dict(_others(path)), left_out)

    def for_saving(self, network: Any) -> Any:
        """Return a shallow copy of a network that has these configs.

        The network itself keeps its own: it may be in a forward pass while a thread saves it.
        """
        network = copy.copy(network)
        network.config = self.config
        if self.generation_config is not None:
            network.generation_config = self.generation_config
        return network

    def write_others(self, folder: Path) -> None:
        """Write the files that are neither configs nor weights."""
        for name, content in self.others.items():
            (folder / name).write_bytes(content)


def follow_umask(folder: Path, config: str = "config.json") -> None:
    """Give a folder's weight files the mode of its config: safetensors lets only the owner read."""
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / config, file)


def check_saveable(key: str, path: str, tokenizer: Any) -> None:
    """Save all of a model but its weights into a temporary folder, as its export will.

    A warning names the values that the export leaves out.

    Args:
        key: The config key that names the model, for messages.
        path: Folder or hub id.
        tokenizer: Tokenizer that is saved beside the model.

    Raises:
        ConfigError: one of its configs or its tokenizer cannot be saved.
    """
    config = read_config(path, key=key)
    generation_config = read_generation_config(path, key=key)
    if generation_config is None:
        generation_config = GenerationConfig.from_model_config(config)
    left_out = ModelFolder.of(path, config, generation_config, key=key).left_out
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
    except Exception as error:
        raise ConfigError(
            f"{key} ({path}): its tokenizer cannot be saved again, so a trained model could not "
            f"be exported: {first_line(error)} Correct tokenizer_config.json."
        ) from error
    if left_out:
        told = ", ".join(f"{name} ({value})" for name, value in left_out.items())
        warnings.warn(
            f"{key} ({path}): exports leave out {told}, because transformers does not save a "
            "generation config with it.",
            stacklevel=2,
        )


def read_generation_config(path: str, *, key: str = "model") -> GenerationConfig | None:
    """Return the content of a model's generation_config.json, or None if it has none.

    Raises:
        ConfigError: transformers refuses the file.
    """
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None
    except Exception as error:
        raise ConfigError(
            f"{key} ({path}): transformers cannot read its generation_config.json: "
            f"{first_line(error)} Correct the file."
        ) from error


def _others(path: str) -> Iterator[tuple[str, bytes]]:
    for name in COPIED if path else ():
        file = cached_file(
            path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if file is not None:
            yield name, Path(file).read_bytes()


def _make_saveable(config: Any, what: str) -> dict[str, Any]:
    """Take from a config the settings of generation for which transformers refuses to save it.

    They have no effect in raypo, whose engines sample as `rollout` says.

    Returns:
        The values that were taken away, by name.
    """
    left_out: dict[str, Any] = {}
    unset = vars(GenerationConfig())
    while True:
        try:
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
            return left_out
        except Exception as error:
            names = unset.keys() & set(REFUSED.findall(str(error))) - left_out.keys()
            wrong = {name: value for name, value in vars(config).items() if name in names}
            if not wrong:
                raise ConfigError(
                    f"{what} cannot be saved again, so a trained model could not be exported: "
                    f"{first_line(error)} Correct the file."
                ) from error
            for name in wrong:
                if isinstance(config, GenerationConfig):
                    setattr(config, name, unset[name])
                else:
                    delattr(config, name)
            left_out |= wrong
