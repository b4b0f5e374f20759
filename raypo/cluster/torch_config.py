"""Ray Train's torch backend, with a check of the workers' GPUs.

Ray Train's controller imports this module, so it must not import model code.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ray.train.torch import TorchConfig

from raypo.cluster.devices import check_granted

_Usual: Any = TorchConfig().backend_cls


class CheckedBackend(_Usual):
    """Backend that explains why torch cannot use a GPU. NCCL would only report none."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Check the GPUs of all workers, before the controller connects them."""
        worker_group.execute(check_granted)
        super().on_start(worker_group, backend_config)


class CheckedTorchConfig(TorchConfig):
    """Ray Train's TorchConfig with `CheckedBackend`, for workers with GPUs."""

    @classmethod
    def of(cls, given: TorchConfig | None) -> TorchConfig:
        """Return the config with the check added.

        Args:
            given: Values of the config. None means the defaults. An instance of a subclass is
                returned unchanged, without the check.
        """
        if given is None:
            return cls()
        return cls(**asdict(given)) if type(given) is TorchConfig else given

    @property
    def backend_cls(self) -> Any:
        """Backend that sets up the workers' process group."""
        return CheckedBackend
