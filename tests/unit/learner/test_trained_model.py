"""What a trained model asks of DeepSpeed, without DeepSpeed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raypo.collectives import Workers
from raypo.config import LearnerSection
from raypo.learner import trained_model
from raypo.learner.trained_model import TrainedModel


class Asked(Exception):
    """Ends the start of a model with the config that DeepSpeed would get."""


@pytest.mark.parametrize("on_gpu", [True, False])
def test_gradients_are_summed_while_others_are_computed_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
):
    def initialize(*, config: Any, **_: Any) -> None:
        raise Asked(config)

    deepspeed = SimpleNamespace(initialize=initialize)
    monkeypatch.setattr(trained_model, "_import_deepspeed", lambda: deepspeed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    with pytest.raises(Asked) as asked:
        TrainedModel(
            nn.Linear(2, 2),
            dtype="float32",
            section=LearnerSection(zero_stage=2),
            workers=Workers(0, 2),
        )
    assert asked.value.args[0]["zero_optimization"]["overlap_comm"] is on_gpu
