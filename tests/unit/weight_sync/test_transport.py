from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from raypo.collectives import Workers
from raypo.weight_sync.transport import exhaust_on_exit, fail_together
from raypo.weights.manifest import WeightError


def test_a_push_that_fails_goes_on_gathering_with_the_other_workers() -> None:
    gathered = []

    def tensors() -> Any:
        for name in "abcd":
            gathered.append(name)
            yield name, torch.ones(1)

    def fail_at_the_second() -> None:
        with exhaust_on_exit(tensors()) as iterator:
            next(iterator)
            next(iterator)
            raise WeightError("an engine said no")

    with pytest.raises(WeightError, match="an engine said no"):
        fail_at_the_second()
    assert gathered == list("abcd")


def test_where_one_worker_fails_all_do() -> None:
    @dataclass(frozen=True)
    class Among(Workers):
        said_by_all: tuple[str | None, ...] = ()

        def gather(self, value: Any) -> list[Any]:
            return [value or said for said in self.said_by_all]

    with (
        pytest.raises(WeightError, match="worker 1 could not push the weights: OSError: full"),
        fail_together(Among(said_by_all=(None, "OSError: full"))),
    ):
        pass
    with pytest.raises(OSError, match="disk"), fail_together(Workers()):
        raise OSError("disk")
    with fail_together(Workers()):
        pass
