"""A run without Ray that is killed at one point of a save after another, always in a new process.

What Ray Train does is done here: a thread calls the function that completes a checkpoint, and a
list has those that are complete. `python -m tests.unit.run.killed_run FOLDER` prints, for each
process, the step from which it went on, and how it ended.
"""

import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint
from ray.train.v2._internal.execution.storage import StorageContext
from transformers import LlamaConfig, LlamaForCausalLM

from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.learner.export import Export, NamedWeights, _write_folder
from raypo.models.model_folder import ModelFolder
from raypo.run import run_checkpoints
from raypo.run.records import Records
from raypo.run.run import Run
from raypo.run.run_checkpoints import Checkpoints
from raypo.run.setup import Runtime
from raypo.storage.folder import replace_file
from raypo.storage.run_files import RunFiles
from tests.unit.run.killed_saves import POINTS, Now, kill_at_points

STEPS = 4


class Learner:
    """A model whose weights all are the number of the last step."""

    def __init__(self) -> None:
        sizes: dict[str, Any] = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
        config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
        self.model: Any = LlamaForCausalLM(config)
        self.model.raypo_folder = ModelFolder.of("", config, self.model.generation_config)

    def set(self, step: float) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(step)

    def state_files(self) -> dict[str, dict[str, Any]]:
        return {"learner_0.pt": dict(self.model.state_dict())}

    def restore(self, directory: Path) -> None:
        self.model.load_state_dict(torch.load(directory / "learner_0.pt"))

    def export(self) -> Export:
        tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)

        def write(folder: Path, weights: NamedWeights) -> None:
            _write_folder(self.model, folder, weights, tokenizer)

        return Export(lambda: iter(self.model.state_dict().items()), write, 0)


class Reported:
    """Ray Train's list of complete checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "list.json"
        self.names: list[str] = json.loads(self._file.read_text()) if self._file.exists() else []

    def add(self, path: str) -> None:
        self.names.append(path)
        replace_file(self._file, json.dumps(self.names).encode())


def run(folder: Path) -> None:
    """Go on with the run to its end, in the process that is to be killed."""
    reported = Reported(folder)
    storage = StorageContext(str(folder), "run")
    train: Any = ray.train
    train.get_context = lambda: SimpleNamespace(get_storage=lambda: storage)
    train.get_preemption_info = lambda: None
    train.get_checkpoint = lambda: Checkpoint(reported.names[-1]) if reported.names else None
    train.get_all_reported_checkpoints = lambda **_: []
    run_checkpoints.log_to_file = lambda *_, **__: None
    config = PPOConfig.parse(
        {
            "name": "run",
            "model": {"policy": "p"},
            "data": {"prompts": "d"},
            "checkpoint": {"every": 1, "background": True, "best_by": "loss"},
        }
    )
    runtime, files = Runtime("run", str(folder), str(folder)), RunFiles(str(folder), "run")
    tell: Any = SimpleNamespace(message=lambda text: None, stop_requested=lambda: False)
    records, learner = Records(Run(config, runtime, Workers(), files, tell)), Learner()
    exports = {"policy": learner.export()}
    checkpoints = Checkpoints(records._run, records, learner, Workers(), exports)  # type: ignore[arg-type]
    state = checkpoints.restore()
    before = state["mine"] if state else 0
    assert not state or learner.model.lm_head.weight.detach().max() == before
    with (folder / "attempts.txt").open("a") as file:
        file.write(f"{before}\n")
    for step in range(before + 1, STEPS + 1):
        Now.step = step
        learner.set(step)
        records.check_stop_rules(step, {"loss": float(step)})
        staged = checkpoints.save(step, {"loss": float(step)}, {"mine": step})
        complete = records.checkpoints.begin(step, staged)
        source = Checkpoint.from_directory(str(staged.folder))

        def report(name: str = f"checkpoint_{os.getpid()}_{step}") -> None:
            reported.add(complete(source, name).path)  # noqa: B023

        threading.Thread(target=report, daemon=True).start()
        learner.set(-1.0)  # the next step begins
    records.checkpoints.wait()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    kill_at_points()
    ends = []
    for _ in range(len(POINTS) + 1):
        if (process := os.fork()) == 0:
            try:
                run(folder)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
