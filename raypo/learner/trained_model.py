"""Model under DeepSpeed that accumulates gradients until `step`, at any ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from raypo.collectives import Workers
from raypo.config import ConfigError, WorkersSection
from raypo.learner.deepspeed_config import deepspeed_config
from raypo.learner.deepspeed_internals import (
    compare_within,
    exact_buffers,
    fragments,
    import_deepspeed,
    leave_out_reduction,
    publish_masters,
)
from raypo.learner.offload import Offload
from raypo.learner.optimizers import (
    compiled_only_on_gpus,
    new_optimizer,
    set_learning_rate,
)
from raypo.learner.roles import DataParallel
from raypo.learner.sharded_state import Fragment, load_fragments, saved_fragments
from raypo.models.activation_memory import checkpoint_layers, dense_mlps, tile_mlps
from raypo.models.checkpoint import first_line
from raypo.models.compiled_layers import compile_on_gpus
from raypo.models.embedding import avoid_racy_counts
from raypo.models.heads import Float32Linear
from raypo.models.lora import Weight, merged_weights
from raypo.models.packed_attention import reads_packed
from raypo.models.sequence_parallel import SequenceGroup
from raypo.models.shares import has_shards, is_sharded, own_shard, whole_bytes
from raypo.pending_work import moved

GATHER_BYTES = 1 << 25
"""Size of the tensors that are gathered together at ZeRO stage 3: a layer of a small model. They
are held beside a push's bucket, so more would add as much to the memory of a push."""


