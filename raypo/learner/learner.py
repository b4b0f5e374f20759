"""Training of policy and critic on one learner worker: log-probs, update, weights, checkpoints.

B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypo.collectives import Workers, as_tensor
from raypo.config import LearnerSection, ModelSection, PPOSection
from raypo.data.batching import batches_by_tokens, equally_many
from raypo.learner.export import Export, adapter_export, critic_export, model_export, on_rank_0
from raypo.learner.learning_rate import learning_rate
from raypo.learner.roles import Roles
from raypo.learner.router_balance import RouterBalance
from raypo.learner.state import (
    SkippedUpdates,
    StateFiles,
    load_worker_state,
    worker_state,
)
from raypo.learner.statistics import UpdateStatistics, UpdateSums
from raypo.learner.trained_model import TrainedModel, in_shares
from raypo.models import lora
from raypo.models.critic import Critic, CriticStart
from raypo.models.lora import adapter_off, load_policy
from raypo.models.networks import Policy
from raypo.models.packing import digest_of
from raypo.models.warm_up import warm_up
from raypo.pending_work import at_work
from raypo.ppo.custom_functions import surrogate_of
from raypo.ppo.objective import StepCounts, policy_objective, value_objective, values_of
from raypo.seeds import SeedWord
from raypo.types import Experience, to_device
from raypo.weights.adapter import AdapterPush


def minibatch_order(seed: int, step: int, epoch: int, count: int) -> list[int]:
    """Return the order of the minibatches in an epoch of a step."""
    words = (SeedWord.MINIBATCH_ORDER, seed, step, epoch)
    return np.random.default_rng(words).permutation(count).tolist()


class Learner:
    """Learner on one worker. Every method is collective: all workers call it together.

    If policy and critic have separate workers, a method that concerns only the weights of one model
    is called only by that model's workers.
    """

    def __init__(
        self,
        model: ModelSection,
        ppo: PPOSection,
        section: LearnerSection,
        *,
        temperature: float,
        max_new_tokens: int,
        num_steps: int,
        seed: int,
        workers: Workers,
        critic_start: CriticStart | None = None,
        roles: Roles | None = None,
    ) -> None:
        """Load the models that this worker trains.

        Args:
            model: Models, dtype, attention and LoRA.
            ppo: The PPO section.
            section: The learner section.
            temperature: Sampling temperature of the responses.
            max_new_tokens: Longest allowed response, in tokens. The `constant` aggregation divides
                by it.
            num_steps: Number of training steps, for the learning rate schedule.
            seed: Seed of new weights and of the minibatch order.
            workers: All learner workers.
            critic_start: Initial weights of the critic. None means `model.critic`, or the
                policy if `model.critic` is not set.
            roles: Assignment of policy and critic to workers. None means that all workers train
                both models.
        """
        torch.manual_seed(seed)
        self._roles = roles = roles or Roles.shared(workers, section.sequence_parallel)
        self._ppo, self._section = ppo, section
        self._workers, self._data = roles.own, roles.data
        self._max_new_tokens, self._num_steps = max_new_tokens, num_steps
        self.seed = seed
        rates = "learner.policy_lr and learner.critic_lr"
        self._skipped = SkippedUpdates(section.max_skipped_updates, rates)
        shared: dict[str, Any] = {"dtype": model.dtype, "section": section}
        shared |= {"workers": roles.own, "mpu": roles.mpu, "sequence": roles.sequence}
        self._model = model
        self._is_reference = ppo.needs_reference and model.is_own_reference
        # transformers fills ZeRO-3 shards from rank 0 of all workers, so with separate roles each
        # worker loads whole models.
        shares: Any = nullcontext
        if not roles.are_apart:
            shares = partial(in_shares, section, dtype=model.dtype, workers=workers)
        network = None
        if roles.trains_policy:
            with shares():
                network = load_policy(model)
        # Give all workers one random state, so that new critic weights equal those of a run in
        # which all workers train both models.
        if roles.are_apart:
            torch.set_rng_state(workers.broadcast(torch.get_rng_state()))
        self._trained_policy = None
        if network is not None:
            self._trained_policy = TrainedModel(Policy(network, temperature=temperature), **shared)
        self._surrogate = surrogate_of(ppo.policy_loss)
        self._critic = None
        self.critic_start = ""
        """Description of the critic's initial weights, for messages."""
        if ppo.needs_critic and roles.trains_critic:
            start = critic_start or CriticStart(model.critic or model.policy)
            with shares():
                critic, self.critic_start = Critic.load(
                    start,
                    lora=model.lora,
                    dtype=model.dtype,
                    attention=model.attention,
                    frozen=model.freeze,
                )
            self._critic = TrainedModel(critic, **shared)

    def warm_up(self) -> None:
        """Compile the policy's kernels now instead of in the first step. Nothing else changes.

        Workers that share rows compile them in the first step: each has only a part of the heads.
        """
        if self._trained_policy and self._roles.sequence is None:
            policy = self._policy.module
            warm_up(policy.model, temperature=policy.temperature)

    @property
    def _models(self) -> list[TrainedModel]:
        return [model for model in (self._trained_policy, self._critic) if model]

    @property
    def _policy(self) -> TrainedModel:
        assert self._trained_policy is not None, "asked of the policy's workers only"
        return self._trained_policy

    @at_work("the log-probs")
    def with_log_probs_and_values(self, experience: Experience) -> Experience:
        """Add `old_log_probs` and, with a critic, `values` to the experience.

        - `old_log_probs` are the engine's log-probs with `ppo.old_log_probs: engine`. Otherwise the
          policy computes them here, or in `update` if the step has a single update and nothing
          needs them earlier.
        - `entropy` is added with `ppo.top_entropy_fraction`.
        - `last_values` are added with `ppo.bootstrap_truncated`. They are 0 for responses that
          ended by themselves.
        - `ref_log_probs` are added if the policy without its adapter is the reference model.

        The microbatches are those of `update`, so the first update has a ratio of exactly 1.
        """
        computed: dict[str, Tensor] = {}
        is_known = None
        is_one_update = len(self._minibatches(experience)) <= 1
        if self._ppo.old_log_probs == "engine":
            is_known = ~experience.rollout_log_probs.isnan()  # leave other tokens out of the loss
            if not is_known.all():
                experience = experience.with_(loss_mask=experience.counted & is_known)
        elif self._ppo.computes_old_log_probs(is_one_update=is_one_update):
            computed |= self._if_policy(
                "old_log_probs", experience, with_entropy=self._ppo.needs_entropy
            )
        if self._is_reference:
            with adapter_off(self._policy.module) if self._trained_policy else nullcontext():
                # The reference is one function of the tokens, whatever sampled them.
                own = experience.with_(prompt_experts=None, response_experts=None)
                computed |= self._if_policy("ref_log_probs", own)
        if self._critic:
            computed |= self._values(experience, self._critic)
        experience = experience.with_(**self._roles.joined(experience, computed))
        if is_known is not None:
            reference = experience.ref_log_probs  # so an unknown token has no KL
            other = torch.zeros(()) if reference is None else reference
            old = experience.rollout_log_probs.where(is_known, other.to(is_known.device))
            experience = experience.with_(old_log_probs=old)
        return experience

    @at_work("the update")
    def update(
        self,
        experience: Experience,
        *,
        step: int,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
    ) -> tuple[Experience, UpdateStatistics]:
        """Run the PPO epochs of a step. Every minibatch is one optimizer step of each model.

        Args:
            experience: This worker's rows, with advantages (and returns, with a critic).
            step: Step number, from 1; it determines the learning rates. The first
                `ppo.critic_warmup_steps` steps do not update the policy.
            kl_coef: Coefficient of a KL term in the loss.
            entropy_coef: Coefficient of the entropy bonus.

        Returns:
            experience: The experience with `old_log_probs`.
            statistics: Statistics of the updates over all workers. They do not depend on the split
                into microbatches.

        Raises:
            NonFiniteUpdateError: more than `learner.max_skipped_updates` updates in a row were
                skipped.
        """
        sums, critic = UpdateSums(), self._critic
        rates = self._set_learning_rates(step)
        with_policy = step > self._ppo.critic_warmup_steps
        computed: dict[str, Tensor] = {}
        if experience.old_log_probs is None and not with_policy:
            computed = self._if_policy("old_log_probs", experience)
        log_probs = self._zeros(experience.response_mask.shape)  # [B, T], those of the last epoch
        balance = None
        if with_policy and self._trained_policy:
            balance = RouterBalance(
                self._policy.module,
                coef=self._section.router_aux_coef,
                workers=self._workers,
                is_replayed=experience.experts is not None,
            )
        for rows in self._minibatches_of_all_epochs(experience, step):
            counts = StepCounts.of(experience.select(rows), self._ppo, self._data)
            pieces = self._microbatches(experience, rows)
            if balance:
                balance.begin_update(
                    pieces, lambda piece: self._policy(self._on_device(experience, piece))
                )
            for piece in pieces:
                batch = self._on_device(experience, piece)
                if balance:
                    with balance.recorded(piece) as routing:
                        new, entropy = self._policy(
                            batch, with_entropy=True, entropy_grad=entropy_coef > 0.0
                        )
                    output = policy_objective(
                        new,
                        entropy,
                        batch,
                        ppo=self._ppo,
                        counts=counts,
                        max_new_tokens=self._max_new_tokens,
                        kl_coef=kl_coef,
                        entropy_coef=entropy_coef,
                        surrogate=self._surrogate,
                    )
                    self._policy.backward(output.loss + balance.loss(routing, piece))
                    sums.add_policy(output)
                    _put(new.detach(), batch, into=log_probs, rows=piece)
                if critic:
                    loss, of_values = value_objective(critic(batch), batch, self._ppo, counts)
                    critic.backward(loss)
                    sums.add_value(loss.detach(), of_values)
            self._skipped.count(self._step(sums, with_policy=with_policy))
        if experience.old_log_probs is None:
            if with_policy and self._trained_policy:
                computed = {"old_log_probs": log_probs.cpu()}
            experience = experience.with_(**self._roles.joined(experience, computed))
        statistics = sums.reduce(self._data)
        routed = balance.metrics("ppo") if balance else {}
        statistics = replace(statistics, metrics=statistics.metrics | rates | routed)
        return experience, self._joined(statistics)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights under their checkpoint names; all workers iterate together."""
        return self._policy.named_weights(self._policy.module.model)

    @torch.no_grad()
    def log_probs(self, experience: Experience) -> Tensor:
        """Return log-probs under the current policy, [B, T] float32, zero where masked."""
        evaluated = self._policy(self._on_device(experience, torch.arange(len(experience))))[0]
        return torch.where(experience.response_mask, evaluated.cpu(), 0.0)

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights without its adapter; all workers iterate together."""
        return self._policy.gathered(lora.base_weights(self._policy.module.model))

    def adapter_push(self, name: str, version: int) -> AdapterPush | None:
        """Return the policy's current adapter on rank 0, None elsewhere; all workers call it."""
        assert self._model.lora is not None
        network = self._policy.module.model
        tensors = on_rank_0(self._policy.gathered(lora.adapter_weights(network)), self._workers)
        if self._workers.rank > 0:
            return None
        config = lora.adapter_config(network, self._model.lora, base=self._model.policy)
        return AdapterPush.of(name, version, config, tensors)

    def offload_training_state(self) -> None:
        """Offload everything except the policy's weights, which the weight sync needs."""
        if self._trained_policy:
            self._policy.offload.training_state()
        if self._critic:
            self._critic.offload.training_state()
            self._critic.offload.parameters()

    def offload_parameters(self) -> None:
        """Offload the policy's weights as well."""
        if self._trained_policy:
            self._policy.offload.parameters()

    def reload(self) -> None:
        """Move everything offloaded back to the device."""
        for model in self._models:
            model.offload.reload()

    def state_files(self) -> StateFiles:
        """Return this worker's part of the state that the next update depends on, by file.

        It waits for no other worker.
        """
        everyone = self._roles.everyone
        files = worker_state(everyone, self._skipped)
        if self._trained_policy:
            files[f"policy_{everyone.rank}.pt"] = self._policy.state()
        if self._critic:
            files[f"critic_{everyone.rank}.pt"] = self._critic.state()
        return files

    def restore(self, directory: Path) -> None:
        """Restore the files of `state_files`, on any number of workers at any ZeRO stage."""
        load_worker_state(directory, self._roles.everyone, self._skipped)
        if self._trained_policy:
            self._policy.load(sorted(directory.glob("policy_*.pt")))
        if self._critic:
            self._critic.load(sorted(directory.glob("critic_*.pt")))

    def policy_export(self, tokenizer: Any) -> Export:
        """Return the export of the policy as a Hugging Face folder."""
        return model_export(self._policy, self._policy.module.model, tokenizer)

    def critic_export(self, tokenizer: Any) -> Export:
        """Return the export of the critic as a folder for `model.critic`."""
        assert self._critic is not None, "the config asks for it only where there is one"
        return critic_export(self._critic, tokenizer)

    def adapter_export(self) -> Export:
        """Return the export of the policy's adapter as a peft folder."""
        assert self._model.lora is not None
        network, base = self._policy.module.model, self._model.policy
        return adapter_export(self._policy, network, section=self._model.lora, base=base)

    @torch.no_grad()
    def _if_policy(
        self, field: str, experience: Experience, *, with_entropy: bool = False
    ) -> dict[str, Tensor]:
        """Return {field: the policy's log-probs}, and its `entropy` if that is wanted.

        They are [B, T] float32, zero where masked. The result is {} if this worker has no policy.
        """
        if not self._trained_policy:
            return {}
        names = (field, "entropy") if with_entropy else (field,)
        results = {name: self._zeros(experience.response_mask.shape) for name in names}
        for rows in self._pieces(experience):
            batch = self._on_device(experience, rows)
            computed = self._policy(batch, with_entropy=with_entropy)
            for result, new in zip(results.values(), computed, strict=False):
                _put(new, batch, into=result, rows=rows)
        return {name: result.cpu() for name, result in results.items()}

    @torch.no_grad()
    def _values(self, experience: Experience, critic: TrainedModel) -> dict[str, Tensor]:
        """Return `values` [B, T], zero where masked, and `last_values` [B] if configured."""
        with_last = self._ppo.bootstrap_truncated
        values = self._zeros(experience.response_mask.shape)
        last_values = self._zeros((len(experience),))
        for rows in self._pieces(experience):
            batch = self._on_device(experience, rows)
            new, after_last = values_of(critic, batch, with_last=with_last)
            _put(new, batch, into=values, rows=rows)
            if len(rows):
                last_values[to_device(rows, last_values.device)] = after_last.to(values)
        computed = {"values": values.cpu()}
        return computed | ({"last_values": last_values.cpu()} if with_last else {})

    def _joined(self, statistics: UpdateStatistics) -> UpdateStatistics:
        """Merge the statistics of both roles, on every worker."""
        if not self._roles.are_apart:
            return statistics
        everyone = self._roles.everyone.gather(statistics)
        policy, critic = (everyone[team[0]] for team in self._roles.teams)
        skipped = "ppo/skipped_updates"
        metrics = critic.metrics | policy.metrics
        metrics[skipped] = policy.metrics[skipped] + critic.metrics[skipped]
        return replace(policy, metrics=metrics)

    def _step(self, sums: UpdateSums, *, with_policy: bool) -> bool:
        """Run one optimizer step of both models. Return False if any worker skipped an update."""
        all_applied = True
        if with_policy and self._trained_policy:
            all_applied, norm = self._policy.step()
            sums.end_step("policy", applied=all_applied, grad_norm=norm)
        if self._critic:
            applied, norm = self._critic.step()
            sums.end_step("critic", applied=applied, grad_norm=norm)
            all_applied = all_applied and applied
        if self._roles.are_apart:
            all_applied = not self._roles.everyone.max(as_tensor(not all_applied)).item()
        return all_applied

    def _set_learning_rates(self, step: int) -> dict[str, float]:
        """Set both models' learning rates for a step, and return them as metrics.

        The policy's schedule counts only the steps that update the policy.
        """
        section, waits = self._section, self._ppo.critic_warmup_steps
        metrics = {}
        if step > waits:
            rate = learning_rate(
                step - waits, self._num_steps - waits, highest=section.policy_lr, section=section
            )
            if self._trained_policy:
                self._policy.set_learning_rate(rate)
            metrics["ppo/policy_learning_rate"] = rate
        if self._critic:
            rate = learning_rate(step, self._num_steps, highest=section.critic_lr, section=section)
            self._critic.set_learning_rate(rate)
            metrics["ppo/critic_learning_rate"] = rate
        return metrics

    def _pieces(self, experience: Experience) -> Iterator[Tensor]:
        """Yield the microbatches of all minibatches in order."""
        for rows in self._minibatches(experience):
            yield from self._microbatches(experience, rows)

    def _minibatches_of_all_epochs(self, experience: Experience, step: int) -> Iterator[Tensor]:
        """Yield this worker's rows of each optimizer step, epoch by epoch."""
        minibatches = self._minibatches(experience)
        for epoch in range(self._ppo.num_epochs):
            for number in minibatch_order(self.seed, step, epoch, len(minibatches)):
                yield minibatches[number]

    def _minibatches(self, experience: Experience) -> list[Tensor]:
        """Return this worker's rows of each minibatch."""
        last = experience.minibatch.max() if len(experience) else torch.tensor(-1)
        count = 1 + int(self._data.max(last))
        return [torch.nonzero(experience.minibatch == number).flatten() for number in range(count)]

    def _microbatches(self, experience: Experience, rows: Tensor) -> list[Tensor]:
        """Split rows into microbatches by token budget.

        All workers get the same number of microbatches, of which some may be empty.
        """
        prompts, tokens = experience.prompt_ids[rows], experience.prompt_mask[rows]
        shared = [prompts]
        if experience.prompt_experts is not None:  # prompts with other experts are packed apart
            shared.append(experience.prompt_experts[rows])
        images = experience.images and [experience.images[row] for row in rows.tolist()]
        pieces = batches_by_tokens(
            [
                b"".join(part[row][own].numpy().tobytes() for part in shared)
                + digest_of(images, row)
                for row, own in enumerate(tokens)
            ],
            tokens.sum(1).tolist(),
            experience.attention_mask[rows].sum(1).tolist(),
            self._section.pass_tokens,
            is_packed=all(model.is_packed for model in self._models),
        )
        cut = equally_many(pieces, self._data)
        return [rows[torch.tensor(piece, dtype=torch.int64)] for piece in cut]

    def _on_device(self, experience: Experience, rows: Tensor) -> Experience:
        """Return the rows on the device, or a blank row of weight 0 if `rows` is empty."""
        batch = experience.select(rows) if len(rows) else experience.blank()
        return batch.to(self._device)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Allocate a tensor on the device for the results of all microbatches of a pass.

        The tensor is copied to the CPU once, at the end of the pass. A copy after each microbatch
        would block, and the device would idle while the next microbatch is packed.
        """
        return torch.zeros(shape, device=self._device)

    @property
    def _device(self) -> torch.device:
        model = self._trained_policy or self._critic
        assert model is not None, "every worker trains something"
        return model.device


def _put(new: Tensor, batch: Experience, *, into: Tensor, rows: Tensor) -> None:
    """Write a microbatch's results for its rows into [B, T], zero where masked."""
    if len(rows):
        masked = torch.where(batch.response_mask, new.to(into), 0.0)
        into[to_device(rows, into.device), : new.shape[1]] = masked
