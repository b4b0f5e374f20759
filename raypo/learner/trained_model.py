"""One model under DeepSpeed: gradients accumulate until `step`, whatever the ZeRO stage."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from raypo.collectives import Workers
from raypo.config import WorkersSection
from raypo.learner.offload import Offload
from raypo.learner.roles import DataParallel
from raypo.learner.team_order import compare_within
from raypo.models.embedding import avoid_racy_counts
from raypo.models.heads import Float32Linear
from raypo.models.lora import Weight, merged_weights
from raypo.models.packed_attention import reads_packed
from raypo.plan.deepspeed_config import deepspeed_config


class TrainedModel:
    """A module, the AdamW of what it trains, and its ZeRO sharding.

    Losses come divided by the counts of the whole optimizer step, so DeepSpeed must only add:
    its mean over workers is undone by a factor, its division by accumulation steps is off.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: str,
        section: WorkersSection,
        workers: Workers,
        mpu: DataParallel | None = None,
    ) -> None:
        """Put it under DeepSpeed; all of its workers call it together.

        Args:
            workers: Those that train the module.
            mpu: The same for DeepSpeed, where they are not all workers of the default group.
        """
        deepspeed = _import_deepspeed()
        if mpu is not None:
            compare_within(mpu.group)
        parameters = list(module.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._has_frozen = len(trained) < len(parameters)
        optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True, **_adamw(section))
        if section.activation_checkpointing:
            for network in outermost_networks(module):
                network.gradient_checkpointing_enable({"use_reentrant": False})
        if torch.cuda.is_available():
            for network in outermost_networks(module):
                avoid_racy_counts(network)
        is_rounded = dtype == "bfloat16"
        self._heads = [m for m in module.modules() if is_rounded and isinstance(m, Float32Linear)]
        self._masters = {p: p.detach().clone() for head in self._heads for p in head.parameters()}
        is_in_shares = any(hasattr(parameter, "ds_id") for parameter in parameters)
        if is_rounded and is_in_shares:  # then DeepSpeed does not round what came later
            for late in (p for p in parameters if not hasattr(p, "ds_id")):
                late.data = late.data.to(torch.bfloat16)
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
        self._workers, self._section = workers, section
        self._stage = int(self._engine.zero_optimization_stage())
        has_buckets = hasattr(self._engine.optimizer, "ipg_buckets")  # it takes gradients itself
        if workers.count == 1 and not has_buckets:  # nothing to sum: it would be copied
            self._engine.enable_backward_allreduce = False
        self._engine.train()
        for parameter, exact in self._masters.items():
            self._set_master(parameter, exact)
        self._read_masters()
        self.offload = Offload(self._engine, optimizer)
        """Of the model to the host, where it shares a GPU with an engine."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self._engine(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """Where inputs must lie."""
        return self._engine.device

    @property
    def is_packed(self) -> bool:
        """Whether all its networks read packed rows."""
        return all(map(reads_packed, outermost_networks(self.module)))

    @property
    def module(self) -> Any:
        """The wrapped module; its weights are whole only inside `named_weights`."""
        return self._engine.module

    def set_learning_rate(self, learning_rate: float) -> None:
        """The rate of the updates from now on; until then it is 0."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss that is this worker's part of the sum over workers."""
        self._engine.backward(loss * self._workers.count, scale_wrt_gas=False)

    def step(self) -> tuple[bool, float | None]:
        """Update the weights with what `backward` has added up.

        Returns:
            applied: False when a gradient was not finite and the update was skipped.
            grad_norm: the global norm before clipping; None when skipped, and at stage 0 of several
                workers.
        """
        norm = None
        if self._stage == 0:  # where DeepSpeed neither looks for what is not finite nor tells it
            own_norm = get_total_norm(
                [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            )
            if self._workers.max((~torch.isfinite(own_norm)).double().cpu()).item():
                self._engine.zero_grad()
                return False, None
            norm = own_norm if self._workers.count == 1 else None
        self._engine.step()
        if not self._engine.was_step_applied():
            return False, None
        self._read_masters()
        norm = self._engine.get_global_grad_norm() if norm is None else norm
        return True, None if norm is None else float(norm)

    def named_weights(self, submodule: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Names below `submodule` and whole weights, gathered one at a time under ZeRO-3.

        All workers must iterate to the end together. A tied weight comes once under each name, one
        with an adapter merged; the module itself stays as it is.
        """
        return self.gathered(merged_weights(submodule))

    def gathered(self, weights: Iterable[Weight]) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors of some weights; all workers iterate to the end together.

        The weights of a float32 head are its master weights.
        """
        for weight in weights:
            with self._gathered_parameters(list(weight.parts), enabled=self._stage == 3):
                master = self._masters.get(weight.parts[0])
                yield weight.name, weight.merged() if master is None else master

    def save(self, directory: Path) -> None:
        """What is trained, optimizer and counters, this worker's shard; all workers call it."""
        self._engine.save_checkpoint(
            str(directory),
            tag="state",
            save_latest=False,
            exclude_frozen_parameters=self._has_frozen,
        )

    def load(self, directory: Path) -> None:
        """What `save` wrote with the same number of workers and the same ZeRO stage.

        AdamW's constants stay this config's, which may be another one's: of a run that began with
        this one's state, or of a trial of pbt. The learning rate is set before each update.
        """
        path, _ = self._engine.load_checkpoint(
            str(directory), tag="state", load_module_strict=not self._has_frozen
        )
        if path is None:
            raise RuntimeError(f"{directory}: holds no DeepSpeed checkpoint that can be loaded.")
        for group in self._engine.optimizer.param_groups:
            group |= _adamw(self._section)
        self._read_masters()

    def _set_master(self, parameter: nn.Parameter, exact: Tensor) -> None:
        """Undo what DeepSpeed rounded when it made the master weight of a head's parameter."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self._stage < 3:
            safe_set_full_fp32_param(parameter, exact)
            return
        size: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = pad(exact.flatten(), (0, size * self._workers.count - exact.numel()))
        safe_set_local_fp32_param(parameter, padded.split(size)[self._workers.rank])

    def _read_masters(self) -> None:
        """Give the float32 heads their master weights; all workers call it together."""
        from deepspeed.utils import safe_get_full_fp32_param

        for head in self._heads:
            for name, parameter in head.named_parameters():
                master = safe_get_full_fp32_param(parameter)
                assert master is not None, "a head is trained, so it has master weights"
                self._masters[parameter] = head.masters[name] = master


def _adamw(section: WorkersSection) -> dict[str, Any]:
    """What a config says of AdamW besides the learning rate."""
    return {
        "betas": section.adam_betas,
        "eps": section.adam_eps,
        "weight_decay": section.weight_decay,
    }


@contextmanager
def in_shares(section: WorkersSection, *, dtype: str, workers: Workers) -> Iterator[None]:
    """At ZeRO stage 3, what transformers loads within lies in the workers' shares from the start.

    Each layer is made whole on every worker, cut, and filled by rank 0 from the file's pages; no
    process holds a whole model. One worker alone, and other stages, load as ever.
    """
    config = deepspeed_config(
        section, dtype=dtype, num_workers=workers.count, on_gpu=torch.cuda.is_available()
    )
    if workers.count == 1 or config["zero_optimization"]["stage"] < 3:
        yield
        return
    zero = _import_deepspeed().zero
    own_init = zero.Init
    zero.Init = _exact_buffers(zero)
    kept = HfDeepSpeedConfig(config)  # transformers looks at it for as long as it lives
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del kept
        zero.Init = own_init


def _exact_buffers(zero: Any) -> Any:
    """DeepSpeed's `zero.Init`, which rounds weights to the dtype of training, and only these.

    Its own rounds all that a model makes of numbers: in bfloat16 rotary frequencies are off by up
    to 0.2 %, which after 1,000 tokens is another angle than an engine's.
    """

    class Init(zero.Init):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            overrides = [zero.DeepSpeedTensorOverride.device]
            super().__init__(*args, tensor_overrides=overrides, **kwargs)

        def _post_init_method(self, module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                if not hasattr(parameter, "ds_id") and parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.dtype)
            super()._post_init_method(module)

    return Init


def outermost_networks(module: nn.Module) -> list[PreTrainedModel]:
    """The Hugging Face models within a module that are no part of another one."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [network for child in module.children() for network in outermost_networks(child)]


def _import_deepspeed() -> Any:
    """DeepSpeed for this machine; on CPU without its shared-memory op.

    That op serves inference alone, and DeepSpeed compiles it for 40 seconds at the first start.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