class TrainedModel:
    """Module with its optimizer and ZeRO sharding.

    Losses are already divided by the counts of the whole optimizer step, so DeepSpeed must only sum
    gradients. A factor in `backward` undoes DeepSpeed's mean over workers, and DeepSpeed's division
    by accumulation steps is off.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: str,
        section: WorkersSection,
        workers: Workers,
        mpu: DataParallel | None = None,
        sequence: SequenceGroup | None = None,
    ) -> None:
        """Initialise DeepSpeed; all workers of the module call it together.

        Args:
            module: The module to train.
            dtype: float32 or bfloat16.
            section: Settings of optimizer and ZeRO.
            workers: The workers that train the module.
            mpu: The same workers, in DeepSpeed's interface. None means all workers of the default
                group.
            sequence: Workers that share the tokens of a pass. None means that this worker computes
                whole rows.

        Raises:
            ConfigError: workers share tokens, but a network does not read packed rows; or MLPs are
                to be tiled, but a network has no dense ones.
        """
        _share_tokens(module, sequence)
        deepspeed = import_deepspeed()
        if mpu is not None:
            compare_within(mpu.group)
        parameters = list(module.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        optimizer = new_optimizer(trained, outermost_networks(module), section)
        self._is_muon = section.optimizer == "muon"
        if kind := section.activation_checkpointing:
            for network in outermost_networks(module):
                on_host = kind == "offload" and torch.cuda.is_available()
                checkpoint_layers(network, on_host=on_host)
        if torch.cuda.is_available():
            for network in outermost_networks(module):
                avoid_racy_counts(network)
        is_rounded = dtype == "bfloat16"
        self._heads = [m for m in module.modules() if is_rounded and isinstance(m, Float32Linear)]
        self._masters: dict[Tensor, Tensor] = {
            p: p.detach().clone() for head in self._heads for p in head.parameters()
        }
        # If a model was loaded in ZeRO-3 shards, DeepSpeed does not round the parameters that were
        # created after loading.
        if is_rounded and has_shards(module):
            for late in (p for p in parameters if not is_sharded(p)):
                late.data = late.data.to(torch.bfloat16)
        _gather_mlps_whole(module, section.mlp_tile_tokens)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=deepspeed_config(
                section,
                dtype=dtype,
                num_workers=workers.count,
                on_gpu=torch.cuda.is_available(),
            ),
            dist_init_required=False,
            mpu=mpu,
        )
        self._gathered_parameters = deepspeed.zero.GatheredParameters
        self._workers, self._optimizer = workers, optimizer
        self._stage = int(self._engine.zero_optimization_stage())
        _change_layers(module, section, stage=self._stage)
        if workers.count == 1:
            leave_out_reduction(self._engine)
        self._engine.train()
        for parameter, exact in self._masters.items():
            self._set_master(parameter, exact)
        self._read_masters()
        self.offload = Offload(self._engine, optimizer)
        """Offloader of the model, for a GPU shared with an engine."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        moved()
        return self._engine(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return self._engine.device

    @property
    def is_packed(self) -> bool:
        """True if all networks in the module read packed rows."""
        return all(map(reads_packed, outermost_networks(self.module)))

    @property
    def module(self) -> Any:
        """Wrapped module. Under ZeRO-3 its weights are complete only inside `named_weights`."""
        return self._engine.module

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next updates. Until the first call it is 0."""
        set_learning_rate(self._engine.optimizer.param_groups, learning_rate)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of this worker's loss. A step's loss is the sum over workers."""
        with compiled_only_on_gpus() if self._is_muon else nullcontext():
            self._engine.backward(loss * self._workers.count, scale_wrt_gas=False)
        moved()

    def step(self) -> tuple[bool, float | None]:
        """Update the weights with the accumulated gradients.

        Returns:
            applied: False if a gradient was not finite and the update was skipped.
            grad_norm: Global norm before clipping. It is None if the update was skipped, and at
                stage 0 with several workers. It is also None with Muon, because DeepSpeed reports
                the norm of Muon's updates instead of that of the gradients.
        """
        norm = None
        if self._stage == 0:  # DeepSpeed neither checks for non-finite gradients nor reports them
            own_norm = get_total_norm(
                [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            )
            if self._workers.max((~torch.isfinite(own_norm)).double().cpu()).item():
                self._engine.zero_grad()
                return False, None
            norm = own_norm if self._workers.count == 1 else None
        with compiled_only_on_gpus() if self._is_muon else nullcontext():
            self._engine.step()
        if not self._engine.was_step_applied():
            return False, None
        self._read_masters()
        if self._is_muon:
            return True, None
        norm = self._engine.get_global_grad_norm() if norm is None else norm
        return True, None if norm is None else float(norm)

    def named_weights(self, submodule: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield names below `submodule` and full weights, gathered in buckets under ZeRO-3.

        These are the tensors of the model's files (`stored_tensors`), and all workers must iterate
        to the end together. Adapters are merged into the result; the module itself does not change.
        """
        return self.gathered(merged_weights(submodule))

    def gathered(self, weights: Iterable[Weight]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors of some weights; all workers iterate to the end together.

        For a float32 head, the master weights are yielded.

        Raises:
            RuntimeError: raised on all workers, if one of them has no memory for a gather.
        """
        is_sharded = self._stage == 3
        for together in _in_buckets(weights):
            moved()
            parts = list(dict.fromkeys(part for weight in together for part in weight.parts))
            if is_sharded:
                self._reserve(sum(map(whole_bytes, parts)))
            with self._gathered_parameters(parts, enabled=is_sharded):
                for weight in together:
                    master = self._masters.get(weight.parts[0])
                    yield weight.name, weight.merged() if master is None else master

    def _reserve(self, num_bytes: int) -> None:
        """Allocate the memory of a gather and free it again, so that torch has it cached.

        If a single worker failed inside the gather, the others would wait for it in NCCL for half
        an hour.

        Raises:
            RuntimeError: raised on all workers, if one of them has no memory.
        """
        failure = None
        try:
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            failure = error
        messages = self._workers.gather(failure and first_line(failure))
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message:
                raise RuntimeError(f"learner worker {rank} could not gather weights: {message}")

    def state(self) -> dict[str, Any]:
        """Return views of this worker's part of the trained weights and the optimizer's moments.

        It waits for no other worker.
        """
        return saved_fragments(self._fragments(), self._optimizer, self._workers)

    def load(self, paths: Sequence[Path]) -> None:
        """Restore weights and moments from the files of `state` of all workers that saved.

        The number of those workers and their ZeRO stage do not matter.

        Raises:
            RuntimeError: the files lack a part of a weight.
        """
        load_fragments(paths, self._fragments(), self._optimizer)
        publish_masters(self._engine)
        self._read_masters()

    def _fragments(self) -> list[Fragment]:
        return fragments(self._engine, self._optimizer, self._workers)

    def _set_master(self, parameter: Any, exact: Tensor) -> None:
        """Set a head's master weight to its exact value, which DeepSpeed has rounded."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self._stage < 3:
            safe_set_full_fp32_param(parameter, exact)
            return
        size = own_shard(parameter).numel()
        padded = pad(exact.flatten(), (0, size * self._workers.count - exact.numel()))
        safe_set_local_fp32_param(parameter, padded.split(size)[self._workers.rank])

    def _read_masters(self) -> None:
        """Copy master weights into the float32 heads; all workers call it together."""
        from deepspeed.utils import safe_get_full_fp32_param

        for head in self._heads:
            for name, parameter in head.named_parameters():
                master = safe_get_full_fp32_param(parameter)
                assert master is not None, "a head is trained, so it has master weights"
                self._masters[parameter] = head.masters[name] = master


def _share_tokens(module: Any, sequence: SequenceGroup | None) -> None:
    if sequence is None:
        return
    for network in outermost_networks(module):
        if not reads_packed(network):
            raise ConfigError(
                f"learner.sequence_parallel ({sequence.count}): {type(network).__name__} cannot "
                "read packed rows, so workers cannot share its tokens. Set "
                "learner.sequence_parallel to 1, or give a model whose layers all have full or "
                "sliding attention."
            )
    module.sequence_group = sequence


def _gather_mlps_whole(module: nn.Module, tile: int | None) -> None:
    """Let ZeRO-3 gather the weights of a tiled MLP once, instead of once for each tile.

    Workers have different numbers of tiles, but must all take part in the same gathers.
    """
    from deepspeed.utils import set_z3_leaf_module

    for network in outermost_networks(module) if tile else ():
        mlps = dense_mlps(network)
        if not mlps:
            raise ConfigError(
                f"learner.mlp_tile_tokens ({tile}): {type(network).__name__} has no dense MLPs "
                "that raypo can tile. Set learner.mlp_tile_tokens to null."
            )
        for mlp in mlps:
            set_z3_leaf_module(mlp, True)


def _in_buckets(weights: Iterable[Weight]) -> Iterator[list[Weight]]:
    """Yield weights in lists of at most `GATHER_BYTES`, or of a single larger one."""
    together: list[Weight] = []
    total = 0
    for weight in weights:
        size = sum(map(whole_bytes, weight.parts))
        if together and total + size > GATHER_BYTES:
            yield together
            together, total = [], 0
        together.append(weight)
        total += size
    if together:
        yield together


def _change_layers(module: nn.Module, section: WorkersSection, *, stage: int) -> None:
    """Compile layers as configured, except at stage 3, which changes weights between modules.

    Then let their MLPs compute tiles, as configured.
    """
    for network in outermost_networks(module):
        if section.compile_layers and stage < 3:
            compile_on_gpus(network)
        if section.mlp_tile_tokens:
            tile_mlps(network, section.mlp_tile_tokens)


@contextmanager
def in_shares(section: WorkersSection, *, dtype: str, workers: Workers) -> Iterator[None]:
    """Shard models that transformers loads inside this context, at ZeRO stage 3.

    Each layer is created on every worker, sharded, and filled by rank 0 from the mapped file, so no
    process holds a whole model. With one worker, or at other stages, the context has no effect.
    """
    config = deepspeed_config(
        section, dtype=dtype, num_workers=workers.count, on_gpu=torch.cuda.is_available()
    )
    if workers.count == 1 or config["zero_optimization"]["stage"] < 3:
        yield
        return
    with exact_buffers():
        reference = HfDeepSpeedConfig(config)  # transformers holds a weak reference to it
        try:
            yield
        finally:
            unset_hf_deepspeed_config()
            del reference


def outermost_networks(module: nn.Module) -> list[PreTrainedModel]:
    """Return the Hugging Face models inside a module, without those nested in another one."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [network for child in module.children() for network in outermost_networks(child)]
