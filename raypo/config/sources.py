"""Data sources: files, folders and data sets, with their options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from raypo.config.base import Config
from raypo.config.fields import FUNCTION, PATH

DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
"""Suffixes of the files that raypo can read rows from."""


def one_or_many(value: Any) -> Any:
    """Return a single value as a list of one; lists are unchanged."""
    return [value] if isinstance(value, str | Mapping | BaseModel) else value


class SourceEntry(Config):
    """A source of rows with options besides its path: `{path: openai/gsm8k, config: main, split:
    train}` or `{path: chat.jsonl, weight: 0.3}`.
    """

    path: str
    """File, pattern, folder or data-set id of the source."""
    config: str | None = None
    """Configuration of a Hugging Face data set, which the hub calls a subset. null means the data
    set's only or default configuration."""
    split: str = "train"
    """Split of a data set, or a slice or sum of splits, like train[:1000] or train+test. If
    `save_to_disk` wrote a folder with several splits: the name of one of them."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*$")
    """Name of the source in `rollout.data_source`, metrics and samples. null means the name of the
    file or data set, without folder and suffix."""
    weight: float | None = Field(default=None, gt=0.0)
    """Sampling weight relative to the other sources. Either every source has a weight, or no source
    has. Held-out sources cannot have weights. null means that the rows of all sources are drawn as
    one data set, each row once per epoch."""
    function: Annotated[str | None, FUNCTION] = None
    """Reward function for the responses to this source, instead of `reward.function` (for held-out
    prompts: instead of `eval.function`). null means no such function."""

    @field_validator("config", "split")
    @classmethod
    def _refuse_options_of_files(cls, value: str | None, info: ValidationInfo) -> str | None:
        path = info.data.get("path", "")
        is_file = "://" in path or path.lower().endswith(DATA_FILES)
        if is_file and value != cls.model_fields[str(info.field_name)].default:
            raise ValueError(
                f"only a Hugging Face data set has a configuration and splits, but {path} is a "
                "file. Remove it."
            )
        return value

    def __str__(self) -> str:
        """Return the source for messages: `openai/gsm8k, main, train`, or a file's path."""
        if self.config is None and self.split == type(self).model_fields["split"].default:
            return self.path
        return ", ".join(filter(None, (self.path, self.config, self.split)))


PromptSource = str | SourceEntry
"""A source of prompts: its path, or a mapping with the path and options."""


def _kind_of_source(value: Any) -> str:
    return "entry" if isinstance(value, Mapping | SourceEntry) else "text"


_Sources = Annotated[
    tuple[
        Annotated[
            Annotated[str, Tag("text")] | Annotated[SourceEntry, Tag("entry")],
            Discriminator(_kind_of_source),
        ],
        ...,
    ],
    BeforeValidator(one_or_many),
]


def source_name(source: PromptSource) -> str:
    """Return the name of a source in metrics: gsm8k for `data/gsm8k.jsonl` and `openai/gsm8k`."""
    if isinstance(source, SourceEntry) and source.name is not None:
        return source.name
    for part in reversed(path_of(source).partition("?")[0].split("/")):
        file = PurePath(part)
        stem = file.stem if file.suffix.lower() in DATA_FILES else part
        if name := re.sub(r"[^\w.-]+", "-", stem).strip(
            "-._"
        ):  # empty if the part is only wildcards
            return name
    return "data"


def path_of(source: PromptSource) -> str:
    """Return the path of a source."""
    return source if isinstance(source, str) else source.path


def _distinct(sources: tuple[PromptSource, ...]) -> tuple[PromptSource, ...]:
    """Refuse two sources of the same name if an option depends on the name."""
    names = [source_name(source) for source in sources]
    repeated = next((name for name in names if names.count(name) > 1), None)
    entries = [source for source in sources if isinstance(source, SourceEntry)]
    if repeated and any(entry.weight or entry.function or entry.name for entry in entries):
        raise ValueError(
            f"two sources have the name {repeated}, but names must be unique. Give each its own "
            "name, like {path: PATH, name: NAME}."
        )
    return sources


def _all_weighted_or_none(sources: tuple[PromptSource, ...]) -> tuple[PromptSource, ...]:
    """Refuse weights if some sources have none, because the shares would be undefined."""
    unweighted = [s for s in sources if isinstance(s, str) or s.weight is None]
    if unweighted and len(unweighted) < len(sources):
        raise ValueError(
            f"{unweighted[0]} has no weight, but others have one. Give every source a weight, or "
            "none of them."
        )
    return sources


def _not_weighted(sources: tuple[PromptSource, ...]) -> tuple[PromptSource, ...]:
    """Refuse weights of held-out sources."""
    for source in sources:
        if isinstance(source, SourceEntry) and source.weight is not None:
            raise ValueError(
                f"{source} has a weight ({source.weight:g}), but every held-out row is used "
                "once. Remove the weight."
            )
    return sources


TrainedSources = Annotated[
    _Sources, PATH, AfterValidator(_distinct), AfterValidator(_all_weighted_or_none)
]
HeldOutSources = Annotated[_Sources, PATH, AfterValidator(_distinct), AfterValidator(_not_weighted)]


def functions_of(sources: Sequence[PromptSource] | None) -> dict[str, str]:
    """Return the reward functions of the sources that name one, by source name."""
    entries = [source for source in sources or () if isinstance(source, SourceEntry)]
    return {source_name(entry): entry.function for entry in entries if entry.function}
