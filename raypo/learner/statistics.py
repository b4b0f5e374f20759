"""Metrics of a step's updates, summed over microbatches, minibatches and workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.metrics.reduce import WeightedMeans
from raypo.ppo.objective import PolicyOutput

ENTROPY = "ppo/entropy"
"""Name of the metric of the policy's entropy."""


@dataclass(frozen=True)
class UpdateStatistics:
    """Result of a step's updates, over all workers."""

    entropy: float | None
    """Mean entropy of the policy during the updates, in nats per token. It is None if the policy
    was not updated, or if no token counts."""
    metrics: dict[str, float]


class UpdateSums:
    """Sums over the microbatches of a step.

    The resulting means do not depend on how the step is split into microbatches.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float | Tensor] = {}
        """float64 scalars, on the device of the losses because reading from a GPU would block."""
        self._norms: dict[str, list[float]] = {"policy": [], "critic": []}
        self._num_steps = {"policy": 0, "critic": 0}
        self._num_skipped = 0

    def add_policy(self, output: PolicyOutput) -> None:
        """Add one microbatch of the policy."""
        self._add("policy_loss", output.policy_loss)
        if output.kl_loss is not None:
            self._add("kl_loss", output.kl_loss)
        if output.nll_loss is not None:
            self._add("nll_loss", output.nll_loss)
        for name, value in output.statistics.items():
            self._add(f"policy/{name}", value)

    def add_value(self, loss: Tensor, sums: dict[str, Tensor]) -> None:
        """Add one microbatch of the critic."""
        self._add("value_loss", loss)
        for name, value in sums.items():
            self._add(f"value/{name}", value)

    def end_step(
        self, model: Literal["policy", "critic"], *, applied: bool, grad_norm: float | None
    ) -> None:
        """Record the end of a model's optimizer step."""
        self._num_steps[model] += 1
        self._num_skipped += not applied
        if grad_norm is not None:
            self._norms[model].append(grad_norm)

    def reduce(self, workers: Workers) -> UpdateStatistics:
        """Return means over tokens or optimizer steps; metrics are named `ppo/*`.

        A model without an optimizer step has no metrics.
        """
        means = WeightedMeans()
        if self._num_steps["policy"]:
            self._join_policy(means, workers)
        if self._num_steps["critic"]:
            share = self._num_steps["critic"] / workers.count
            tokens = self._sum("value/tokens")
            means.add("ppo/value_loss", self._sum("value_loss"), share)
            means.add("ppo/value_clip_fraction", self._sum("value/clipped"), tokens)
        metrics = means.reduce(workers)
        for model, norms in self._norms.items():
            if norms:
                metrics[f"ppo/{model}_grad_norm"] = math.fsum(norms) / len(norms)
        metrics["ppo/policy_updates"] = float(self._num_steps["policy"])
        metrics["ppo/skipped_updates"] = float(self._num_skipped)
        entropy = metrics.get(ENTROPY, math.nan)
        return UpdateStatistics(None if math.isnan(entropy) else entropy, metrics)

    def _join_policy(self, means: WeightedMeans, workers: Workers) -> None:
        # A loss is already divided by the counts of all workers, so its sum over workers is the
        # loss of the step.
        share = self._num_steps["policy"] / workers.count
        tokens = self._sum("policy/tokens")
        means.add("ppo/policy_loss", self._sum("policy_loss"), share)
        for name in ("kl_loss", "nll_loss"):
            if name in self._sums:
                means.add(f"ppo/{name}", self._sum(name), share)
        means.add("ppo/clip_fraction", self._sum("policy/clipped"), tokens)
        means.add("ppo/dual_clip_fraction", self._sum("policy/dual_clipped"), tokens)
        if "policy/off_policy" in self._sums:
            means.add("ppo/off_policy_fraction", self._sum("policy/off_policy"), tokens)
        means.add("ppo/approx_kl", self._sum("policy/approx_kl"), tokens)
        means.add("ppo/ratio_mean", self._sum("policy/ratio"), tokens)
        means.add(ENTROPY, self._sum("policy/entropy"), tokens)
        means.total("ppo/ratio_clamped_tokens", self._sum("policy/clamped"))

    def _sum(self, name: str) -> float:
        return float(self._sums.get(name, 0.0))

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value.to(torch.float64)
