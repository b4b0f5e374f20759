"""Push the learner's weights to the engines after each update.

Concurrency. The main thread of each worker pushes. Sampling threads wait until the push has ended
(`raypo.rollout.engines`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from raypo.cluster.actors import survivors
from raypo.config import OnlineConfig
from raypo.learner.learner import Learner
from raypo.learner.roles import Roles
from raypo.learner.supervised import SupervisedLearner
from raypo.pending_work import at_work
from raypo.rollout.engines import PolicyEngines, Pushes
from raypo.run.online_inputs import OnlineInputs
from raypo.run.phases import Phase, Phases
from raypo.run.run import Run
from raypo.run.service_gauges import ServiceGauges
from raypo.run.services import Services
from raypo.serving.engine import Engine
from raypo.weight_sync.probe import Probe, try_probe
from raypo.weight_sync.push import AdaptedLearner, open_transport, push_adapter

AnyLearner = Learner | SupervisedLearner[Any]


class WeightPusher:
    """Pushes weights, or only the adapter, and resumes the engines. All workers call all methods.

    Workers that only train a critic take part, because all workers change phases together.
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
        self._phases, self.roles = phases, roles
        self._gauges = ServiceGauges(run, services)
        self._repeat_last_push: Callable[[], object] = lambda: None
        self._in_flight = rollout.in_flight if rollout.has_requests_in_flight else None
        # Requests join running batches instead of forming separate batches.
        joins_running_batches = self._in_flight is not None
        self.pushes = Pushes()
        self.engines = PolicyEngines(services.engine, self.pushes, joins_running_batches)
        """Engines for sampling between pushes."""
        self._transport = open_transport(
            rollout.engine,
            colocated=config.placement.group_of("engine") == "colocated",
            share_gpus=config.engines_share_gpus,
            keep_for_restarts=config.pushes_adapter,
            in_flight=self._in_flight,
        )
        self._probe = Probe.of(
            inputs.first_prompts,
            config,
            temperature=config.trained_temperature,
            adapter=run.name if config.pushes_adapter else None,
            joins_running_batches=joins_running_batches,
        )

    def push_first(self, learner: AnyLearner, *, version: int) -> None:
        """Wait for the engines, and push the run's initial weights."""
        run, services = self._run, self._services
        run.tell.phase("waiting for the engine")
        services.wait(run.config.placement.timeout_s)
        if run.workers.rank == 0:  # cancel requests of an earlier attempt
            engines, attempt = services.engine.handle, self._inputs.attempt
            survivors(engines.control(Engine.cancel_other_attempts, run.name, attempt))
        self.push(learner, version=version)

    def push_again(self) -> None:
        """Repeat the last push. Must be called before the learner updates its weights again."""
        self._repeat_last_push()

    @at_work("the push of the weights")
    def push(self, learner: AnyLearner, *, version: int) -> dict[str, float]:
        """Push the learner's weights to the engines.

        Args:
            learner: The learner.
            version: Version of the weights: the step whose update produced them.

        Returns:
            Metrics of the push, of memory, and of the engines' load.
        """
        engine, roles = self._services.engine, self.roles
        self._repeat_last_push = lambda: self.push(learner, version=version)
        self._phases.enter(Phase.LEARN)
        self._phases.enter(Phase.PUSH)
        metrics = self._gauges.load()
        with self.pushes.push():
            if roles.trains_policy and self._run.config.pushes_adapter:
                push_adapter(
                    cast(AdaptedLearner, learner),
                    engine,
                    name=self._run.name,
                    version=version,
                    transport=self._transport,
                    engines_have_base=self._services.uses_shared_engines,
                    workers=roles.own,
                )
            elif roles.trains_policy:
                weights = learner.named_weights
                self._transport.push(weights, engine, version=version, workers=roles.own)
            self._phases.enter(Phase.PROBE)  # wakes the engines
            if self._in_flight and self._run.workers.rank == 0:
                survivors(engine.handle.control(Engine.resume))
            if roles.trains_policy:
                metrics |= try_probe(learner, engine, self._probe, version, roles.own)
            self._phases.enter(Phase.GENERATE)
        return metrics | self._gauges.memory()
