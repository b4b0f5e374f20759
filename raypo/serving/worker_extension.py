"""The part of the engine that runs inside vLLM's worker, reached by method name with plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from raypo.weights.buckets import unpack
from raypo.weights.manifest import Manifest, TensorSpec, WeightError, summary
from raypo.weights.transport import WeightPush, receive


class WorkerExtension:
    """Mixed into vLLM's worker class; every name starts with raypo_ so that none can clash."""

    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]

    def raypo_load_weights(self, push: WeightPush, second_names: list[str]) -> Manifest:
        """Stream a push through vLLM's layerwise reload; what arrived, checksums verified.

        Layers that are complete when a tensor turns out wrong hold the new weights, the others
        the old ones: after an error the model is whole in shape but of no version.

        Args:
            push: What to load.
            second_names: Of tied tensors; passed over where vLLM's model has no module for them.

        Raises:
            WeightError: bytes were corrupted, or vLLM did not load one of its parameters.
        """
        model = self.model_runner.get_model()
        modules = {
            _without_adapter(name) for name, _ in model.named_modules(remove_duplicate=False)
        }
        skipped = {name for name in second_names if name.rpartition(".")[0] not in modules}
        arrived: list[TensorSpec] = []
        with _LoadedNames(model) as loaded:
            try:
                self.reload_weights(weights_iterator=_named_tensors(push, arrived, skipped))
            except BaseException:
                _leave_reload(model, self.vllm_config.model_config)
                raise
        names = {_without_adapter(name) for name, _ in model.named_parameters()}
        missing = sorted(names - {_without_adapter(name) for name in loaded.names})
        if missing:
            raise WeightError(f"vLLM did not load {summary(missing)}. Push every parameter.")
        _repack_tied_heads(model, loaded.names)
        return Manifest.of(push.version, arrived)


class _LoadedNames:
    """Remembers which of the model's parameters `load_weights` says it loaded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.names: set[str] = set()

    def __enter__(self) -> _LoadedNames:
        load_weights = self._model.load_weights

        def load_and_remember(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            names = load_weights(weights)
            told = names is not None  # a few models do not tell
            self.names.update(names if told else dict(self._model.named_parameters()))
            return names

        self._model.load_weights = load_and_remember
        return self

    def __exit__(self, *_: object) -> None:
        del self._model.load_weights  # the class's own method shows again


def _named_tensors(
    push: WeightPush, arrived: list[TensorSpec], skipped: set[str]
) -> Iterator[tuple[str, Tensor]]:
    for bucket in receive(push):
        for name, tensor in unpack(bucket, verify=True):
            if name not in skipped:
                yield name, tensor
        arrived += [spec for spec, _ in bucket.entries]


def _without_adapter(name: str) -> str:
    """The name of a layer's weight where an adapter may be around the layer."""
    return name.replace(".base_layer", "")


def _leave_reload(model: nn.Module, model_config: Any) -> None:
    """End a reload that was cut short, so that the next one starts clean."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)


def _repack_tied_heads(model: nn.Module, loaded: set[str]) -> None:
    """Rebuild the packed copy of a head that is tied to the embedding, where vLLM keeps one.

    vLLM's CPU build multiplies with a packed copy of each matrix. The reload rebuilds it for
    layers that were loaded by name, so a head that changed through its embedding alone would
    go on with the old one, silently.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    module: Any
    for name, module in model.named_modules(remove_duplicate=False):
        is_packed_head = isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")
        if is_packed_head and f"{name}.weight" not in loaded:
            module.quant_method.process_weights_after_loading(module)
