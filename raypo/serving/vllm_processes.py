"""vLLM's workers: how the engine calls them, and the code that runs inside them.

With one device, the worker is this process. With several devices, each worker has its own process.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raypo.metrics.process_memory import peak_memory
from raypo.serving.expert_store import ExpertStore
from raypo.serving.inside_vllm import InsideVllm
from raypo.serving.model_tensors import as_in_files
from raypo.weights.buckets import Bucket, unpack
from raypo.weights.group import Group
from raypo.weights.manifest import TensorSpec, WeightError, summary
from raypo.weights.messages import (
    CUMEM,
    BroadcastBucket,
    IpcBucket,
    Ready,
    Rendezvous,
    device_uuid,
)

PARENT_S = 1.0
GREW = "Memory usage increased after sleeping"
"""Message of an assertion in vLLM's `Worker.sleep`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """Result of one call in one worker: a value or an exception."""

    value: Any = None
    failure: WeightError | None = None


class VllmProcesses:
    """Caller of vLLM's workers, which also tracks whether they are still usable.

    vLLM (0.32) raises the first failure that it reads from a worker. It does not read the failures
    of the other workers, and mistakes them for replies to the next call. Methods of
    `WorkerExtension` therefore return a failure as a value. vLLM's own methods raise. After such an
    error, the workers count as unusable if there are several, or if requests are unfinished.
    """

    def __init__(self, llm: Any) -> None:
        """Set up the workers of a `vllm.LLM` that has started."""
        self._llm, self._inside = llm, InsideVllm(llm)
        self._are_several = self._inside.num_workers > 1
        self._out_of_step: str | None = None
        if self._are_several:
            self.ask("raypo_end_with", os.getpid())
            self.ask("raypo_leave_no_shared_memory")
            leave_no_shared_memory()
        if self._inside.has_sleep_mode:
            self.ask("raypo_share_device")
        if self._inside.speculates:
            self.ask("raypo_expand_parameters")

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method in every worker and return the values.

        Raises:
            WeightError: the first worker's failure.
        """
        with self.vllms_own_call():
            answers: list[Answer] = self._llm.collective_rpc(
                "raypo_answer", args=(method, *arguments)
            )
        for answer in answers:
            if answer.failure is not None:
                raise answer.failure
        return [answer.value for answer in answers]

    @contextmanager
    def vllms_own_call(self) -> Iterator[None]:
        """Wrap a call that vLLM makes to its workers; mark the workers as unusable if it fails."""
        try:
            yield
        except ValueError:  # invalid input, rejected before it reached a worker
            raise
        except Exception as error:
            if self._are_several or self._inside.has_unfinished_requests:
                self._out_of_step = f"vLLM's processes are out of sync after a failure ({error})"
            raise

    def why_broken(self) -> str | None:
        """Return why the workers are unusable. None means they are usable."""
        if self._inside.has_lost_a_process:
            return "one of vLLM's processes has ended"
        return self._out_of_step

    def peak_memory(self) -> dict[str, float]:
        """Return the peak memory in GB: RAM summed over processes, GPU memory of the fullest GPU.

        With several processes the RAM is an upper bound: their peaks need not coincide, and shared
        memory is counted in each.
        """
        peaks = [peak_memory()]
        if self._are_several:
            peaks += self.ask("raypo_peak_memory")
        memory = {"memory": sum((peak["memory"] for peak in peaks), 0.0)}
        of_gpus = [peak["gpu_memory"] for peak in peaks if "gpu_memory" in peak]
        return memory | ({"gpu_memory": max(of_gpus)} if of_gpus else {})


class WorkerExtension:
    """Mixin of vLLM's worker class, called by method name with plain data.

    All names start with raypo_ to avoid clashes.

    Weights arrive in buckets through vLLM's layerwise reload: begin, load buckets, finish. An
    aborted push leaves a model whose tensors have the right shapes but mixed versions.
    """

    model_runner: Any
    vllm_config: Any
    sleep: Any
    device: torch.device
    raypo_awaited: list[set[str]]
    """The names of each parameter that a push has to replace: several where it is shared."""
    raypo_loaded: set[str]
    """Parameters that vLLM reported as loaded in this push."""
    raypo_is_loading: bool = False
    raypo_group: Group | None = None
    raypo_experts: ExpertStore

    def raypo_answer(self, method: str, *arguments: Any) -> Answer:
        """Call one of this worker's methods and return its value or failure (`VllmProcesses`)."""
        try:
            return Answer(getattr(self, method)(*arguments))
        except WeightError as error:
            return Answer(failure=error)
        except Exception as error:  # converted, because it may not be picklable
            logger.exception("%s failed", method)
            return Answer(failure=WeightError(f"{method}: {type(error).__name__}: {error}"))

    def raypo_end_with(self, parent: int) -> None:
        """Start a thread that ends this process when its parent dies.

        vLLM's own monitor does not stop a worker that waits for a large message or for a peer.
        """

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(PARENT_S)
            os._exit(1)

        threading.Thread(target=watch, name="raypo-parent", daemon=True).start()

    def raypo_leave_no_shared_memory(self) -> None:
        """Unlink the shared memory of this process (`leave_no_shared_memory`)."""
        leave_no_shared_memory()

    def raypo_share_device(self) -> None:
        """Patch `sleep` to tolerate other processes that allocate memory on the device.

        After it has freed its own memory, vLLM (0.23 to 0.33) asserts that the device has at least
        as much free memory as before. Another process's allocation would crash the engine.
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
                    "process has allocated some. If the next phase runs out of memory, give "
                    "each run its own GPUs, or lower rollout.engine.gpu_memory_fraction."
                )

        self.sleep = sleep  # vLLM calls its workers' methods by name

    def raypo_expand_parameters(self) -> None:
        """On CPUs, replace vLLM's expansion of sampling parameters to the drafted tokens.

        vLLM (0.23 to 0.32) converts the output to integers there, and so fills a copy: temperatures
        and `top_p` are uninitialised memory, and log-probs NaN.
        """
        if self.device.type != "cpu":
            return
        from vllm.v1.sample import rejection_sampler

        def expand(
            values: Tensor,
            ends: Tensor,
            num_tokens: int,
            replace_from: Any = 0,
            replace_to: Any = 0,
        ) -> Tensor:
            counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
            values = values.masked_fill(values == replace_from, replace_to)
            return values.repeat_interleave(counts, output_size=num_tokens)

        rejection_sampler.expand_batch_to_tokens = expand

    def raypo_peak_memory(self) -> dict[str, float]:
        """Return the peak memory of this process, in GB."""
        return peak_memory()

    def raypo_record_experts(self) -> None:
        """Record the experts of all tokens from now on.

        Raises:
            WeightError: the experts of the model cannot be recorded.
        """
        self.raypo_experts = ExpertStore(self.model_runner)

    def raypo_read_experts(self, blocks: list[int], first: int, end: int) -> np.ndarray:
        """Return the experts of some tokens of a request (`ExpertStore.read`)."""
        return self.raypo_experts.read(blocks, first, end)

    def raypo_begin_push(self) -> Ready:
        """Prepare the model for new weights; an unfinished push is ended first."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.raypo_leave_push()
        model = self.model_runner.get_model()
        _repack_experts_at_every_load(model)
        before = _names_by_parameter(model)
        with _current_config(self.vllm_config):
            initialize_layerwise_reload(model)
        # While vLLM reloads, the model has the parameters of a checkpoint: without the scales of
        # quantised weights, which vLLM computes when a layer is complete. Tied ones are apart then.
        of_checkpoint = _names_by_parameter(model)
        checkpoint_names: set[str] = set().union(*of_checkpoint)
        names_before: set[str] = set().union(*before)
        self.raypo_awaited = [
            *filter(None, (names & checkpoint_names for names in before)),
            *(names for names in of_checkpoint if names.isdisjoint(names_before)),
        ]
        self.raypo_is_loading, self.raypo_loaded = True, set()
        group = self.raypo_group
        gpus = (device_uuid(self.device),) if self.device.type == "cuda" else ()
        return Ready(1, group.rendezvous.epoch if group else None, gpus, os.environ.get(CUMEM))

    def raypo_load_bucket(
        self,
        bucket: Bucket | IpcBucket | BroadcastBucket,
        second_names: list[str],
        conversions: Any,
    ) -> list[TensorSpec]:
        """Load the tensors of a bucket, with checksums verified.

        Args:
            bucket: The tensors, or a description of where to receive them.
            second_names: Second names of tied tensors, skipped if vLLM's model has no such module.
            conversions: `ModelTensors.conversions`.

        Returns:
            Specs of the tensors that arrived.

        Raises:
            WeightError: bytes are corrupted or missing.
        """
        model = self.model_runner.get_model()
        if isinstance(bucket, IpcBucket):
            received = bucket.read(device_uuid(self.device), self.device)
        elif isinstance(bucket, BroadcastBucket):
            if self.raypo_group is None:
                raise WeightError(
                    "this engine is not in a broadcast group. Push the weights again."
                )
            received = self.raypo_group.receive(bucket)
        else:
            received = bucket
        modules = {
            _without_adapter(name) for name, _ in model.named_modules(remove_duplicate=False)
        }
        skipped = {name for name in second_names if name.rpartition(".")[0] not in modules}
        tensors = (each for each in unpack(received, verify=True) if each[0] not in skipped)
        tensors = _named_for_adapters(model, as_in_files(conversions, tensors))
        with _current_config(self.vllm_config):
            names = model.load_weights(tensors)
        # A few models report no names: count all parameters as loaded.
        self.raypo_loaded.update(_parameter_names(model) if names is None else names)
        return list(received.specs)

    def raypo_finish_push(self) -> None:
        """End the push, and check that it replaced every parameter.

        Raises:
            WeightError: vLLM did not load one of its parameters.
        """
        self.raypo_leave_push()
        loaded = {_without_adapter(name) for name in self.raypo_loaded}
        missing = sorted(min(names) for names in self.raypo_awaited if names.isdisjoint(loaded))
        if missing:
            raise WeightError(f"vLLM did not load {summary(missing)}. Push every parameter.")
        # vLLM 0.23 lacks this method in both model runners and does not need it: requests for an
        # adapter are refused until it is pushed again, and that push overwrites it completely.
        reset = getattr(self.model_runner, "reset_lora_state", None)
        if reset is not None:
            reset()
        _repack_tied_heads(self.model_runner.get_model(), self.raypo_loaded)

    def raypo_leave_push(self) -> None:
        """End vLLM's layerwise reload, also after an aborted push. Idempotent."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.raypo_is_loading:
            self.raypo_is_loading = False
            model = self.model_runner.get_model()
            head: Any = getattr(model, "lm_head", None)
            bias = None if getattr(head, "has_bias", True) else getattr(head, "bias", None)
            with _current_config(self.vllm_config):
                finalize_layerwise_reload(model, self.vllm_config.model_config)
            # The loader of vLLM's Transformers backend adds a bias to an output head that was made
            # without one, and the end of the reload drops it or restores the last one (0.32).
            if bias is not None:
                head.register_parameter("bias", bias)

    def raypo_join_group(self, rendezvous: Rendezvous) -> None:
        """Join a broadcast group, after leaving the previous one.

        Raises:
            WeightError: not all members joined in time.
        """
        group, self.raypo_group = self.raypo_group, None
        if group is not None:
            group.leave()
        self.raypo_group = Group.join(rendezvous, device=self.device)


def _current_config(vllm_config: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(vllm_config)


def _parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _names_by_parameter(model: nn.Module) -> list[set[str]]:
    """Return all names of each parameter, which has several if it is tied or its module shared."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(_without_adapter(name))
    return list(names.values())


