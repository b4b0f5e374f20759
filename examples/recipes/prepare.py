"""Writes prompts for the recipes: chat messages and an answer, from data sets of the hub.

    python -m examples.recipes.prepare gsm8k          # examples/recipes/data/gsm8k/
    python -m examples.recipes.prepare deepscaler     # examples/recipes/data/deepscaler/

Needs `pip install datasets` and the hub.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BOXED = "Reason step by step, and put the final answer in \\boxed{}."
TASKS = {
    "gsm8k": ("openai/gsm8k", "main", "question", "answer"),
    "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", None, "problem", "answer"),
}
"""Task -> hub id, configuration, column of the question, column of the answer."""
HELD_OUT = 512


def prepared(row: Mapping[str, Any], question: str, answer: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": BOXED}, {"role": "user", "content": row[question]}]
    return {"prompt": messages, "answer": row[answer]}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def main(task: str) -> None:
    from datasets import load_dataset

    name, config, question, answer = TASKS[task]
    every: Any = load_dataset(name, config)
    train = [prepared(row, question, answer) for row in every["train"]]
    test = [prepared(row, question, answer) for row in every["test"]] if "test" in every else []
    if not test:
        train, test = train[:-HELD_OUT], train[-HELD_OUT:]
    folder = Path(__file__).parent / "data" / task
    write(folder / "train.jsonl", train)
    write(folder / "test.jsonl", test[:HELD_OUT])


if __name__ == "__main__":
    main(sys.argv[1])
