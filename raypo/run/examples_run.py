"""What runs that learn from examples share, besides what all runs do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from raypo.cluster.messenger import MonitorClient
from raypo.config import RewardModelConfig, SFTConfig
from raypo.data.examples import LoadedExamples
from raypo.data.stream import ShuffledStream
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Task
from raypo.rollout.dealing import balanced_shares
from raypo.run.run import Run
from raypo.types import Example, Pair

Item = TypeVar("Item", Example, Pair)
AnyConfig = TypeVar("AnyConfig", SFTConfig, RewardModelConfig)


@dataclass
class ExamplesRun(Run[AnyConfig], Generic[AnyConfig, Item]):
    """One worker's view of a run that learns from examples; all workers call every method."""

    tokenizer: Any
    stream: ShuffledStream[Item]
    held_out: Sequence[Item]

    @abstractmethod
    def make_task(self) -> Task[Item]:
        """The model in its task; called once torch's random state is seeded."""

    def start_learner(self) -> SupervisedLearner[Item]:
        """The model under DeepSpeed, restored from the run's last checkpoint if there is one."""
        self.tell.phase("loading the model")
        torch.manual_seed(self.config.seed)
        learner = SupervisedLearner(
            self.make_task(),
            self.config.learner,
            dtype=self.config.model.dtype,
            num_steps=self.config.num_steps,
            workers=self.workers,
        )
        self.restore(learner)
        return learner

    def draw_batch(self) -> list[Item]:
        """This worker's share of the next batch, about as many tokens as the others'."""
        batch = [item for _, item in self.stream.take(self.config.learner.batch_size)]
        shares = balanced_shares(
            [[position] for position in range(len(batch))],
            [len(item.prompt_ids) for item in batch],
            [item.num_tokens - len(item.prompt_ids) for item in batch],
            self.workers.count,
        )
        return [batch[position] for position in shares[self.workers.rank]]

    def evaluate_held_out(self, learner: SupervisedLearner[Item]) -> dict[str, float]:
        """Loss and its company on the held-out examples; nothing where there are none."""
        if not self.held_out:
            return {}
        return learner.evaluate(self.held_out[self.workers.rank :: self.workers.count])

    def is_evaluation_due(self, step: int) -> bool:
        """Whether an evaluation is due after a step; 0 is before the first update."""
        return step % self.config.eval.every == 0 or step == self.config.num_steps

    def state_dict(self) -> dict[str, Any]:
        """The data cursor."""
        return {"stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.stream.load_state_dict(state["stream"])

    def save_models(self, learner: SupervisedLearner[Item]) -> None:
        """The model into the run's `policy/` or `reward_model/`, its adapter into `adapter/`."""
        self.replace_folder(
            self.files.folder / learner.name,
            lambda folder: learner.save_model(folder, self.tokenizer),
        )
        model = self.config.model
        section = model.lora
        if section:
            self.replace_folder(
                self.files.adapter_dir,
                lambda folder: learner.save_adapter(folder, section, model.policy),
            )


def tell_skipped(loaded: LoadedExamples[Any], tell: MonitorClient) -> None:
    """Say how many rows are too long."""
    if loaded.num_skipped:
        tell.message(
            f"{loaded.num_skipped} of {loaded.num_skipped + len(loaded.items)} rows have a prompt "
            f"longer than data.max_prompt_tokens or a response longer than "
            f"data.max_response_tokens and are skipped"
        )