def _without_adapter(name: str) -> str:
    """Return a weight's name without the level that vLLM's LoRA wrapper adds."""
    return name.replace(".base_layer", "")


def _named_for_adapters(
    model: Any, tensors: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Add the level of vLLM's LoRA wrapper to weights' names, where vLLM does not do so itself.

    vLLM's wrapper forwards `load_weights` to the layer that it wraps. Without that method, as in
    0.23, the loader of a model looks its parameters up by their names inside the wrapper.
    """
    wrapped = {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "base_layer") and not hasattr(module, "load_weights")
    }
    parts = getattr(model, "packed_modules_mapping", {}).items()
    packed = {part: whole for whole, of_it in parts for part in of_it}
    for name, tensor in tensors:
        path, _, parameter = name.rpartition(".")
        parent, dot, layer = path.rpartition(".")
        if f"{parent}{dot}{packed.get(layer, layer)}" in wrapped:
            name = f"{path}.base_layer.{parameter}"
        yield name, tensor


def _repack_experts_at_every_load(model: nn.Module) -> None:
    """Make vLLM pack the experts for its kernel at every load, not only at the first (0.32)."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if not hasattr(experts, "process_weights_after_loading") or "_setup_kernel" in vars(method):
            continue

        def set_up(
            layer: Any, w13: Tensor, w2: Tensor, method: Any = method, experts: Any = experts
        ) -> None:
            type(method)._setup_kernel(method, layer, w13, w2)
            experts.process_weights_after_loading(layer)

        method._setup_kernel = set_up


def _repack_tied_heads(model: nn.Module, loaded: set[str]) -> None:
    """Rebuild vLLM's packed copy of an output head that is tied to the embedding.

    vLLM's CPU build multiplies with a packed copy of each matrix. The reload rebuilds it only for
    layers that were loaded by name, so a tied head would silently keep the old copy.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    module: Any
    for name, module in model.named_modules(remove_duplicate=False):
        is_packed_head = isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")
        if is_packed_head and f"{name}.weight" not in loaded:
            module.quant_method.process_weights_after_loading(module)


def leave_no_shared_memory(maps: Path = Path("/proc/self/maps")) -> None:
    """Unlink the shared memory of vLLM's processes, once all of them have it open.

    The memory holds message queues and, on CPU, buffers of collectives. After it is unlinked, it is
    freed when the last process ends. Without this, it would leak if the processes were killed.

    Args:
        maps: Memory map of this process, from which the names are read.
    """
    if not maps.exists():
        return
    for name in set(re.findall(r"/dev/shm/(?:psm|vllm_dist)_\S+$", maps.read_text(), re.MULTILINE)):
        with suppress(FileNotFoundError):
            os.unlink(name)
