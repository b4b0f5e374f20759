"""Images in prompts: reading and checking them, and the token ids that stand for them.

The text of a prompt has a slot for each image, which is the token that the model's chat template
writes for one. `ImageReader.expanded` replaces each slot by as many placeholders as the vision
tower makes vectors of the image.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from typing_extensions import override

from raypo.config import ConfigError, DataSection, PromptSource
from raypo.config.paths import is_uri
from raypo.config.sources import path_of
from raypo.data.chat_messages import Message, is_chat
from raypo.data.item_store import LazySequence
from raypo.data.rows import Row, RowError, RowImage
from raypo.storage.folder import open_storage
from raypo.storage.retries import StorageError, retried
from raypo.types import Images

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")
ImageSource = str | bytes
"""Path or URI of an image, or the content of its file."""

PART_KEYS = ("image", "image_url", "url", "path", "bytes")
"""Keys of a message's image part that may hold the image."""
MARK = "<image>"
"""Text in a message at which an image of the column stands, as in data sets of verl."""


class Slotted(NamedTuple, Generic[Item]):
    """A prompt or example without its images, with what they are read from."""

    item: Item
    sources: tuple[ImageSource, ...]
    slotted_ids: np.ndarray
    """`Images.slotted_ids`."""
    num_prompt_tokens: int
    where: str
    """Location of the row, for error messages."""

    @classmethod
    def of(cls, item: Item, row: Row) -> Slotted[Item]:
        """Return the prompt or example of a tokenised row."""
        sources = tuple(image.source for image in row.images)
        return cls(item, sources, row.slotted_ids, len(row.prompt_ids), row.where)


def with_images(
    row: Row, section: DataSection, source: PromptSource, parts: Sequence[Mapping[str, Any]]
) -> Row:
    """Return a row with its images, checked, and with their places in its chat messages.

    A part of type image without an image, and a mark `<image>` in a text, take the next image of
    the column. Without both, the images of the column stand at the beginning of the first message
    of the user.

    Args:
        row: Row with the columns of the section.
        section: The data section.
        source: Source of the row. Relative paths begin at its folder.
        parts: The image parts of the row's messages, in order.

    Raises:
        RowError: the images do not fit the messages, an image is missing or broken, or there are
            more than `data.max_images`.
    """
    column, name = section.image_key, section.prompt_key
    if column is None:
        return row
    values = _image_list(row.values[column]) if column != name else []
    if not values and not parts:
        return row
    where = f"data.image_key ({column}): {row.where}"
    part_sources = [source_of(part, where) for part in parts if _has_image(part)]
    messages, num_places = row.values[name], len(parts) - len(part_sources)
    if is_chat(messages):
        if not parts:
            messages, num_places = _marked(messages)
        if not num_places and not part_sources:
            messages, num_places = _at_beginning(messages, len(values)), len(values)
        if num_places != len(values):
            raise RowError(
                f"{where} has {len(values)} images in its column, but its messages have "
                f"{num_places} places for them (parts of type image, or {MARK}). Correct the row "
                "or remove it."
            )
    num_images = len(values) + len(part_sources)
    if num_images > section.max_images:
        raise RowError(
            f"data.max_images ({section.max_images}): {row.where} has {num_images} images. Raise "
            "it if the model takes so many, or remove the row."
        )
    from_column = (source_of(value, where) for value in values)
    from_parts = iter(part_sources)
    in_part = [_has_image(part) for part in parts] or [False] * len(values)
    sources = [
        _from_folder_of(source, next(from_parts if is_part else from_column)) for is_part in in_part
    ]
    images = [RowImage(image, image_size(read_file(image, where), where)) for image in sources]
    # Files stand in `images` alone. Rollouts carry the other columns to rewards and files.
    names = [image if isinstance(image, str) else f"{len(image)} bytes" for image in sources]
    return row._replace(
        values=row.values | {column: names} | {name: messages}, images=tuple(images)
    )


def _image_list(value: Any) -> list[Any]:
    """Return the images of a column's value: one image, a list of them, or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _has_image(part: Mapping[str, Any]) -> bool:
    return any(part.get(key) is not None for key in PART_KEYS)


def _marked(messages: Sequence[Message]) -> tuple[list[Message], int]:
    """Return messages with parts in place of marks, and the number of marks."""
    count, changed = 0, []
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant" or MARK not in content:
            changed.append(message)
            continue
        texts = content.split(MARK)
        parts: list[dict[str, str]] = []
        for number, text in enumerate(texts):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
        count += len(texts) - 1
        changed.append(message | {"content": parts})
    return changed, count


def _at_beginning(messages: Sequence[Message], count: int) -> list[Message]:
    """Return messages with places for images before the text of the user's first message."""
    changed = list(messages)
    for number, message in enumerate(messages):
        if message["role"] == "user":
            text = {"type": "text", "text": message["content"]}
            changed[number] = message | {"content": [{"type": "image"}] * count + [text]}
            break
    return changed


