"""The part of the engine that runs inside vLLM's worker, reached by method name with plain data."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import torch
from torch import nn

from raypo.metrics.process_memory import peak_memory
from raypo.serving.vllm_processes import Answer, leave_no_shared_memory
from raypo.weights.buckets import Bucket, Staged, unpack
from raypo.weights.group import Group
from raypo.weights.manifest import TensorSpec, WeightError, summary
from raypo.weights.messages import BroadcastBucket, IpcBucket, Ready, Rendezvous, device_uuid

PARENT_S = 1.0
GREW = "Memory usage increased after sleeping"
"""Assertion of vLLM's `Worker.sleep`."""

logger = logging.getLogger(__name__)


class WorkerExtension:
    """Mixed into vLLM's worker class; every name starts with raypo_ so that none can clash.

    Weights arrive in pieces, through the life cycle of vLLM's layerwise reload: begin, load some
    tensors, load some more, finish. A push that ends early leaves a model that is whole in shape
    but of no version.
    """

    model_runner: Any
    vllm_config: Any
    sleep: Any
    device: torch.device
    raypo_loaded: set[str]
    """Parameters that vLLM says it has loaded in this push."""
    raypo_is_loading: bool = False
    raypo_group: Group | None = None

    def raypo_answer(self, method: str, *arguments: Any) -> Answer:
        """What one of this worker's methods returns, or why it failed (`VllmProcesses`)."""
        try:
            return Answer(getattr(self, method)(*arguments))
        except WeightError as error:
            return Answer(failure=error)
        except Exception as error:  # of any class, maybe one that cannot be sent
            logger.exception("%s failed", method)
            return Answer(failure=RuntimeError(f"{type(error).__name__}: {error}"))

    def raypo_end_with(self, parent: int) -> None:
        """End this process with its parent, however that ends.

        vLLM's own watch does not reach a worker that waits for a large message or for a peer.
        """

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(PARENT_S)
            os._exit(1)

        threading.Thread(target=watch, name="raypo-parent", daemon=True).start()

    def raypo_leave_no_shared_memory(self) -> None:
        """Take away the names of what this process shares with the other workers."""
        leave_no_shared_memory()

    def raypo_share_device(self) -> None:
        """Let `sleep` succeed where another process takes memory of the device meanwhile.

        vLLM (0.23 to 0.33) asserts that the whole device has no less free memory than before, once
        the worker has already given up its own: one assertion would end the engine.
        """
        alone = self.sleep

        def sleep(level: int = 1) -> None:
            try:
                alone(level)
            except AssertionError as error:
                if GREW not in str(error):
                    raise
                logger.warning(
                    "The engine sleeps, yet its GPU has less free memory than before: another "
                    "process took some meanwhile. Where the next phase runs out of memory, give "
                    "each run GPUs of its own, or lower rollout.engine.gpu_memory_fraction."
                )

        self.sleep = sleep  # vLLM calls its workers' methods by name

    def raypo_peak_memory(self) -> dict[str, float]:
        """The most memory that this process has held, in GB."""
        return peak_memory()

    def raypo_begin_push(self) -> Ready:
        """Make the model ready for new weights."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.raypo_leave_push()
        with _current_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())
        self.raypo_is_loading, self.raypo_loaded = True, set()
        group = self.raypo_group
        gpus = (device_uuid(self.device),) if self.device.type == "cuda" else ()
        return Ready(1, group.rendezvous.epoch if group else None, gpus)

    def raypo_load_bucket(
        self, bucket: Bucket | IpcBucket | BroadcastBucket, second_names: list[str]
    ) -> list[TensorSpec]:
        """Load some tensors; what arrived, checksums verified.

        Args:
            bucket: Where the tensors are.
            second_names: Of tied tensors; passed over where vLLM's model has no module for them.

        Raises:
            WeightError: bytes were corrupted or did not come.
        """
        model = self.model_runner.get_model()
        received = self._raypo_receive(bucket)
        modules = {
            _without_adapter(name) for name, _ in model.named_modules(remove_duplicate=False)
        }
        skipped = {name for name in second_names if name.rpartition(".")[0] not in modules}
        tensors = (each for each in unpack(received, verify=True) if each[0] not in skipped)
        with _current_config(self.vllm_config):
            names = model.load_weights(tensors)
        told = names is not None  # a few models do not tell
        self.raypo_loaded.update(names if told else _parameter_names(model))
        return list(received.specs)

    def raypo_finish_push(self) -> None:
        """End the push: every layer is whole, and nothing of the old weights is left.

        Raises:
            WeightError: vLLM did not load one of its parameters.
        """
        model = self.model_runner.get_model()
        self.raypo_leave_push()
        loaded = {_without_adapter(name) for name in self.raypo_loaded}
        missing = sorted({_without_adapter(n) for n in _parameter_names(model)} - loaded)
        if missing:
            raise WeightError(f"vLLM did not load {summary(missing)}. Push every parameter.")
        # vLLM 0.23 has no such method, in either model runner, and needs none: requests for an
        # adapter are refused until it is pushed again, and that push overwrites all of it.
        reset = getattr(self.model_runner, "reset_lora_state", None)
        if reset is not None:
            reset()
        _repack_tied_heads(model, self.raypo_loaded)

    def raypo_leave_push(self) -> None:
        """End a push that may have been cut short, so that the next one starts clean."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.raypo_is_loading:
            self.raypo_is_loading = False
            with _current_config(self.vllm_config):
                finalize_layerwise_reload(
                    self.model_runner.get_model(), self.vllm_config.model_config
                )

    def raypo_join_group(self, rendezvous: Rendezvous) -> None:
        """Join a broadcast group; the one of before is left.

        Raises:
            WeightError: not all members came in time.
        """
        group, self.raypo_group = self.raypo_group, None
        if group is not None:
            group.leave()
        self.raypo_group = Group.join(rendezvous, device=self.device)

    def _raypo_receive(self, bucket: Bucket | IpcBucket | BroadcastBucket) -> Bucket | Staged:
        if isinstance(bucket, IpcBucket):
            return bucket.read(device_uuid(self.device), self.device)
        if isinstance(bucket, BroadcastBucket):
            if self.raypo_group is None:
                raise WeightError("this engine is in no broadcast group. Push the weights again.")
            return self.raypo_group.receive(bucket)
        return bucket


def _current_config(vllm_config: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(vllm_config)


def _parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _without_adapter(name: str) -> str:
    """The name of a layer's weight where an adapter may be around the layer."""
    return name.replace(".base_layer", "")


def _repack_tied_heads(model: nn.Module, loaded: set[str]) -> None:
    """Rebuild the packed copy of a head that is tied to the embedding, where vLLM keeps one.

    vLLM's CPU build multiplies with a packed copy of each matrix. The reload rebuilds it for
    layers that were loaded by name, so a head that changed only through its embedding would
    go on with the old one, silently.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    module: Any
    for name, module in model.named_modules(remove_duplicate=False):
        is_packed_head = isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")
        if is_packed_head and f"{name}.weight" not in loaded:
            module.quant_method.process_weights_after_loading(module)
