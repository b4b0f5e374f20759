"""Nothing between the micro-batches of an update reads a value back from the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from raypo.config import PPOSection
from raypo.learner import learner as learner_module
from raypo.learner.statistics import UpdateSums
from raypo.models.packing import Packed
from raypo.ppo.losses import aggregate
from tests.unit.learner.plain import PlainModel, one_step, plain_models
from tests.unit.ppo.steps import AGGREGATIONS

READS = ("_local_scalar_dense", "nonzero", "masked_select", "masked_scatter_backward")
"""Operations that wait for a GPU, because their result is a number or has a shape that it finds."""


class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        is_mask = any(each is not None and each.dtype == torch.bool for each in indices)
        waits = is_mask or name in READS
        assert not waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def refusing(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        with Refuses():
            return function(*args, **kwargs)

    return called


@pytest.mark.parametrize(
    "section",
    [
        {"kl": {"coef": 0.05}, "entropy_coef": 0.01, "bootstrap_truncated": True},
        {"preset": "grpo", "policy_loss": "gspo"},
        {"preset": "grpo", "policy_loss": "cispo", "nll_coef": 0.1, "num_epochs": 2},
    ],
)
def test_losses_backward_passes_and_figures_wait_for_nothing(
    section: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for owner, name in (
        (learner_module, "policy_objective"),
        (learner_module, "value_objective"),
        (learner_module, "_put"),
        (UpdateSums, "add_policy"),
        (UpdateSums, "add_value"),
        (PlainModel, "backward"),
        (Packed, "unpacked"),
    ):
        monkeypatch.setattr(owner, name, refusing(getattr(owner, name), calls))
    with plain_models():
        one_step(PPOSection.model_validate({"minibatch_size": 6} | section), tokens=20)
    assert calls.count("backward") >= 4
    assert {"policy_objective", "_put", "add_policy", "unpacked"} <= {*calls}


class RefusesCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        there = {each.device.type for each in args if isinstance(each, Tensor)}
        is_copy = isinstance(result, Tensor) and there == {"cpu"} and result.is_cuda
        assert not is_copy, f"{func} copies to the device from pageable memory"
        return result


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_count_of_a_step_is_not_copied_to_the_device(aggregation: str) -> None:
    """Such a copy waits for all that is queued. The tensors are of a GPU, but hold no numbers."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 3, device="cuda")
        mask = torch.ones(2, 3, dtype=torch.bool, device="cuda")
        with pytest.raises(AssertionError, match="copies to the device"), RefusesCopies():
            torch.as_tensor(7.0, device="cuda")
        with RefusesCopies():
            aggregate(x, mask, aggregation=aggregation, max_new_tokens=4, normalizer=7.0)


def test_it_would_see_one_that_waits() -> None:
    waits: list[Callable[[], Any]] = [
        lambda: float(torch.ones(())),
        lambda: torch.ones(2)[torch.tensor([True, False])],
        lambda: torch.ones(2).masked_select(torch.tensor([True, False])),
    ]
    for each in waits:
        with pytest.raises(AssertionError, match="waits for the device"), Refuses():
            each()
