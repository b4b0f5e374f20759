"""Pushes of the learner's weights to the engines, one after each update.

Concurrency. The main thread of every worker pushes. If requests stay in flight during a push
(`rollout.mode: async`), `EnginesInFlight` makes the threads that sample ahead wait for its end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

from raypo.cluster.actors import survivors
from raypo.config import OnlineConfig
from raypo.learner.roles import Roles
from raypo.rollout.async_rollouts import AsyncRollouts
from raypo.rollout.collect import Sampler
from raypo.rollout.dispatch import PushAgain
from raypo.rollout.in_flight import EnginesInFlight, Pushes
from raypo.run.online_inputs import OnlineInputs
from raypo.run.phases import OffloadingLearner, Phase, Phases
from raypo.run.run import Run
from raypo.run.service_gauges import ServiceGauges
from raypo.run.services import Services
from raypo.weight_sync.push import Probe, PushedLearner, open_transport, push_adapter, push_weights


class OnlineLearner(PushedLearner, OffloadingLearner, Protocol):
    """Methods of a learner that a push calls."""


class WeightPusher:
    """Pushes weights, or the adapter only, and resumes the engines; all workers call each method.

    Workers that only train a critic take part, because phases change on all workers together.
    """

    def __init__(
        self,
        run: Run[OnlineConfig],
        inputs: OnlineInputs,
        services: Services,
        phases: Phases,
        roles: Roles,
    ) -> None:
        """Open the transport of `rollout.engine.transport`."""
        config, rollout = run.config, run.config.rollout
        self._run, self._inputs, self._services = run, inputs, services
        self._phases, self._roles = phases, roles
        self._gauges = ServiceGauges(run, services)
        self._last_push: Callable[[], object] = lambda: None
        in_flight = rollout.in_flight if rollout.has_requests_in_flight else None
        self._pushes = Pushes() if in_flight else None
        joins = in_flight is not None or services.joins
        common: dict[str, Any] = {
            "transport": open_transport(
                rollout.engine,
                colocated=config.placement.group_of("engine") == "colocated",
                share_gpus=config.engines_share_gpus,
                kept=config.pushes_adapter,
                in_flight=in_flight,
            ),
            "probe": Probe.of(
                inputs.prompts, config, temperature=config.trained_temperature, joins=joins
            ),
            "workers": roles.own,
            "on_arrival": self._go_on,
        }
        self._push: Callable[..., dict[str, float]] = partial(push_weights, **common)
        if config.pushes_adapter:
            self._push = partial(
                push_adapter, name=run.name, engines_have_base=services.in_pool, **common
            )

    def sampler(self) -> Sampler:
        """Return a sampler of the engines, which repeats the last push if all engines are lost."""
        inputs, services = self._inputs, self._services
        joins = self._pushes is not None or services.joins
        engines = services.engine
        # Ahead of the update the learner's weights belong to no version, so no push is repeated.
        is_ahead = self._run.config.rollout.mode != "sync"
        return Sampler(
            EnginesInFlight(engines, self._pushes or Pushes()) if joins else engines,
            inputs.tokenizer,
            inputs.sampling,
            None if is_ahead else PushAgain(lambda: self._last_push(), self._run.workers),
            shares_engines=services.shared_engine and not joins,
        )

    def push_first(self, learner: OnlineLearner, *, version: int) -> None:
        """Wait for the engines, and push the weights that the run begins with."""
        run, services = self._run, self._services
        run.tell.phase("waiting for the engine")
        services.wait(run.config.placement.timeout_s)
        if run.workers.rank == 0:  # cancel requests of an earlier attempt
            engines = services.engine.pinned()
            survivors(engines.cancel_other_attempts(run.name, self._inputs.attempt))
        self.push(learner, version=version)

    def push(
        self, learner: OnlineLearner, *, version: int, ahead: AsyncRollouts | None = None
    ) -> dict[str, float]:
        """Push the learner's weights to the engines.

        Args:
            learner: The learner.
            version: Version of the weights: the step whose update produced them.
            ahead: Rollouts that are sampled ahead, which wait for new versions.

        Returns:
            Metrics of the push, of memory, and of the engines' load.
        """
        engine, roles = self._services.engine, self._roles
        self._last_push = lambda: self.push(learner, version=version)
        self._phases.enter(Phase.LEARN)
        self._phases.enter(Phase.PUSH)
        metrics = ahead.settle() if ahead else {}
        metrics |= self._gauges.load()
        with self._pushes.push() if self._pushes else nullcontext():
            if roles.trains_policy:
                metrics |= self._push(learner, engine, version=version)
            else:
                self._go_on()
            if roles.are_apart:  # critic workers took no part in the push
                engine.require(*self._run.workers.broadcast(engine.required))
            self._phases.enter(Phase.GENERATE)
        metrics |= self._gauges.memory()
        if ahead:
            ahead.arrived(version)
        return metrics

    def _go_on(self) -> None:
        """Wake the engines for the probe, and resume requests in flight, once weights arrived."""
        self._phases.enter(Phase.PROBE)
        if self._pushes and self._run.workers.rank == 0:
            survivors(self._services.engine.pinned().resume())
