"""Figures of a step's updates, added up over micro-batches, minibatches and workers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.learner.objective import PolicyOutput
from raypo.metrics.reduce import WeightedMeans


class UpdateStatistics:
    """Sums over the pieces of a step; what they become does not depend on the cut."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._norms: dict[str, list[float]] = {"policy": [], "critic": []}
        self._num_steps = {"policy": 0, "critic": 0}
        self._num_skipped = 0

    def add_policy(self, output: PolicyOutput) -> None:
        """One micro-batch of the policy."""
        self._add("policy_loss", output.policy_loss)
        for name, value in output.statistics.items():
            self._add(f"policy/{name}", value)

    def add_value(self, loss: Tensor, sums: dict[str, Tensor]) -> None:
        """One micro-batch of the critic."""
        self._add("value_loss", loss)
        for name, value in sums.items():
            self._add(f"value/{name}", value)

    def end_policy_step(self, *, applied: bool, grad_norm: float | None) -> None:
        """One optimizer step of the policy is over."""
        self._end("policy", applied, grad_norm)

    def end_critic_step(self, *, applied: bool, grad_norm: float | None) -> None:
        """One optimizer step of the critic is over."""
        self._end("critic", applied, grad_norm)

    def reduce(self, workers: Workers) -> dict[str, float]:
        """Means over tokens or optimizer steps; `ppo/*` names of DESIGN.md section 7."""
        means = WeightedMeans()
        # A loss is already divided by the counts of all workers: its sum over them is the loss.
        share = self._num_steps["policy"] / workers.count
        tokens = self._sums.get("policy/tokens", 0.0)
        means.add("ppo/policy_loss", self._sums.get("policy_loss", 0.0), share)
        means.add("ppo/clip_fraction", self._sums.get("policy/clipped", 0.0), tokens)
        means.add("ppo/approx_kl", self._sums.get("policy/approx_kl", 0.0), tokens)
        means.add("ppo/ratio_mean", self._sums.get("policy/ratio", 0.0), tokens)
        means.add("ppo/entropy", self._sums.get("policy/entropy", 0.0), tokens)
        if "value_loss" in self._sums:
            means.add("ppo/value_loss", self._sums["value_loss"], share)
            value_tokens = self._sums.get("value/tokens", 0.0)
            means.add("ppo/value_clip_fraction", self._sums.get("value/clipped", 0.0), value_tokens)
        figures = means.reduce(workers)
        for model, norms in self._norms.items():
            if norms:
                figures[f"ppo/{model}_grad_norm"] = math.fsum(norms) / len(norms)
        figures["ppo/skipped_updates"] = float(self._num_skipped)
        return figures

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value.to(torch.float64))

    def _end(self, model: str, applied: bool, grad_norm: float | None) -> None:
        self._num_steps[model] += 1
        self._num_skipped += not applied
        if grad_norm is not None:
            self._norms[model].append(grad_norm)
