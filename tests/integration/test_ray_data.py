"""Data sets of Ray Data as rows of a trainer: the same files as from a list of dicts."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data

from raypo import DPOTrainer, SFTTrainer
from raypo.config import ConfigError
from tests.integration.pipeline import dpo_values, sft_values, write_examples

pytestmark = pytest.mark.usefixtures("local_ray")

ROWS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(40)]


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray_data")
    write_examples(folder)
    values = sft_values(folder)
    del values["data"]["prompts"]
    return values


def slow_at_first(row: dict[str, Any]) -> dict[str, Any]:
    """Let the first block end last."""
    time.sleep(0.2 if row["prompt"] == "0+1=" else 0.0)
    return row


def as_messages(rows: Any) -> Any:
    rows["messages"] = [
        np.array([{"role": "user", "content": prompt}, {"role": "assistant", "content": response}])
        for prompt, response in zip(rows["prompt"], rows["response"], strict=True)
    ]
    return rows[["messages"]]


def test_a_data_set_is_written_in_the_order_of_its_blocks(values: dict[str, Any]):
    rows = ray.data.from_items(ROWS, override_num_blocks=8).map(slow_at_first)
    made = SFTTrainer(values, datasets={"train": rows, "eval": rows.limit(5)}).config
    same = SFTTrainer(values, datasets={"data.prompts": ROWS, "eval.prompts": ROWS[:5]}).config
    assert (made.data.prompts, made.eval.prompts) == (same.data.prompts, same.eval.prompts)
    assert rows.context.execution_options.preserve_order is False


def test_messages_in_blocks_of_pandas_are_written_as_messages(values: dict[str, Any]):
    rows = ray.data.from_items(ROWS, override_num_blocks=3).map_batches(
        as_messages, batch_format="pandas"
    )
    data = {"messages_key": "messages", "max_prompt_tokens": 16, "max_response_tokens": 16}
    made = SFTTrainer(values | {"data": data, "eval": {}}, train_dataset=rows).config
    lines = Path(str(made.data.prompts[0])).read_text().splitlines()
    said = [[each["content"] for each in json.loads(line)["messages"]] for line in lines]
    assert said == [[row["prompt"], row["response"]] for row in ROWS]


def test_a_data_set_that_does_not_fit_the_recipe_is_refused(values: dict[str, Any]):
    rows = ray.data.from_items(ROWS)
    for trainer, given, told in (
        (
            SFTTrainer,
            rows.drop_columns(["prompt"]),
            r"data\.prompt_key \(prompt\): .* has resp",
        ),
        (
            SFTTrainer,
            rows.filter(lambda row: False),
            r"data\.prompts \(given in Python\): there are",
        ),
        (
            SFTTrainer,
            rows.iterator(),
            r"data\.prompts \(ray\.data\..*DataIteratorImpl\): rows must",
        ),
        (DPOTrainer, rows, r"data\.chosen_key \(chosen\): .* It has prompt, response"),
    ):
        settings = values if trainer is SFTTrainer else dpo_without_prompts(values)
        with pytest.raises(ConfigError, match=told):
            trainer(settings, datasets={"train": given})


def dpo_without_prompts(values: dict[str, Any]) -> dict[str, Any]:
    changed = dpo_values(Path(values["storage_path"]).parent)
    del changed["data"]["prompts"]
    return changed
