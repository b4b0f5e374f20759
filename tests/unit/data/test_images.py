"""Images of prompts: where they come from, where they stand, and what is refused."""

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from raypo.config import ConfigError, DataSection, ResponsesSection
from raypo.data import images
from raypo.data.examples import load_examples
from raypo.data.images import ImageReader, decoded
from raypo.data.prompts import load_prompts, peek
from raypo.data.rows import RowError
from raypo.rollout.saved_batches import _prompt_of
from raypo.run.text_metrics import TextMetrics
from raypo.storage import retries
from raypo.types import Prompt
from tests.tiny_vision import picture, tiny_qwen_vl

pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_vl(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reader(model: Path) -> ImageReader:
    return ImageReader(str(model), placeholder_id=6)


def load(folder: Path, reader: ImageReader, *rows: dict[str, Any], **values: Any) -> list[Prompt]:
    for name, color in (("red", "red"), ("blue", "blue")):
        (folder / f"{name}.png").write_bytes(picture(color))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    values = {"image_key": "image", "as_chat": True, "max_prompt_tokens": 100} | values
    section = DataSection(prompts=(f"{folder}/rows.jsonl",), **values)
    peek(section)
    tokenizer = reader.processor.tokenizer
    return list(load_prompts(section, tokenizer, reader=lambda: reader).prompts)


def test_ids_and_pixels_are_those_of_the_processor(tmp_path: Path, reader: ImageReader):
    (tmp_path / "wide.png").write_bytes(picture("green", (200, 60)))
    (prompt,) = load(
        tmp_path, reader, {"prompt": "<image>a<image>b", "image": ["wide.png", "red.png"]}
    )
    assert prompt.images is not None
    images = [decoded(file) for file in prompt.images.files]
    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"user: {slot}a{slot}b\nassistant: "
    expected = reader.processor(text=[text], images=images, return_tensors="np")
    assert prompt.token_ids.tolist() == expected["input_ids"][0].tolist()
    assert prompt.images.num_prompt_tokens == len(prompt.token_ids)
    assert prompt.images.slotted_ids.tolist().count(6) == 2
    assert set(prompt.images.inputs) == {"pixel_values", "image_grid_thw"}
    for name, values in prompt.images.inputs.items():
        assert np.array_equal(values, expected[name]), name


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Name it.", "user: []Name it.\n"),
        ("Name <image>.", "user: Name [].\n"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
            "user: a[]\n",
        ),
    ],
)
def test_images_stand_at_parts_or_marks_or_before_the_text(
    tmp_path: Path, reader: ImageReader, prompt: Any, text: str
):
    (loaded,) = load(tmp_path, reader, {"prompt": prompt, "image": "red.png"})
    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    assert loaded.text == text.replace("[]", slot) + "assistant: "


def test_an_image_may_be_in_its_part(tmp_path: Path, reader: ImageReader):
    content = base64.b64encode(picture("blue")).decode()
    parts = [
        {"type": "image", "image": "red.png"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}},
    ]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    (prompt,) = load(tmp_path, reader, {"prompt": messages}, image_key="prompt")
    assert prompt.images is not None
    assert prompt.images.files == (picture("red"), picture("blue"))


def test_bytes_and_pictures_of_datasets_are_read(tmp_path: Path, reader: ImageReader):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(prompt=datasets.Value("string"), image=datasets.Image())
    rows = {"prompt": ["a", "b"], "image": [decoded(picture("red")), decoded(picture("blue"))]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    section = DataSection(
        prompts=(f"{tmp_path}/saved",), image_key="image", as_chat=True, max_prompt_tokens=100
    )
    loaded = load_prompts(section, reader.processor.tokenizer, reader=lambda: reader).prompts
    for prompt, color in zip(loaded, ("red", "blue"), strict=True):
        assert prompt.images is not None
        assert decoded(prompt.images.files[0]).getpixel((3, 3)) == decoded(picture(color)).getpixel(
            (3, 3)
        )


def test_rows_without_images_are_mixed_with_others(tmp_path: Path, reader: ImageReader):
    rows = {"prompt": "a", "image": None}, {"prompt": "b", "image": "red.png"}
    without, with_one = load(tmp_path, reader, *rows)
    assert without.images is None
    assert with_one.images is not None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "gone.png"}, "data.image_key (image): {where} has the image {folder}/gone.png"),
        ({"image": "broken.png"}, "that cannot be decoded"),
        ({"image": "data:image/png;base64,a"}, "{where} has the image data:image/png;base64,a, "),
        ({"image": "data:image/png,%89PNG"}, "{where} has the image data:image/png,%89PNG, which"),
        ({"image": "~nobody-there/a.png"}, "{where} has the image ~nobody-there/a.png, which "),
        ({"image": "a\0.png"}, "cannot be read: embedded null byte"),
        ({"image": "none://a.png"}, "{where} has the image none://a.png, which cannot be read: "),
        ({"image": "cut.png"}, "that cannot be decoded"),
        ({"image": 3}, "{where} has int there. An image is a path"),
        ({"prompt": "<image> <image>", "image": "red.png"}, "have 2 places for them"),
        ({"image": ["red.png"] * 3}, "data.max_images (2): {where} has 3 images"),
        ({"images": ["red.png"], "image": None}, "{where} has images, which the policy would not"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video"}]}], "image": None},
            "messages.0.content: has a part of type video",
        ),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(
    tmp_path: Path, reader: ImageReader, row: dict[str, Any], message: str
):
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "cut.png").write_bytes(picture("red", (80, 90))[:-40])
    with pytest.raises(ConfigError) as error:
        load(tmp_path, reader, {"prompt": "a"} | row, max_images=2)
    where = f"{tmp_path}/rows.jsonl:1"
    assert message.format(where=where, folder=tmp_path) in str(error.value)


