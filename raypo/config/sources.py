"""Where rows come from: files, folders and data sets, each with what is to be said of it."""

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

DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
"""How the names of files that raypo reads rows from end."""


def one_or_many(value: Any) -> Any:
    """A list of one where a single value stands for it."""
    return [value] if isinstance(value, str | Mapping | BaseModel) else value


class SourceEntry(Config):
    """A source of rows of which more than its path is to be said:
    `{path: openai/gsm8k, config: main, split: train}` or `{path: chat.jsonl, weight: 0.3}`.
    """

    path: str
    """What a source without further keys is: a file, a pattern, a folder, a data set's id."""
    config: str | None = None
    """Configuration of a Hugging Face data set, which the hub calls a subset; null: the only one,
    or the default."""
    split: str = "train"
    """Split of a data set, also a slice or a sum, like train[:1000] or train+test; of a folder that
    `save_to_disk` wrote of several splits, the name of one."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*$")
    """What `rollout.data_source`, metrics and samples call it; null: the file's or data set's name
    without folder and ending."""
    weight: float | None = Field(default=None, gt=0.0)
    """Share of what is drawn, beside the weights of the other sources: all have one, or none. null:
    the rows of all sources are drawn as those of one, each once an epoch."""
    function: str | None = None
    """Function that judges the responses to this source, in place of `reward.function` (to held-out
    prompts: of `eval.function`)."""

    @field_validator("config", "split")
    @classmethod
    def _is_no_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        path = info.data.get("path", "")
        is_file = "://" in path or path.lower().endswith(DATA_FILES)
        if is_file and value != cls.model_fields[str(info.field_name)].default:
            raise ValueError(
                f"configuration and split are a Hugging Face data set's, and {path} is a file. "
                f"Remove it."
            )
        return value

    def __str__(self) -> str:
        """As messages name it: `openai/gsm8k, main, train`, or a file's path."""
        if self.config is None and self.split == type(self).model_fields["split"].default:
            return self.path
        return ", ".join(filter(None, (self.path, self.config, self.split)))


PromptSource = str | SourceEntry
"""A source by its path, or an entry."""


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
    """What metrics call a source: `data/gsm8k.jsonl` and `openai/gsm8k` are gsm8k."""
    if isinstance(source, SourceEntry) and source.name is not None:
        return source.name
    for part in reversed(path_of(source).partition("?")[0].split("/")):
        file = PurePath(part)
        word = file.stem if file.suffix.lower() in DATA_FILES else part
        if name := re.sub(r"[^\w.-]+", "-", word).strip("-._"):  # of a pattern, what is no wildcard
            return name
    return "data"


def path_of(source: PromptSource) -> str:
    """What a source is, by itself."""
    return source if isinstance(source, str) else source.path


def _distinct(sources: tuple[PromptSource, ...]) -> tuple[PromptSource, ...]:
    """Refuse names that could mean two sources."""
    names = [source_name(source) for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    entries = [source for source in sources if isinstance(source, SourceEntry)]
    if twice and any(entry.weight or entry.function or entry.name for entry in entries):
        raise ValueError(
            f"two sources are called {twice}, and names tell sources apart. Name each otherwise, "
            f"like {{path: PATH, name: NAME}}."
        )
    return sources


def _all_weighted_or_none(sources: tuple[PromptSource, ...]) -> tuple[PromptSource, ...]:
    """Refuse weights beside sources without one: they would be shares of nothing known."""
    without = [s for s in sources if isinstance(s, str) or s.weight is None]
    if without and len(without) < len(sources):
        raise ValueError(
            f"{without[0]} has no weight, and others have. Give each source a weight, or none."
        )
    return sources


def _not_weighted(sources: tuple[PromptSource, ...]) -> tuple[PromptSource, ...]:
    """Refuse weights of held-out sources."""
    for source in sources:
        if isinstance(source, SourceEntry) and source.weight is not None:
            raise ValueError(
                f"{source} has a weight ({source.weight:g}), and every held-out row is used once. "
                f"Remove the weight."
            )
    return sources


TrainedSources = Annotated[
    _Sources, AfterValidator(_distinct), AfterValidator(_all_weighted_or_none)
]
HeldOutSources = Annotated[_Sources, AfterValidator(_distinct), AfterValidator(_not_weighted)]


def functions_of(sources: Sequence[PromptSource] | None) -> dict[str, str]:
    """Name of a source -> the function that judges responses to it, of those that have one."""
    entries = [source for source in sources or () if isinstance(source, SourceEntry)]
    return {source_name(entry): entry.function for entry in entries if entry.function}