def _from_folder_of(source: PromptSource, image: ImageSource) -> ImageSource:
    """Return an image's path, from the folder of the data if it is relative."""
    if isinstance(image, bytes) or is_uri(image) or Path(image).is_absolute():
        return image
    if image.startswith(("~", "data:")):
        return image
    data = path_of(source)
    return f"{data.rpartition('/')[0]}/{image}" if "/" in data else image


def source_of(value: Any, where: str) -> ImageSource:
    """Return what an image is read from.

    Args:
        value: A path, a URI, the bytes of a file, an image of PIL, or a mapping with one of them
            under a key of `PART_KEYS`, as in messages and in undecoded columns of `datasets`.
        where: Key, column and row, for error messages.

    Raises:
        RowError: the value is no image.
    """
    if isinstance(value, Mapping):
        # OpenAI's parts hold a mapping with the key url.
        entries = [value[key] for key in PART_KEYS if value.get(key) is not None]
        # An undecoded image of `datasets` has its bytes beside the path that they came from.
        entries.sort(key=lambda entry: not isinstance(entry, bytes))
        return source_of(entries[0] if entries else None, where)
    if isinstance(value, bytes):
        return value
    if isinstance(value, str | Path) and str(value):
        return str(value)
    picture: Any = value
    if hasattr(picture, "save") and hasattr(picture, "mode"):  # of PIL
        file = io.BytesIO()
        picture.save(file, "PNG")
        return file.getvalue()
    raise RowError(
        f"{where} has {type(value).__name__} there. An image is a path, a URI, the bytes of a file "
        "or an image of PIL. Correct the row or remove it."
    )


def read_file(source: ImageSource, where: str) -> bytes:
    """Return the content of an image's file.

    Raises:
        RowError: the file is missing or cannot be read.
        StorageError: remote storage does not answer, also after some time.
    """
    if isinstance(source, bytes):
        return source
    try:
        if source.startswith("data:"):  # as in OpenAI's messages
            return _of_data_uri(source)
        if is_uri(source):
            uri = f"fsspec+{source}" if source.startswith(("http://", "https://")) else source
            return retried(partial(_of_storage, uri), f"reading {source}")
        return Path(source).expanduser().read_bytes()
    except StorageError:  # no error of the row
        raise
    except Exception as error:  # file systems raise many types
        raise RowError(
            f"{where} has the image {source if len(source) < 500 else source[:50] + '...'}, which "
            f"cannot be read: {str(error) or type(error).__name__}. Relative paths begin at the "
            "folder of the data. Correct the path or remove the row."
        ) from None


def _of_data_uri(uri: str) -> bytes:
    header, _, content = uri.partition(",")
    if not header.endswith(";base64"):
        raise ValueError("a data: URI has to be in base64 (data:image/png;base64,...)")
    return base64.b64decode("".join(content.split()), validate=True)


def _of_storage(uri: str) -> bytes:
    files, path = open_storage(uri, key="data.image_key")
    with files.open_input_stream(path) as file:
        return file.read()


def image_size(content: bytes, where: str) -> tuple[int, int]:
    """Return width and height of an image, as `decoded` returns it, after checking it.

    Raises:
        RowError: the image is broken.
    """
    try:
        return _decoded(content, check_only=True).size
    except Exception as error:  # decoders raise many types
        raise RowError(
            f"{where} has an image ({len(content)} bytes) that cannot be decoded: "
            f"{str(error) or type(error).__name__}. Replace it or remove the row."
        ) from None


@lru_cache(maxsize=16)
def decoded(content: bytes) -> Image:
    """Return an image in RGB, upright. Engine and learner both read images by this function."""
    return _decoded(content)


