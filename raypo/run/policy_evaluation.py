"""Evaluate the policy on held-out prompts, before the first update and as `eval` schedules it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from raypo.config import OnlineConfig
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import Sampler
from raypo.rollout.evaluation import evaluate_policy
from raypo.run.online_inputs import OnlineInputs
from raypo.run.phases import Phase, Phases
from raypo.run.records import Records
from raypo.run.rollout_metrics import sample_row
from raypo.run.run import Run
from raypo.types import Rollout


class Evaluation:
    """Evaluation on the held-out prompts. All workers call every method."""

    def __init__(
        self,
        run: Run[OnlineConfig],
        inputs: OnlineInputs,
        sampler: Sampler,
        scorer: Scorer,
        phases: Phases,
        records: Records,
    ) -> None:
        """Choose the scorer. `eval.function` replaces reward function, reward servers and judge."""
        self._run, self._inputs, self._sampler = run, inputs, sampler
        self._phases, self._records = phases, records
        self._scorer = scorer
        if inputs.eval_function is not None:
            self._scorer = replace(scorer, function=None, servers={}, judge=None)

    def before_first_update(self) -> None:
        """Evaluate the initial policy; the score is reported with the first step."""
        if self._records.last_step == 0 and self._inputs.held_out:
            self._run.tell.phase("evaluating the policy as it is")
            metrics = self.metrics(step=0)
            self._records.note_initial(metrics)
            score = metrics["eval/score_mean"]
            self._run.tell.message(f"before the first update: eval {score:+.3f}")

    def metrics(self, step: int) -> dict[str, float]:
        """Evaluate the policy after a step. There are no metrics without held-out prompts."""
        if not self._inputs.held_out:
            return {}

        def keep(scored: list[Rollout]) -> None:
            rows = partial(list, map(sample_row, scored))
            self._records.write_samples(step, rows, held_out=True)

        self._phases.enter(Phase.GENERATE)
        return evaluate_policy(
            self._inputs.held_out,
            self._sampler,
            self._inputs.eval_function,
            section=self._run.config.eval,
            workers=self._run.workers,
            scorer=self._scorer,
            before_scoring=lambda: self._phases.enter(Phase.SCORE),
            keep=keep,
        )
