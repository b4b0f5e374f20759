"""Evaluate the policy on held-out prompts, before the first update and as `eval` schedules it."""

from __future__ import annotations

from functools import partial

from raypo.config import OnlineConfig
from raypo.run.records import Records
from raypo.run.rollout_metrics import sample_row
from raypo.run.rollouts import Rollouts
from raypo.run.run import Run


class Evaluation:
    """Evaluation on the held-out prompts. All workers call every method."""

    def __init__(self, run: Run[OnlineConfig], rollouts: Rollouts, records: Records) -> None:
        """Store the parts of the run."""
        self._run, self._rollouts, self._records = run, rollouts, records

    def before_first_update(self) -> None:
        """Evaluate the initial policy; the score is reported with the first step."""
        if self._records.last_step == 0 and self._run.config.eval.prompts:
            self._run.tell.phase("evaluating the policy as it is")
            metrics = self.metrics(step=0)
            self._records.note_initial(metrics)
            score = metrics["eval/score_mean"]
            self._run.tell.message(f"before the first update: eval {score:+.3f}")

    def metrics(self, step: int) -> dict[str, float]:
        """Evaluate the policy after a step. There are no metrics without held-out prompts."""
        if not self._run.config.eval.prompts:
            return {}
        metrics, scored = self._rollouts.evaluate()
        rows = partial(list, map(sample_row, scored))
        self._records.write_samples(step, rows, held_out=True)
        return metrics
