"""Ray Train's set-up of torch on workers with GPUs, which looks at these first.

Ray Train's controller imports this module: it takes no model code.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ray.train.torch import TorchConfig

from raypo.cluster.devices import check_granted

_Usual: Any = TorchConfig().backend_cls


class CheckedBackend(_Usual):
    """Workers whose torch cannot use their GPUs say why; NCCL would only say that it finds none."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Called by the controller before it connects the workers."""
        worker_group.execute(check_granted)
        super().on_start(worker_group, backend_config)


class CheckedTorchConfig(TorchConfig):
    """Ray Train's, of workers with GPUs."""

    @classmethod
    def of(cls, given: TorchConfig | None) -> TorchConfig:
        """The same values; a kind of the user's own stays as it is."""
        if given is None:
            return cls()
        return cls(**asdict(given)) if type(given) is TorchConfig else given

    @property
    def backend_cls(self) -> Any:
        """What sets up the workers' process group."""
        return CheckedBackend