def _decoded(content: bytes, *, check_only: bool = False) -> Image:
    from PIL import Image, ImageOps

    image = Image.open(io.BytesIO(content))
    if check_only:
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # its sides change places
        width, height = image.size
        image.draft(None, (max(width // 8, 1), max(height // 8, 1)))  # JPEG decodes faster so
        image.load()
        return Image.new("1", (height, width) if turned else (width, height))
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # grey values of 16 bits, which `convert` would cut off at 255
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    return image.convert("RGB")


class ImageInputs(Mapping[str, np.ndarray]):
    """Inputs of a model that its processor makes of images, at the first access in a process.

    A process that only passes images on, or reads their files, loads no processor.
    """

    def __init__(self, files: tuple[bytes, ...], path: str) -> None:
        self._files, self._path = files, path
        self._values: dict[str, np.ndarray] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        return self._processed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._processed())

    def __len__(self) -> int:
        return len(self._processed())

    def __reduce__(self) -> Any:
        return ImageInputs, (self._files, self._path)

    def _processed(self) -> dict[str, np.ndarray]:
        if self._values is None:
            processor = _processor(self._path).image_processor
            made = processor(images=[decoded(file) for file in self._files], return_tensors="np")
            names = processor.model_input_names
            self._values = {name: np.asarray(made[name]) for name in made if name in names}
        return self._values


class ImageReader:
    """Reads images for one model, by the processor in the model's folder."""

    def __init__(self, path: str, *, placeholder_id: int) -> None:
        """Load the processor.

        Args:
            path: Folder or hub id of the model.
            placeholder_id: Token that stands in a prompt for each vector of the vision tower.

        Raises:
            ConfigError: the folder has no processor for images.
        """
        self.path, self.placeholder_id = path, placeholder_id
        self.processor = _processor(path)
        tokenizer = self.processor.tokenizer
        # Gemma 3 has a token for the beginning of an image, and writes placeholders behind it.
        self.slot: str = getattr(self.processor, "boi_token", None) or tokenizer.decode(
            [placeholder_id]
        )
        self.slot_id: int = tokenizer.convert_tokens_to_ids(self.slot)

    def expanded(self, ids: np.ndarray, sizes: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return ids with placeholders for each slot, int32.

        Args:
            ids: Ids of a prompt with one slot for each image.
            sizes: Width and height of each image.

        Raises:
            ValueError: there are more or fewer slots than images, or the model takes no image of
                such a size.
        """
        slots = np.flatnonzero(ids == self.slot_id)
        if len(slots) != len(sizes):
            raise ValueError(
                f"has {len(sizes)} images, but the prompt has {len(slots)} places for them "
                f"({self.slot}). Write chat messages, whose template has to write a place for each "
                "part of type image, or as many <image> as images into the text of a message"
            )
        parts: list[np.ndarray] = []
        begin = 0
        for slot, size in zip(slots, sizes, strict=True):
            parts += [ids[begin:slot], self._expansion(size)]
            begin = slot + 1
        return np.concatenate([*parts, ids[begin:]]).astype(np.int32)

    def read(self, slotted: Slotted[Any]) -> Images:
        """Return the images of a prompt or example."""
        files = tuple(read_file(source, slotted.where) for source in slotted.sources)
        digest = hashlib.sha256()
        for file in files:
            digest.update(hashlib.sha256(file).digest())
        return Images(
            files=files,
            inputs=ImageInputs(files, self.path),
            placeholder_id=self.placeholder_id,
            digest=digest.hexdigest(),
            slotted_ids=slotted.slotted_ids,
            num_prompt_tokens=slotted.num_prompt_tokens,
        )

    @lru_cache(maxsize=4096)  # noqa: B019 (a process has one reader)
    def _expansion(self, size: tuple[int, int]) -> np.ndarray:
        """Return the ids that stand for an image of a width and height, int32."""
        width, height = size
        if self._is_plain:
            (count,) = self.processor._get_num_multimodal_tokens(
                image_sizes=[(height, width)]
            ).num_image_tokens
            return np.full(count, self.placeholder_id, np.int32)
        return self._by_processor(size)

    @cached_property
    def _is_plain(self) -> bool:
        """True if only placeholders stand for an image, and the processor can count them."""
        ids = self._by_processor((256, 256))
        is_counted = hasattr(self.processor, "_get_num_multimodal_tokens")
        return is_counted and bool((ids == self.placeholder_id).all())

    def _by_processor(self, size: tuple[int, int]) -> np.ndarray:
        from PIL import Image

        made = self.processor(
            text=[self.slot], images=[Image.new("RGB", size)], add_special_tokens=False
        )
        return np.asarray(made["input_ids"][0], np.int32)


@lru_cache(maxsize=2)
def _processor(path: str) -> Any:
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(path)
    except Exception as error:
        raise ConfigError(
            f"model.policy ({path}): its processor, which its images need, cannot be loaded: "
            f"{error} Give a folder with preprocessor_config.json or processor_config.json."
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ConfigError(
            f"model.policy ({path}): it has no processor for images. Give a folder with "
            "preprocessor_config.json or processor_config.json."
        )
    return processor


class WithImages(LazySequence[Item]):
    """Prompts or examples whose images are read at each access.

    So memory never holds the images of all of them.
    """

    def __init__(
        self, items: Sequence[Slotted[Item]], reader: Callable[[], ImageReader] | None
    ) -> None:
        """Wrap the items.

        Args:
            items: The prompts or examples without images.
            reader: Function that returns the reader of the images. None means that there are none.
        """
        self._items, self._reader = items, reader

    @property
    def without_images(self) -> Sequence[Item]:
        """The same items with `images` None. Their access reads no image."""
        return _WithoutImages(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @override
    def item(self, index: int) -> Item:
        slotted = self._items[index]
        if not slotted.sources:
            return slotted.item
        assert self._reader is not None, "rows with images are refused without a reader"
        item: Any = slotted.item
        return replace(item, images=self._reader().read(slotted))


class _WithoutImages(LazySequence[Item]):
    """The items of `WithImages` as they are stored."""

    def __init__(self, items: Sequence[Slotted[Item]]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @override
    def item(self, index: int) -> Item:
        return self._items[index].item


def without_images(items: Sequence[Item]) -> Sequence[Item]:
    """Return prompts or examples for a use that needs no images, so that none is read."""
    return items.without_images if isinstance(items, WithImages) else items