def test_storage_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0))
    answers: list[Any] = [OSError("timeout"), OSError("timeout"), b"file"]

    def answer(uri: str) -> bytes:
        value = answers.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(images, "_of_storage", answer)
    assert images.read_file("s3://a/b.png", "row 1") == b"file"
    answers[:] = [OSError("timeout")] * 3
    with pytest.raises(retries.StorageError, match=r"reading s3://a/b.png failed 3 times"):
        images.read_file("s3://a/b.png", "row 1")
    answers[:] = [FileNotFoundError("gone")]
    with pytest.raises(RowError, match=r"^row 1 has the image s3://a/b.png, which .* gone"):
        images.read_file("s3://a/b.png", "row 1")


def test_a_template_without_places_is_refused(tmp_path: Path, reader: ImageReader):
    tokenizer, template = reader.processor.tokenizer, reader.processor.tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    try:
        with pytest.raises(ConfigError, match="has 1 images, but the prompt has 0 places"):
            load(tmp_path, reader, {"prompt": "a", "image": "red.png"})
    finally:
        tokenizer.chat_template = template


def test_a_user_cannot_write_a_placeholder(tmp_path: Path, reader: ImageReader):
    (prompt,) = load(tmp_path, reader, {"prompt": "<|image_pad|>", "image": "red.png"})
    assert (prompt.token_ids == 6).sum() == 4  # of the image alone


def test_images_travel_as_files(tmp_path: Path, reader: ImageReader):
    (prompt,) = load(tmp_path, reader, {"prompt": "a", "image": "red.png"})
    assert prompt.images is not None
    pixels = prompt.images.inputs["pixel_values"]
    sent = pickle.dumps([prompt] * 8)
    assert len(sent) < pixels.nbytes / 4
    copies = pickle.loads(sent)
    assert all(copy.images is copies[0].images for copy in copies)
    assert np.array_equal(copies[0].images.inputs["pixel_values"], pixels)
    assert prompt.row["image"] == [f"{tmp_path}/red.png"]


def test_a_turned_photograph_is_upright(tmp_path: Path, reader: ImageReader):
    from PIL import Image

    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (112, 56)).save(file, "JPEG", exif=exif)
    (tmp_path / "turned.jpg").write_bytes(file.getvalue())
    (prompt,) = load(tmp_path, reader, {"prompt": "a", "image": "turned.jpg"})
    assert prompt.images is not None
    assert prompt.images.inputs["image_grid_thw"].tolist() == [[1, 8, 4]]
    assert (prompt.token_ids == 6).sum() == 8


def test_labels_around_a_prompt_are_found_without_its_images(tmp_path: Path, reader: ImageReader):
    rows = [{"prompt": "a", "image": "red.png", "label": str(n)} for n in range(5)]
    load(tmp_path, reader, *rows)
    section = DataSection(
        prompts=(f"{tmp_path}/rows.jsonl",),
        image_key="image",
        as_chat=True,
        label_key="label",
        max_prompt_tokens=100,
    )
    tokenizer = reader.processor.tokenizer
    loaded = load_prompts(section, tokenizer, reader=lambda: reader)
    texts = TextMetrics.of(loaded, None, tokenizer)
    with patch.object(reader, "read", wraps=reader.read) as read:
        assert texts._labels_around(2) == ["1", "2", "3"]
        read.assert_not_called()
        prompt = _prompt_of(loaded.prompts, 2)
        assert prompt is not None
        assert prompt.images is not None
        assert read.call_count == 1


def test_grey_values_of_16_bits_are_scaled():
    from PIL import Image

    file, values = io.BytesIO(), np.array([[0, 257 * 100], [65535, 300]], np.uint16)
    Image.fromarray(values).save(file, "PNG")
    grey = np.asarray(decoded(file.getvalue()))
    assert grey[..., 0].tolist() == [[0, 100], [255, 1]]
    assert (grey == grey[..., :1]).all()


def test_examples_hold_images(tmp_path: Path, reader: ImageReader):
    (tmp_path / "red.png").write_bytes(picture("red"))
    row = {"prompt": "Name it.", "image": "red.png", "response": "red"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    section = ResponsesSection(
        prompts=(f"{tmp_path}/rows.jsonl",),
        image_key="image",
        as_chat=True,
        response_key="response",
        max_prompt_tokens=100,
    )
    tokenizer = reader.processor.tokenizer
    (example,) = load_examples(section, tokenizer, [2], reader=lambda: reader).items
    assert example.images is not None
    assert example.images.files == (picture("red"),)
    assert (example.prompt_ids == example.images.placeholder_id).sum() == 4
